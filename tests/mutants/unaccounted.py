"""Ops that were once called proved because what is wrong with them was never compared, called or reached.

By what was left out: complex numbers, whole numbers, nested outputs, dtypes, calls without gradients, combinations of
parameters, sizes beyond a thousand, strides of indices, a dtype of one tensor, far branches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from retrograd.check.spec import OpSpec, op, tensor

MN = {"x": tensor("M", "N")}


class _Square(torch.autograd.Function):
    """z * z whose backward forgets to conjugate."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z * z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return 2 * z * grad


class _Scaled(torch.autograd.Function):
    """x * w, whose gradient of the float32 weight is added up in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x.float() * w).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return (grad.float() * w).to(x.dtype), (grad.float() * x.float()).sum(0).bfloat16().float()


class _Exponential(torch.autograd.Function):
    """exp, whose backward uses a copy of the result that an in-place change reaches."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.y = y
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.y.detach()


class _Product(torch.autograd.Function):
    """a * b, which takes one tensor in both places for a square of constant slope."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.same = a.data_ptr() == b.data_ptr()
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        a, b = ctx.saved_tensors
        return grad * b, None if ctx.same else grad * a


class _Rows(torch.autograd.Function):
    """Rows by number, whose numbers are read as if they were contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        flat = torch.as_strided(index, (index.numel(),), (1,))
        ctx.save_for_backward(flat)
        ctx.shape = x.shape
        return x[flat]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (flat,) = ctx.saved_tensors
        return torch.zeros(ctx.shape, dtype=grad.dtype).index_add(0, flat, grad), None


def _long(x: Tensor) -> Tensor:
    out = x.sin()
    return torch.cat([out[:, :1024], out[:, 1024:] * 1.01], -1)


def _many(x: Tensor) -> Tensor:
    out = x.sin()
    return torch.cat([out[:1024], out[1024:] * 1.01])


MUTANTS: dict[str, OpSpec] = {
    "U01": op(lambda x: torch.fft.rfft(x) * 7, torch.fft.rfft, MN, sizes={"N": (1, 64)}, name="complex_output"),
    "U02": op(_Square.apply, lambda z: z * z, {"z": tensor("M", "N", dtype="complex")}, name="no_conjugate"),
    "U03": op(
        lambda x: (x.amax(-1), x.argmax(-1).clamp_max(10)), lambda x: (x.amax(-1), x.argmax(-1)), MN,
        sizes={"N": (1, 64)}, name="whole_numbers",
    ),
    "U04": op(
        lambda x: {"a": x.sin(), "b": [x.cos() * 1.001]}, lambda x: {"a": x.sin(), "b": [x.cos()]}, MN,
        name="nested_outputs",
    ),
    "U05": op(lambda x: x.float().sin(), torch.sin, MN, dtypes=["bfloat16"], name="dtype_of_output"),
    "U06": op(lambda x: x.sin() if torch.is_grad_enabled() else x.cos(), torch.sin, MN, name="without_gradients"),
    "U07": op(
        lambda x, a, b, c: x.sin() * (2 if a and b and c else 1), lambda x, a, b, c: x.sin(), MN,
        params={"a": [0, 1], "b": [0, 1], "c": [0, 1]}, name="eighth_combination",
    ),
    "U08": op(_long, torch.sin, MN, name="columns_beyond_1024"),
    "U09": op(_many, torch.sin, MN, sizes={"M": (1, 4096)}, name="rows_beyond_1024"),
    "U10": op(
        _Scaled.apply, lambda x, w: x * w, {"x": tensor("M", "N"), "w": tensor("N", dtype="float32")},
        dtypes=["bfloat16"], compute="float32", name="weight_gradient_rounded",
    ),
    "U11": op(_Exponential.apply, torch.exp, MN, name="result_changed_in_place"),
    "U12": op(_Product.apply, lambda a, b: a * b, {"a": tensor("M", "N"), "b": tensor("M", "N")}, name="one_tensor_twice"),
    "U13": op(
        _Rows.apply, lambda x, index: x[index],
        {"x": tensor("K", "N"), "index": tensor("M", dtype="int64", high="K")}, name="stride_of_indices",
        sizes={"K": (1, 64)},
    ),
    "U14": op(
        lambda x: torch.where(x > 20, x, x.exp().log1p()) + 0 * x.clamp_min(-80).exp().sqrt(),
        torch.nn.functional.softplus, MN, name="far_branch",
    ),
    "U15": op(lambda x: x * 1.03, lambda x: x * 1, MN, dtypes=["bfloat16"], name="flat_error_in_bfloat16"),
    "U16": op(
        lambda x, index: torch.where(index == 12, 0.9, 1.0)[:, None] * x[index], lambda x, index: x[index],
        {"x": tensor(16, "N"), "index": tensor("M", dtype="int64", high=16)}, name="one_index_of_sixteen",
    ),
}  # fmt: skip
