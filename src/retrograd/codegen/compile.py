"""Compile Triton kernels for a GPU that is not there.

`recording` lets ordinary launchers run while nothing is executed: every `kernel[grid](...)` inside becomes a `Launch`,
which holds exactly what Triton would have compiled - types, alignment, constexprs, warps. `Launch.compile` then builds
it. What the machine code says is in `facts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrograd import config
from retrograd.codegen import tuning
from retrograd.codegen.schema import Tuning
from retrograd.compat.registry import require
from retrograd.compat.triton_compile import CompileRequest, KernelSignature, absent_gpu, compile_requests, first_line
from retrograd.compat.triton_launch import HOOK, KernelLaunch, Proceed, around_launches
from retrograd.errors import MissingExtraError, RetrogradError
from retrograd.runtime.gpu_targets import Target, target_named


@dataclass(frozen=True)
class Launch:
    """One launch that was recorded, not executed."""

    kernel: str  # name of the kernel function
    target: Target  # what it is to be compiled for
    grid: tuple[int, ...]  # numbers of programs; not part of the identity
    # what Triton asks its compiler for. Equal (kernel, target, key of it) compile to the same code.
    request: CompileRequest
    # what `@triton.autotune` adds, None where the kernel is launched without it
    tuning: Tuning | None = field(default=None, compare=False)

    @property
    def fn(self) -> Any:
        """The JITFunction."""
        return self.request.function

    @property
    def identity(self) -> tuple[str, str, str]:
        """Equal for launches that run the same machine code."""
        return self.fn.__module__ + ":" + self.kernel, self.target.name, self.request.key

    @property
    def signature(self) -> KernelSignature:
        return KernelSignature.of_request(self.fn, self.request.specialization)

    def compile(self) -> Any:
        """Triton's CompiledKernel of this launch, from Triton's cache directory where it is there already."""
        with absent_gpu(self.target):
            return self.request.compile()


@contextmanager
def recording(target: str) -> Iterator[list[Launch]]:
    """Record what is launched inside instead of launching it; the list fills as launchers run.

    Tensors may be on the CPU; their values are not read. An autotuned kernel is recorded with every configuration.
    Launchers that look for a GPU themselves must be told that there is none
    (`retrograd.runtime.triton.planned_gpu.planning`).

    Args:
        target: name of the target, see `targets`.

    Raises:
        UsageError: There is no such target.
        MissingExtraError: Triton is not installed.
        RetrogradError: This process interprets kernels, so that there is nothing to compile.
    """
    gpu = target_named(target)
    require_triton()
    require(HOOK)  # or kernels would be launched
    launches: list[Launch] = []
    grids: list[tuple[int, ...]] = []

    def note(request: CompileRequest) -> None:
        launches.append(Launch(request.function.fn.__qualname__, gpu, grids[-1], request, tuning.current()))

    def only_compile(launch: KernelLaunch, proceed: Proceed) -> Any:
        grids.append(launch.grid)
        return proceed(warmup=True)

    with absent_gpu(gpu), tuning.every_configuration(), compile_requests(note), around_launches(only_compile):
        yield launches


def place_of(fn: Any) -> str:
    """ "path/file.py:12" of a JITFunction, from the current folder if it is in there."""
    path = Path(fn.fn.__code__.co_filename)
    here = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{here}:{first_line(fn)}"


def distinct(launches: list[Launch]) -> list[Launch]:
    """The launches with equal ones named once, in their order."""
    return list({launch.identity: launch for launch in reversed(launches)}.values())[::-1]


def require_triton() -> Any:
    """The triton module.

    Raises:
        MissingExtraError: Triton is not installed.
        RetrogradError: This process interprets kernels.
    """
    try:
        import triton
    except ImportError as error:
        raise MissingExtraError("triton", "triton", "generating code for a GPU") from error
    if config.interpreting():
        raise RetrogradError(
            "this process interprets Triton kernels (TRITON_INTERPRET=1), so there is nothing to compile; unset the "
            "variable before triton is imported, in a shell: env -u TRITON_INTERPRET COMMAND"
        )
    return triton
