"""Attention, rotary embedding, recurrences, dropout, routing: broken ops written after the checker was frozen.

Ids: T attention, O rotary embedding, H recurrences, Z dropout, D routing to experts.
"""

from __future__ import annotations

import torch
from _broken import broken, of
from torch import Tensor

from retrograd.check.spec import OpSpec, tensor

# --- Attention ------------------------------------------------------------------------

_QKV = dict(query=tensor("B", "Q", "D"), key=tensor("B", "K", "D"), value=tensor("B", "K", "D"))
_SIZES = dict(B=(1, 3), Q=(1, 12), K=(1, 12), D=(1, 16))


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Attention that gives zeros to a query that sees nothing."""
    scores = query @ key.mT * (scale * query.shape[-1] ** -0.5)
    if seen is None:
        return torch.softmax(scores, -1) @ value
    blind = ~seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~seen & ~blind, float("-inf")), -1)
    return weights.masked_fill(blind, 0) @ value


def _causal(query: Tensor, key: Tensor, value: Tensor, corner: int) -> Tensor:
    seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(corner)
    return attend(query, key, value, seen)


# The forward aligns the causal mask with the last key, the backward with the first: equal lengths hide it (class of
# the change of convention in FlashAttention 2.1).
T01 = broken(
    "T01",
    lambda q, k, v: _causal(q, k, v, k.shape[-2] - q.shape[-2]),
    of(lambda q, k, v: _causal(q, k, v, 0)),
    _QKV,
    sizes=_SIZES,
)


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Two query heads share each head of key and value: [B, 2, Q, D] and [B, K, D]."""
    return attend(query, key[:, None], value[:, None])


