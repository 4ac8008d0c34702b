"""Samplers, modules with buffers, in-place and view ops, broken; and four that no spec of today describes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Call, Entries, function
from torch import Tensor

from retrograd.check.spec import tensor

BROKEN = Entries()
add = BROKEN.broken

# --- Z53, Z54: linear gather, windows ----------------------------------------------------------


def sampled(x: Tensor, where: Tensor, whole: Any = torch.floor) -> Tensor:
    """Linear interpolation of rows at positions in samples; zero outside."""
    low = whole(where.detach())
    out: Any = 0
    for step in (0, 1):
        index = (low + step).long()
        inside = (index >= 0) & (index < x.shape[-1])
        share = where - low if step else 1 - (where - low)
        out = out + x.gather(-1, index.clamp(0, x.shape[-1] - 1)) * inside * share
    return out


add("Z53", "positions are cut to whole numbers, not rounded down: wrong between -1 and 0", "some inputs",
    lambda x, where: sampled(x, where, torch.trunc), sampled,
    dict(x=tensor("B", "N"), where=tensor("B", "P", low=-1.0, high="N")), sizes=dict(B=(1, 3), N=(2, 40), P=(1, 12)),
    proof=Call(change=lambda t: dict(where=t["where"] - t["where"].detach().amin() - 0.6)))  # fmt: skip

LENGTH = 4


def windows(x: Tensor, hop: int) -> Tensor:
    return x.unfold(-1, LENGTH, hop).contiguous()


def windows_backward(dy: Tensor, y: Tensor, x: Tensor, hop: int) -> Tensor:
    grad = torch.zeros_like(x, memory_format=torch.contiguous_format)
    grad.unfold(-1, LENGTH, hop).copy_(dy)  # windows that overlap overwrite each other
    return grad


add("Z54", "windows that overlap overwrite each other's gradient: right at hop 4", "parameters",
    function(windows, windows_backward), windows, dict(x=tensor("B", "N")), params=dict(hop=[4, 2]),
    sizes=dict(B=(1, 3), N=(4, 32)), proof=Call(dict(N=12), dict(hop=2)))  # fmt: skip

# --- Z55, Z56: buffers -----------------------------------------------------------------------------

NORM = dict(x=tensor("B", "C", "L"), weight=tensor("C"), bias=tensor("C"), mean=tensor("C", grad=False),
            var=tensor("C", low=0.5, high=2.0, grad=False))  # fmt: skip


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, unbiased: bool = True) -> Any:
    """The module's buffers as inputs and outputs, since no spec describes a module that is changed by its call."""
    y = F.batch_norm(x, None, None, weight, bias, training=True)
    with torch.no_grad():
        mean = 0.9 * mean + 0.1 * x.mean((0, 2))
        var = 0.9 * var + 0.1 * x.var((0, 2), correction=int(unbiased))
    return y, mean, var


add("Z55", "the running variance is updated with the biased variance", "every input",
    lambda *a: batch_norm(*a, unbiased=False), batch_norm, NORM, sizes=dict(B=(2, 4), C=(1, 4), L=(2, 8)))  # fmt: skip


def spectral_norm(weight: Tensor, u: Tensor, iterate: bool = True) -> Tensor:
    with torch.no_grad():
        v = F.normalize(weight.mT @ u, dim=0)
        u = F.normalize(weight @ v, dim=0) if iterate else u
    return weight / (u @ weight @ v)


add("Z56", "without grad mode the power iteration is skipped and the result is another", "calls",
    lambda weight, u: spectral_norm(weight, u, torch.is_grad_enabled()), spectral_norm,
    dict(weight=tensor("M", "N"), u=tensor("M", low=0.1, high=1.0, grad=False)), sizes=dict(M=(2, 8), N=(2, 8)),
    surrogate=True, proof=lambda: not_the_same_without_grad())  # fmt: skip


def not_the_same_without_grad() -> bool:
    w, u = torch.randn(4, 3), torch.rand(4)
    with torch.no_grad():
        quiet = BROKEN.ops["Z56"].fn(w, u)
    return torch.equal(BROKEN.ops["Z56"].fn(w, u), spectral_norm(w, u)) and not torch.allclose(
        quiet, spectral_norm(w, u)
    )


# --- Z57 to Z59: inputs, outputs and one tensor twice ---------------------------------------------------


def column_sums(x: Tensor) -> Tensor:
    return torch.cat([x[..., :1] * 0, x[..., 1:]], -1).cumsum(-1)


def column_sums_in_place(x: Tensor) -> Tensor:
    columns = x.mT.contiguous()  # the input itself where it is transposed already
    columns[..., 0, :] = 0
    return columns.cumsum(-2).mT


