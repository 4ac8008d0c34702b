"""The page of run-kernel shows what its examples print, and what people's Triton programs do runs without a GPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from retrograd import report as reports

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = sorted((ROOT / "tests" / "ttir" / "user_programs").glob("*.py"))
SHOWN = dict(
    re.findall(
        r"^```\n\$ retrograd run-kernel (\S+)\n(.*?)^```$", (ROOT / "docs" / "run-kernel.md").read_text(), re.M | re.S
    )
)


def run_kernel(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "retrograd", "run-kernel", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


@pytest.mark.parametrize("script", SHOWN)
def test_the_page_shows_what_an_example_prints(script):
    done = run_kernel(script)
    assert done.stdout.splitlines() == SHOWN[script].splitlines(), done.stderr
    assert done.returncode == ("FINDING" in SHOWN[script])


def test_every_example_is_on_the_page():
    assert len(SHOWN) == len(list((ROOT / "examples").glob("triton_*.py"))) == 4


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_of_the_kind_that_people_write_is_clean(program):
    done = run_kernel(program)
    assert (done.returncode, "CLEAN" in done.stdout) == (0, True), done.stdout + done.stderr


def test_the_report_is_written_in_each_form(tmp_path):
    files = [tmp_path / f"run.{suffix}" for suffix in ("json", "html", "txt")]
    done = run_kernel(*(word for file in files for word in ("-o", file)), "--format", "github", *LOST)
    assert done.returncode == 1
    assert "::error file=" in done.stdout
    record = reports.load(files[0])
    assert (record.verdict, record.exit_code, record.kernels[0].programs) == ("finding", 1, 64)
    assert record.findings[0].places == tuple(f"{LOST[0]}:{line}" for line in (17, 16))
    assert "race" in files[1].read_text()
    assert files[2].read_text() == record.text() + "\n"


LOST = ("examples/triton_lost_sums.py",)


def test_a_program_that_fails_keeps_its_exit_code_and_proves_nothing(tmp_path):
    done = run_kernel("-o", tmp_path / "r.json", "--", "-c", "raise SystemExit(7)")
    assert done.returncode == 7
    assert json.loads((tmp_path / "r.json").read_text())["undecided"] == ["the program failed with exit code 7"]


def test_without_a_kernel_nothing_is_decided():
    assert run_kernel("--", "-c", "print(1)").returncode == 3


SPIN = """
import torch, triton, triton.language as tl
@triton.jit
def spin_kernel(flag_ptr):
    while tl.atomic_add(flag_ptr, 0) == 0:
        pass
spin_kernel[(4,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
"""


def test_a_kernel_that_never_ends_is_reported(tmp_path):
    (tmp_path / "spin.py").write_text(SPIN)
    done = run_kernel(tmp_path / "spin.py")
    assert done.returncode == 1
    assert "endless loop in kernel spin_kernel" in done.stdout


def test_the_interpreter_is_refused(monkeypatch):
    from retrograd.errors import UsageError
    from retrograd.ttir.run_kernels import run_kernels

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UsageError, match="unset it"):
        run_kernels(["-c", "print(1)"])


STARTED = """
import concurrent.futures, multiprocessing, subprocess, sys, torch, triton, triton.language as tl
@triton.jit
def sum_kernel(x_ptr, out_ptr, RACES: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0))
    if RACES:
        tl.store(out_ptr, tl.load(out_ptr) + x)
    else:
        tl.atomic_add(out_ptr, x)
def summed(races):
    out = torch.zeros(1, device="cuda")
    sum_kernel[(4,)](torch.ones(4, device="cuda"), out, RACES=races)
    assert torch.cuda.is_available()
def terminated(races):
    summed(races)
    import os, signal
    os.kill(os.getpid(), signal.SIGTERM)  # as multiprocessing's pools end their workers
def killed():
    summed(False)
    import os
    os._exit(0)
if __name__ == "__main__":
    races, how = sys.argv[1] == "races", sys.argv[2]
    if how == "itself":
        summed(races)
    elif how == "subprocess":
        subprocess.run([sys.executable, __file__, sys.argv[1], "itself"], check=True)
    elif how == "pool":
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            pool.submit(summed, races).result()
    else:
        context = multiprocessing.get_context("fork")
        target = {"killed": killed, "terminated": terminated}.get(how, summed)
        process = context.Process(target=target, args=[races] * (how != "killed"))
        process.start()
        process.join()
"""


@pytest.mark.parametrize(
    ("how", "races", "code"),
    [
        ("subprocess", "races", 1),
        ("pool", "races", 1),
        ("fork", "races", 1),
        ("terminated", "races", 1),
        ("pool", "adds", 0),
    ],
)
def test_processes_that_a_program_starts_are_in_its_report(tmp_path, how, races, code):
    (tmp_path / "starts.py").write_text(STARTED)
    done = run_kernel(tmp_path / "starts.py", races, how)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("race in kernel sum_kernel" in done.stdout and "starts.py:7: tl.store" in done.stdout) == (code == 1)
    assert "1 launch of sum_kernel" in done.stdout
    assert "note: of the program and of 1 process that it started" in done.stdout


def test_a_process_that_leaves_no_report_proves_nothing(tmp_path):
    (tmp_path / "starts.py").write_text(STARTED)
    done = run_kernel(tmp_path / "starts.py", "adds", "killed")
    assert done.returncode == 3
    assert "was killed, and left no report of its launches" in done.stdout


def test_a_suite_that_makes_warnings_errors_runs(tmp_path):
    """In a wheel all of the package is marked for pytest to rewrite, which this program has imported already."""
    # pytest-benchmark, where it is installed, warns of pytest-xdist.
    (tmp_path / "conftest.py").write_text("import pytest\npytest.register_assert_rewrite('retrograd')\n")
    (tmp_path / "test_x.py").write_text("import torch\n\ndef test_x():\n    assert torch.cuda.is_available()\n")
    done = run_kernel("--", "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", "-p", "no:benchmark", tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("writes", [False, True])
def test_a_report_that_is_asked_for_behind_the_program_is_the_programs_own(tmp_path, writes):
    (tmp_path / "x.py").write_text("import pathlib, sys\n" + "pathlib.Path(sys.argv[2]).touch()\n" * writes)
    done = run_kernel(tmp_path / "x.py", "-o", tmp_path / "r.html")
    assert ("no report is in" in done.stdout) != writes


def test_a_program_that_is_terminated_leaves_the_report_so_far(tmp_path):
    ready, kept = tmp_path / "ready", tmp_path / "run.json"
    (tmp_path / "test_lost.py").write_text(
        "import pathlib, runpy, time\n"
        "def test_lost():  # pytest has stdout in a file meanwhile\n"
        f"    runpy.run_path({str(ROOT / LOST[0])!r}, run_name='__main__')\n"
        f"    pathlib.Path({str(ready)!r}).touch()\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "retrograd", "run-kernel", "-o", kept, "--", "-m", "pytest", tmp_path / "test_lost.py"],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    while process.poll() is None and not ready.exists():
        time.sleep(0.05)
    process.terminate()
    out, _ = process.communicate()
    assert process.returncode == -signal.SIGTERM, out
    record = reports.load(kept)
    assert (record.verdict, record.code, record.kernels[0].programs) == ("finding", 128 + signal.SIGTERM, 64)
    assert "FINDING" in out
    assert "SIGTERM ended the program" in out
