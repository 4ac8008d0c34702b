"""Rates add up over days and commits; files that are none of ours are refused in words."""

from __future__ import annotations

import sqlite3
import subprocess

import pytest

from retrograd.errors import UsageError
from retrograd.flake import history
from retrograd.flake.schema import Flake, FlakeReport, Rate, Run


def report(
    day: str,
    seeds: range,
    bad: tuple[int, ...] = (),
    target: str = "t.py::test",
    repeats: int = 1,
    stage: str = "seeds",
):
    runs = tuple(
        Run(seed, "failed" if seed in bad else "passed", stage=stage, process=r)
        for r in range(repeats)
        for seed in seeds
    )
    return FlakeReport((Flake(target, "steady", Rate(0, 0, 0, 1, 0.95), runs=runs),), started=f"{day}T10:00:00+00:00")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "flake.sqlite3"


def test_rates_by_day_and_commit_and_in_sum(path):
    history.record(path, report("2026-11-01", range(30), bad=(3,)), "aaa")
    history.record(path, report("2026-11-02", range(30, 60)), "aaa")
    history.record(path, report("2026-11-02", range(60, 100), bad=(60, 61)), "bbb+")
    found = history.periods(path)
    assert [(p.day, p.revision, p.rate.failures, p.rate.runs) for p in found] == [
        ("2026-11-01", "aaa", 1, 30),
        ("2026-11-02", "aaa", 0, 30),
        ("2026-11-02", "bbb+", 2, 40),
        ("", "", 3, 100),
    ]
    assert (found[-1].rate.low, found[-1].rate.high) == pytest.approx((0.00623, 0.0852), rel=1e-2)
    # 100 seeds say more than any day.
    assert found[-1].rate.high < min(p.rate.high for p in found[:-1])


def test_a_seed_counts_once_a_commit(path):
    for day in ("2026-11-01", "2026-11-02"):
        history.record(path, report(day, range(10), bad=(3,), repeats=2), "aaa")
    assert [(p.rate.failures, p.rate.runs) for p in history.periods(path)] == [(1, 10), (1, 10)]
    history.record(path, report("2026-11-03", range(10)), "bbb")
    assert history.periods(path)[-1].rate.runs == 20


def test_closer_looks_and_skipped_runs_do_not_count(path):
    history.record(path, report("2026-11-01", range(10), bad=(3,)), "aaa")
    assert history.record(path, report("2026-11-01", range(50), bad=(3,), stage="alone"), "aaa") == 0
    assert history.periods(path)[-1].rate.runs == 10


def test_tests_are_kept_apart_and_can_be_chosen(path):
    for target in ("a.py::x", "a.py::xy", "b.py::x[1]"):
        history.record(path, report("2026-11-01", range(10), target=target), "aaa")
    assert {p.target for p in history.periods(path, ["a.py"])} == {"a.py::x", "a.py::xy"}
    assert history.periods(path, ["c.py"]) == []


def test_the_next_seed_is_new(path):
    assert history.next_seed(path, "a.py::x") == 0
    history.record(path, report("2026-11-01", range(30), target="a.py::x[1]"), "aaa")
    assert history.next_seed(path, "a.py::x[1]") == 30
    assert history.next_seed(path, "a.py::x") == 30
    assert history.next_seed(path, "a.py") == 30
    assert history.next_seed(path, "a.py::y") == 0


def test_the_usual_place_is_not_seen_by_git(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    history.record(history.DEFAULT, report("2026-11-01", range(3)), "")
    assert (tmp_path / ".retrograd" / ".gitignore").read_text() == "*\n"
    assert history.periods(history.DEFAULT)[0].revision == ""


def test_files_that_are_no_history(path, tmp_path):
    with pytest.raises(UsageError, match="there is no history yet"):
        history.periods(path)
    path.write_text("not a database at all, but long enough to be looked at\n" * 50)
    with pytest.raises(UsageError, match="cannot be used as a history: file is not a database"):
        history.periods(path)
    newer = tmp_path / "newer"
    with sqlite3.connect(newer) as base:
        base.execute("PRAGMA user_version = 7")
    with pytest.raises(UsageError, match="it has version 7, this retrograd reads 1"):
        history.record(newer, report("2026-11-01", range(3)), "")
    with pytest.raises(UsageError, match="--no-history"):
        history.record(tmp_path / "nowhere" / "file", report("2026-11-01", range(3)), "")


def test_the_commit(tmp_path):
    assert history.revision(tmp_path) == ""

    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=tmp_path, check=True, capture_output=True
        )

    (tmp_path / "file").write_text("1")
    git("init")
    git("add", "file")
    git("commit", "-m", "first")
    clean = history.revision(tmp_path)
    assert len(clean) == 12
    (tmp_path / "file").write_text("2")
    assert history.revision(tmp_path) == clean + "+"
