"""Arguments that the norms accept; messages say what was given, what was expected and how to mend it.

What is no tensor or of a wrong dtype raises TypeError, a shape, device or number that does not fit ValueError.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from retrograd.ops.norm.arguments import NormArguments, NormTensors
from retrograd.ops.types import inner_dtype

_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_NARROW = "float32, float16 or bfloat16"


def check_tensors(tensors: NormTensors, name: str = "x") -> None:
    """Check the tensors of a norm against each other; `name` is what the caller calls x."""
    x, weight, bias, residual = tensors
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"`{name}` is a {type(x).__name__}, expected a torch.Tensor")
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"`{name}` has dtype {x.dtype}, expected float32, float16, bfloat16 or float64; cast it with {name}.float()"
        )
    if x.dim() == 0:
        raise ValueError(f"`{name}` has shape (), expected at least one dimension; use {name}.reshape(1)")
    if weight is not None:
        _check_vector("weight", weight, x)
    if bias is not None:
        _check_vector("bias", bias, x)
        if weight is not None and bias.shape != weight.shape:
            raise ValueError(
                f"`bias` has shape {tuple(bias.shape)}, expected {tuple(weight.shape)} like weight; "
                "expand one with .expand_as(the other)"
            )
    if residual is not None:
        check_shape_and_device("residual", residual, x)
        check_dtype_beside("residual", residual.dtype, x.dtype)


def _check_vector(name: str, vector: Any, x: torch.Tensor) -> None:
    if not isinstance(vector, torch.Tensor):
        raise TypeError(f"`{name}` is a {type(vector).__name__}, expected a torch.Tensor or None")
    shape, n = vector.shape, x.shape[-1]
    # Two dimensions of x are rows, not heads: a residual passed for a weight would otherwise be accepted.
    if len(shape) == 2 and x.dim() > 2:
        if shape != x.shape[-2:]:
            raise ValueError(
                f"`{name}` has shape {tuple(shape)}, expected {tuple(x.shape[-2:])} to match x.shape[-2:] (one row a "
                f"head), or ({n},)"
            )
    elif len(shape) != 1 or shape[0] != n:
        hint = f"reshape or slice it to ({n},)"
        if shape == x.shape:
            hint = "did you pass the residual?" + (
                " For one row a head give x three dimensions, x.unsqueeze(0)" if len(shape) == 2 else ""
            )
        raise ValueError(f"`{name}` has shape {tuple(shape)}, expected ({n},) to match x.shape[-1]; {hint}")
    if vector.dtype not in _DTYPES or (vector.dtype == torch.float64 and x.dtype != torch.float64):
        raise TypeError(
            f"`{name}` has dtype {vector.dtype}, expected {_NARROW} beside x of {x.dtype}; "
            f"cast it with {name}.to(x.dtype)"
        )
    _check_device(name, vector, x)


def check_shape_and_device(name: str, tensor: Any, x: torch.Tensor) -> None:
    """Check that a tensor lies like x."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"`{name}` is a {type(tensor).__name__}, expected a torch.Tensor or None")
    if tensor.shape != x.shape:
        raise ValueError(
            f"`{name}` has shape {tuple(tensor.shape)}, expected {tuple(x.shape)} like x; "
            f"expand it with {name}.expand_as(x)"
        )
    _check_device(name, tensor, x)


def check_statistic(name: str, statistic: Any, s: torch.Tensor) -> None:
    """Check that mean or rstd is one the forward of s may have returned."""
    if not isinstance(statistic, torch.Tensor):
        raise TypeError(f"`{name}` is a {type(statistic).__name__}, expected a torch.Tensor")
    if statistic.shape != s.shape[:-1]:
        raise ValueError(
            f"`{name}` has shape {tuple(statistic.shape)}, expected {tuple(s.shape[:-1])} like the rows of s; pass "
            "what the forward returned"
        )
    inner = inner_dtype(s)
    if statistic.dtype != inner:
        raise TypeError(
            f"`{name}` has dtype {statistic.dtype}, expected {inner} beside s of {s.dtype}; pass what the forward "
            "returned"
        )
    _check_device(name, statistic, s)


