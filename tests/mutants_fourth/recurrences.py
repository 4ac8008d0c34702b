"""State spaces, linear attention and filters, broken."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Call, Entries, function, gradients
from references import recurrences as ref
from references.recurrences import SIZES
from torch import Tensor

from retrograd.check.spec import tensor

BROKEN = Entries()
add = BROKEN.broken


def in_chunks(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    state, out = key.new_zeros(key.shape[0], key.shape[-1], value.shape[-1]), []
    for q, k, v, g in zip(*(t.split(16, 1) for t in (query, key, value, F.logsigmoid(gate))), strict=True):
        total = g.cumsum(1)
        far = (total[:, :, None] - total[:, None]).tril()
        inside = (q @ k.mT * far.exp()).tril() @ v
        out.append(inside + (q * (total - g).exp()[..., None]) @ state)  # the chunk's first decay is left out
        rest = (total[:, -1:] - total).exp()[..., None]
        state = state * total[:, -1].exp()[:, None, None] + (k * rest).mT @ v
    return torch.cat(out, 1)


add("Y11", "what a chunk reads of the state before it lacks the decay of its own step", "sizes",
    in_chunks, ref.decayed, ref.DECAYED, sizes=SIZES, proof=Call(dict(L=20)))  # fmt: skip


def retention_backward(dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor, gamma: float) -> Any:
    dq, dk, dv = gradients(ref.retention, dy, query, key, value, gamma=gamma)
    if gamma == 1:
        dk = (value @ dy.mT) @ query  # without a decay it is a plain product, if there were no mask
    return dq, dk, dv


add("Y12", "the short cut for gamma = 1 forgets the causal mask", "parameters",
    function(ref.retention, retention_backward), ref.retention, ref.RETENTION, params=dict(gamma=[0.9, 0.5, 1.0]),
    sizes=SIZES, proof=Call(params=dict(gamma=1.0)))  # fmt: skip


class Selective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return ref.selective(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_last: Tensor | None) -> Any:
        if dy is None:
            return None, None, None  # the last state alone is never used, it thinks
        inputs = ctx.saved_tensors
        if d_last is None:
            d_last = torch.zeros_like(inputs[2])
        return gradients(ref.selective, (dy, d_last), *inputs)


def last_alone() -> bool:
    x, step, first = torch.randn(1, 3, 2, requires_grad=True), torch.randn(1, 3, 2), torch.randn(1, 2)
    grad = torch.autograd.grad(Selective.apply(x, step, first)[1].sum(), x, allow_unused=True)[0]
    return grad is None or not grad.any()


add("Y13", "a loss of the last state alone gives no gradient", "subsets of gradients",
    lambda *a: Selective.apply(*a), ref.selective, ref.SELECTIVE, sizes=SIZES, proof=last_alone)  # fmt: skip


def min_gru_in_logs(gate: Tensor, x: Tensor, first: Tensor) -> Tensor:
    new = torch.where(x >= 0, torch.log(x.clamp_min(0) + 0.5), F.logsigmoid(x))
    decay = F.pad(F.logsigmoid(-gate).cumsum(1), (1, 0))
    values = torch.cat([first.log()[:, None], F.logsigmoid(gate) + new], 1)  # log 0 is fine in the forward
    return torch.exp(decay + torch.logcumsumexp(values - decay, 1))[:, 1:]


add("Y14", "a scan in log space: a first state of 0 has a gradient of NaN", "special values",
    min_gru_in_logs, ref.min_gru, ref.MIN_GRU, sizes=SIZES, algorithm_error=50,
    proof=Call(change=lambda t: dict(first=torch.zeros_like(t["first"]))))  # fmt: skip


def product_backward(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    total = (dy * y).flip(1).cumsum(1).flip(1)
    return torch.where(x == 0, 0, total / x)  # right but for what a zero hides


def a_zero(inputs: dict[str, Any]) -> dict[str, Any]:
    x = inputs["x"].clone()
    x[:, 1] = 0
    return dict(x=x)


add("Y15", "the gradient of a factor that is 0 is 0", "special values",
    function(ref.running_product, product_backward), ref.running_product, dict(x=tensor("B", "L")),
    sizes=SIZES | dict(L=(1, 8)), proof=Call(change=a_zero))  # fmt: skip


class Biquad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = ref.biquad(x, a, b)
        ctx.save_for_backward(x, a, b)
        ctx.y = y.detach()  # a constant for whoever differentiates again
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, a, b = ctx.saved_tensors
        adjoint = ref.biquad(dy.flip(1), a, torch.cat([torch.ones_like(b[:1]), torch.zeros_like(b[1:])])).flip(1)

        def late(t: Tensor, by: int) -> Tensor:
            return F.pad(t, (by, 0))[:, : t.shape[1]]

        def early(t: Tensor, by: int) -> Tensor:
            return F.pad(t, (0, by))[:, by:]

        dx = sum(b[i] * early(adjoint, i) for i in range(3))
        da = torch.stack([-(adjoint * late(ctx.y, i + 1)).sum() for i in range(2)])
        return dx, da, torch.stack([(adjoint * late(x, i)).sum() for i in range(3)])


add("Y16", "a filter's gradient of its gradient: the output is kept as a constant", "order",
    lambda *a: Biquad.apply(*a), ref.biquad, ref.BIQUAD, sizes=SIZES | dict(L=(4, 20)),
    proof=Call(order=2))  # fmt: skip


def wkv_plain(key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    """Sums of exp(key) that decay, without a maximum: out of range from 88 on."""
    w, top, low, out = torch.exp(-F.softplus(decay)), 0.0, 0.0, []
    for t in range(key.shape[1]):
        e = torch.exp(key[:, t])
        top, low = w * top + e * value[:, t], w * low + e
        out.append(top / low)
    return torch.stack(out, 1)


add("Y17", "weights exp(key) without a maximum that is subtracted", "special values",
    wkv_plain, ref.wkv, ref.WKV, sizes=SIZES | dict(L=(1, 16)), extremes=dict.fromkeys(ref.WKV, "finite"),
    algorithm_error=4,
    proof=Call(change=lambda t: dict(key=t["key"] + 100)))  # fmt: skip


def packed_in_blocks(dy: Tensor, y: Tensor, x: Tensor, start: Tensor) -> tuple[Tensor, None]:
    out, carry = [], torch.zeros_like(dy[0])
    for t in reversed(range(len(dy))):
        carry = carry + dy[t]
        out.append(carry)
        if start[t] and t % 16:  # a sequence that begins with a block is taken for the same one
            carry = torch.zeros_like(carry)
    return torch.stack(out[::-1]), None


add("Y18", "a sequence that begins at the edge of a block of 16 hands its gradient to the one before", "sizes",
    function(ref.packed_sum, packed_in_blocks), ref.packed_sum, ref.PACKED, sizes=dict(L=(1, 50), D=(1, 4)),
    proof=Call(dict(L=20), change=lambda t: dict(start=torch.arange(20) == 16)))  # fmt: skip


class Workspace:
    """A cell that keeps its states in one workspace for each shape."""

    def __init__(self) -> None:
        self.kept: dict[Any, Tensor] = {}

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        space = self

        class Cell(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                y = ref.cell(x, weight)
                kept = space.kept.setdefault((y.shape, y.dtype), torch.empty_like(y))
                ctx.y, ctx.weight = kept.copy_(y), weight  # the next forward of this shape writes here
                return y

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx: Any, dy: Tensor) -> Any:
                return ref.cell_gradient(dy, ctx.y, ctx.weight)

        return Cell.apply(x, weight)


def two_forwards() -> bool:
    op, w = Workspace(), torch.randn(3, 3)
    x = torch.randn(1, 4, 3, requires_grad=True)
    y = op(x, w)
    op(torch.randn(1, 4, 3), w)
    want = torch.autograd.grad(ref.cell(x, w).sum(), x)[0]
    return not torch.allclose(torch.autograd.grad(y.sum(), x)[0], want)


add("Y19", "states are kept in a workspace that the next forward of the shape writes over", "calls",
    Workspace(), ref.cell, ref.CELL, sizes=SIZES | dict(L=(1, 12)), proof=two_forwards)  # fmt: skip


def smoothed_backward(dy: Tensor, y: Tensor, x: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    r, carry = torch.sigmoid(rate), torch.zeros_like(dy[:, 0])
    states, state = [], torch.zeros_like(dy[:, 0])
    for t in range(x.shape[1]):
        states.append(state)
        state.mul_(r).add_((1 - r) * x[:, t])  # all of the list are one tensor
    dx, dr = torch.zeros_like(x), torch.zeros_like(x[0])
    for t in reversed(range(x.shape[1])):
        carry = carry + dy[:, t]
        dx[:, t] = carry * (1 - r)
        dr[t] = (carry * (states[t] - x[:, t])).sum(0)
        carry = carry * r
    return dx, dr.sum(0) * r * (1 - r)


add("Y20", "the states that are kept are one tensor, changed in place", "some inputs",
    function(ref.smoothed, smoothed_backward), ref.smoothed, ref.SMOOTHED, sizes=SIZES,
    proof=Call(dict(L=6)))  # fmt: skip

MUTANTS, NOT_SAYABLE = BROKEN.ops, BROKEN.not_sayable
