"""Chains of tags, clouds of points, max-plus algebra, splines, flows, filters of states, wavelets, flows of time: right."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Entries, function, gradients
from references import families as ref
from torch import Tensor

RIGHT = Entries()
add = RIGHT.healthy


def tagged_backward(dy: Tensor, y: Tensor, score: Tensor, step: Tensor, tag: Tensor) -> tuple[Tensor, Tensor, None]:
    """By marginals, of which each row of a step's sums to that of its first tag."""
    length = len(score)
    before, after = [score[0]], [torch.zeros_like(score[0])]
    for t in range(1, length):
        before.append(torch.logsumexp(before[-1][:, None] + step, 0) + score[t])
        after.append(torch.logsumexp(step + score[length - t] + after[-1], 1))
    after.reverse()
    d_score = torch.stack([torch.softmax(b + a, 0) for b, a in zip(before, after, strict=True)])
    d_score = d_score - F.one_hot(tag, score.shape[1])
    d_step = torch.zeros_like(step)
    for t in range(1, length):
        d_step += torch.softmax((before[t - 1][:, None] + step + score[t] + after[t]).flatten(), 0).view_as(step)
        d_step[tag[t - 1], tag[t]] -= 1
    return dy * d_score, dy * d_step, None


# Sums of scores, up to 1e5 with a mean of 1e4, have roundings of their size.
add("crf_by_marginals", function(ref.tagged, tagged_backward), ref.tagged, ref.TAGGED, sizes=ref.TAGGED_SIZES,
    algorithm_error=8, extremes=())  # fmt: skip


def chamfer_gathered(x: Tensor, y: Tensor) -> Tensor:
    """Who is nearest is asked without gradients, in chunks; distances to them alone are differentiated."""
    with torch.no_grad():
        to_y = torch.cat([(part[:, None] - y).square().sum(-1).argmin(1) for part in x.split(8)])
        to_x = torch.cat([(part[:, None] - x).square().sum(-1).argmin(1) for part in y.split(8)])
    return torch.cat([(x - y[to_y]).square().sum(-1), (y - x[to_x]).square().sum(-1)])


add("chamfer_of_the_nearest", chamfer_gathered, ref.chamfer, ref.CLOUDS, sizes=ref.CLOUD_SIZES)