def column_sums_backward(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    grad = dy.flip(-1).cumsum(-1).flip(-1)
    return torch.cat([grad[..., :1] * 0, grad[..., 1:]], -1)


def changed_input() -> bool:
    x = torch.ones(4, 3).mT
    BROKEN.ops["Z57"].fn(x)
    return not torch.equal(x, torch.ones(3, 4))


add("Z57", "a transposed input is its own column-major copy, and written to", "layouts",
    function(column_sums_in_place, column_sums_backward), column_sums, dict(x=tensor("M", "N")), sizes=dict(N=(1, 32)),
    proof=changed_input)  # fmt: skip


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.y = torch.exp(x * weight)  # not save_for_backward: nobody asks for its version
        ctx.save_for_backward(x, weight)
        return ctx.y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy * ctx.y * weight, (dy * ctx.y * x).sum(0)


def output_changed() -> bool:
    x, w = torch.randn(2, 3, requires_grad=True), torch.ones(3)
    y = Exponential.apply(x, w)
    y.mul_(5)
    (grad,) = torch.autograd.grad(y.sum(), x)
    return not torch.allclose(grad, 5 * x.exp())


add("Z58", "the output is kept without its version: changed in place, it gives another gradient", "calls",
    lambda x, w: Exponential.apply(x, w), lambda x, w: torch.exp(x * w), dict(x=tensor("M", "N"), weight=tensor("N")),
    proof=output_changed)  # fmt: skip


def product(x: Tensor, y: Tensor) -> Tensor:
    return x * y + torch.sin(x)


def product_backward(dy: Tensor, out: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if x.data_ptr() == y.data_ptr() and x.numel() and x.stride() == y.stride():
        return dy * (2 * x + torch.cos(x)), dy * 2 * x  # the whole gradient of a square, and again
    return dy * (y + torch.cos(x)), dy * x


def one_tensor_twice() -> bool:
    x = torch.randn(5, requires_grad=True)
    (grad,) = torch.autograd.grad(BROKEN.ops["Z59"].fn(x, x).sum(), x)
    return not torch.allclose(grad, 2 * x + torch.cos(x))


add("Z59", "one tensor passed twice gets the gradient of the square for each of its two uses", "calls",
    function(product, product_backward), product, dict(x=tensor("M", "N"), y=tensor("M", "N")),
    proof=one_tensor_twice)  # fmt: skip

# --- Z60: a gradient that must not be -----------------------------------------------------------------------


def distilled(student: Tensor, teacher: Tensor) -> Tensor:
    return 2 - 2 * F.cosine_similarity(student, teacher.detach(), eps=1e-6)


add("Z60", "the teacher's branch gets a gradient: a detach is missing", "every input",
    lambda s, t: 2 - 2 * F.cosine_similarity(s, t, eps=1e-6), distilled,
    dict(student=tensor("M", "N"), teacher=tensor("M", "N")), sizes=dict(N=(2, 16)), surrogate=True)  # fmt: skip

# --- Not sayable -------------------------------------------------------------------------------------------


class Averaged(torch.nn.Module):
    """Batch statistics with a cumulative mean (momentum None), whose count of batches starts at one too many."""

    def __init__(self, features: int, count: int = 1) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.mean
        self.count += 1
        with torch.no_grad():
            self.mean += (x.mean(0) - self.mean) / self.count
        return x - x.mean(0)


def averages_wrongly() -> bool:
    wrong, right, x = Averaged(3), Averaged(3, 0), torch.randn(4, 3)
    wrong(x), right(x)
    return torch.equal(wrong(x), right(x)) and not torch.allclose(wrong.eval()(x), right.eval()(x))


BROKEN.refused("Z61", "a module with a state over calls: train, then eval; a spec has one call, and no buffers",
               averages_wrongly, bug="the cumulative mean counts one batch too many", rarity="calls")  # fmt: skip


class SparseRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = table.shape
        return table[index]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        flags = dict(is_coalesced=True)  # which promises that no index occurs twice
        return torch.sparse_coo_tensor(index[None], dy, ctx.shape, check_invariants=False, **flags), None


def promises_too_much() -> bool:
    table, index = torch.zeros(4, 2, requires_grad=True), torch.tensor([1, 1])
    SparseRows.apply(table, index).sum().backward()
    assert table.grad is not None
    return table.grad.coalesce().values().shape[0] == 2


BROKEN.refused("Z62", "the gradient is a sparse tensor: no spec says so, and none is compared", promises_too_much,
               bug="a sparse gradient with equal indices says that it is coalesced", rarity="special values")  # fmt: skip


def drop(x: Tensor) -> Tensor:
    keep = torch.rand_like(x) < 0.75
    return x * keep + (x - x.detach()) * (~keep) * 0.0 + (x / 0.75 - x).detach() * keep


def drops_wrongly() -> bool:
    x = torch.ones(64, requires_grad=True)
    y = drop(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    return not torch.allclose(grad, y.detach())  # of ones: value and factor are the same number


BROKEN.refused("Z63", "a random op: the reference cannot have the numbers that the op drew", drops_wrongly,
               bug="kept values are scaled by 1 / 0.75 in the forward alone", rarity="every input")  # fmt: skip


def leaky_in_place(x: Tensor, slope: float) -> Tensor:
    """Like F.leaky_relu_, by design: the sign is read from the result, which is another where the slope is negative."""
    return LeakyInPlace.apply(x, slope)


class LeakyInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        x.copy_(torch.where(x > 0, x, slope * x))
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return torch.where(y > 0, dy, ctx.slope * dy), None


def negative_slope() -> bool:
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    (grad,) = torch.autograd.grad(leaky_in_place(x * 1, slope=-0.5).sum(), x)
    return not torch.allclose(grad, torch.tensor([-0.5, 1.0]))


BROKEN.refused("Z64", "an op that works in place by design: a spec's inputs must stay as they are", negative_slope,
               bug="the sign is read from the result: wrong for negative slopes", rarity="parameters")  # fmt: skip

MUTANTS, NOT_SAYABLE = BROKEN.ops, BROKEN.not_sayable
