"""Relaunch of a compiled Triton kernel, past Triton's look at each argument."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from triton import knobs

from retrograd.compat.registry import part, works
from retrograd.compat.torch_cuda import current_raw_stream
from retrograd.compat.triton_compile import PROBE_GPU, _active_driver
from retrograd.compat.triton_launch import unheard

_SCRATCH = ("launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")


class KernelHandle(NamedTuple):
    """A kernel that has been compiled and loaded for arguments of one kind, and its grid."""

    run: Any
    function: int
    metadata: Any
    grid: tuple[int, int, int]
    compiled: Any = None


def loaded_kernel(compiled: Any, grid: tuple[int, ...]) -> KernelHandle | None:
    """What `relaunch` needs of a launch's CompiledKernel; None where there is none or Triton launches otherwise."""
    function = getattr(compiled, "function", None)
    if function is None or not works(RELAUNCH):
        return None
    whole: Any = (*grid, 1, 1)[:3]
    return KernelHandle(compiled.run, function, compiled.packed_metadata, whole, compiled)


def relaunch(kernel: KernelHandle, args: tuple[Any, ...], device_index: int) -> None:
    """The launch again with other tensors: 2 us of host time instead of 13.

    Args:
        kernel: of a launch on this device, which has to be the current one.
        args: all arguments of the kernel, constexprs too. What Triton specialises on has to be as it was: dtypes,
            None, alignment to 16 bytes, integers, constexprs.
        device_index: the device.
    """
    stream = current_raw_stream(device_index)
    kernel.run(*kernel.grid, stream, kernel.function, kernel.metadata, None, None, None, *args)


def hooked() -> bool:
    """Whether a profiler or `through_triton` wants each launch to go through Triton."""
    # None, or from Triton 3.6 on a chain of hooks that may be empty.
    hook = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


def has_plain_arguments(compiled: Any) -> bool:
    """Whether a kernel is passed its own arguments and two null addresses of scratch memory, and nothing else.

    Instrumented kernels have hidden arguments (GSan on Triton 3.8 and 3.9), descriptors become several.
    """
    metadata = compiled.metadata
    unusual = (*_SCRATCH, "instrumentation_mode", "tensordesc_meta")
    return not any(getattr(metadata, name, None) for name in unusual)


def _probe(x: Any, n: Any) -> None:
    """What the self-test launches; it is not compiled."""


@part(
    "triton.relaunch",
    "launches kernels again that Triton has compiled",
    "each launch goes through Triton and takes 13 us of host time instead of 2",
    names=("CompiledKernel.run", "CompiledKernel.function", "CompiledKernel.packed_metadata"),
)
def RELAUNCH() -> str:
    """The order in which Triton itself calls the launcher of a compiled kernel."""
    from triton.runtime.jit import JITFunction

    calls: list[tuple[Any, ...]] = []
    compiled = SimpleNamespace(
        function=object(),
        packed_metadata=object(),
        launch_metadata=lambda *_: None,
        run=lambda *args: calls.append(args),
    )
    kernel = JITFunction(_probe)
    kernel._do_compile = lambda *_, **__: compiled
    with _active_driver(PROBE_GPU), unheard():
        kernel[5, 6, 7](0.5, 3)
    hooks = None, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if calls != [(5, 6, 7, 0, compiled.function, compiled.packed_metadata, *hooks, 0.5, 3)]:
        return "the launcher of a compiled kernel takes other arguments"
    return ""
