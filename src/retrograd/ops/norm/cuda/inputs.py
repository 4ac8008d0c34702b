"""What the launchers of the wide kernels share: numbers of dtypes, rows that can be read in pieces of 16 bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

HEADER = Path(__file__).with_name("wide.cuh")
NUMBERS = {None: -1, torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # enum Type
SIZES = {None: 0, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


@cache
def capability(device_index: int) -> tuple[int, int]:
    """The compute capability of a GPU."""
    return torch.cuda.get_device_capability(device_index)


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
