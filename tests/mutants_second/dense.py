"""Convolution, pooling, resampling, losses, products, quantisation, embedding bags, segments: broken ops written after
the checker was frozen.

Ids: V convolution, P pooling, I resampling, E embedding bags, X cross entropy, B products, Q quantisation, Y segments,
U gated units, N norms of another kind.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from _broken import broken, of
from torch import Tensor

from retrograd.check.spec import OpSpec, tensor

# --- Convolution ---------------------------------------------------------------------------------------

_CONV = dict(x=tensor("B", "C", "L"), weight=tensor("K", "C", 3))
_CONV_SIZES = dict(B=(1, 3), C=(1, 5), K=(1, 5), L=(5, 24))


def _dilated(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x, weight, padding=2, dilation=2)


# The gradient of the weight ignores the dilation (class of pytorch/pytorch#13008).
V01 = broken(
    "V01",
    _dilated,
    lambda dy, y, x, w: (of(_dilated)(dy, y, x, w)[0], of(lambda x, w: F.conv1d(x, w, padding=1))(dy, y, x, w)[1]),
    _CONV,
    sizes=_CONV_SIZES,
)


def _two_groups(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1, groups=2)


def _first_group(dy: Tensor, y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    half = weight[: weight.shape[0] // 2]
    return of(_two_groups)(dy, y, x, torch.cat([half, half]))[0], of(_two_groups)(dy, y, x, weight)[1]


# dx takes the first group's weight for all groups (class of pytorch/pytorch#51430).
V02 = broken(
    "V02",
    _two_groups,
    _first_group,
    dict(x=tensor("B", 4, "H", "W"), weight=tensor(4, 2, 3, 3)),
    sizes=dict(B=(1, 3), H=(1, 8), W=(1, 8)),
)


def _strided(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x, weight, stride=2)


def _short(dy: Tensor, y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    dx, dw = of(_strided)(dy, y, x, weight)
    reached = 2 * (y.shape[-1] - 1) + 3
    grad = torch.ones_like(dx)  # what a caching allocator's block still holds; fresh memory would often be zeros
    grad[..., :reached] = dx[..., :reached]
    return grad, dw


# Columns that the stride does not reach are left unwritten in dx: no output padding in the transposed convolution
# (flagos-ai/FlagGems#1576).
V03 = broken("V03", _strided, _short, _CONV, sizes=_CONV_SIZES)

# The gradient of the weight is a mean over the batch, not a sum (sebgao/cTensor#3).
V04 = broken(
    "V04",
    F.conv1d,
    lambda dy, y, x, w: (of(F.conv1d)(dy, y, x, w)[0], of(F.conv1d)(dy, y, x, w)[1] / len(x)),
    _CONV,
    sizes=_CONV_SIZES,
)

# --- Pooling and resampling ------------------------------------------------------------------------------

_ROWS = dict(x=tensor("B", "C", "L"))
_ROW_SIZES = dict(B=(1, 3), C=(1, 4), L=(3, 32))

# The border's windows are divided by what lies inside in the forward, by their full width in the backward (class of
# count_include_pad).
P01 = broken(
    "P01",
    lambda x: F.avg_pool1d(x, 3, stride=2, padding=1, count_include_pad=False),
    of(lambda x: F.avg_pool1d(x, 3, stride=2, padding=1)),
    _ROWS,
    sizes=_ROW_SIZES,
)


def _written(dy: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    index = F.max_pool1d(x, 3, stride=1, return_indices=True)[1]
    return (torch.zeros_like(x).scatter(-1, index, dy),)


# Overlapping windows with the same maximum overwrite each other's gradient (class of missing atomics).
P02 = broken("P02", lambda x: F.max_pool1d(x, 3, stride=1), _written, _ROWS, sizes=_ROW_SIZES)


def _every_maximum(dy: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    return (dy[..., None] * (x == y[..., None]),)


# All elements that equal the maximum get the whole gradient: only ties show it (class of chainer's and Theano's max).
P03 = broken("P03", lambda x: x.amax(-1), _every_maximum, dict(x=tensor("M", "N")), sizes=dict(N=(1, 64)))


def _double(x: Tensor, corners: bool = False) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=corners)


_IMAGE = dict(image=tensor("B", "C", "H", "W"))
_IMAGE_SIZES = dict(B=(1, 2), C=(1, 3), H=(2, 8), W=(2, 8))

# The backward aligns the corners, the forward does not (class of align_corners).
I01 = broken("I01", _double, of(lambda x: _double(x, True)), _IMAGE, sizes=_IMAGE_SIZES)


def _folded(dy: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    grad = dy[..., 1:-1].clone()
    grad[..., 1] = dy[..., 0]
    grad[..., -2] = dy[..., -1]
    return (grad,)


# What reflection brings back replaces the gradient that was there (class of missing atomics).
I02 = broken("I02", lambda x: F.pad(x, (1, 1), mode="reflect"), _folded, _ROWS, sizes=_ROW_SIZES)

# --- Embedding bags and segments --------------------------------------------------------------------------

_BAGS = dict(table=tensor("V", "N"), index=tensor("M", 4, dtype="int64", low=0, high="V"))
_BAG_SIZES = dict(V=(2, 24), N=(1, 8), M=(1, 16))


def _bag(table: Tensor, index: Tensor, padding: int | None = 0) -> Tensor:
    """The mean of each bag's rows; row 0 is padding and does not count."""
    counts = index != padding if padding is not None else torch.ones_like(index, dtype=torch.bool)
    total = torch.where(counts[..., None], table[index], 0).sum(1)
    return total / counts.sum(1, keepdim=True).clamp_min(1)


