"""Ops that crash, hang, leak, print without end or end the interpreter: each is told, and the other stages go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from retrograd.check.schema import Report

HEAD = """
import ctypes, os, sys, time
import torch
from retrograd import op, tensor

calls = 0
DTYPES = ["float32", "bfloat16", "float16"]

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        global calls
        calls += 1
        misbehave(ctx.saved_tensors[0])
        return 2 * g * ctx.saved_tensors[0]

spec = op(Square.apply, lambda x: x * x, dict(x=tensor("M", "N")), dtypes=["float32"], name="square")
"""
# Only where grad_out or x is not contiguous, so in one stage.
CRASH = "def misbehave(x):\n    if not x.is_contiguous(): ctypes.string_at(0)\n"
EXIT = "def misbehave(x):\n    if not x.is_contiguous(): os._exit(7)\n"
HANG = "def misbehave(x):\n    while not x.is_contiguous(): time.sleep(0.1)\n"
LEAK = "kept = []\ndef misbehave(x):\n    while not x.is_contiguous(): kept.append(bytes(2**24))\n"
PRINT = "def misbehave(x):\n    print('x' * 100000); sys.stderr.write('y' * 100000)\n"
ALWAYS = "def misbehave(x):\n    ctypes.string_at(0)\n"
ONLY = ("--only", "oracle,layouts,shapes", "--level", "quick", "--device", "cpu")


def verify(folder: Path, body: str, *args: str, target: str = "op.py:spec") -> subprocess.CompletedProcess[str]:
    (folder / "op.py").write_text(HEAD + body)
    command = [sys.executable, "-m", "retrograd", "verify", target, *ONLY, "-o", "r.json", *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=200)


def report(folder: Path) -> Report:
    return Report.from_json((folder / "r.json").read_text())


@pytest.mark.dealt(2)
@pytest.mark.parametrize(
    ("body", "args", "kind", "said"),
    [
        (CRASH, (), "crash", "killed by SIGSEGV"),
        (EXIT, (), "crash", "exit code 7"),
        # A healthy stage answers in under a second on an idle machine, and took more than 4 s on a busy one.
        (HANG, ("--timeout", "20"), "hang", "no answer for 20 s"),
        (LEAK, ("--memory", "0.8"), "memory", "came to hold 0.8 GB"),
    ],
    ids=["crash", "exit", "hang", "leak"],
)
def test_what_takes_the_process_down_is_a_finding(
    tmp_path: Path, body: str, args: tuple[str, ...], kind: str, said: str
) -> None:
    done = verify(tmp_path, body, *args)
    assert done.returncode == 1, done.stderr
    found = report(tmp_path)
    assert {stage.id: stage.status for stage in found.stages} == dict(
        oracle="passed", layouts="failed", shapes="passed"
    )
    (finding,) = found.findings
    assert finding.kind == kind
    assert said in finding.what
    if kind == "hang" or "SIGSEGV" in said:
        assert "in misbehave" in finding.what
    assert "x:" in finding.where
    assert "--only layouts" in finding.repro
    assert said in done.stdout


def test_megabytes_of_output_harm_nobody(tmp_path: Path) -> None:
    done = verify(tmp_path, PRINT)
    assert done.returncode == 0, done.stderr[-500:]
    assert len(done.stdout) + len(done.stderr) < 5000
    assert report(tmp_path)


def test_an_op_that_always_crashes_is_given_up(tmp_path: Path) -> None:
    done = verify(tmp_path, ALWAYS, "--only", "contract,mutation,algebra,oracle,shapes")
    assert done.returncode == 1
    assert [stage.status for stage in report(tmp_path).stages] == ["failed"] * 3
    assert "three in a row ended the process" in done.stdout


def test_a_module_that_ends_the_process_is_an_error(tmp_path: Path) -> None:
    done = verify(tmp_path, "def misbehave(x): pass\nos._exit(9)\n")
    assert done.returncode == 2
    assert "ended (exit code 9) before the first stage" in done.stderr


def test_errors_of_the_child_are_those_of_the_command(tmp_path: Path) -> None:
    done = verify(tmp_path, "def misbehave(x): pass\n", target="op.py:nothing")
    assert done.returncode == 2
    assert "nothing" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("args", [("--timeout", "0"), ("--memory", "-1")])
def test_limits_are_numbers_above_0(tmp_path: Path, args: tuple[str, ...]) -> None:
    done = verify(tmp_path, "def misbehave(x): pass\n", *args)
    assert done.returncode == 2
    assert f"`{args[0]}` is" in done.stderr
    assert not (tmp_path / "r.json").exists()


def test_jobs_and_this_process_say_the_same(tmp_path: Path) -> None:
    """More jobs than dtypes among them."""
    body = "def misbehave(x): pass\nspec = op(Square.apply, lambda x: x * x, dict(x=tensor('M', 'N')), dtypes=DTYPES)\n"
    seen = []
    for args in ((), ("--in-process",), ("-j", "3")):
        done = verify(tmp_path, body, *args, "--dtype", "float32,float16")
        assert done.returncode == 0, done.stderr
        found = report(tmp_path)
        assert sorted(found.dtypes) == ["float16", "float32"]
        seen.append([(s.id, s.status, s.cases, s.runs, s.power_text) for s in found.stages])
    alone, here, shared = seen
    assert alone == here
    assert [stage[:4] for stage in alone] == [stage[:4] for stage in shared]


def test_a_crash_in_one_job_leaves_the_others_alone(tmp_path: Path) -> None:
    body = CRASH.replace("not x.is_contiguous()", "x.dtype == torch.float16 and not x.is_contiguous()")
    body += "spec = op(Square.apply, lambda x: x * x, dict(x=tensor('M', 'N')), dtypes=DTYPES)\n"
    assert verify(tmp_path, body, "-j", "2", "--dtype", "float32,float16").returncode == 1
    found = report(tmp_path)
    assert [finding.case.dtype for finding in found.findings] == ["float16"]
    assert {stage.id: stage.status for stage in found.stages} == dict(
        oracle="passed", layouts="failed", shapes="passed"
    )


def test_no_jobs_are_refused(tmp_path: Path) -> None:
    done = verify(tmp_path, "def misbehave(x): pass\n", "-j", "0")
    assert done.returncode == 2
    assert "`--jobs` is 0, expected 1 or more" in done.stderr


# What a kernel does that reads where it must not: it is over with CUDA for this process, whoever calls.
LOSES_GPU = """
from retrograd.check import runner, verification
dead = []
runner.lost = verification.lost = lambda device: "CUDA error: an illegal memory access was encountered" if dead else ""
def misbehave(x):
    if not x.is_contiguous(): dead.append(x)
    if dead: raise RuntimeError(runner.lost(''))
"""


# The same, but nobody has looked at a result when the reference calls the GPU.
LOSES_GPU_LATE = (
    LOSES_GPU.replace("    if dead: raise RuntimeError(runner.lost(''))\n", "")
    + """
def reference(x):
    if dead: raise RuntimeError(runner.lost(""))
    return x * x
spec = op(Square.apply, reference, dict(x=tensor("M", "N")), dtypes=["float32"], name="square")
"""
)


@pytest.mark.parametrize("body", [LOSES_GPU, LOSES_GPU_LATE], ids=["op", "reference"])
def test_a_lost_gpu_is_told_once_and_the_other_stages_go_on(tmp_path: Path, body: str) -> None:
    done = verify(tmp_path, body)
    assert done.returncode == 1, done.stderr
    found = report(tmp_path)
    assert {stage.id: stage.status for stage in found.stages} == dict(
        oracle="passed", layouts="failed", shapes="passed"
    )
    (finding,) = found.findings
    assert finding.kind == "crash"
    assert "illegal memory access" in finding.what
    assert "the first case that does it" in finding.where
