"""GPU that launches on CPU tensors are planned for, by who records or executes them without one. Imports no Triton."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from retrograd.runtime.cuda import driver
from retrograd.runtime.triton.gpu import Backend, Gpu

# While nothing is executed; None outside `dry`.
_DRY: ContextVar[Gpu | None] = ContextVar("dry", default=None)
# For launches of all threads while kernels are executed without a GPU.
_EXECUTED: list[Gpu] = []


def planned() -> Gpu | None:
    """The GPU; None where launches are real, or none is possible."""
    return _DRY.get() or (_EXECUTED[-1] if _EXECUTED else None)


@contextmanager
def executed(num_sms: int, arch: int = 90) -> Iterator[None]:
    """Plan launches on CPU tensors, of all threads, as if for a GPU; for whoever executes them without it."""
    gpu = Gpu(Backend.CUDA, num_sms, arch, pdl=arch >= driver.PDL_FROM_ARCH)
    _EXECUTED.append(gpu)
    try:
        yield
    finally:
        _EXECUTED.remove(gpu)


@contextmanager
def dry(num_sms: int, hip: bool = False, arch: int = 90) -> Iterator[None]:
    """Plan launches on CPU tensors as if for a GPU of `num_sms` multiprocessors, an AMD one if `hip`, else sm_`arch`.

    For whoever records launches instead of executing them; launching for real inside is an error of Triton's.
    """
    gpu = Gpu(Backend.HIP, num_sms, 0) if hip else Gpu(Backend.CUDA, num_sms, arch, pdl=arch >= driver.PDL_FROM_ARCH)
    token = _DRY.set(gpu)
    try:
        yield
    finally:
        _DRY.reset(token)
