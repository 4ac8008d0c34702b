"""Facts that the code of a kernel tells, from the source's own atomics to the instructions of the machine.

NVIDIA: `cuobjdump -res-usage` and `nvdisasm` of the cubin, both shipped with Triton, and the PTX. AMD: the text of the
assembly and LLVM's intermediate code. Nothing here needs a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from retrograd.codegen import amd, arithmetic, nvidia, ttir
from retrograd.codegen.compile import Launch, recording
from retrograd.codegen.kept_code import disassembled
from retrograd.codegen.schema import Facts
from retrograd.compat.cuda_tools import TOOLS
from retrograd.compat.registry import works
from retrograd.compat.triton_compile import KernelSignature, of_dtype
from retrograd.runtime.gpu_targets import Target


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
    with recording(target) as launches:
        kernel[grid](*map(of_dtype, args), **{name: of_dtype(value) for name, value in kwargs.items()})
    return facts_of(launches[-1])


def facts_of(launch: Launch) -> Facts:
    """Compile a recorded launch and read its machine code."""
    return facts_of_compiled(launch.compile(), launch.kernel, launch.target, launch.signature)


def facts_of_compiled(compiled: Any, name: str, target: Target, signature: KernelSignature) -> Facts:
    """Read the machine code of a CompiledKernel of Triton's, wherever it was compiled."""
    asm = compiled.asm
    if target.nvidia:
        parts = nvidia.read(*disassembled(asm["cubin"]), asm["ptx"]) | arithmetic.of_ptx(asm["ptx"])
        parts["spill_bytes"] = max(parts["spill_bytes"] - arithmetic.local_bytes(asm["ptx"]), 0)
        parts["pdl"] = bool(getattr(compiled.metadata, "launch_pdl", False))
        if not parts["pdl"]:
            parts["ahead_of_wait"] = ()
    else:
        parts = amd.read(asm["amdgcn"]) | arithmetic.of_llvm(asm["llir"])
    return Facts(
        kernel=name,
        target=target.name,
        arguments=signature.arguments,
        constants=signature.constants,
        aligned=signature.aligned,
        num_warps=compiled.metadata.num_warps,
        num_stages=compiled.metadata.num_stages,
        shared_bytes=compiled.metadata.shared,
        fp_fusion=getattr(compiled.metadata, "enable_fp_fusion", None),
        **ttir.read(asm["ttir"]),
        **parts,
    )


def attempts(launches: list[Launch], workers: int) -> Iterator[tuple[int, Facts | str]]:
    """(position, its facts or why it does not compile) in the order of completion, in processes of their own.

    A compiler that dies takes its process with it and is told like any other failure; 0 workers are this process.
    """
    if workers == 0:
        yield from map(_attempt, range(len(launches)), launches)
        return
    left = set(range(len(launches)))
    # All processes of a pool are forked at once.
    with contextlib.suppress(BrokenProcessPool), _forked(launches, min(workers, len(launches))) as pool:
        for done in as_completed([pool.submit(_attempt, position) for position in sorted(left)]):
            position, result = done.result()
            left.discard(position)
            yield position, result
    for position in sorted(left):  # one of them has killed its process
        try:
            with _forked(launches, 1) as pool:
                yield pool.submit(_attempt, position).result()
        except BrokenProcessPool:
            yield position, "the compiler's process died; what it said is above"


@contextlib.contextmanager
def _forked(launches: list[Launch], workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that know these launches: kernels cannot be pickled, so they are told positions only."""
    if any(launch.target.nvidia for launch in launches):
        works(TOOLS)  # once, not in each process
    _PENDING[:] = launches
    try:
        with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
            yield pool
    finally:
        _PENDING.clear()


_PENDING: list[Launch] = []


def _attempt(position: int, launch: Launch | None = None) -> tuple[int, Facts | str]:
    try:
        return position, facts_of(launch or _PENDING[position])
    except Exception as error:  # compilers raise whatever they like
        return position, reason(error)


def reason(error: BaseException) -> str:
    """Why a kernel does not compile, in a line: Triton quotes the source first and says what is wrong last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^\t")]
    return lines[-1] if lines else type(error).__name__
