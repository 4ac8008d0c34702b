"""GPU that launches on CPU tensors are planned for, by who records or executes them without one. Imports no Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from retrograd.compat.triton_compile import GpuDescription
from retrograd.runtime.cuda import driver
from retrograd.runtime.triton.gpu import Backend, Gpu

_PLANNED: list[Gpu] = []  # for launches of all threads; the innermost last


def planned() -> Gpu | None:
    """The GPU; None where launches are real, or none is possible."""
    return _PLANNED[-1] if _PLANNED else None


@contextmanager
def planning(gpu: GpuDescription) -> Iterator[None]:
    """Plan launches on CPU tensors as if for a GPU, for whoever records or executes them without it.

    Launching for real inside is an error of Triton's.
    """
    arch = gpu.arch if isinstance(gpu.arch, int) else 0
    pdl = arch >= driver.PDL_FROM_ARCH
    _PLANNED.append(Gpu(Backend(gpu.backend), gpu.num_sms, arch, pdl, gpu.warp_size))
    try:
        yield
    finally:
        _PLANNED.pop()
