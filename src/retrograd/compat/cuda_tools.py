"""Output of cuobjdump and nvdisasm, the versions that Triton's wheel brings: resources and instructions of a cubin."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from retrograd.compat.registry import part, require
from retrograd.compat.triton_compile import PROBE_GPU, CompileRequest, _active_driver, compile_requests, of_dtype

_LINE = re.compile(r'//## File "([^"]*)", line (\d+)( inlined at )?')
# An instruction: its offset in a comment, perhaps a predicate, the name with its modifiers.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:\{\s*)?(@!?U?P[T\d]\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)")
_ASSEMBLY = re.compile(r"// begin inline asm\n(.*?)// end inline asm", re.DOTALL)
_LOC = re.compile(r"\.loc\s+(\d+) (\d+)")
_FILE = re.compile(r'\.file\s+(\d+) "([^"]+)"')
_RESOURCE = re.compile(r"\b(REG|STACK|LOCAL):(\d+)")


class MachineInstruction(NamedTuple):
    """One instruction: "LDG.E.128", and (file, line) of the innermost function if known."""

    name: str
    line: tuple[str, int] | None


def disassemble(cubin: bytes) -> tuple[str, str]:
    """(resource usage, machine code with source lines) of a cubin, as text.

    Raises:
        UnsupportedVersionError: the programs of this Triton write something else.
    """
    require(TOOLS)
    return _disassemble(cubin)


def resources(usage: str) -> dict[str, int]:
    """Registers ("REG") and bytes of a thread's memory ("STACK", "LOCAL")."""
    return {name: int(value) for name, value in _RESOURCE.findall(usage)}


def instructions(code: str) -> Iterator[MachineInstruction]:
    """The instructions in their order, without those that are never executed."""
    line, inlined = None, False
    for text in code.splitlines():
        if (at := _LINE.search(text)) is not None:
            # After the line of an inlined function come those of its callers, up to the first that is not inlined.
            line = line if inlined else (at[1], int(at[2]))
            inlined = at[3] is not None
        elif (match := _INSTRUCTION.search(text)) is not None and (match[1] or "").strip() != "@!PT":
            yield MachineInstruction(match[2], line)


def assembly_lines(ptx: str) -> dict[tuple[str, int], tuple[str, int]]:
    """Line that the last instruction of inline assembly has -> line of the source that it was made for.

    Triton 3.8 and later count on for each line of the assembly, of which a load has one for each register.
    """
    files = dict(_FILE.findall(ptx))
    lines: dict[tuple[str, int], tuple[str, int]] = {}
    for block in _ASSEMBLY.findall(ptx):
        places = [(files.get(file, ""), int(line)) for file, line in _LOC.findall(block)]
        if len(places) == 1:
            lines[places[0]] = places[0]
        elif places:
            lines.setdefault(places[-1], places[0])
    return lines


def _disassemble(cubin: bytes) -> tuple[str, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(_tool("cuobjdump"), "-res-usage", file.name)
        # Without data flow analysis: it has nothing to add here and takes as long as the rest on large kernels.
        return usage, _run(_tool("nvdisasm"), "-c", "-gi", "-ndf", file.name)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@cache
def _tool(name: str) -> str:
    """Path of a program that Triton's wheel brings."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


@part(
    "triton.cuda_tools",
    "reads machine code",
    "machine code for NVIDIA GPUs is not read; name AMD ones, gfx942 and gfx950",
    names=("cuobjdump -res-usage", "nvdisasm -c -gi -ndf", "triton/backends/nvidia/bin"),
    refuses=True,
)
def TOOLS() -> str:
    """A kernel that doubles 512 numbers: one wide load and one wide store a thread, on their lines."""
    import torch

    from retrograd.compat.triton_probe import doubling_kernel

    requests: list[CompileRequest] = []
    with _active_driver(PROBE_GPU):
        with compile_requests(requests.append):
            options = {"num_warps": 4, "enable_fp_fusion": True}  # Triton 3.9 warns who leaves the second open
            doubling_kernel.run(of_dtype(torch.float32), N=512, grid=(1,), warmup=True, **options)
        asm = requests[0].compile().asm
    ptx, (usage, code) = asm["ptx"], _disassemble(asm["cubin"])
    names = {i.name.partition(".")[0]: i for i in instructions(code) if ".128" in i.name}
    if not 0 < resources(usage).get("REG", 0) <= 255 or "STACK" not in resources(usage):
        return f"cuobjdump reports the resources {resources(usage)}"
    if names.keys() != {"LDG", "STG"}:
        return f"nvdisasm lists the wide accesses {', '.join(names) or 'of no kind'}"
    for instruction in names.values():
        line = instruction.line or ("", 0)
        file, number = assembly_lines(ptx).get(line, line)
        if (Path(file).name, number - doubling_kernel.fn.__code__.co_firstlineno) != ("triton_probe.py", 3):
            return f"nvdisasm has {instruction.name} on line {number} of {file or 'no file'}"
    return ""
