"""Chains of tags, clouds of points, max-plus algebra, splines, flows, filters of states, wavelets, flows of time: broken."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Call, Entries, function, gradients
from references import families as ref
from torch import Tensor

BROKEN = Entries()
add = BROKEN.broken


def tagged_backward(dy: Tensor, y: Tensor, score: Tensor, step: Tensor, tag: Tensor) -> tuple[Tensor, Tensor, None]:
    """By marginals: forward and backward sums of all chains."""
    length = len(score)
    before, after = [score[0]], [torch.zeros_like(score[0])]
    for t in range(1, length):
        before.append(torch.logsumexp(before[-1][:, None] + step, 0) + score[t])
        after.append(torch.logsumexp(step + score[length - t] + after[-1], 1))
    after.reverse()
    total = torch.logsumexp(before[-1], 0)
    d_score = torch.stack([torch.exp(b + a - total) for b, a in zip(before, after, strict=True)])
    d_score = d_score - F.one_hot(tag, score.shape[1])
    d_step = torch.zeros_like(step)
    for t in range(1, length):
        if t > 1:  # the step from the first tag is forgotten
            d_step += torch.exp(before[t - 1][:, None] + step + score[t] + after[t] - total)
        d_step[tag[t - 1], tag[t]] -= 1
    return dy * d_score, dy * d_step, None


add("V01", "a CRF's marginals of steps lack the first", "every input", function(ref.tagged, tagged_backward), ref.tagged,
    ref.TAGGED, sizes=ref.TAGGED_SIZES, proof=Call(dict(L=4, K=3)))  # fmt: skip


def chamfer_expanded(x: Tensor, y: Tensor) -> Tensor:
    far = x.square().sum(-1)[:, None] + y.square().sum(-1) - 2 * x @ y.mT  # nothing is left of clouds far from 0
    return torch.cat([far.amin(1), far.amin(0)])


add("V02", "distances as |x|^2 + |y|^2 - 2 x y: no digit of them is left far from 0", "special values",
    chamfer_expanded, ref.chamfer, ref.CLOUDS, sizes=ref.CLOUD_SIZES, algorithm_error=16,
    proof=Call(change=lambda t: dict(x=t["x"] + 1000, y=t["y"] + 1000)))  # fmt: skip


def max_plus_backward(dy: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    best, place = torch.full_like(y, float("-inf")), torch.zeros(y.shape, dtype=torch.int64)
    for start in range(0, a.shape[1], 32):
        part = slice(start, start + 32)
        top, at = (a[:, part, None] + b[part]).max(1)
        place = torch.where(top > best, at, place)  # the block's start is not added
        best = torch.maximum(best, top)
    rows, columns = torch.arange(y.shape[0])[:, None], torch.arange(y.shape[1])
    return (torch.zeros_like(a).index_put((rows.expand_as(place), place), dy, accumulate=True),
            torch.zeros_like(b).index_put((place, columns.expand_as(place)), dy, accumulate=True))  # fmt: skip


add("V03", "the place of a maximum counts from its block of 32", "sizes", function(ref.max_plus, max_plus_backward),
    ref.max_plus, ref.MAX_PLUS, sizes=ref.MAX_PLUS_SIZES, proof=Call(dict(K=70)))  # fmt: skip


def spline_backward(dy: Tensor, y: Tensor, x: Tensor, weight: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    (dw,) = gradients(lambda w: ref.spline(x, w, bins), dy, weight)
    piece, t = ref.basis(x, bins)
    rows = [weight.expand(len(x), -1, -1).gather(-1, (piece + i)[..., None])[..., 0] for i in range(3)]
    return dy * ((t - 1) * rows[0] + (1 - 2 * t) * rows[1] + t * rows[2]), dw  # pieces are of length 1, it thinks


add("V04", "a spline's slope is one by the piece's length", "parameters", function(ref.spline, spline_backward),
    ref.spline, ref.SPLINE, sizes=ref.SPLINE_SIZES, params=dict(bins=[4, 8]), proof=Call(params=dict(bins=8)))  # fmt: skip


class Reversible(torch.autograd.Function):
    """Keeps its outputs alone, and has its inputs from them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        first, second = ref.coupled(a, b, weight)
        first = first.clone()
        ctx.save_for_backward(weight)
        ctx.outs = first.detach(), second.detach()  # whoever changes them in place is not noticed
        return first, second

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dy: Tensor) -> Any:
        (weight,), (a, y) = ctx.saved_tensors, ctx.outs
        h = torch.tanh(a @ weight)
        return gradients(ref.coupled, dy, a, (y - h) * torch.exp(-0.5 * h), weight)


