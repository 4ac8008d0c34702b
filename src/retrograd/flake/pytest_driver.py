"""Driver of pytest: the tests are collected once and run as often as the job says, in one process.

Every run has its own fixtures, those of the session included, so that what a fixture draws is seeded too.
"""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from retrograd.flake.trials import Trials


class Driver:
    def __init__(self, trials: Trials) -> None:
        self.trials = trials
        self.ran = False
        self._errors: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what went wrong while tests were collected."""
        if report.failed:
            self._errors.append(report.longreprtext.strip())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the trials instead of the session's list."""
        self.ran = True
        results, job = self.trials.results, self.trials.job
        items = {item.nodeid: item for item in session.items}
        wanted = job["target"]["item"] or next(iter(items), "")
        if wanted not in items:
            gone = f"{wanted!r} is not collected any more" if wanted else "no test is collected here"
            results.send("problem", "\n".join(self._errors) or gone)
            return True
        results.send("items", list(items))
        item = items[wanted]
        file = inspect.getsourcefile(item.obj) if hasattr(item, "obj") else None  # type: ignore[attr-defined]
        self.trials.prepare(Path(file or item.path).read_text(encoding="utf-8", errors="replace"))

        def run(trial: dict[str, Any]) -> tuple[str, str]:
            for name in trial["before"]:
                if name in items:
                    _run(items[name])
            if trial["before"]:
                # The seed is for the test, whatever ran before it drew.
                self.trials.restart(trial["seed"])
            return _run(item)

        self.trials.each(run)
        return True


def _run(item: pytest.Item) -> tuple[str, str]:
    """One run of one test with fixtures of its own: outcome and message."""
    # A method's test class instance is made once an item; a new run must not find the old one.
    for name in ("_instance", "_obj"):
        item.__dict__.pop(name, None)  # type: ignore[attr-defined]
    reports = runtestprotocol(item, log=False, nextitem=None)
    for report in reports:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else report.longreprtext.strip()
            return ("failed" if report.when == "call" else "error"), message
    skipped = [report for report in reports if report.skipped and not hasattr(report, "wasxfail")]
    if skipped:
        reason = skipped[0].longrepr
        return "skipped", str(reason[2] if isinstance(reason, tuple) else reason)
    return "passed", ""


def run_tests(trials: Trials) -> None:
    """Collect and run; what pytest says about arguments that it refuses goes to the results as a problem."""
    job = trials.job
    driver = Driver(trials)
    # Other plugins must neither repeat, nor shuffle, nor seed, nor distribute what is controlled here.
    args = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:terminalreporter"]
    if importlib.util.find_spec("xdist"):
        args.append("-n0")
    code = pytest.main([*args, *job["pytest_args"], job["collected"]], plugins=[driver])
    if not driver.ran:
        errors = "\n".join(driver._errors)
        trials.results.send("problem", errors or f"pytest ends with exit code {int(code)} before any test runs")
