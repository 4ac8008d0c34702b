"""compute-sanitizer's reports are read, on recorded text; the tool itself needs a GPU."""

from __future__ import annotations

import stat

import pytest

from retrograd.check import memcheck
from retrograd.check.isolation import VerifyCommand
from retrograd.check.schema import Report, StageResult

# From muhos/ParaFROST#10, NVIDIA/cuCollections#539 and pytorch/pytorch#196209, with host frames left out.
AFTER = """========= COMPUTE-SANITIZER
=========
========= Invalid __global__ write of size 4 bytes
=========     at ParaFROST::cnt_cls_lits(const ParaFROST::CNF *)+0x8b0
=========     by thread (0,0,0) in block (278,0,0)
=========     Address 0x7fe71d800958 is out of bounds
=========     and is 85 bytes after the nearest allocation at 0x7fe71d800900 of size 4 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========     Host Frame: [0x2dcdbf]
=========                in /usr/lib/x86_64-linux-gnu/libcuda.so.1
"""
LINE = """========= Invalid __global__ read of size 1 bytes
=========     at void assign_value<bool>(thrust::device_ptr<bool>, const bool *)+0xd0 in /src/assign_value.h:58
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7b3c42e0000a is out of bounds
=========     and is 1 bytes before the nearest allocation at 0x7b3c42e00000 of size 10 bytes
=========     Device Frame:void assign_value<bool>(thrust::device_ptr<bool>, const bool *)+0xd0 in /src/x.h:62
"""
INSIDE = """========= Invalid __global__ write of size 256 bytes
=========     at bulk_copy_range(unsigned char *, int)+0x120
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x147267fff80 is out of bounds
=========     and is inside the nearest allocation at 0x14725400000 of size 20971520 bytes
"""
COMMAND = VerifyCommand(("op.py:spec", "--level", "full"), ("--only", "bounds,oracle", "--case", "M=5"))


def summary(count):
    return f"========= ERROR SUMMARY: {count} error{'s' * (count != 1)}\n"


def report(device):
    stages = tuple(StageResult(name, "", "passed", cases=1) for name in ("contract", "bounds"))
    return Report("op.py:spec", "proved", "full", 0, ("float32",), device, stages, 1.0, "now", {})


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A stand-in for compute-sanitizer that writes what it is told; the command it was given is kept beside it."""

    def make(log, after="exit 0"):
        path = tmp_path / memcheck.TOOL
        (tmp_path / "said").write_text(log)
        path.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\ncat {tmp_path}/said > "$6"\n{after}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return tmp_path / "words"

    return make


def test_faults_are_read():
    after, line = memcheck.parse(AFTER + LINE + summary(2))
    assert after.text() == (
        "kernel ParaFROST::cnt_cls_lits(const ParaFROST::CNF *): invalid global write of 4 bytes, "
        "85 bytes after an allocation of 4, thread (0,0,0) of block (278,0,0)"
    )
    assert line.line == "/src/assign_value.h:58"
    assert line.near == "1 bytes before an allocation of 10"


def test_no_fault_and_no_end():
    assert memcheck.parse("========= COMPUTE-SANITIZER\n" + summary(0)) == []
    assert memcheck.parse(AFTER) is None
    assert memcheck.parse("") is None


def test_false_alarms_inside_an_allocation_are_left_out():
    assert [f.what for f in memcheck.parse(INSIDE + AFTER + summary(2))] == ["invalid global write of 4 bytes"]


def test_findings_join_the_bounds_stage(tool):
    words = tool(AFTER + AFTER + LINE + summary(3), "exit 1")
    got = memcheck.with_memcheck(report("cuda (some GPU)"), COMMAND, 30)
    assert got.verdict == "finding"
    assert [f.wrong for f in got.stage("bounds").findings] == [2, 1]
    assert got.stage("bounds").findings[0].repro.endswith("--only bounds --memcheck")
    assert got.stage("contract").status == "passed"
    said = words.read_text()
    assert "verify op.py:spec --level full --level quick --only contract --case M=5 --in-process" in said
    assert "bounds" not in said


def test_no_fault_is_a_note(tool):
    tool(summary(0))
    got = memcheck.with_memcheck(report("cuda"), COMMAND, 30)
    assert got.verdict == "proved"
    assert got.stage("bounds").notes == ("memcheck: no fault",)


@pytest.mark.parametrize(("after", "says"), [("sleep 20", "no end within 0.5 s"), ("echo no GPU; exit 3", "no GPU")])
def test_a_tool_that_fails_is_a_note(tool, after, says):
    tool("", after)
    got = memcheck.with_memcheck(report("cuda"), COMMAND, 0.5)
    assert got.verdict == "proved"
    (note,) = got.stage("bounds").notes
    assert "did not come to its end" in note
    assert says in note


def test_a_missing_tool_is_a_note(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    got = memcheck.with_memcheck(report("cuda"), COMMAND, 30)
    assert got.verdict == "proved"
    assert "not on PATH" in got.stage("bounds").notes[0]


def test_nothing_is_started_without_a_gpu_or_the_stage(tool):
    words = tool(AFTER + summary(1))
    assert "it is for GPUs" in memcheck.with_memcheck(report("cpu"), COMMAND, 30).stage("bounds").notes[0]
    without = report("cuda")
    without = Report(**{**vars(without), "stages": without.stages[:1]})
    assert memcheck.with_memcheck(without, COMMAND, 30) == without
    assert not words.exists()
