"""`retrograd mutate`: exit codes, which lines, annotations, bad usage."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from retrograd.cli import main

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch runs no backward in a fork beside a GPU")
OP = Path(__file__).resolve().parents[1] / "mutation" / "norm_op.py"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(OP, tmp_path / "mine.py")
    (tmp_path / "passes.py").write_text("import mine\n")
    return tmp_path


def mutate(*args: str) -> Any:
    return CliRunner().invoke(main, ["mutate", *args])


def line_of(text: str) -> int:
    return OP.read_text().splitlines().index(text) + 1


def test_verify_notices_and_the_report_has_every_form(folder: Path) -> None:
    result = mutate("mine.py:spec", "-n", "4", "--fail-under", "100", "-o", "r.json", "-o", "r.html")
    assert result.exit_code == 0
    assert "NOTICED by verify" in result.stdout
    assert "4 of 4: " in result.stderr
    assert len(json.loads((folder / "r.json").read_text())["results"]) == 4
    again = CliRunner().invoke(main, ["report", "r.json"])
    assert again.stdout == result.stdout


def test_tests_that_look_at_nothing_fail_under_a_share(folder: Path) -> None:
    line = str(line_of("    g = dy * w"))
    asked = ("mine.py:spec", "--tests", "python passes.py", "--only-lines", line, "-n", "2", "-q", "--fail-under", "50")
    result = mutate(*asked, "--format", "github")
    assert result.exit_code == 1
    assert f"file=mine.py,line={line}" in result.stdout
    assert "the tests would not notice" in result.stdout
    assert (
        "::error title=retrograd mutate mine.py%3Aspec::0 of 2 noticed by the tests, fewer than 50 %25" in result.stdout
    )
    assert result.stderr == ""


def test_only_what_changed_since_a_revision(folder: Path) -> None:
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run([*git, *words], check=True)
    changed = (folder / "mine.py").read_text().replace("    g = dy * w\n", "    g = w * dy\n")
    (folder / "mine.py").write_text(changed)
    result = mutate("mine.py:spec", "--since", "HEAD", "--json", "-q")
    mutants = [r["mutant"] for r in json.loads(result.stdout)["results"]]
    assert {m["line"] for m in mutants} == {line_of("    g = dy * w")}
    assert len(mutants) >= 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere.py:spec"], "nowhere.py"),
        (
            ["mine.py:spec", "--budget", "soon"],
            "`--budget` is 'soon', expected seconds, or a time such as 90s, 5m or 1h",
        ),
        (["mine.py:spec", "--only-lines", "a-b"], "`--only-lines` is 'a-b'"),
        (["mine.py:spec", "--since", "HEAD"], "`--since` is 'HEAD', which git cannot compare with"),
        (["mine.py:spec", "--tests", "python nowhere.py"], "`tests` must pass without any mutant"),
        (["mine.py:spec", "-o", "report.pdf"], "must end in one of"),
    ],
)
def test_bad_usage_is_2_and_a_sentence(args: list[str], message: str) -> None:
    result = mutate(*args)
    assert result.exit_code == 2
    assert message in result.stderr