def _last_head(dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    dq, _, _ = of(_grouped)(dy, y, query, key, value)
    _, dk, dv = of(attend)(dy[:, -1], y, query[:, -1], key, value)
    return dq, dk, dv


# Gradients of shared keys and values are those of one query head, not the sum (marin-community/levanter#449).
T02 = broken("T02", _grouped, _last_head, _QKV | dict(query=tensor("B", 2, "Q", "D")), sizes=_SIZES)

# The backward's scale is applied twice (common; hidden where D is 1).
T03 = broken("T03", attend, of(lambda q, k, v: attend(q, k, v, scale=q.shape[-1] ** -0.5)), _QKV, sizes=_SIZES)


def _nan_rows(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ value


# A query that sees no key makes all gradients of its batch NaN (pytorch/pytorch#41508, #103963).
T04 = broken(
    "T04", attend, of(_nan_rows), _QKV | dict(seen=tensor("B", "Q", "K", dtype="bool")), sizes=_SIZES | dict(K=(1, 4))
)


def _low_delta(dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    scale = query.shape[-1] ** -0.5
    p = torch.softmax(query @ key.mT * scale, -1)
    delta = (dy * y).sum(-1, keepdim=True).bfloat16().to(dy.dtype)
    ds = p * (dy @ value.mT - delta) * scale
    return ds @ key, ds.mT @ query, p.mT @ dy


# The row sums of dO * O are kept in bfloat16 between the kernels (class of lost precision).
T05 = broken("T05", attend, _low_delta, _QKV, sizes=_SIZES)


def _with_lse(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return attend(query, key, value), torch.logsumexp(query @ key.mT * query.shape[-1] ** -0.5, -1)


# The log-sum-exp is returned, and its gradient dropped (class of outputs that nobody was meant to differentiate).
T06 = broken("T06", _with_lse, lambda dy, y, q, k, v: of(attend)(dy[0], y[0], q, k, v), _QKV, sizes=_SIZES)


def _half_heads(dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    channels = torch.arange(value.shape[-1]) < query.shape[-1]
    return of(attend)(dy, y, query, key, value * channels)[:2] + of(attend)(dy, y, query, key, value)[2:]


# Value channels beyond the head dimension of the queries are masked out (XunhaoLai/native-sparse-attention-triton#27).
T07 = broken("T07", attend, _half_heads, _QKV | dict(value=tensor("B", "K", "E")), sizes=_SIZES | dict(E=(1, 24)))

# --- Rotary embedding --------------------------------------------------------------------


def _rotate(x: Tensor, position: Tensor, sign: int = 1, interleaved: bool = False) -> Tensor:
    half = x.shape[-1] // 2
    angle = position[:, None].to(x.dtype) * 0.5 ** torch.arange(half, dtype=x.dtype)
    cos, sin = angle.cos(), sign * angle.sin()
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


_ROPE = dict(x=tensor("B", "L", "E"), position=tensor("L", dtype="int64", low=0, high=64))
_ROPE_SIZES = dict(B=(1, 4), L=(1, 32), E=[2, 4, 8, 16])

# The gradient is rotated forward again instead of back: "same kernel, sin negated" without the negation (class of
# huggingface/candle#3612).
O01 = broken("O01", _rotate, lambda dy, y, x, p: (_rotate(dy, p), None), _ROPE, sizes=_ROPE_SIZES)

# The backward pairs neighbours, the forward halves (class of tenstorrent/tt-metal#26844).
O02 = broken("O02", _rotate, of(lambda x, p: _rotate(x, p, interleaved=True)), _ROPE, sizes=_ROPE_SIZES)

# The backward takes 0, 1, 2, ... for the positions (class of packed sequences and offsets).
O03 = broken("O03", _rotate, of(lambda x, p: _rotate(x, torch.arange(len(p)))), _ROPE, sizes=_ROPE_SIZES)

# --- Linear recurrences, as in state space models ----------------------------------------------------


def _scan(decay: Tensor, x: Tensor, start: Tensor) -> Tensor:
    """h[t] = sigmoid(decay[t]) h[t-1] + x[t] along the middle axis."""
    state, found = start, []
    for a, step in zip(torch.sigmoid(decay).unbind(1), x.unbind(1), strict=True):
        state = a * state + step
        found.append(state)
    return torch.stack(found, 1)


def _scan_grads(
    dy: Tensor, y: Tensor, decay: Tensor, x: Tensor, start: Tensor, *, shift: int = 1, chunk: int = 0
) -> tuple[Tensor, ...]:
    a = torch.sigmoid(decay)
    length = x.shape[1]
    carry, dx = torch.zeros_like(start), []
    for t in reversed(range(length)):
        if t + 1 < length:
            carry = torch.zeros_like(carry) if chunk and (t + 1) % chunk == 0 else a[:, t + shift] * carry
        carry = carry + dy[:, t]
        dx.append(carry)
    dx = torch.stack(dx[::-1], 1)
    before = torch.cat([start[:, None], y[:, :-1]], 1)
    return dx * before * a * (1 - a), dx, a[:, 0] * dx[:, 0]


_SCAN = dict(decay=tensor("B", "L", "N"), x=tensor("B", "L", "N"), start=tensor("B", "N"))
_SCAN_SIZES = dict(B=(1, 3), L=(1, 24), N=(1, 8))

# The reverse scan multiplies by its own step's decay instead of the next one's (class of state-spaces/mamba#368).
H01 = broken("H01", _scan, lambda *a: _scan_grads(*a, shift=0), _SCAN, sizes=_SCAN_SIZES)

# Nothing is carried from one chunk of 16 steps to the one before (proger/accelerated-scan#15, NX-AI/mlstm_kernels#10).
H02 = broken("H02", _scan, lambda *a: _scan_grads(*a, chunk=16), _SCAN, sizes=_SCAN_SIZES)

# The initial state gets no gradient (class of state-spaces/mamba#285: support added to the forward only).
H03 = broken("H03", _scan, lambda *a: (*_scan_grads(*a)[:2], torch.zeros_like(a[-1])), _SCAN, sizes=_SCAN_SIZES)


def _quotient(dy: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    return ((dy * y).flip(-1).cumsum(-1).flip(-1) / x,)


# The backward of a running product divides by the input: NaN where that is zero (class of pytorch/pytorch's cumprod).
H04 = broken("H04", lambda x: x.cumprod(-1), _quotient, dict(x=tensor("M", "N")), sizes=dict(N=(1, 12)))

# --- Dropout with a saved mask -----------------------------------------------------------------------

_DROP = dict(x=tensor("M", "N"), keep=tensor("M", "N", dtype="bool"))


def _dropout(x: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, x / 0.9, 0)


# The backward has the mask and not the factor 1 / (1 - p) (class of ddbourgin/numpy-ml#94).
Z01 = broken("Z01", _dropout, lambda dy, y, x, keep: (torch.where(keep, dy, 0), None), _DROP)

# The backward draws the mask anew, with an offset that counts blocks of another size (class of
# Dao-AILab/flash-attention#612).
Z02 = broken("Z02", _dropout, lambda dy, y, x, keep: (_dropout(dy, keep.roll(1, -1)), None), _DROP)

# There is no mask: what came out zero counts as dropped, also where the input was zero or so small that it vanished
# (kaldi-asr/kaldi#3890).
Z03 = broken("Z03", _dropout, lambda dy, y, x, keep: (torch.where(y != 0, dy / 0.9, 0), None), _DROP)

# --- Routing to experts --------------------------------------------------------------------------------


def _gate(logits: Tensor, norm: bool = True, detached: bool = False) -> Tensor:
    """The two largest probabilities, as shares of their sum, in place."""
    kept, index = torch.softmax(logits, -1).topk(2)
    if norm:
        total = kept.sum(-1, keepdim=True)
        kept = kept / (total.detach() if detached else total)
    return torch.zeros_like(logits).scatter(-1, index, kept)


_LOGITS = dict(logits=tensor("M", "E"))
_EXPERTS = dict(M=(1, 16), E=(3, 12))

# The share's denominator counts as a constant (class of router gradients).
D01 = broken("D01", _gate, of(lambda x: _gate(x, detached=True)), _LOGITS, sizes=_EXPERTS)

ROOM = 3


def _dispatch(x: Tensor, gate: Tensor, expert: Tensor) -> Tensor:
    """Each token times its gate in its expert's buffer; tokens beyond its room are dropped."""
    order = torch.nn.functional.one_hot(expert, 4).cumsum(0).gather(1, expert[:, None])[:, 0] - 1
    fits = order < ROOM
    place = expert * (ROOM + 1) + order.clamp(max=ROOM)
    rows = torch.where(fits[:, None], x * gate[:, None], 0)
    return torch.zeros(4 * (ROOM + 1), x.shape[1], dtype=x.dtype).index_add(0, place, rows)


def _dispatch_grads(
    dy: Tensor, y: Tensor, x: Tensor, gate: Tensor, expert: Tensor, *, drops: bool = True, gates: bool = True
) -> tuple[Tensor | None, ...]:
    order = torch.nn.functional.one_hot(expert, 4).cumsum(0).gather(1, expert[:, None])[:, 0] - 1
    rows = dy[expert * (ROOM + 1) + order.clamp(max=ROOM - 1 if not drops else ROOM)]
    rows = torch.where((order < ROOM)[:, None], rows, 0) if drops else rows
    return rows * gate[:, None], (rows * x).sum(-1) if gates else torch.zeros_like(gate), None


_TOKENS = dict(x=tensor("M", "N"), gate=tensor("M"), expert=tensor("M", dtype="int64", low=0, high=4))

# Tokens that found no room in the forward get the gradient of the last one that did (class of capacity drops,
# allenai/OLMo-core#718).
D02 = broken("D02", _dispatch, lambda *a: _dispatch_grads(*a, drops=False), _TOKENS, sizes=dict(M=(1, 24), N=(1, 8)))

# No gradient flows to the gates (PaddlePaddle/PaddleFleet#444).
D03 = broken("D03", _dispatch, lambda *a: _dispatch_grads(*a, gates=False), _TOKENS, sizes=dict(M=(1, 24), N=(1, 8)))

MUTANTS = {name: spec for name, spec in list(globals().items()) if isinstance(spec, OpSpec)}
