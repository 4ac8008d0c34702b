"""Options of recurrences of flash-linear-attention 0.6.0: states, packed sequences, gates in other forms, reversal.

Drawn blind, from the source alone; before each spec stands what was expected of it. Formulas are our own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from specs import SINGLE, Registry, of
from torch import Tensor

import retrograd as rg

OPTIONS = Registry("flash-linear-attention==0.6.0 options")
FLA_OPTIONS = {"fla-options": OPTIONS}
_add = OPTIONS.add

_HALF = ("bfloat16",)  # the chunked forms of the delta rule refuse float32
_TIME = dict(B=(1, 2), T=[1, 2, 15, 16, 33, 64, 70], H=[1, 2], K=[16, 32], V=[16, 32])
_SHORT = _TIME | dict(T=[1, 2, 7, 16, 33])
_PACKED = dict(T=[3, 16, 33, 100, 70], H=[1, 2], K=[16, 32], V=[16, 32])
_PACKED_SHORT = _PACKED | dict(T=[3, 7, 16, 33])

_Q, _V = rg.tensor("B", "T", "H", "K"), rg.tensor("B", "T", "H", "V")
_KEY = rg.tensor("B", "T", "H", "K", scale=0.2)  # about of length 1, as the delta rule wants keys
_GATE = rg.tensor("B", "T", "H", low=-0.5, high=-0.01)
_GATES = rg.tensor("B", "T", "H", "K", low=-0.5, high=-0.01)
_BETA = rg.tensor("B", "T", "H", low=0.1, high=0.9)
_STATE = rg.tensor("B", "H", "K", "V", dtype="float32")
_QKV = dict(q=_Q, k=_Q, v=_V)

# Two sequences in a row: shapes begin with 1, states with 2.
_Q1, _V1 = rg.tensor(1, "T", "H", "K"), rg.tensor(1, "T", "H", "V")
_GATE1 = rg.tensor(1, "T", "H", low=-0.5, high=-0.01)
_GATES1 = rg.tensor(1, "T", "H", "K", low=-0.5, high=-0.01)
_STATE2 = rg.tensor(2, "H", "K", "V", dtype="float32")
_QKV1 = dict(q=_Q1, k=_Q1, v=_V1)


def offsets(length: int, device: Any) -> Tensor:
    """Where two packed sequences begin and end, the first a third of all steps."""
    return torch.tensor([0, length // 3, length], dtype=torch.int64, device=device)


def each_sequence(function: Callable[..., Any], states: int = 1) -> Callable[..., Any]:
    """The function by sequence on packed inputs; the last `states` inputs, and all outputs but one, are states."""

    def call(*inputs: Tensor) -> Any:
        steps, others = inputs[: len(inputs) - states], inputs[len(inputs) - states :]
        length = steps[0].shape[1]
        spans = ((0, length // 3), (length // 3, length))
        parts = [
            function(*(x[:, a:b] for x in steps), *(s[i : i + 1] for s in others)) for i, (a, b) in enumerate(spans)
        ]
        if not isinstance(parts[0], tuple):
            return torch.cat(parts, 1)
        outputs, *finals = zip(*parts, strict=True)
        return torch.cat(outputs, 1), *(torch.cat(x) for x in finals)

    return call


def _op(module: str, name: str, order: str, *, packed: bool = False, **fixed: Any) -> Callable[..., Any]:
    """A function of fla.ops by names of its arguments, with its final state; the last of `order` is the state."""
    function = of(f"fla.ops.{module}", name)

    def call(*args: Tensor) -> Any:
        named: dict[str, Any] = dict(zip(order.split(), args, strict=True))
        if packed:
            named["cu_seqlens"] = offsets(args[0].shape[1], args[0].device)
        return function(**named, output_final_state=True, **fixed)

    return call


def _scan(step: Callable[..., tuple[Any, Tensor]], state: Any, *inputs: Tensor, reverse: bool = False) -> Any:
    """Outputs of a step (state, inputs at t) -> (state, output) along dimension 1, and the last state."""
    times = list(zip(*(x.unbind(1) for x in inputs), strict=True))
    outputs = []
    for at_t in reversed(times) if reverse else times:
        state, output = step(state, *at_t)
        outputs.append(output)
    return torch.stack(outputs[::-1] if reverse else outputs, 1), state


def _outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., None] * v[..., None, :]


def _read(state: Tensor, q: Tensor) -> Tensor:
    return (q[..., None] * state).sum(-2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _gated(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, *, scale: float | None = None, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """S = exp(g) S + k v, o = S q; g [B, T, H], [B, T, H, K] or whole [B, T, H, K, V]."""
    g = g.reshape(*g.shape, *[1] * (5 - g.dim()))

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        s = g.exp() * s + _outer(k, v)
        return s, _read(s, q)

    o, s = _scan(step, state, q * (scale or q.shape[-1] ** -0.5), k, v, g, reverse=reverse)
    return o.to(v.dtype), s.float()


def _constant(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A decay [H] that does not change."""
    return _gated(q, k, v, gamma.expand(q.shape[:3]), state)


