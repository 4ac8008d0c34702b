"""compute-sanitizer's memcheck on an op's ordinary case: what guard bands cannot see on a GPU. Torch-free.

It sees every access of a compiled kernel, if each tensor is an allocation of the driver's: so PyTorch's cache is off.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from retrograd.check.isolation import VerifyCommand
from retrograd.check.schema import Case, Finding, Report, StageResult
from retrograd.core import subprocesses

TOOL = "compute-sanitizer"
_STAGE = "bounds"
_RUNS = "contract"  # the stage whose runs are watched: the op as it is, without reference and without bands

_FAULT = re.compile(r"(Invalid|Misaligned) (\S+) (\S+) of size (\d+) bytes?")
_AT = re.compile(r"at (.+?)\+0x[0-9a-f]+(?: in (\S+:\d+))?$")
_THREAD = re.compile(r"by thread (\(.*?\)) in block (\(.*?\))")
_NEAR = re.compile(r"and is (\d+) bytes (before|after) the nearest allocation .* of size (\d+) bytes")
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")

Look = tuple[Mapping[str, int], str]  # what a tool found, in words and how often, and a note


@dataclass(frozen=True)
class Fault:
    """One access that memcheck reports: `what` ("global read of 4 bytes"), the kernel, its line, thread and block."""

    what: str
    kernel: str = "?"
    line: str = ""
    thread: str = ""
    near: str = ""

    def text(self) -> str:
        """A sentence for a report."""
        parts = (f"kernel {self.kernel}: {self.what}", self.near, self.line, self.thread)
        return ", ".join(filter(None, parts))


def parse(log: str) -> list[Fault] | None:
    """The faults in what memcheck wrote; None if it did not come to its end.

    Accesses "inside the nearest allocation" are left out: with expandable segments these are false (pytorch#196209).
    """
    if not _SUMMARY.search(log):
        return None
    faults: list[Fault] = []
    inside: list[Fault] = []
    for line in (raw.removeprefix("=========").strip() for raw in log.splitlines()):
        if match := _FAULT.search(line):
            how, space, access, size = match.groups()
            faults.append(Fault(f"{how.lower()} {space.strip('_')} {access} of {size} bytes"))
        elif faults and (match := _AT.match(line)) and faults[-1].kernel == "?":
            faults[-1] = replace(faults[-1], kernel=match[1], line=match[2] or "")
        elif faults and (match := _THREAD.search(line)):
            faults[-1] = replace(faults[-1], thread=f"thread {match[1]} of block {match[2]}")
        elif faults and (match := _NEAR.search(line)):
            faults[-1] = replace(faults[-1], near=f"{match[1]} bytes {match[2]} an allocation of {match[3]}")
        elif faults and "is inside the nearest allocation" in line:
            inside.append(faults[-1])
    return [f for f in faults if not any(f is i for i in inside)]


def ordinary_case(command: VerifyCommand) -> list[str]:
    """Arguments of `retrograd verify` that run the op's ordinary case, or the case asked for, and nothing else."""
    words = list(command.chosen)
    kept = [w for i in range(0, len(words), 2) if words[i] != "--only" for w in words[i : i + 2]]
    return [*command.always, "--level", "quick", "--only", _RUNS, *kept, "--in-process", "-q"]


def memcheck_command(command: VerifyCommand, tool: str, log: Path) -> list[str]:
    """What runs the op's ordinary case, or the case asked for, under memcheck."""
    options = ["--tool", "memcheck", "--print-limit", "20", "--log-file", str(log)]
    return [tool, *options, sys.executable, "-m", "retrograd", "verify", *ordinary_case(command)]


def with_memcheck(report: Report, command: VerifyCommand, timeout: float) -> Report:
    """The report with what memcheck finds in its bounds stage; a tool that is missing or slow is a note there."""
    return with_tool(report, command, _STAGE, ["--memcheck"], lambda: _faults(command, timeout))


def with_tool(
    report: Report, command: VerifyCommand, stage: str, option: Sequence[str], look: Callable[[], Look]
) -> Report:
    """The report with what a tool that this option of `verify` asks for finds on a GPU, in one of its stages."""
    if not any(result.id == stage for result in report.stages):
        return report
    tool = option[-1].lstrip("-")
    counts, note = {}, f"{tool} was not run: it is for GPUs, and the device is {report.device}"
    if report.device.startswith("cuda"):
        counts, note = look()
    again = shlex.join(["retrograd", "verify", *command.always, "--only", stage, *option])
    case = Case(report.dtypes[0])
    findings = tuple(
        Finding(stage, tool, text, case, wrong=count, where="the ordinary case", repro=again)
        for text, count in counts.items()
    )
    return report.with_stages(_added(s, findings, note) if s.id == stage else s for s in report.stages)


def _added(stage: StageResult, findings: Sequence[Finding], note: str) -> StageResult:
    status = "failed" if findings else stage.status
    return replace(stage, findings=(*stage.findings, *findings), notes=(*stage.notes, note), status=status)


def _faults(command: VerifyCommand, timeout: float) -> Look:
    """What memcheck reports, and how it ended or why it could not look."""
    tool = shutil.which(TOOL)
    if tool is None:
        return {}, f"memcheck was not run: {TOOL} is not on PATH; it comes with the CUDA toolkit"
    with tempfile.TemporaryDirectory(prefix="retrograd-memcheck-") as folder:
        log = Path(folder) / "log"
        # With the cache an access beyond a tensor stays inside the block that was asked of the driver.
        uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        with subprocesses.Child(memcheck_command(command, tool, log), uncached) as child:
            ended = child.wait(timeout) or f"no end within {timeout:g} s"
        faults = parse(log.read_text(errors="replace")) if log.exists() else None
    if faults is None:
        return {}, f"memcheck did not come to its end ({ended}): {child.output()[-300:]}".rstrip(": ")
    count = Counter((fault.kernel, fault.what) for fault in faults)
    first = {(fault.kernel, fault.what): fault.text() for fault in reversed(faults)}
    note = f"memcheck: {len(faults) or 'no'} fault{'s' * (len(faults) > 1)}"
    return {first[key]: number for key, number in count.items()}, note
