"""Healthy ops of the kinds that were once accused: views, poles, scalars, empty means, conventions.

Each comes from PyTorch's own operators or from a public library; the comment says what an oracle may trip over.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from retrograd.check.spec import OpSpec, op, tensor

MN = {"x": tensor("M", "N")}
POSITIVE = {"x": tensor("M", "N", low=0.1, high=4.0)}
SQUARE = {"x": tensor("N", "N")}
OFF_REAL = torch.randn(4, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))


def shifted(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return y


def windows(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.as_strided((x.shape[0], x.shape[1] - 2, 3), (x.stride(0), 1, 1)).sum(-1)


class SoftmaxWithSum(torch.autograd.Function):
    """Softmax, with the logarithm of its sum as an output without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, total = x.softmax(-1), x.logsumexp(-1)
        ctx.save_for_backward(y)
        ctx.mark_non_differentiable(total)
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor | None) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (dy - (dy * y).sum(-1, keepdim=True))


def softmax_with_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.softmax(-1), x.logsumexp(-1).detach()


def normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.square().mean(-1) + 1e-6)
    return x * rstd[..., None], rstd


def least_squares(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.linalg.lstsq(a, b).solution
    return x, x.abs()


def lu_solved(z: Tensor, b: Tensor) -> Tensor:
    packed, pivots = torch.linalg.lu_factor(z + 4 * torch.eye(z.shape[-1], dtype=z.dtype))
    return torch.linalg.lu_solve(packed, pivots, b, left=False)


def solvable(x: Tensor) -> Tensor:
    return x @ x.mT + x.shape[-1] * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def rotated(x: Tensor) -> Tensor:
    generators = torch.eye(3) + 0j
    basis = torch.eye(3, dtype=torch.complex128).to(dtype=torch.complex64)
    return x[:, None, None] * (basis.conj().T @ generators @ basis).real


def two_of(logits: Tensor) -> Tensor:
    kept, index = logits.topk(2, -1)
    return torch.zeros_like(logits).scatter(-1, index, kept.softmax(-1))


def two_masked(logits: Tensor) -> Tensor:
    others = torch.ones_like(logits, dtype=torch.bool).scatter(-1, logits.topk(2, -1).indices, False)
    return logits.masked_fill(others, float("-inf")).softmax(-1)


def deviance(x: Tensor, y: Tensor) -> Tensor:
    return (8 * y.sqrt() - 4 * y / x.sqrt() - 4 * x.sqrt()).mean()


def largest_of_bags(table: Tensor) -> Tensor:
    return F.embedding_bag(torch.tensor([[0, 2], [1, 2], [2, 3], [2, 0], [3, 2]]), table, mode="max")


def cross_entropy(x: Tensor) -> Tensor:
    return F.binary_cross_entropy(x, torch.tensor([0.3, 0.0, 1.0], dtype=x.dtype))


def gathered(x: Tensor, index: Tensor) -> Tensor:
    return torch.zeros_like(x).index_put((index,), x, accumulate=True)


HEALTHY: dict[str, OpSpec] = {
    # Gradients of views copy by absolute storage offsets.
    "shifted by a slice": op(shifted, shifted, MN),
    "circular padding": op(
        lambda x: F.pad(x, (2, 1), mode="circular"),
        lambda x: torch.cat([x[..., -2:], x, x[..., :1]], -1),
        {"x": tensor("B", "C", "N")},
        sizes={"B": (1, 8), "C": (1, 8), "N": (4, 4096)},
    ),
    "windows by strides": op(windows, lambda x: x.unfold(-1, 3, 1).sum(-1), MN, sizes={"M": (1, 4096), "N": (3, 4096)}),
    # An output that is marked as not differentiable.
    "softmax with its sum": op(SoftmaxWithSum.apply, softmax_with_sum, MN, sizes={"M": (1, 4096), "N": (1, 4096)}),
    "layer norm with its mean": op(
        lambda x: torch.native_layer_norm(x, (x.shape[-1],), None, None, 1e-5),
        lambda x: (
            F.layer_norm(x, x.shape[-1:]),
            x.mean(-1, keepdim=True).detach(),
            torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5).detach(),
        ),
        MN,
        sizes={"M": (1, 4096), "N": (2, 4096)},
    ),
    # Poles: infinite on both sides, and no kink.
    "log10": op(torch.log10, torch.log10, MN_ABOVE := {"x": tensor("M", "N", low=0.0, high=4.0)}),
    "log2": op(torch.log2, torch.log2, MN_ABOVE),
    "atanh": op(torch.atanh, torch.atanh, {"x": tensor("M", "N", low=-1.0, high=1.0)}),
    "lgamma": op(torch.lgamma, torch.lgamma, {"x": tensor("M", "N", low=0.0, high=3.0)}),
    "digamma": op(torch.digamma, torch.digamma, {"x": tensor("M", "N", low=0.0, high=3.0)}),
    "cross entropy of two": op(
        lambda p, t: F.binary_cross_entropy(p, t, reduction="none"),
        lambda p, t: -(t * p.log() + (1 - t) * (-p).log1p()),
        {"p": tensor("M", "N", low=0.0, high=1.0), "t": tensor("M", "N", low=0.0, high=1.0, grad=False)},
    ),
    # Scalars and vectors.
    "logaddexp of scalars": op(torch.logaddexp, torch.logaddexp, {"a": tensor(), "b": tensor()}),
    "logsigmoid of a vector": op(F.logsigmoid, F.logsigmoid, {"x": tensor("N")}),
    "rounded": op(torch.round, torch.round, {"x": tensor("N")}),
    "sum of a scalar": op(lambda x: x.sum(0), lambda x: x.sum(0), {"x": tensor()}),
    "softmax of a scalar": op(lambda x: x.softmax(0), lambda x: x.softmax(0), {"x": tensor()}),
    # Algorithms that depend on the size of what goes in.
    "matrix exponential": op(torch.matrix_exp, torch.matrix_exp, SQUARE, sizes={"N": (1, 24)}),
    "logcumsumexp": op(lambda x: x.logcumsumexp(-1), lambda x: x.exp().cumsum(-1).log(), MN),
    # Outputs of several ranks.
    "norm with its scale": op(normalised, normalised, MN, sizes={"M": (0, 4096), "N": (1, 4096)}),
    # Equal rows are a singular matrix.
    "inverse": op(torch.linalg.inv, torch.linalg.inv, SQUARE, sizes={"N": (1, 24)}),
    "solve": op(
        lambda x, b: torch.linalg.solve(solvable(x), b),
        lambda x, b: torch.linalg.solve(solvable(x), b),
        {"x": tensor("N", "N"), "b": tensor("N", "K")},
        sizes={"N": (1, 24), "K": (1, 24)},
    ),
    "triangular part of qr": op(
        lambda x: torch.linalg.qr(x)[1].abs(), lambda x: torch.linalg.qr(x)[1].abs(), SQUARE, sizes={"N": (1, 12)}
    ),
    # Exactly 0 in the reference.
    "direction": op(lambda x: x / x.abs(), lambda x: x.sign() + 0 * x, MN, extremes=()),
    "smooth loss": op(
        lambda a, b: F.smooth_l1_loss(a, b, reduction="none"),
        lambda a, b: torch.where((a - b).abs() < 1, 0.5 * (a - b) ** 2, (a - b).abs() - 0.5),
        {"a": tensor("M", "N"), "b": tensor("M", "N")},
    ),
    # Means of nothing.
    "mean": op(lambda x: x.mean(0), lambda x: x.mean(0), MN),
    "mean loss": op(
        lambda x, t: F.cross_entropy(x, t),
        lambda x, t: -x.log_softmax(-1).gather(1, t[:, None]).mean(),
        {"x": tensor("M", "N"), "t": tensor("M", dtype="int64", high="N")},
        sizes={"N": (1, 4096)},
    ),
    # 0 * inf in the reference where grad_out is zero.
    "entropy": op(
        torch.special.entr, torch.special.entr, POSITIVE_AND_ZERO := {"x": tensor("M", "N", low=0.0, high=1.0)}
    ),
    "power pool": op(
        lambda x: F.lp_pool1d(x, 2.0, 2),
        lambda x: F.lp_pool1d(x, 2.0, 2),
        {"x": tensor("B", "C", "N")},
        sizes={"B": (1, 8), "C": (1, 8), "N": (2, 4096)},
    ),
    "base to a power": op(lambda x: 2.0**x, lambda x: (x * 0.6931471805599453).exp(), MN),
    # A NaN at its own element is a convention, and so is who gets a tie.
    "relu as a maximum": op(lambda x: x.clamp_min(0.0), torch.relu, MN),
    "relu of a comparison": op(lambda x: torch.where(x > 0, x, 0.0), torch.relu, MN),
    # Rows that are added up in any order.
    "rows added by number": op(
        gathered, gathered, {"x": tensor("M", "N"), "index": tensor("M", dtype="int64", high="M")}
    ),
    # An edge that is not near 0 or 1.
    "logit with an edge": op(
        lambda x: torch.logit(x, 1e-3),
        lambda x: (lambda c: c.log() - (1 - c).log())(x.clamp(1e-3, 1 - 1e-3)),
        {"x": tensor("M", "N", low=0.0, high=1.0)},
    ),
    # Constants in the default dtype, beside which float64 is no operand of a product.
    "constants of their own": op(rotated, rotated, {"x": tensor("N")}),
    "product with a constant": op(
        lambda x: x @ torch.eye(x.shape[-1], dtype=x.dtype), lambda x: x @ torch.eye(x.shape[-1]), MN
    ),
    # Which places of a row a NaN reaches differs between a sort and a mask.
    "two largest": op(two_masked, two_of, MN, sizes={"N": (3, 16)}),
    # What is left of numbers below the smallest normal one has no scale.
    "far tail": op(
        torch.logaddexp,
        lambda x, y: torch.maximum(x, y) + F.softplus(-(x - y).abs()),
        {"x": tensor("M", low=-200.0, high=-100.0), "y": tensor("M")},
        accept={"higher_order": "torch's own second derivative is NaN where one argument is far below the other"},
    ),
    # A result that does not depend on what is normalised: the gradient is rounding alone.
    "norm of one column": op(
        lambda x, w: F.layer_norm(x, (1,), w),
        lambda x, w: F.layer_norm(x, (1,), w),
        {"x": torch.tensor([-4.3228]), "w": torch.tensor([-8.4784])},
    ),
    "angle of one number": op(
        lambda x, y: F.cosine_similarity(x, y, dim=1),
        lambda x, y: F.cosine_similarity(x, y, dim=1),
        {"x": tensor("M", 1, "N"), "y": tensor("M", 1, "N")},
    ),
    # Gradients that cancel where two inputs are one tensor.
    "a function less itself": op(
        lambda x, y: x.exp() - y.exp(), lambda x, y: x.exp() - y.exp(), {"x": tensor("M", "N"), "y": tensor("M", "N")}
    ),
    # A loss whose optimum is where both are equal: there its value and gradients are what cancelling terms leave.
    "a deviance at its optimum": op(
        deviance, deviance, {"x": tensor("M", low=0.3, high=3.0), "y": tensor("M", low=0.3, high=3.0)}
    ),
    # One element that is the largest of several windows, in each of which rounding decides anew.
    "largest of bags": op(largest_of_bags, largest_of_bags, {"table": tensor(4, "N")}),
    "kinks that meet": op(
        lambda a: (3 * a - 1).abs() - 0.7 * (1 - a * 3).abs() + (a * 3.0 / 3 * 3 - 1).relu(),
        lambda a: (3 * a - 1).abs() - 0.7 * (1 - a * 3).abs() + (a * 3.0 / 3 * 3 - 1).relu(),
        {"a": tensor("N")},
    ),
    # Conjugation that is only marked, and read by an operator inside of another; a real result beside a complex one.
    "complex least squares": op(
        least_squares, least_squares, {"a": 3 * OFF_REAL[:, :3], "b": OFF_REAL[:, 3:]}, dtypes=["complex64"]
    ),
    "complex solution of a factored system": op(
        lu_solved,
        lu_solved,
        {"z": tensor("N", "N", dtype="complex"), "b": tensor("N", "N", dtype="complex")},
        sizes={"N": (1, 8)},
    ),
    # A grad_out that is stored in less than complex64 has.
    "real part in 16 bits": op(
        lambda z: z.real.bfloat16(), lambda z: z.real.bfloat16(), {"z": OFF_REAL}, dtypes=["complex64"]
    ),
    # Points beside these are refused.
    "at the edge of what is defined": op(cross_entropy, cross_entropy, {"x": torch.tensor([0.3, 1.0, 1e-7])}),
    # Far branches of a choice that overflow where they are not chosen.
    "softplus": op(F.softplus, lambda x: torch.where(x > 20, x, x.exp().log1p()), MN),
    "masked with the least number": op(
        lambda x, m: x.masked_fill(m, torch.finfo(x.dtype).min).softmax(-1),
        lambda x, m: x.masked_fill(m, torch.finfo(x.dtype).min).softmax(-1),
        {"x": tensor("M", "N"), "m": tensor("M", "N", dtype="bool")},
    ),
}
HEALTHY = {f"outside: {name}": spec for name, spec in HEALTHY.items()}