def check_dtype_beside(name: str, dtype: Any, x_dtype: torch.dtype) -> None:
    """float64 goes with float64 only; the three narrower dtypes mix freely."""
    if dtype not in _DTYPES or (dtype == torch.float64) != (x_dtype == torch.float64):
        wanted = "torch.float64" if x_dtype == torch.float64 else _NARROW
        raise TypeError(
            f"`{name}` has dtype {dtype}, expected {wanted} beside x of {x_dtype}; cast one with .to(dtype)"
        )


def _check_device(name: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(
            f"`{name}` is on {tensor.device}, expected {x.device} like x; move it with {name}.to(x.device)"
        )


def check_arguments(arguments: NormArguments, x_dtype: torch.dtype, has_weight: bool) -> NormArguments:
    """Check the arguments that are no tensors; numbers come back as floats."""
    eps, offset = arguments.eps, arguments.weight_offset
    if type(eps) is not float and (isinstance(eps, bool) or not isinstance(eps, (int, float))):
        raise TypeError(f"`eps` is a {type(eps).__name__}, expected a Python float; a 1-element tensor has .item()")
    if not 0 <= eps < math.inf:
        raise ValueError(f"`eps` is {eps}, expected a finite number of 0 or more; the usual value is 1e-6")
    if type(offset) is not float and (isinstance(offset, bool) or not isinstance(offset, (int, float))):
        raise TypeError(f"`weight_offset` is a {type(offset).__name__}, expected a Python float such as 1.0")
    if offset and not has_weight:
        raise ValueError(f"`weight_offset` is {offset} without a weight; pass weight, or leave it out")
    if arguments.dw_parts is not None and (type(arguments.dw_parts) is not int or arguments.dw_parts < 1):
        raise ValueError(
            f"`dw_parts` is {arguments.dw_parts!r}, expected an int of 1 or more, or None to choose by device"
        )
    if arguments.residual_dtype is not None:
        check_dtype_beside("residual_dtype", arguments.residual_dtype, x_dtype)
    if arguments.out_dtype is not None:
        check_dtype_beside("out_dtype", arguments.out_dtype, x_dtype)
    if not arguments.deterministic and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            "deterministic=False adds gradients atomically, which torch.use_deterministic_algorithms(True) "
            "forbids; pass deterministic=True, or turn the torch setting off"
        )
    if type(eps) is float and type(offset) is float:
        return arguments
    return arguments._replace(eps=float(eps), weight_offset=float(offset))


def check_float8(x: torch.Tensor, scale: Any) -> None:
    """Check that a norm of x can have a y in float8, and the scale of all of it, if one is given."""
    if x.dtype == torch.float64:
        raise TypeError(f"`x` has dtype {x.dtype}, expected {_NARROW} for a y in float8; cast it with x.float()")
    if scale is None:
        return
    if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
        name = scale.dtype if isinstance(scale, torch.Tensor) else type(scale).__name__
        raise TypeError(
            f"`scale` is {name}, expected a float32 tensor of one element, such as torch.ones((), device=x.device), or "
            "None for a scale a row"
        )
    if scale.numel() != 1:
        raise ValueError(
            f"`scale` has shape {tuple(scale.shape)}, expected one element for all of y; None computes a scale a row"
        )
    _check_device("scale", scale, x)


def check_main_grad(name: str, parameter: torch.Tensor | None) -> None:
    """Check that a parameter has the float32 buffer that accumulate_main_grad=True adds to."""
    if parameter is None or not parameter.requires_grad:
        return
    buffer = getattr(parameter, "main_grad", None)
    if not isinstance(buffer, torch.Tensor):
        raise ValueError(
            f"`{name}` has no main_grad, which accumulate_main_grad=True adds to; set {name}.main_grad = "
            f"torch.zeros_like({name}, dtype=torch.float32)"
        )
    if buffer.dtype != torch.float32 or buffer.shape != parameter.shape or buffer.device != parameter.device:
        raise ValueError(
            f"`{name}.main_grad` is {buffer.dtype} {tuple(buffer.shape)} on {buffer.device}, expected torch.float32 "
            f"{tuple(parameter.shape)} on {parameter.device}"
        )
