"""Processes of mutants: what one does to itself ends it alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from retrograd.mutation.isolation import run_forked

FOREVER = threading.Event()


def dies():
    os.kill(os.getpid(), signal.SIGSEGV)


def exits():
    sys.stderr.write("last words\n")
    raise SystemExit(3)


def hangs():
    FOREVER.wait()


def test_each_end_is_told_and_the_others_go_on():
    outcomes = dict(run_forked([lambda: 1, dies, lambda: 2, exits, lambda: 3], jobs=2, timeout=60))
    assert {n: o.state for n, o in outcomes.items()} == {0: "done", 1: "crashed", 2: "done", 3: "crashed", 4: "done"}
    assert [outcomes[n].value for n in (0, 2, 4)] == [1, 2, 3]
    assert "SIGSEGV" in outcomes[1].text
    assert "exit code 3" in outcomes[3].text


def test_what_never_ends_is_ended_with_all_that_it_started(tmp_path):
    pid = tmp_path / "pid"

    def starts_another():
        child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
        pid.write_text(str(child.pid))
        hangs()

    ((_, outcome),) = run_forked([starts_another], timeout=5)
    assert outcome.state == "timed out"
    assert not alive(int(pid.read_text()))


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_nothing_is_begun_after_the_time():
    assert list(run_forked([lambda: 1], until=0.0)) == []
