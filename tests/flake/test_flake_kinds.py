"""Each kind of flake and each reason, by a specimen that has it and is told apart, and healthy ones that are left alone."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest

from retrograd.flake import run
from retrograd.flake.schema import Flake, FlakeReport

SPECIMENS = Path(__file__).parent / "specimens"


@functools.cache
def examined(name: str) -> Flake:
    return examine(name)


def examine(name: str, **options: Any) -> Flake:
    report = run(str(SPECIMENS / name), **options)
    assert FlakeReport.from_json(report.to_json()).to_json() == report.to_json()
    (found,) = report.flakes
    return found


@pytest.fixture(autouse=True)
def counter(tmp_path, monkeypatch):
    """What no seed controls is a counter in a file here, so that these tests do not depend on chance themselves."""
    monkeypatch.setenv("SPECIMEN_COUNTER", str(tmp_path / "counter"))


def reasons(found: Flake) -> list[str]:
    return [reason.kind for reason in found.reasons]


@pytest.mark.dealt(3)
@pytest.mark.parametrize(
    ("name", "kinds", "why"),
    [
        ("one_seed_in_five", ("seed",), []),
        ("kink", ("seed",), ["kink"]),
        ("tight", ("seed",), ["tolerance"]),
        ("as_wide_as_the_error", ("seed",), ["tolerance"]),
        ("unseeded", ("run",), ["race"]),
        ("any_order", ("run",), ["accumulation"]),
        ("hashes", ("run",), ["hash"]),
        ("remembers", ("order",), ["state"]),
        ("second_time", ("order",), ["state"]),
    ],
)
def test_a_flake_is_told_apart(name, kinds, why):
    found = examined(f"flaky.py:{name}")
    assert (found.verdict, found.kinds, reasons(found)) == ("flaky", kinds, why)
    assert found.repro
    assert not found


@pytest.mark.parametrize("name", ["steady", "seeds_itself", "prints"])
def test_a_healthy_test_is_left_alone(name):
    found = examine(f"flaky.py:{name}")
    assert (found.verdict, found.kinds, found.reasons) == ("steady", (), ())
    assert found.rate.high == pytest.approx(1 - 0.025 ** (1 / 30))
    assert found
    assert any("seeds itself" in note for note in found.notes) == (name == "seeds_itself")


def test_the_rate_is_that_of_the_seeds():
    found = examined("flaky.py:one_seed_in_five")
    assert found.failing_seeds == (3, 8, 13, 18, 23, 28)
    assert (found.counting, found.rate.failures, found.rate.runs) == ("seeds", 6, 30)
    assert found.shows[0] == 14  # log 0.05 / log 0.8
    assert "--seed 3 --seeds 1" in found.repro[0]


def test_the_seed_that_is_named_reproduces_it():
    seed = examined("flaky.py:kink").failing_seeds[0]
    assert examine("flaky.py:kink", seeds=1, first=seed).verdict == "broken"


def test_processes_count_where_they_decide():
    """Two hash seeds are two draws, not sixty; alone in its process, a test that trips over itself never fails."""
    assert examined("flaky.py:hashes").rate.runs <= 4
    found = examined("flaky.py:second_time")
    assert (found.counting, found.rate.failures) == ("processes", 0)
    assert examine("flaky.py:second_time", seeds=3, repeats=1, fresh=True).verdict == "steady"


def test_environment_by_thread_count():
    found = examine("flaky.py:chunks", seeds=5, threads=(1, 2))
    assert found.kinds == ("environment",)
    assert [(name, rate.failures) for name, rate in found.settings] == [("threads=1", 0), ("threads=2", 5)]
    assert "--threads 2" in found.repro[0]
    assert examine("flaky.py:steady", seeds=5, threads=(1, 2)).verdict == "steady"


def test_a_race_that_needs_two_threads():
    """The setting in which it fails is the one that is looked at closer."""
    found = examine("flaky.py:two_threads_race", seeds=10, threads=(1, 2))
    assert found.kinds == ("run", "environment")
    assert reasons(found) == ["race"]
    assert found.rate.failures == 0
    assert found.settings[1][1].failures > 0


def test_bits_that_differ_within_the_tolerance_are_a_note():
    found = examine("flaky.py:warms_up")
    assert (found.verdict, found.kinds, found.reasons) == ("steady", (), ())
    assert (found.counting, found.rate.runs) == ("seeds", 30)
    assert any("differs to the bit" in note for note in found.notes)


def test_a_value_with_blanks_is_quoted():
    found = examine("flaky.py:spaces", seeds=1, env={"FLAGS": ["", "-a -b"]})
    assert found.kinds == ("environment",)
    assert [name for name, _ in found.settings] == ["FLAGS=", "'FLAGS=-a -b'"]
    assert found.repro[0].startswith("env 'FLAGS=-a -b' retrograd flake")


def test_environment_by_variable():
    found = examine("flaky.py:chunks", seeds=3, env={"OMP_NUM_THREADS": ["1", "3"]})
    assert found.kinds == ("environment",)
    assert found.repro[0].startswith("env OMP_NUM_THREADS=3 retrograd flake")


def test_uninitialised_memory():
    found = examine("torch_flaky.py:uninitialised", seeds=2, repeats=1)
    assert (found.verdict, found.kinds, reasons(found)) == ("flaky", ("run",), ["uninitialised"])
    assert found.rate.failures == 0


@pytest.fixture
def suite(tmp_path, monkeypatch) -> Path:
    """The pytest specimens, away from this suite's conftest."""
    monkeypatch.chdir(tmp_path)
    for name in ("order.py", "various.py"):
        shutil.copy(SPECIMENS / name, tmp_path / name)
    return tmp_path


def test_order_flake_names_the_one_test_that_matters(suite):
    (found,) = run("order.py::test_victim", seeds=3, orders=1).flakes
    assert (found.verdict, found.kinds) == ("flaky", ("order",))
    assert [r.kind for r in found.reasons] == ["state"]
    assert "fails after order.py::test_polluter and passes alone" in found.reasons[0].text
    assert found.repro == ("python -m pytest order.py::test_polluter order.py::test_victim --retrograd-flake-seed 0",)


def test_tests_that_bear_any_order(suite):
    (found,) = run("order.py::test_other", seeds=2, orders=1).flakes
    assert found.verdict == "steady"
    assert not any("not tried: other tests" in note for note in found.notes)


def test_a_file_stands_for_its_tests(suite):
    report = run("various.py", seeds=4, repeats=1)
    assert {f.target: f.verdict for f in report.flakes} == {
        "various.py::TestDraws::test_fixture_is_drawn_anew": "flaky",
        "various.py::test_parametrized[1]": "steady",
        "various.py::test_parametrized[2]": "steady",
        "various.py::test_skipped": "undecided",
        "various.py::test_error": "broken",
        "various.py::TestOld::test_own_instance": "steady",
    }
    assert report.exit_code == 1