def _full_bags(dy: Tensor, y: Tensor, table: Tensor, index: Tensor) -> tuple[Tensor | None, ...]:
    counts = (index != 0).sum(1, keepdim=True).clamp_min(1)
    return of(_bag)(dy * counts / index.shape[1], y, table, index)[0], None


# The mean's gradient is divided by the bag's length with its padding (class of pytorch/pytorch#49237).
E01 = broken("E01", _bag, _full_bags, _BAGS, sizes=_BAG_SIZES)


def _padding_too(dy: Tensor, y: Tensor, table: Tensor, index: Tensor) -> tuple[Tensor | None, ...]:
    counts = (index != 0).sum(1, keepdim=True).clamp_min(1)
    rows = (dy / counts)[:, None].expand(-1, index.shape[1], -1)
    return torch.zeros_like(table).index_add(0, index.flatten(), rows.flatten(0, 1)), None


# The padding's row gets a gradient (pytorch/pytorch#26302, #3842).
E02 = broken("E02", _bag, _padding_too, _BAGS, sizes=_BAG_SIZES)


def _weighted(table: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    return (table[index] * weight[..., None]).sum(1)


def _unweighted(dy: Tensor, y: Tensor, table: Tensor, index: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
    _, _, dw = of(_weighted)(dy, y, table, index, weight)
    return of(_weighted)(dy, y, table, index, torch.ones_like(weight))[0], None, dw


# The table's gradient lacks the weight of each sample (class of pytorch/pytorch#18799).
E03 = broken("E03", _weighted, _unweighted, _BAGS | dict(weight=tensor("M", 4)), sizes=_BAG_SIZES)


_SEGMENTS = dict(x=tensor("M", "N"), segment=tensor("M", dtype="int64", low=0, high=6))


def _segment_mean(x: Tensor, segment: Tensor) -> Tensor:
    count = torch.bincount(segment, minlength=6).clamp_min(1)
    return torch.zeros(6, x.shape[1], dtype=x.dtype).index_add(0, segment, x) / count[:, None]


def _empty_segments(dy: Tensor, y: Tensor, x: Tensor, segment: Tensor) -> tuple[Tensor | None, ...]:
    share = dy / torch.bincount(segment, minlength=6)[:, None]
    return F.one_hot(segment, 6).to(x.dtype) @ share, None


# Segments without rows divide by zero, and a product with zeros spreads it (tensorflow/tensorflow#127233,
# rusty1s/pytorch_scatter#118).
Y01 = broken("Y01", _segment_mean, _empty_segments, _SEGMENTS, sizes=dict(N=(1, 8)))


def _sorted_only(dy: Tensor, y: Tensor, x: Tensor, segment: Tensor) -> tuple[Tensor | None, ...]:
    count = torch.bincount(segment, minlength=6)
    return (dy / count.clamp_min(1)[:, None])[segment.sort().values], None


# The backward takes the segments for sorted (class of segment_csr beside scatter).
Y02 = broken("Y02", _segment_mean, _sorted_only, _SEGMENTS, sizes=dict(N=(1, 8)))

# --- Cross entropy -------------------------------------------------------------------------------------------

_LOGITS = dict(logits=tensor("M", "C"), target=tensor("M", dtype="int64", low=0, high="C"))
_CLASSES = dict(M=(1, 32), C=(2, 12))


def _loss(logits: Tensor, target: Tensor, smoothing: float = 0.1, ignored: int = 0) -> Tensor:
    """Summed over the rows whose target is not 0, divided by their number."""
    counts = target != ignored
    total = F.cross_entropy(logits, target, reduction="sum", label_smoothing=smoothing, ignore_index=ignored)
    return total / counts.sum().clamp_min(1)


def _all_rows(logits: Tensor, target: Tensor) -> Tensor:
    total = F.cross_entropy(logits, target, reduction="sum", label_smoothing=0.1, ignore_index=0)
    return total / len(target)


# Ignored rows count in the backward's mean (class of tinygrad/tinygrad#3570).
X01 = broken("X01", _loss, of(_all_rows), _LOGITS, sizes=_CLASSES)

# The backward is that without label smoothing (class of linkedin/Liger-Kernel#198).
X02 = broken("X02", _loss, of(lambda x, t: _loss(x, t, 0.0)), _LOGITS, sizes=_CLASSES)

# The smoothing part counts ignored rows (pytorch/pytorch#73205).
X03 = broken(
    "X03",
    _loss,
    of(lambda x, t: _loss(x, t) - 0.1 * torch.where(t == 0, F.log_softmax(x, -1).mean(-1), 0).sum() / len(t)),
    _LOGITS,
    sizes=_CLASSES,
)

# The gradient is computed in the forward, and grad_out taken for 1 (class of fused linear cross entropy).
X04 = broken("X04", _loss, lambda dy, y, x, t: of(_loss)(torch.ones_like(dy), y, x, t), _LOGITS, sizes=_CLASSES)


def _empty_mean(dy: Tensor, y: Tensor, logits: Tensor, target: Tensor) -> tuple[Tensor | None, ...]:
    kept = (target != 0)[:, None]
    wanted = 0.9 * F.one_hot(target, logits.shape[-1]) + 0.1 / logits.shape[-1]
    return dy * kept * (torch.softmax(logits, -1) - wanted) / kept.sum(), None


# A batch in which every row is ignored divides by zero, in the backward only (ROCm/aiter#5165). Written by hand: in a
# gradient by autograd PyTorch leaves out the ignored rows after the division, so 0 is what comes of it.
X05 = broken("X05", _loss, _empty_mean, _LOGITS, sizes=_CLASSES)


def _capped(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(5 * torch.tanh(logits / 5), target, reduction="none")


# The soft cap's slope is missing (class of logit softcapping).
X06 = broken(
    "X06",
    _capped,
    lambda dy, y, x, t: of(lambda z, t: F.cross_entropy(z, t, reduction="none"))(dy, y, 5 * torch.tanh(x / 5), t),
    _LOGITS,
    sizes=_CLASSES,
)

# --- Products, quantisation, gated units, norms of another kind -------------------------------------------------


def _shared(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("bmk,kn->bmn", x, weight)


# The gradient of a factor that all batches share is the first batch's (class of un-broadcasting).
B01 = broken(
    "B01",
    _shared,
    lambda dy, y, x, w: (dy @ w.mT, x[0].mT @ dy[0]),
    dict(x=tensor("B", "M", "K"), weight=tensor("K", "N")),
    sizes=dict(B=(1, 4), M=(1, 16), K=(1, 16), N=(1, 16)),
)


def _tail_lost(dy: Tensor, y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    whole = max(len(x) // 16 * 16, min(len(x), 16))
    return dy @ weight.mT, x[:whole].mT @ dy[:whole]


# Split-K leaves out what is over a multiple of 16 rows, from 17 on (class of BobMcDear/attorch#18).
B02 = broken("B02", torch.matmul, _tail_lost, dict(x=tensor("M", "K"), weight=tensor("K", "N")))


def _quantised(x: Tensor, weight: Tensor, clamps: bool = True) -> Tensor:
    """Eight steps a unit, four units either way, straight-through: the rounding has slope one, the clamp its own."""
    inside = x.clamp(-1, 1) if clamps else x
    steps = inside + (torch.round(x.clamp(-1, 1) * 8) / 8 - inside).detach()
    return steps @ weight


_QUANT = dict(x=tensor("M", "K"), weight=tensor("K", "N"))

# The gradient passes where the input was clamped, too (Oneflow-Inc/oneflow#8685, microsoft/nni#3160).
Q01 = broken("Q01", _quantised, of(lambda x, w: _quantised(x, w, False)), _QUANT, surrogate=True)

# The weight's gradient takes the input before it was quantised (class of straight-through estimators).
Q02 = broken(
    "Q02",
    _quantised,
    lambda dy, y, x, w: (of(_quantised)(dy, y, x, w)[0], x.clamp(-1, 1).mT @ dy),
    _QUANT,
    surrogate=True,
)


def _packed(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.gelu(gate) * up


# The halves of the packed gradient are in the wrong order (class of gate and up projections merged).
U01 = broken(
    "U01", _packed, lambda dy, y, x: (of(_packed)(dy, y, x)[0].roll(x.shape[-1] // 2, -1),), dict(x=tensor("M", "E")),
    sizes=dict(E=[2, 8, 32]),
)  # fmt: skip


def _limited(gate: Tensor, up: Tensor, limit: float = 1.5) -> Tensor:
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-limit, limit) + 1)


def _no_limit(dy: Tensor, y: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return of(lambda g, u: _limited(g, u, float("inf")))(dy, y, gate.clamp(max=1.5), up.clamp(-1.5, 1.5))


# Clamped gates and values get a gradient all the same (class of SwiGLU with limits).
U02 = broken("U02", _limited, _no_limit, dict(gate=tensor("M", "N"), up=tensor("M", "N")))


def _unit(x: Tensor, eps: float = 1e-3) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp_min(eps)


def _always_far(dy: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    length = x.norm(dim=-1, keepdim=True).clamp_min(1e-3)
    return ((dy - y * (dy * y).sum(-1, keepdim=True)) / length,)


# F.normalize: rows shorter than eps get the formula of the others (class of clamped denominators).
N01 = broken("N01", _unit, _always_far, dict(x=tensor("M", "N")), sizes=dict(N=(1, 64)))


def _groups(x: Tensor, weight: Tensor) -> Tensor:
    return F.group_norm(x, 2, weight)


def _group_mean_lost(dy: Tensor, y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    dw = of(_groups)(dy, y, x, weight)[1]
    grouped, g = x.unflatten(1, (2, -1)), (dy * weight[:, None]).unflatten(1, (2, -1))
    centred = grouped - grouped.mean((2, 3), keepdim=True)
    rstd = torch.rsqrt(centred.square().mean((2, 3), keepdim=True) + 1e-5)
    xhat = centred * rstd
    # Means over the length alone, where a group is its channels as well.
    dx = rstd * (g - g.mean(3, keepdim=True) - xhat * (g * xhat).mean(3, keepdim=True))
    return dx.flatten(1, 2), dw


# The backward's means run over one channel instead of the group: right where a group has one channel (class of
# BobMcDear/attorch#18).
N02 = broken(
    "N02",
    _groups,
    _group_mean_lost,
    dict(x=tensor("B", "C", "L"), weight=tensor("C")),
    sizes=dict(B=(1, 3), C=[2, 4, 8], L=(2, 24)),
)

MUTANTS = {name: spec for name, spec in list(globals().items()) if isinstance(spec, OpSpec)}
