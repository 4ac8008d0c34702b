"""Runs of every examination in one SQLite file, so that rates add up over days and commits.

Only runs of the plan are kept, none of the closer looks. A run counts once a seed and commit: the same seed on the
same commit tells nothing new about a seed flake.
"""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrograd.errors import UsageError
from retrograd.flake import classify, rates
from retrograd.flake.schema import FlakeReport, Rate

# Beside pytest's own cache: a folder that may be deleted, and that git does not see.
DEFAULT = Path(".retrograd") / "flake.sqlite3"
VERSION = 1
_TABLE = """
CREATE TABLE IF NOT EXISTS runs (
    target TEXT NOT NULL, at TEXT NOT NULL, revision TEXT NOT NULL, setting TEXT NOT NULL, seed INTEGER NOT NULL,
    process INTEGER NOT NULL, outcome TEXT NOT NULL, margin REAL, seconds REAL NOT NULL
)
"""


@dataclass(frozen=True)
class Period:
    """What one commit showed on one day; `day` and `revision` are "" in a sum."""

    target: str
    setting: str
    day: str
    revision: str
    rate: Rate


def revision(folder: Path | None = None) -> str:
    """The commit that the folder is at, with "+" if files differ from it; "" where git knows nothing."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def record(path: Path, report: FlakeReport, at_revision: str) -> int:
    """Append the runs of a report, and count them; UsageError if the file is no history of this version."""
    rows = [
        (flake.target, report.started, at_revision)
        + (run.setting, run.seed, run.process, run.outcome, classify.margin(run), run.seconds)
        for flake in report.flakes
        for run in flake.runs
        if run.stage == "seeds"
    ]
    with _opened(path) as base, base:
        # SQLite keeps inf, but other readers of the file may not.
        base.executemany("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, min(?, 1e300), ?)", rows)
    return len(rows)


def next_seed(path: Path, target: str) -> int:
    """The first seed that was never tried for a target, or for any of the tests that it stands for."""
    if not path.is_file():
        return 0
    with _opened(path) as base:
        query = "SELECT max(seed) FROM runs WHERE target = ? OR substr(target, 1, ?) IN (?, ?)"
        n = len(target)
        (last,) = base.execute(query, (target, n + 1, f"{target}[", f"{target}:")).fetchone()
    return 0 if last is None else int(last) + 1


def periods(path: Path, targets: Sequence[str] = ()) -> list[Period]:
    """Rates by target, setting, day and commit, then the sum of each target and setting; UsageError if there are none.

    Only of tests whose names begin as one of `targets`, if there are any.
    """
    if not path.is_file():
        raise UsageError(f"`--db` is {str(path)!r}: there is no history yet; it is written by retrograd flake NODEID")
    with _opened(path) as base:
        # The first run of each seed and commit, on the day that it was made.
        query = """
            SELECT target, setting, substr(at, 1, 10), revision, outcome FROM runs
            WHERE outcome != 'skipped' AND rowid IN (
                SELECT min(rowid) FROM runs WHERE outcome != 'skipped' GROUP BY target, setting, revision, seed
            ) ORDER BY target, setting, at
        """
        rows = [row for row in base.execute(query) if not targets or row[0].startswith(tuple(targets))]
    periods: list[Period] = []
    for target, setting in dict.fromkeys(row[:2] for row in rows):
        mine = [row for row in rows if row[:2] == (target, setting)]
        for day, at_revision in dict.fromkeys(row[2:4] for row in mine):
            outcomes = [row[4] for row in mine if row[2:4] == (day, at_revision)]
            periods.append(Period(target, setting, day, at_revision, _rate(outcomes)))
        periods.append(Period(target, setting, "", "", _rate([row[4] for row in mine])))
    return periods


def _rate(outcomes: list[str]) -> Rate:
    return rates.rate(sum(outcome != "passed" for outcome in outcomes), len(outcomes))


@contextlib.contextmanager
def _opened(path: Path) -> Generator[sqlite3.Connection, None, None]:
    """The history; UsageError if it cannot be used. Its default folder is made, and left out of git."""
    try:
        if path.parent == DEFAULT.parent and not path.exists():
            path.parent.mkdir(exist_ok=True)
            (path.parent / ".gitignore").write_text("*\n", encoding="utf-8")
        # Several jobs may write at once; each waits for its turn.
        with contextlib.closing(sqlite3.connect(path, timeout=30)) as base:
            (version,) = base.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"it has version {version}, this retrograd reads {VERSION}")
            if version == 0:
                with base:
                    base.execute(_TABLE)
                    base.execute(f"PRAGMA user_version = {VERSION}")
            yield base
    except (OSError, sqlite3.Error) as error:
        raise UsageError(
            f"`--db` is {str(path)!r}, which cannot be used as a history: {error}; name another file or give "
            "--no-history"
        ) from None
