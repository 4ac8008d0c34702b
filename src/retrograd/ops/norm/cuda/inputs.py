"""Parts that launchers of the wide kernels share: GPUs, dtypes, rows in pieces of 16 bytes, compiling and loading."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from retrograd.runtime.cuda import driver, nvrtc

HEADER = Path(__file__).with_name("wide.cuh")
NUMBERS = {None: -1, torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Type
SIZES = {None: 0, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


@cache
def arch_of(device_index: int) -> int:
    """The compute capability of a GPU times ten."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


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


def aligned_rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """`tensor`, copied only if its rows are not contiguous or do not start at multiples of 16 bytes."""
    if tensor is None:
        return None
    fits = (tensor.stride(0) * tensor.element_size()) % 16 == 0 or tensor.shape[0] <= 1
    if tensor.stride(-1) == 1 and fits and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def aligned_vector(vector: torch.Tensor | None) -> torch.Tensor | None:
    """`vector`, copied if it is not contiguous or does not start at a multiple of 16 bytes."""
    if vector is None or (vector.is_contiguous() and vector.data_ptr() % 16 == 0):
        return vector
    return vector.clone(memory_format=torch.contiguous_format)
