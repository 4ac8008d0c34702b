"""The public function: checks its arguments, makes them 2-D and hands them to the autograd node."""

from __future__ import annotations

import math

import torch

from retrograd.ops.norm.autograd import RmsNormFunction
from retrograd.ops.types import Impl, resolve_impl

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    prenorm: bool = False,
    deterministic: bool = True,
    impl: str | Impl | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square normalisation over the last dimension, with an optional residual addition before it.

    s = x + residual;  y = s / sqrt(mean(s^2) + eps) * weight + bias

    Args:
        x: [..., N], float32, float16 or bfloat16; float64 with impl="torch". Any strides, any leading dimensions
            or none, and sizes of 0.
        weight: [N], a floating dtype of its own choice (float64 only with a float64 x). None is ones.
        bias: [N], as weight. None is zeros.
        residual: like x in shape and dtype. None adds nothing.
        eps: finite, 0 or more. With 0 a row of zeros gives NaN.
        prenorm: Return s too, for the next residual connection.
        deterministic: Sum grad_weight and grad_bias over rows in a fixed order. False adds them atomically on
            impl="triton": last bits differ from run to run. impl="torch" is deterministic anyway.
        impl: "triton", "torch", or None: triton on CUDA, torch elsewhere. An explicit choice never falls back.

    Returns:
        y [..., N] in the dtype of x, contiguous; with prenorm (y, s), where s is x itself without a residual.

    Raises:
        TypeError: A tensor has a dtype that is not supported, or eps is not a number.
        ValueError: A shape or a device does not fit x, eps is negative or not finite, impl is unknown.
        RuntimeError: deterministic=False under torch.use_deterministic_algorithms(True), impl="triton" on a
            CPU tensor without Triton's interpreter, or a second derivative is asked for.

    Numerics: statistics, sums and products in float32 (float64 for float64). s is rounded to the dtype of x and
    that rounded value is normalised. Gradients have the dtypes of their inputs; a weight that needs no gradient
    costs nothing in the backward.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    n = _check_x(x)
    chosen = resolve_impl(impl, x.device)
    _check_vector("weight", weight, x, n)
    _check_vector("bias", bias, x, n)
    _check_residual(residual, x)
    _check_eps(eps)
    if chosen is Impl.TRITON and x.dtype == torch.float64:
        raise TypeError(
            "`x` has dtype torch.float64, expected float32, float16 or bfloat16 for impl='triton' (its kernels "
            "compute in float32); use impl='torch'"
        )
    if not deterministic and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            "deterministic=False adds gradients atomically, which torch.use_deterministic_algorithms(True) "
            "forbids; pass deterministic=True, or turn the torch setting off"
        )
    m = math.prod(x.shape[:-1])
    return_s = prenorm and residual is not None
    out = RmsNormFunction.apply(
        x.reshape(m, n),
        weight,
        bias,
        None if residual is None else residual.reshape(m, n),
        float(eps),
        return_s,
        deterministic,
        chosen,
    )
    if return_s:
        y, s = out
        return y.reshape(x.shape), s.reshape(x.shape)
    y = out.reshape(x.shape)
    return (y, x) if prenorm else y


def _check_x(x: torch.Tensor) -> int:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"`x` is a {type(x).__name__}, expected a torch.Tensor")
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"`x` has dtype {x.dtype}, expected float32, float16, bfloat16 or float64; cast it with x.float()"
        )
    if x.dim() == 0:
        raise ValueError("`x` has shape (), expected at least one dimension; use x.reshape(1)")
    return x.shape[-1]


def _check_vector(name: str, vector: torch.Tensor | None, x: torch.Tensor, n: int) -> None:
    if vector is None:
        return
    if not isinstance(vector, torch.Tensor):
        raise TypeError(f"`{name}` is a {type(vector).__name__}, expected a torch.Tensor or None")
    if tuple(vector.shape) != (n,):
        hint = "did you pass the residual?" if vector.shape == x.shape else f"reshape or slice it to ({n},)"
        raise ValueError(f"`{name}` has shape {tuple(vector.shape)}, expected ({n},) to match x.shape[-1]; {hint}")
    if vector.dtype not in _DTYPES or (vector.dtype == torch.float64 and x.dtype != torch.float64):
        raise TypeError(
            f"`{name}` has dtype {vector.dtype}, expected float32, float16 or bfloat16 beside x of {x.dtype}; "
            f"cast it with {name}.to(x.dtype)"
        )
    _check_device(name, vector, x)


def _check_residual(residual: torch.Tensor | None, x: torch.Tensor) -> None:
    if residual is None:
        return
    if not isinstance(residual, torch.Tensor):
        raise TypeError(f"`residual` is a {type(residual).__name__}, expected a torch.Tensor or None")
    if residual.shape != x.shape:
        raise ValueError(
            f"`residual` has shape {tuple(residual.shape)}, expected {tuple(x.shape)} like x; "
            "expand it with residual.expand_as(x)"
        )
    if residual.dtype != x.dtype:
        raise TypeError(
            f"`residual` has dtype {residual.dtype}, expected {x.dtype} like x; cast one with .to({x.dtype})"
        )
    _check_device("residual", residual, x)


def _check_device(name: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(
            f"`{name}` is on {tensor.device}, expected {x.device} like x; move it with {name}.to(x.device)"
        )


def _check_eps(eps: float) -> None:
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"`eps` is a {type(eps).__name__}, expected a Python float; a 1-element tensor has .item()")
    if not math.isfinite(eps) or eps < 0:
        raise ValueError(f"`eps` is {eps}, expected a finite number of 0 or more; the usual value is 1e-6")
