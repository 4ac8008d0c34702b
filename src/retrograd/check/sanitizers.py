"""Triton's own sanitizers on an op's ordinary case, on a GPU: gsan for races in global memory, consan for those within
a program. Torch-free but for what is done in the process that runs the op.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from retrograd.check.isolation import VerifyCommand
from retrograd.check.memcheck import Look, ordinary_case, with_tool
from retrograd.check.schema import Report
from retrograd.compat import versions
from retrograd.core import subprocesses
from retrograd.errors import UsageError

MODES = ("gsan", "consan", "fpsan")
_SINCE = "3.9"
_STAGE = "races"
# gsan takes 4 bytes together: two programs that write 16-bit neighbours would race.
_GSAN_DTYPES = ("float32", "float64")
_RUN = """
import sys, triton
from retrograd.check import sanitizers
sanitizers.switch_on(sys.argv.pop(1))
from retrograd.cli import main
main()
"""
# What CUDA prints of a failed assertion, for each thread.
_ASSERTION = re.compile(r"^(.*?):(\d+): .*?block: (\[.*?\]), thread: \[.*?\] Assertion `(.*)` failed", re.MULTILINE)


def check_mode(mode: str) -> None:
    """Refuse what this Triton does not have, and what says nothing of a gradient.

    Raises:
        UsageError: names the version.
    """
    version = versions.installed("triton")
    if mode == "fpsan":
        raise UsageError(
            "`--sanitize fpsan` has Triton compute with whole numbers in place of floats, to compare two kernels: no "
            "gradient that verify compares means anything then; take gsan or consan"
        )
    if not version:
        raise UsageError(f"`--sanitize {mode}` is a mode of Triton {_SINCE}, which is not installed")
    if versions.minor(version) < versions.minor(_SINCE):
        raise UsageError(f"`--sanitize {mode}` is a mode of Triton {_SINCE}, and Triton {version} is installed")


def switch_on(mode: str) -> None:
    """Have this process compile kernels with a sanitizer; gsan sees the memory of its own pool alone."""
    from triton import knobs

    knobs.compilation.instrumentation_mode = mode
    if mode == "gsan":
        gsan = importlib.import_module("triton.experimental.gsan")  # which older releases do not have
        from retrograd.compat.torch_cuda import allocate_from

        allocate_from(gsan.create_mem_pool())


def with_sanitizer(report: Report, command: VerifyCommand, mode: str, timeout: float) -> Report:
    """The report with what a sanitizer finds in its races stage; where it did not end as it should, a note there."""
    return with_tool(report, command, _STAGE, ["--sanitize", mode], lambda: _look(report, command, mode, timeout))


def parse(printed: str) -> Counter[str]:
    """Assertions that failed on a GPU, in words, with the number of threads that told them."""
    matches = list(_ASSERTION.finditer(printed))
    first = {(m[4], m[1], m[2]): m[3] for m in reversed(matches)}
    return Counter(f"{m[4]}, {m[1]}:{m[2]}, block {first[m[4], m[1], m[2]]}" for m in matches)


def _look(report: Report, command: VerifyCommand, mode: str, timeout: float) -> Look:
    """What a sanitizer reports of dtypes that it can judge, and a note of how it ended."""
    if mode == "gsan":
        wide = [dtype for dtype in report.dtypes if dtype in _GSAN_DTYPES]
        if not wide:
            return {}, f"gsan was not run: it takes 4 bytes together, and the dtypes are {', '.join(report.dtypes)}"
        command = replace(command, chosen=(*_without_dtypes(command.chosen), "--dtype", wide[0]))
    return _assertions(command, mode, timeout)


def _without_dtypes(words: Sequence[str]) -> list[str]:
    return [w for i in range(0, len(words), 2) if words[i] != "--dtype" for w in words[i : i + 2]]


def _assertions(command: VerifyCommand, mode: str, timeout: float) -> Look:
    """What a sanitizer reports, and a note of how it ended."""
    words = [sys.executable, "-c", _RUN, mode, "verify", *ordinary_case(command)]
    with subprocesses.Child(words, {"TRITON_ALWAYS_COMPILE": "1"}) as child:
        ended = child.wait(timeout) or f"no end within {timeout:g} s"
    counts = parse(child.output())
    if counts:
        return counts, f"{mode}: {len(counts)} fault{'s' * (len(counts) > 1)}"
    if ended == "exit code 0":
        return counts, f"{mode}: no fault"
    return counts, f"{mode} did not come to its end ({ended}): {child.output()[-300:]}".rstrip(": ")