# expected: proved
_add(
    "fla_chunk_simple_gla_state",
    _op("simple_gla", "chunk_simple_gla", "q k v g initial_state", scale=0.3),
    partial(_gated, scale=0.3),
    _QKV | dict(g=_GATE, state=_STATE),
    sizes=_TIME,
)
# expected: proved
_add(
    "fla_chunk_simple_gla_packed",
    _op("simple_gla", "chunk_simple_gla", "q k v g initial_state", packed=True, chunk_size=16),
    each_sequence(_gated),
    _QKV1 | dict(g=_GATE1, state=_STATE2),
    sizes=_PACKED,
)


def _turned(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    o, s = _constant(*inputs[:-1], inputs[-1].mT)
    return o, s.mT


_GAMMA = rg.tensor("H", low=-0.5, high=-0.01, dtype="float32", grad=False)
# expected: proved
_add(
    "fla_chunk_simple_gla_values_first",
    _op("simple_gla", "chunk_simple_gla", "q k v g_gamma initial_state", state_v_first=True),
    _turned,
    _QKV | dict(gamma=_GAMMA, state=rg.tensor("B", "H", "V", "K", dtype="float32")),
    sizes=_TIME,
)
# expected: finding (both autograd functions return None for g_gamma, so a decay that is learned gets no gradient)
_add(
    "fla_chunk_simple_gla_learned",
    _op("simple_gla", "chunk_simple_gla", "q k v g_gamma initial_state"),
    _constant,
    _QKV | dict(gamma=rg.tensor("H", low=-0.5, high=-0.01, dtype="float32"), state=_STATE),
    sizes=_TIME,
)
# expected: proved
_add(
    "fla_fused_chunk_simple_gla_state",
    _op("simple_gla", "fused_chunk_simple_gla", "q k v g initial_state"),
    _gated,
    _QKV | dict(g=_GATE, state=_STATE),
    sizes=_TIME,
)
# expected: proved
_add(
    "fla_fused_recurrent_simple_gla_reverse",
    _op("simple_gla", "fused_recurrent_simple_gla", "q k v g initial_state", reverse=True),
    partial(_gated, reverse=True),
    _QKV | dict(g=_GATE, state=_STATE),
    sizes=_SHORT,
)
# expected: proved
_add(
    "fla_fused_recurrent_simple_gla_packed",
    _op("simple_gla", "fused_recurrent_simple_gla", "q k v g initial_state", packed=True),
    each_sequence(_gated),
    _QKV1 | dict(g=_GATE1, state=_STATE2),
    sizes=_PACKED_SHORT,
)
# expected: proved
_add(
    "fla_chunk_gla_state",
    _op("gla", "chunk_gla", "q k v g initial_state", scale=1.0),
    partial(_gated, scale=1.0),
    _QKV | dict(g=_GATES, state=_STATE),
    sizes=_TIME,
)
# expected: proved
_add(
    "fla_chunk_gla_packed",
    _op("gla", "chunk_gla", "q k v g initial_state", packed=True),
    each_sequence(_gated),
    _QKV1 | dict(g=_GATES1, state=_STATE2),
    sizes=_PACKED,
)
# expected: proved
_add(
    "fla_fused_recurrent_gla_values",
    _op("gla", "fused_recurrent_gla", "q k v gk gv initial_state", reverse=True),
    lambda q, k, v, gk, gv, s: _gated(q, k, v, gk[..., None] + gv[..., None, :], s, reverse=True),
    _QKV | dict(gk=_GATES, gv=rg.tensor("B", "T", "H", "V", low=-0.5, high=-0.01), state=_STATE),
    sizes=_SHORT,
)


def _retention(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    head = torch.arange(q.shape[2], device=q.device, dtype=q.dtype)
    return _constant(q, k, v, (1 - 2.0 ** (-5 - head)).log(), state)


# expected: proved
_add(
    "fla_chunk_retention_packed",
    _op("retention", "chunk_retention", "q k v initial_state", packed=True),
    each_sequence(_retention),
    _QKV1 | dict(state=_STATE2),
    sizes=_PACKED,
)


def _shares(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *, reverse: bool = False) -> Any:
    """Linear attention over its sum of weights; z [B, 1, H, K] is the sum of the keys before."""

    def step(state: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        s, z = state[0] + _outer(k, v), state[1] + k
        return (s, z), _read(s, q) / ((q * z).sum(-1, keepdim=True) + 1e-10)

    o, (s, z) = _scan(step, (s, z[:, 0]), q * q.shape[-1] ** -0.5, k, v, reverse=reverse)
    return o.to(v.dtype), s.float(), z[:, None]


def _of_shares(name: str, *, packed: bool = False, **fixed: Any) -> Callable[..., Any]:
    function = of("fla.ops.linear_attn", name)

    def call(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor) -> Any:
        options = fixed | (dict(cu_seqlens=offsets(q.shape[1], q.device)) if packed else {})
        o, (s, z) = function(q, k, v, initial_state=(s, z), output_final_state=True, normalize=True, **options)
        return o, s, z

    return call


_POSITIVE, _POSITIVE1 = rg.tensor("B", "T", "H", "K", low=0.1, high=1.0), rg.tensor(1, "T", "H", "K", low=0.1, high=1.0)
_SUM, _SUM2 = rg.tensor("B", 1, "H", "K", low=0.1, high=1.0), rg.tensor(2, 1, "H", "K", low=0.1, high=1.0)
# expected: finding (higher_order: the backward of the division is torch's, of sums of keys that no graph remembers)
_add(
    "fla_chunk_linear_attn_shares",
    _of_shares("chunk_linear_attn"),
    _shares,
    dict(q=_POSITIVE, k=_POSITIVE, v=_V, state=_STATE, z=_SUM),
    sizes=_TIME,
)
# expected: finding (higher_order: as above)
_add(
    "fla_fused_recurrent_linear_attn_shares",
    _of_shares("fused_recurrent_linear_attn", packed=True, reverse=True),
    each_sequence(partial(_shares, reverse=True), 2),
    dict(q=_POSITIVE1, k=_POSITIVE1, v=_V1, state=_STATE2, z=_SUM2),
    sizes=_PACKED_SHORT,
)


def _rwkv6(u: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, state: Tensor, *, reverse: bool = False) -> Any:
    """What is read has the present key with a bonus u [H, K] instead of a decay."""

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        new = _outer(k, v)
        return w.exp()[..., None] * s + new, _read(s + u[..., None] * new, q)

    o, s = _scan(step, state, q * q.shape[-1] ** -0.5, k, v, w, reverse=reverse)
    return o.to(v.dtype), s.float()


_RWKV6, _BONUS = _QKV | dict(w=_GATES, state=_STATE), rg.tensor("H", "K")
# expected: proved
_add(
    "fla_chunk_rwkv6_state",
    _op("rwkv6", "chunk_rwkv6", "u r k v w initial_state", chunk_size=32),
    _rwkv6,
    dict(u=_BONUS) | _RWKV6,
    sizes=_SHORT,
)
# expected: finding (the backward takes dht and leaves it: what the final state is used for gives no gradient;
# and higher_order, as of the form without states)
_add(
    "fla_fused_recurrent_rwkv6_state",
    _op("rwkv6", "fused_recurrent_rwkv6", "u r k v w initial_state"),
    _rwkv6,
    dict(u=_BONUS) | _RWKV6,
    sizes=_SHORT,
)
# expected: finding (the kernel of dw shifts q by +1 whatever the direction: dw is wrong in reverse)
_add(
    "fla_fused_recurrent_rwkv6_reverse",
    lambda *args: _op("rwkv6", "fused_recurrent_rwkv6", "u r k v w initial_state", reverse=True)(*args)[0],
    lambda *args: _rwkv6(*args, reverse=True)[0],
    dict(u=_BONUS) | _RWKV6,
    sizes=_SHORT,
)


def _rwkv4(w: Tensor, u: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of values, numerator and denominator over exp(top); the state [B, 3, 1, D] is of these three."""
    numerator, denominator, top = state[:, :, 0].unbind(1)
    outputs = []
    for k_t, v_t in zip(k.unbind(1), v.unbind(1), strict=True):
        most = torch.maximum(u + k_t, top)
        old, new = (top - most).exp(), (u + k_t - most).exp()
        outputs.append((old * numerator + new * v_t) / (old * denominator + new))
        decayed = top - w.exp()
        top = torch.maximum(decayed, k_t)
        old, new = (decayed - top).exp(), (k_t - top).exp()
        numerator, denominator = old * numerator + new * v_t, old * denominator + new
    return torch.stack(outputs, 1), torch.stack([numerator, denominator, top], 1)[:, :, None]


_CHANNELS, _CHANNEL = rg.tensor("B", "T", "D"), rg.tensor("D")
# expected: proved
_add(
    "fla_fused_recurrent_rwkv4",
    lambda *args: of("fla.ops.rwkv4", "fused_recurrent_rwkv4")(*args),
    _rwkv4,
    dict(w=_CHANNEL, u=_CHANNEL, k=_CHANNELS, v=_CHANNELS, state=rg.tensor("B", 3, 1, "D", low=0.2, high=1.0)),
    sizes=dict(B=(1, 3), T=[1, 2, 16, 33], D=[16, 40, 64]),
    dtypes=SINGLE,
)


def _hgrn(x: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """h = exp(g) h + x, [B, T, D]."""

    def step(h: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        h = g.exp() * h + x
        return h, h

    return _scan(step, state, x, g)


# expected: finding (the backward returns None for the initial state and leaves dht)
_add(
    "fla_chunk_hgrn_state",
    _op("hgrn.chunk", "chunk_hgrn", "x g initial_state"),
    lambda x, g, s: (_hgrn(x, g, s)[0], _hgrn(x, g, s)[1].float()),
    dict(x=_CHANNELS, g=rg.tensor("B", "T", "D", low=-1.0, high=-0.01), state=rg.tensor("B", "D")),
    sizes=dict(B=(1, 3), T=[1, 2, 16, 130, 33], D=[16, 100, 64]),
)
# expected: proved
_add(
    "fla_fused_recurrent_hgrn_packed",
    _op("hgrn", "fused_recurrent_hgrn", "x g initial_state", packed=True),
    each_sequence(_hgrn),
    dict(x=rg.tensor(1, "T", "D"), g=rg.tensor(1, "T", "D", low=-1.0, high=-0.01), state=rg.tensor(2, "D")),
    sizes=dict(T=[3, 16, 33], D=[16, 100, 64]),
)
