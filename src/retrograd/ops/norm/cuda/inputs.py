"""Parts that launchers of the wide kernels share: GPUs, dtypes, rows in pieces of 16 bytes, compiling and loading."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch

from retrograd.runtime.cuda import driver, nvrtc
from retrograd.runtime.cuda.driver import aligned, arch_of

_Rows = TypeVar("_Rows", torch.Tensor, torch.Tensor | None)

HEADER = Path(__file__).with_name("wide.cuh")
NUMBERS = {None: -1, torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Type
SIZES = {None: 0, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


def require_clusters(name: str, device: torch.device) -> None:
    """Refuse for the function `name` what is not on a GPU with thread block clusters.

    Raises:
        RuntimeError: it is not.
    """
    if device.type != "cuda" or arch_of(device.index) < 90:
        raise RuntimeError(
            f"{name} got a tensor on {device}, expected a GPU of compute capability 9.0 or more; use impl='triton'"
        )


def load(
    source: Path, options: tuple[str, ...], device_index: int, *, cluster: int, threads: int, shared_bytes: int
) -> driver.LoadedKernel:
    """The kernel of a file's name, compiled for a device, which has to be the current one. See `driver.load`."""
    arch = arch_of(device_index)
    cubin = nvrtc.compile_cubin(source, (f"--gpu-architecture=sm_{arch}", *options), (HEADER,))
    return driver.load(
        cubin, source.stem, device_index,
        cluster=cluster, threads=threads, shared_bytes=shared_bytes, pdl=driver.has_pdl(arch),
    )  # fmt: skip


def aligned_rows(tensor: _Rows) -> _Rows:
    """`tensor`, copied only if its rows are not contiguous or do not start at multiples of 16 bytes."""
    if tensor is None:
        return tensor
    fits = (tensor.stride(0) * tensor.element_size()) % 16 == 0 or tensor.shape[0] <= 1
    if tensor.stride(-1) == 1 and fits and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def aligned_vector(vector: torch.Tensor | None) -> torch.Tensor | None:
    """`vector`, or None, as `aligned` has it."""
    return None if vector is None else aligned(vector)
