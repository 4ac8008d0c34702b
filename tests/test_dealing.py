"""What is dealt over days: everything is run in as many days as there are parts, and what is not marked every day."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dealing import left_out

MARKED = """
import pytest

@pytest.mark.dealt(3)
@pytest.mark.parametrize("n", range(7))
def test_set(n): pass

@pytest.mark.parametrize("n", ["daily", *(pytest.param(n, marks=pytest.mark.dealt(2)) for n in "ab")])
def test_some(n): pass

def test_plain(): pass
"""

FILE = """
import pytest

pytestmark = pytest.mark.dealt(3, whole_file=True)

@pytest.mark.parametrize("n", range(4))
def test_of_file(n): pass

def test_alone(): pass
"""


@pytest.fixture
def items(tmp_path: Path) -> list[pytest.Item]:
    """Tests of two files, as pytest collects them."""
    collected: list[pytest.Item] = []

    class Keep:
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            collected.extend(items)

    (tmp_path / "test_marked.py").write_text(MARKED)
    (tmp_path / "test_one_fixture.py").write_text(FILE)
    pytest.main(["--collect-only", "-q", "-c", "/dev/null", "--import-mode=importlib", str(tmp_path)], [Keep()])
    assert len(collected) == 16
    return collected


def run(items: list[pytest.Item], day: int) -> list[str]:
    gone = {item.name for item in left_out(items, day)}
    return [item.name for item in items if item.name not in gone]


@pytest.mark.parametrize("first", [0, 20_785])
def test_in_as_many_days_as_parts_everything_runs_once(items, first):
    days = [run(items, first + day) for day in range(6)]
    for name in (item.name for item in items):
        times = {"test_plain": 6, "test_some": 3}.get(name.split("[")[0], 2)
        assert sum(name in day for day in days) == (6 if name == "test_some[daily]" else times)
    assert {len([name for name in day if name.startswith("test_set")]) for day in days} == {2, 3}
    together = [{name for name in day if name.startswith(("test_of_file", "test_alone"))} for day in days]
    assert sorted(map(len, together)) == [0, 0, 0, 0, 5, 5]


@pytest.mark.dealt(3)
@pytest.mark.parametrize("part", ["first", "second", "third"])
def test_of_another_day(part):
    """What the next test collects."""


def test_the_option_leaves_out_what_another_day_runs():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--rotate", "20786", __file__]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert [line.split("[")[1] for line in done.stdout.splitlines() if "of_another_day" in line] == ["first]"]
    assert "2 deselected" in done.stdout


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    return importlib.import_module("versions")


def test_what_depends_on_versions_is_run_once_in_as_many_days_as_parts_and_self_tests_every_day(versions):
    whole, days = versions.files(None), [versions.files(day) for day in range(20_785, 20_785 + versions.PARTS)]
    daily = set.intersection(*map(set, days))
    assert "tests/compat/test_torch_parts.py" in daily
    assert sorted([*daily, *(name for day in days for name in day if name not in daily)]) == sorted(whole)
    assert not {*versions.TEXTS, "tests/codegen/test_norm_gate.py"} & set(whole)
    assert {*versions.LONGEST} <= set(whole)
    assert all((Path(__file__).parents[1] / name).is_file() for name in [*whole, *versions.TEXTS])
