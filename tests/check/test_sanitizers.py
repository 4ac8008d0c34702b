"""Triton's sanitizers are refused where there are none, and what a GPU prints of them is read; they need a GPU to run."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from retrograd.check import sanitizers
from retrograd.check.isolation import VerifyCommand
from retrograd.check.schema import Report, StageResult
from retrograd.cli import main
from retrograd.compat import versions
from retrograd.errors import UsageError

# As CUDA prints failed assertions of device code, one line a thread; those of gsan have no name of a function.
RACE = "\n".join(
    f"/home/me/op.py:14: : block: [{block},0,0], thread: [{thread},0,0] Assertion `Write after write race detected` failed."
    for block, thread in ((3, 0), (3, 1), (0, 0))
)
SHARED = "/home/me/op.py:20: dw_kernel: block: [0,0,0], thread: [5,0,0] Assertion `Buffer being accessed has outstanding writes` failed."
COMMAND = VerifyCommand(("op.py:spec", "--level", "full"), ("--only", "races,oracle", "--case", "M=5"))


def report(device: str) -> Report:
    stages = tuple(StageResult(name, "", "passed", cases=1) for name in ("contract", "races"))
    return Report("op.py:spec", "proved", "full", 0, ("float32",), device, stages, 1.0, "now", "")


@pytest.fixture
def python(tmp_path, monkeypatch):
    """A stand-in for Python that prints what it is told and keeps its arguments."""

    def make(printed: str, after: str = "exit 0"):
        path = tmp_path / "python"
        (tmp_path / "printed").write_text(printed + "\n")
        path.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\ncat {tmp_path}/printed\n{after}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sanitizers.sys, "executable", str(path))
        return tmp_path / "words"

    return make


def test_threads_that_say_the_same_are_one_fault():
    assert sanitizers.parse(f"compiling\n{RACE}\n{SHARED}\nexit") == {
        "Write after write race detected, /home/me/op.py:14, block [3,0,0]": 3,
        "Buffer being accessed has outstanding writes, /home/me/op.py:20, block [0,0,0]": 1,
    }
    assert not sanitizers.parse("AssertionError: op.py:14: Assertion `x` was fine")


def test_faults_join_the_races_stage(python):
    words = python(RACE, "exit 1")
    got = sanitizers.with_sanitizer(report("cuda (some GPU)"), COMMAND, "gsan", 30)
    assert got.verdict == "finding"
    (finding,) = got.stage("races").findings
    assert (finding.kind, finding.wrong) == ("gsan", 3)
    assert finding.repro.endswith("--only races --sanitize gsan")
    assert got.stage("contract").status == "passed"
    assert (
        "gsan verify op.py:spec --level full --level quick --only contract --case M=5 --dtype float32 --in-process"
        in words.read_text()
    )


def test_gsan_is_given_what_it_can_judge(python):
    """Neighbours of 16 bits that two programs write are one place to it."""
    words = python("compiling")
    command = VerifyCommand(("op.py:spec",), ("--dtype", "bfloat16,float32"))
    both = replace(report("cuda"), dtypes=("bfloat16", "float32"))
    assert sanitizers.with_sanitizer(both, command, "gsan", 30).stage("races").notes == ("gsan: no fault",)
    assert "--dtype float32 --in-process" in words.read_text()
    words.unlink()
    half = replace(both, dtypes=("bfloat16",))
    (note,) = sanitizers.with_sanitizer(half, command, "gsan", 30).stage("races").notes
    assert note == "gsan was not run: it takes 4 bytes together, and the dtypes are bfloat16"
    assert not words.exists()


@pytest.mark.parametrize(
    ("device", "after", "note"),
    [
        ("cuda", "exit 0", "consan: no fault"),
        ("cuda", "exit 3", "consan did not come to its end (exit code 3): compiling"),
        ("cuda", "sleep 20", "consan did not come to its end (no end within 0.5 s)"),
        ("cpu", "exit 0", "consan was not run: it is for GPUs, and the device is cpu"),
    ],
)
def test_what_is_no_fault_is_a_note(python, device, after, note):
    python("compiling", after)
    got = sanitizers.with_sanitizer(report(device), COMMAND, "consan", 0.5)
    assert got.verdict == "proved"
    assert got.stage("races").notes[0].startswith(note)


@pytest.mark.parametrize(
    ("version", "mode", "says"),
    [
        ("3.7.1", "gsan", "is a mode of Triton 3.9, and Triton 3.7.1 is installed"),
        ("3.8.0", "consan", "is a mode of Triton 3.9, and Triton 3.8.0 is installed"),
        ("", "gsan", "is a mode of Triton 3.9, which is not installed"),
        ("3.9.0", "fpsan", "whole numbers"),
    ],
)
def test_where_there_is_no_such_mode_nothing_is_run(monkeypatch, version, mode, says):
    monkeypatch.setattr(versions, "installed", lambda package: version)
    with pytest.raises(UsageError, match=says):
        sanitizers.check_mode(mode)
    result = CliRunner().invoke(main, ["verify", "rms_norm", "--sanitize", mode])
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize("version", ["3.9.0", "3.10.0"])
def test_where_there_is_one_it_is_taken(monkeypatch, version):
    monkeypatch.setattr(versions, "installed", lambda package: version)
    for mode in ("gsan", "consan"):
        sanitizers.check_mode(mode)


def test_kernels_are_compiled_with_the_mode():
    triton = pytest.importorskip("triton")
    with triton.knobs.compilation.scope():
        sanitizers.switch_on("consan")
        assert triton.knobs.compilation.instrumentation_mode == "consan"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels on a GPU")
@pytest.mark.parametrize(
    ("mode", "op", "wanted"), [("gsan", "racy", "gsan"), ("gsan", "atomic", ""), ("consan", "racy", "")]
)
def test_on_a_gpu(mode, op, wanted):
    """A sum by plain additions of several programs is a race in global memory, and none within a program."""
    if versions.minor(versions.installed("triton")) < versions.minor("3.9"):
        pytest.skip("Triton 3.9 has sanitizers")
    target = f"{Path(__file__).parent / 'sanitized_ops.py'}:{op}"
    result = CliRunner().invoke(
        main,
        ["verify", target, "--device", "cuda", "--level", "quick", "--only", "races", "--sanitize", mode, "--json"],
    )
    (stage,) = json.loads(result.stdout)["stages"]
    assert {finding["kind"] for finding in stage["findings"]} - {"race"} == ({wanted} if wanted else set())
    assert any(
        note.startswith((f"{mode}: no fault", f"{mode}: 1 fault", f"{mode}: 2 faults")) for note in stage["notes"]
    )
