"""State spaces, linear attention and filters, right: chunks, log space, matrices, products with zeros."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from entries import Entries, function, gradients
from references import recurrences as ref
from references.recurrences import SIZES
from torch import Tensor

from retrograd.check.spec import tensor

RIGHT = Entries()
add = RIGHT.healthy


def in_chunks(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    """Chunks of 16: the decay between two steps is exp of a difference of sums of logarithms."""
    state, out = key.new_zeros(key.shape[0], key.shape[-1], value.shape[-1]), []
    for q, k, v, g in zip(*(t.split(16, 1) for t in (query, key, value, F.logsigmoid(gate))), strict=True):
        total = g.cumsum(1)
        hidden = ~torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        far = (total[:, :, None] - total[:, None]).masked_fill(hidden, float("-inf"))
        out.append((q @ k.mT * far.exp()) @ v + (q * total.exp()[..., None]) @ state)
        rest = (total[:, -1:] - total).exp()[..., None]
        state = state * total[:, -1].exp()[:, None, None] + (k * rest).mT @ v
    return torch.cat(out, 1)


# A sum of 16 logarithms has rounding errors of its size, up to 10 here, which exp makes relative ones. Not for gates
# that are infinite: inf - inf.
add("decayed_in_chunks", in_chunks, ref.decayed, ref.DECAYED, sizes=SIZES, algorithm_error=40,
    extremes=dict.fromkeys(("query", "key", "value"), "finite"))  # fmt: skip


def retention_by_exp(query: Tensor, key: Tensor, value: Tensor, gamma: float) -> Tensor:
    """Decay on the queries and its inverse on the keys, from the middle of the sequence."""
    place = (torch.arange(query.shape[1]) - query.shape[1] / 2).to(query.dtype)[:, None]
    return ((query * gamma**place) @ (key * gamma**-place).mT).tril() @ value


# Hidden products are computed and thrown away: a NaN in a key reaches its own column alone.
add("retention_by_inverse_decay", retention_by_exp, ref.retention, ref.RETENTION, params=dict(gamma=[0.9, 1.0]),
    sizes=SIZES, algorithm_error=8)  # fmt: skip


class Selective(torch.autograd.Function):
    """Takes None for outputs that nobody uses."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return ref.selective(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_last: Tensor | None) -> Any:
        if dy is None and d_last is None:
            return None, None, None
        inputs = ctx.saved_tensors
        dy = torch.zeros_like(inputs[0]) if dy is None else dy
        return gradients(ref.selective, (dy, torch.zeros_like(inputs[2]) if d_last is None else d_last), *inputs)


add("last_state_alone", lambda *a: Selective.apply(*a), ref.selective, ref.SELECTIVE, sizes=SIZES)


def min_gru_backward(dy: Tensor, y: Tensor, gate: Tensor, x: Tensor, first: Tensor) -> tuple[Tensor, ...]:
    z, new = torch.sigmoid(gate), torch.where(x >= 0, x + 0.5, torch.sigmoid(x))
    slope = torch.where(x >= 0, 1, new * (1 - new))
    before, carry = torch.cat([first[:, None], y[:, :-1]], 1), torch.zeros_like(first)
    d_gate, d_x = torch.zeros_like(gate), torch.zeros_like(x)
    for t in reversed(range(x.shape[1])):
        carry = carry + dy[:, t]
        d_gate[:, t] = carry * (new[:, t] - before[:, t]) * z[:, t] * (1 - z[:, t])
        d_x[:, t] = carry * z[:, t] * slope[:, t]
        carry = carry * (1 - z[:, t])
    return d_gate, d_x, carry


# At x = 0 both branches have slopes, 1 and 1/4: the first holds, as in the reference.
add("min_gru_by_hand", function(ref.min_gru, min_gru_backward), ref.min_gru, ref.MIN_GRU, sizes=SIZES)