def max_plus_backward(dy: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    best, place = torch.full_like(y, float("-inf")), torch.zeros(y.shape, dtype=torch.int64)
    for start in range(0, a.shape[1], 32):
        part = slice(start, start + 32)
        top, at = (a[:, part, None] + b[part]).max(1)
        place = torch.where((top > best) | top.isnan() & ~best.isnan(), at + start, place)
        best = torch.maximum(best, top)
    rows, columns = torch.arange(y.shape[0])[:, None], torch.arange(y.shape[1])
    return (torch.zeros_like(a).index_put((rows.expand_as(place), place), dy, accumulate=True),
            torch.zeros_like(b).index_put((place, columns.expand_as(place)), dy, accumulate=True))  # fmt: skip


add("max_plus_in_blocks", function(ref.max_plus, max_plus_backward), ref.max_plus, ref.MAX_PLUS,
    sizes=ref.MAX_PLUS_SIZES)  # fmt: skip


def spline_backward(dy: Tensor, y: Tensor, x: Tensor, weight: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    piece, t = ref.basis(x, bins)
    dw, slope = torch.zeros_like(weight), torch.zeros_like(x)
    columns = torch.arange(x.shape[1]).expand_as(piece)
    for i, (part, d) in enumerate((((1 - t).square() / 2, t - 1), (0.5 + t - t * t, 1 - 2 * t), (t.square() / 2, t))):
        dw.index_put_((columns, piece + i), dy * part, accumulate=True)
        slope = slope + d * weight[columns, piece + i]
    return dy * slope * (bins / 4), dw


add("spline_by_hand", function(ref.spline, spline_backward), ref.spline, ref.SPLINE, sizes=ref.SPLINE_SIZES,
    params=dict(bins=[4, 8]))  # fmt: skip


class Reversible(torch.autograd.Function):
    """Saves its outputs alone, and has its inputs from them."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        first, second = ref.coupled(a, b, weight)
        first = first.clone()
        ctx.save_for_backward(first, second, weight)
        return first, second

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dy: Tensor) -> Any:
        a, y, weight = ctx.saved_tensors
        h = torch.tanh(a @ weight)
        return gradients(ref.coupled, dy, a, (y - h) * torch.exp(-0.5 * h), weight)


# b is had from y - h: of a b of 1e-6 beside an h of 1 nothing is left.
add("reversible_coupling", lambda *a: Reversible.apply(*a), ref.coupled, ref.COUPLED, sizes=ref.COUPLED_SIZES,
    algorithm_error=16, extremes=dict(a="any", weight="any"))  # fmt: skip


def kalman_by_information(y: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """Precisions add up: the mean is weighed by them."""
    step, noise = F.softplus(q), F.softplus(r)
    mean, precision, out = torch.zeros_like(y[:, 0]), torch.ones_like(q), []
    for t in range(y.shape[1]):
        before = precision / (1 + precision * step)
        precision = before + 1 / noise
        mean = (before * mean + y[:, t] / noise) / precision
        out.append(mean)
    return torch.stack(out, 1)


# Variances have no inverse where softplus is 0 or infinite.
add("kalman_by_information", kalman_by_information, ref.kalman, ref.KALMAN, sizes=ref.KALMAN_SIZES, algorithm_error=8,
    extremes=dict(y="any"))  # fmt: skip


def haar_backward(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """The transform's matrix is orthogonal: its transpose is made by columns of pairs."""
    sizes = [x.shape[-1]]
    for _ in range(3):
        sizes.append(sizes[-1] - sizes[-1] // 2)
    low, at = dy[..., : sizes[3]], sizes[3]
    for n in reversed(sizes[:3]):
        half = n // 2
        high, at = dy[..., at : at + half], at + half
        pairs = torch.stack([low[..., :half] + high, low[..., :half] - high], -1).flatten(-2) * 0.5**0.5
        low = torch.cat([pairs, low[..., half:]], -1)
    return low


add("haar_of_any_length", function(ref.haar, haar_backward), ref.haar, ref.HAAR, sizes=ref.HAAR_SIZES)


def adapted_folded(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """The adapter is added to the weight, in float32."""
    wide = [t.float() if t.dtype != torch.float64 else t for t in (x, weight, down, up)]
    return (wide[0] @ (wide[1] + 0.5 * wide[2] @ wide[3])).to(x.dtype)


# Other products add up in another order: x (A B) has rounded all of A B.
add("adapter_folded_into_the_weight", adapted_folded, ref.adapted, ref.ADAPTED, sizes=ref.ADAPTED_SIZES,
    dtypes=["float32", "bfloat16"], compute="float32", algorithm_error=8)  # fmt: skip


def by_places(x: Tensor, k: int) -> Tensor:
    place = x.topk(min(k, x.shape[-1]), -1).indices
    return torch.where(torch.zeros_like(x, dtype=torch.bool).scatter(-1, place, True), x, 0)


add("largest_by_places", by_places, ref.largest, ref.LARGEST, sizes=ref.LARGEST_SIZES, params=dict(k=[3, 8]))


def steps_backward(dy: Tensor, y: Tensor, z: Tensor, weight: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Each step's own gradient, at states that are computed once more."""
    states, dw = [z], torch.zeros_like(weight)
    for _ in range(steps - 1):
        states.append(ref.midpoint(states[-1], weight, 1 / steps))
    for state in reversed(states):
        dy, d = gradients(lambda s, w: ref.midpoint(s, w, 1 / steps), dy, state, weight)
        dw = dw + d
    return dy, dw


add("gradient_of_the_steps", function(ref.integrated, steps_backward), ref.integrated, ref.INTEGRATED,
    sizes=ref.INTEGRATED_SIZES, params=dict(steps=[4, 16]))  # fmt: skip

HEALTHY = RIGHT.ops