def changed_output() -> bool:
    a, b, w = (torch.randn(2, 2, requires_grad=True) for _ in range(3))
    second = Reversible.apply(a, b, w)[1]
    twice = second.mul_(2)
    want = torch.autograd.grad(2 * ref.coupled(a, b, w)[1].sum(), w)[0]
    return not torch.allclose(torch.autograd.grad(twice.sum(), w)[0], want)


add("V05", "a reversible layer keeps its outputs where autograd does not watch them", "calls",
    lambda *a: Reversible.apply(*a), ref.coupled, ref.COUPLED, sizes=ref.COUPLED_SIZES, algorithm_error=16,
    proof=changed_output)  # fmt: skip


def kalman_constant(y: Tensor, q: Tensor, r: Tensor) -> Tensor:
    step, noise = F.softplus(q), F.softplus(r)
    mean, spread, out = torch.zeros_like(y[:, 0]), torch.ones_like(q), []
    for t in range(y.shape[1]):
        before = spread.detach() + step  # what the spread owes to q and r is lost
        gain = before / (before + noise)
        mean, spread = mean + gain * (y[:, t] - mean), (1 - gain) * before
        out.append(mean)
    return torch.stack(out, 1)


add("V06", "a filter's variance is a constant from step to step", "sizes", kalman_constant, ref.kalman, ref.KALMAN,
    sizes=ref.KALMAN_SIZES)  # fmt: skip


def haar_backward(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    sizes = [x.shape[-1]]
    for _ in range(3):
        sizes.append(sizes[-1] - sizes[-1] // 2)
    low, at = dy[..., : sizes[3]], sizes[3]
    for n in reversed(sizes[:3]):
        half = n // 2
        high, at = dy[..., at : at + half], at + half
        pairs = torch.stack([low[..., :half] + high, low[..., :half] - high], -1).flatten(-2) * 0.5**0.5
        low = F.pad(pairs, (0, n - 2 * half))  # what had no partner gets nothing
    return low


add("V07", "a number without a partner gets no gradient", "sizes", function(ref.haar, haar_backward), ref.haar, ref.HAAR,
    sizes=ref.HAAR_SIZES, proof=Call(dict(N=7)))  # fmt: skip


def adapted_low(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return x @ weight + 0.5 * (x @ down) @ up  # the adapter's middle is rounded to the inputs' precision


add("V08", "an adapter that promises float32 rounds its middle to bfloat16", "dtypes", adapted_low, ref.adapted,
    ref.ADAPTED, sizes=ref.ADAPTED_SIZES, dtypes=["float32", "bfloat16"], compute="float32",
    proof=Call(dict(M=8, N=40, D=8), dtype=torch.bfloat16, bound=3e-3))  # fmt: skip


def by_threshold(x: Tensor, k: int) -> Tensor:
    least = x.detach().topk(min(k, x.shape[-1]), -1).values[..., -1:]
    return torch.where(x >= least, x, 0)  # equal ones come all


add("V09", "the k largest by a threshold: more of them where some are equal", "special values", by_threshold, ref.largest,
    ref.LARGEST, sizes=ref.LARGEST_SIZES, params=dict(k=[3, 8]),
    proof=Call(dict(N=12), change=lambda t: dict(x=torch.ones_like(t["x"]))))  # fmt: skip


def adjoint_backward(dy: Tensor, y: Tensor, z: Tensor, weight: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Integrates the state and its adjoint back in time: the gradient of the flow, not of the steps."""

    def back(state: Tensor, adjoint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        da, dw = gradients(ref.slope, adjoint, state, weight)
        return ref.slope(state, weight), da, dw

    h, state, adjoint, dw = 1 / steps, y, dy, torch.zeros_like(weight)
    for _ in range(steps):
        s, a, _ = back(state, adjoint)
        s, a, w = back(state - h / 2 * s, adjoint + h / 2 * a)
        state, adjoint, dw = state - h * s, adjoint + h * a, dw + h * w
    return adjoint, dw


add("V10", "the continuous adjoint of a flow, not the gradient of its steps", "every input",
    function(ref.integrated, adjoint_backward), ref.integrated, ref.INTEGRATED, sizes=ref.INTEGRATED_SIZES,
    params=dict(steps=[4, 16]), proof=Call(params=dict(steps=4), bound=1e-4))  # fmt: skip

MUTANTS, NOT_SAYABLE = BROKEN.ops, BROKEN.not_sayable