def product_backward(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """No division: products before and after each factor, for zeros too."""
    before = F.pad(y, (1, 0), value=1.0)[:, :-1]
    out, carry = [], torch.zeros_like(dy[:, 0])
    for t in reversed(range(x.shape[1])):
        carry = dy[:, t] + carry * (x[:, t + 1] if t + 1 < x.shape[1] else 1)
        out.append(carry * before[:, t])
    return torch.stack(out[::-1], 1)


add("product_without_division", function(ref.running_product, product_backward), ref.running_product,
    dict(x=tensor("B", "L")), sizes=SIZES | dict(L=(1, 8)))  # fmt: skip


def biquad_by_matrix(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The filter as two triangular band matrices: one applied, the other solved for."""
    length = x.shape[1]
    eye = torch.eye(length, dtype=x.dtype)

    def shifted(by: int) -> Tensor:
        return F.pad(eye, (by, 0))[:, :length].mT if by < length else torch.zeros_like(eye)

    right = sum(b[i] * shifted(i) for i in range(3))
    left = eye + sum(a[i] * shifted(i + 1) for i in range(2))
    return torch.linalg.solve_triangular(left, right @ x.mT, upper=False, unitriangular=True).mT


# A matrix spreads what is not finite to all steps.
add("biquad_by_matrices", biquad_by_matrix, ref.biquad, ref.BIQUAD, sizes=SIZES | dict(L=(1, 20)), algorithm_error=4,
    extremes=dict.fromkeys(("x", "b"), "finite"))  # fmt: skip


def wkv_stable(key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    """RWKV's own recurrence: numerator, denominator and the running maximum of their exponents."""
    w = F.softplus(decay)
    top, low, high, out = value[:, 0], torch.ones_like(key[:, 0]), key[:, 0], [value[:, 0]]
    for t in range(1, key.shape[1]):
        new = torch.maximum(high - w, key[:, t]).detach()
        old, now = torch.exp(high - w - new), torch.exp(key[:, t] - new)
        top, low, high = old * top + now * value[:, t], old * low + now, new
        out.append(top / low)
    return torch.stack(out, 1)


# exponents are sums over time here, which round anew at each step
add("wkv_with_running_maximum", wkv_stable, ref.wkv, ref.WKV, sizes=SIZES | dict(L=(1, 12)), algorithm_error=8)  # fmt: skip


def packed_by_parts(x: Tensor, start: Tensor) -> Tensor:
    """Each sequence for itself, cut at the places where one begins."""
    places = [0, *(int(i) for i in start.nonzero()[:, 0] if i), len(x)]
    return torch.cat([x[a:b].cumsum(0) for a, b in itertools.pairwise(places)])


add("packed_by_parts", packed_by_parts, ref.packed_sum, ref.PACKED, sizes=dict(L=(1, 50), D=(1, 4)))


class Workspace:
    """A cell whose backward recomputes into one workspace for each shape: kept between calls, never between passes."""

    def __init__(self) -> None:
        self.kept: dict[Any, Tensor] = {}

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        space = self

        class Cell(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                ctx.save_for_backward(x, weight)
                return ref.cell(x, weight)

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx: Any, dy: Tensor) -> Any:
                x, weight = ctx.saved_tensors
                y = ref.cell(x, weight)
                kept = space.kept.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)
                return ref.cell_gradient(dy, kept, weight)

        return Cell.apply(x, weight)


add("workspace_of_a_backward", Workspace(), ref.cell, ref.CELL, sizes=SIZES | dict(L=(1, 12)))


def smoothed_by_kernel(x: Tensor, rate: Tensor) -> Tensor:
    """A convolution with (1 - r) r^t as a Toeplitz product."""
    length = x.shape[1]
    far = torch.arange(length)[:, None] - torch.arange(length)
    weight = torch.exp(F.logsigmoid(rate) * far.clamp_min(0)[..., None]).masked_fill((far < 0)[..., None], 0)
    return torch.einsum("tsd,bsd->btd", weight, x) * torch.sigmoid(-rate)


# What is not finite meets zeros of the kernel: promised for finite values.
add("smoothed_by_kernel", smoothed_by_kernel, ref.smoothed, ref.SMOOTHED, sizes=SIZES, algorithm_error=16,
    extremes=dict.fromkeys(ref.SMOOTHED, "finite"))  # fmt: skip

HEALTHY = RIGHT.ops
