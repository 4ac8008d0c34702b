"""What the machine code of a kernel says: registers, spills, widths of loads and stores, atomics, float64.

NVIDIA: `cuobjdump -res-usage` and `nvdisasm` of the cubin, both shipped with Triton. AMD: the text of the assembly.
Nothing here needs a GPU.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from retrograd.codegen import amd, nvidia
from retrograd.codegen.access import Access
from retrograd.codegen.compile import Launch, record, require_triton
from retrograd.codegen.targets import target_named


@dataclass(frozen=True)
class Facts:
    """One compiled kernel.

    Attributes:
        kernel: name of the kernel function.
        target: name of the target.
        arguments: argument -> type ("*bf16"), without constexprs.
        constants: argument -> value, of constexprs and of arguments that are None or 1.
        aligned: arguments known to be divisible by 16.
        num_warps, num_stages: options of the launch.
        registers: 32-bit registers of a thread; on AMD vector and accumulation registers together.
        spill_bytes: stack of a thread; kernels without calls have one only for spilled registers.
        shared_bytes: shared memory of a program.
        uses_f64: whether any instruction computes in float64.
        bulk_copies: instructions that copy whole blocks to or from shared memory (TMA).
        accesses: what touches global memory, one entry per kind, width and source line.
    """

    kernel: str
    target: str
    arguments: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    uses_f64: bool
    bulk_copies: int
    accesses: tuple[Access, ...]

    @property
    def load_bytes(self) -> dict[int, int]:
        """Width in bytes -> number of global load instructions, asynchronous copies to shared memory included."""
        return self._widths("load")

    @property
    def store_bytes(self) -> dict[int, int]:
        """Width in bytes -> number of global store instructions."""
        return self._widths("store")

    @property
    def atomics(self) -> dict[str, int]:
        """Kind ("add.f32", "cas") -> number of atomic instructions."""
        counts: Counter[str] = Counter()
        for access in self.accesses:
            if access.op == "atomic":
                counts[access.kind] += access.count
        return dict(sorted(counts.items()))

    @property
    def programs_per_sm(self) -> int:
        """Programs of this kernel that fit one multiprocessor (AMD: compute unit) at once."""
        target = target_named(self.target)
        # Registers are handed out to warps in multiples of 8 a thread on all of these targets.
        a_program = max(-(-self.registers // 8) * 8, 8) * target.warp_size * self.num_warps
        by_shared = (target.shared_limit_bytes // self.shared_bytes) if self.shared_bytes else 32
        return min(target.registers // a_program, target.max_warps // self.num_warps, by_shared, 32)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Facts:
        """The inverse of `to_dict`."""
        accesses = tuple(Access(**(access | {"names": tuple(access["names"])})) for access in data["accesses"])
        return cls(**(data | {"accesses": accesses, "aligned": tuple(data["aligned"])}))

    def _widths(self, op: str) -> dict[int, int]:
        counts: Counter[int] = Counter()
        for access in self.accesses:
            if access.op == op:
                counts[access.bytes] += access.count
        return dict(sorted(counts.items(), reverse=True))


def cross_compile(kernel: Any, *args: Any, target: str, grid: tuple[int, ...] = (1,), **kwargs: Any) -> Facts:
    """Compile the launch `kernel[grid](*args, **kwargs)` for a target and read its machine code.

    Args:
        kernel: a `@triton.jit` function.
        *args: as in the launch: tensors (CPU ones do; their values are not read), numbers, None; a torch dtype stands
            for an aligned tensor.
        target: "sm_80", "sm_90", "sm_100", "gfx942" or "gfx950".
        grid: as in the launch; it changes no code.
        **kwargs: as in the launch, `num_warps` and `num_stages` included.

    Raises:
        UsageError: There is no such target.
        MissingExtraError: Triton is not installed.
        RetrogradError: This process interprets kernels.
    """
    return facts_of(record(kernel, *args, target=target, grid=grid, **kwargs))


def facts_of(launch: Launch) -> Facts:
    """Compile a recorded launch and read its machine code."""
    compiled = launch.compile()
    if launch.target.nvidia:
        found = nvidia.read(*_disassemble(compiled.asm["cubin"]))
    else:
        found = amd.read(compiled.asm["amdgcn"])
    return Facts(
        kernel=launch.kernel,
        target=launch.target.name,
        arguments=launch.arguments,
        constants=launch.constants,
        aligned=launch.aligned,
        num_warps=compiled.metadata.num_warps,
        num_stages=compiled.metadata.num_stages,
        shared_bytes=compiled.metadata.shared,
        **found,
    )


def facts_of_all(launches: list[Launch], workers: int = 1) -> list[Facts]:
    """`facts_of` each launch, in `workers` processes forked from this one."""
    if workers <= 1:
        return [facts_of(launch) for launch in launches]
    # Kernels cannot be pickled; forked processes have them already and are told positions only.
    _PENDING[:] = launches
    try:
        with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
            return list(pool.map(_facts_at, range(len(launches))))
    finally:
        _PENDING.clear()


_PENDING: list[Launch] = []


def _facts_at(position: int) -> Facts:
    return facts_of(_PENDING[position])


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """(resource usage, machine code with source lines) of a cubin, as text."""
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
    return str(Path(require_triton().__file__).parent / "backends" / "nvidia" / "bin" / name)
