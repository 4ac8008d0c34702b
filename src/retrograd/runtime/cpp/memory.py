"""Tensors as compiled code is handed them."""

from __future__ import annotations

import torch


def address(tensor: torch.Tensor) -> int:
    """Of the first element.

    Raises:
        TypeError: the tensor has elements but no memory of its own.
    """
    pointer = tensor.data_ptr()
    if not pointer and tensor.numel():
        raise TypeError(
            f"impl='native' got a {type(tensor).__name__} without memory of its own, expected a torch.Tensor with "
            "storage; use impl='torch'"
        )
    return pointer
