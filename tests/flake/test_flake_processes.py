"""Tests that take their process down, hang or do not exist: each a clear statement, and nothing takes the tool down."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from retrograd.core import subprocesses
from retrograd.errors import UsageError
from retrograd.flake import run
from retrograd.flake.plan import Batch, FlakeTarget, Trial
from retrograd.flake.processes import _Process

SPECIMENS = Path(__file__).parent / "specimens"


def examine(name, **options):
    (found,) = run(str(SPECIMENS / name), **options).flakes
    return found


def test_a_test_that_is_always_wrong_is_no_flake():
    found = examine("flaky.py:always_wrong", seeds=10)
    assert (found.verdict, found.kinds) == ("broken", ())
    assert found.rate.low == pytest.approx(0.025 ** (1 / 10))


@pytest.mark.parametrize(
    ("name", "outcome", "said"),
    [("dies", "crashed", "killed by SIGABRT"), ("leaves", "crashed", "exit code 0"), ("hangs", "hung", "in hangs")],
)
def test_three_in_a_row_are_enough(name, outcome, said):
    # Half a second is what a test may take here that would hang for ever; one that dies has the time it needs.
    found = examine(f"flaky.py:{name}", seeds=10, timeout=0.5 if name == "hangs" else 300.0)
    assert found.verdict == "broken"
    assert [run.outcome for run in found.runs] == [outcome] * 3
    assert [reason.kind for reason in found.reasons] == [outcome]
    assert said in found.message
    assert any("17 runs were given up" in note for note in found.notes)


def test_a_crash_now_and_then_is_a_seed_flake():
    found = examine("flaky.py:dies_sometimes", seeds=7)
    assert (found.verdict, found.kinds, found.failing_seeds) == ("flaky", ("seed",), (2, 5))
    assert len([run for run in found.runs if run.stage == "seeds"]) == 14


BROKEN = {
    "raises.py": "raise ValueError('no data here')\n",
    "syntax.py": "def test_x(:\n",
    "empty.py": "x = 1\n",
    "dies.py": "import os\nos._exit(3)\n",
}


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nowhere.py::test_x", "there is no 'nowhere.py' here"),
        ("empty.py::test_x", "not found"),
        ("empty.py", "no test"),
        ("raises.py", "ValueError: no data here"),
        ("syntax.py", "SyntaxError"),
        ("dies.py", "exit code 3"),
        ("dies.py:f", "exit code 3"),
        ("empty.py:f", "no attribute 'f'"),
        ("empty.py:x", "'empty.py:x' is int, expected something to call"),
        ("raises.py:f", "ValueError: no data here"),
        ("nowhere.py:f", "there is no file 'nowhere.py'"),
        ("not_a_module_of_ours:f", "there is no module 'not_a_module_of_ours'"),
        ("test_without_place", "there is no 'test_without_place' here"),
        ("module:not a name", "unknown target"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path, monkeypatch, target, said):
    monkeypatch.chdir(tmp_path)
    for name, text in BROKEN.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as raised:
        run(target, seeds=2)
    assert said in str(raised.value)


def test_what_pytest_prints_of_a_problem_is_waited_for(tmp_path, monkeypatch):
    """The process's output comes by another way than its results, and on a busy machine later."""
    kind, ended = subprocesses.Child, threading.Event()
    drain, end = kind._drain, kind._end
    monkeypatch.setattr(kind, "_drain", lambda self, pipe: (ended.wait(60), drain(self, pipe)))
    monkeypatch.setattr(kind, "_end", lambda self: (end(self), ended.set()))
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(UsageError, match="not found"):
        run(f"{tmp_path / 'empty.py'}::test_x", seeds=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(seeds=0), "`seeds` is 0, expected a whole number of at least 1"),
        (dict(first=-1), "`seed` is -1"),
        (dict(repeats=1.5), "`repeats` is 1.5"),
        (dict(jobs=0), "`jobs` is 0"),
        (dict(timeout=0), "`timeout` is 0, expected seconds above 0"),
        (dict(timeout=float("nan")), "`timeout` is nan"),
        (dict(threads=(0,)), "`threads` has 0"),
        (dict(env={"A B": ["1"]}), "`env` has 'A B'"),
        (dict(env={"A": "1"}), "`env` has 'A': '1'"),
    ],
)
def test_bad_options_are_named(options, said):
    with pytest.raises(UsageError) as raised:
        run(str(SPECIMENS / "flaky.py:steady"), **options)
    assert said in str(raised.value)


def test_no_target():
    with pytest.raises(UsageError, match="`targets` is empty"):
        run()


def test_an_interrupt_ends_the_processes(tmp_path):
    """Ctrl-C while a run hangs: the command ends at once, and so does the process that it started."""
    note = tmp_path / "pid"
    (tmp_path / "mine.py").write_text(
        f"import os, pathlib, time\ndef f():\n    pathlib.Path({str(note)!r}).write_text(str(os.getpid()))\n    time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "retrograd", "flake", f"{tmp_path / 'mine.py'}:f", "--no-history", "-j", "2"]
    # A shell makes what it starts in the background, such as these tests, ignore the signal.
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=heeds) as running:
        try:
            until(lambda: note.exists() and note.read_text())
            running.send_signal(signal.SIGINT)
            assert running.wait(timeout=30) != 0
        finally:
            running.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_jobs_change_nothing():
    one, two = (examine("flaky.py:steady", seeds=3, jobs=jobs) for jobs in (1, 2))
    assert [(r.seed, r.outcome, r.margins) for r in one.runs] == [(r.seed, r.outcome, r.margins) for r in two.runs]


def test_the_time_limit_is_that_of_one_test():
    """Two tests go before it: a slow file must not look like an order flake."""
    batch = Batch(FlakeTarget("t.py", "t.py::c"), (Trial(0, ("t.py::a", "t.py::b")), Trial(1)))
    assert _Process(batch, 2.0, (), threading.Event())._timeout == 6.0


def test_what_a_process_leaves_behind_does_not_matter():
    """A thread that never ends, and a grandchild that holds the output open."""
    found = examine("flaky.py:leaves_things_behind", seeds=2, repeats=1)
    assert found.verdict == "steady"
