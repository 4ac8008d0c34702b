"""Operators of torch that compute on CUDA alone what these do on the CPU: results in another dtype, whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def _widened(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, position: int) -> Any:
    """A product of matrices, of factors in the dtype of the result where one is named: each product fits in there."""
    if len(args) > position and isinstance(args[position], torch.dtype):
        args, kwargs = args[:position] + args[position + 1 :], kwargs | {"out_dtype": args[position]}
    dtype = kwargs.get("out_dtype")
    if dtype is None:
        return func(*args, **kwargs)
    kwargs = {name: _in_dtype(value, dtype) for name, value in kwargs.items() if name != "out_dtype"}
    return func(*(_in_dtype(value, dtype) for value in args), **kwargs)


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


def _counted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A histogram, of whole numbers in float64: up to 2^53 each is in its bin there."""
    if not args or not isinstance(args[0], torch.Tensor) or args[0].is_floating_point() or "out" in kwargs:
        return func(*args, **kwargs)
    return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)


CUDA_ALONE: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.mm: partial(_widened, position=2),
    torch.bmm: partial(_widened, position=2),
    torch.addmm: partial(_widened, position=3),
    torch.baddbmm: partial(_widened, position=3),
    torch.histc: _counted,
    torch.Tensor.histc: _counted,
}
