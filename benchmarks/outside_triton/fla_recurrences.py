"""fla-core 0.6.0, linear attention: the forms of one recurrence each, on tensors [B, T, H, D]."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from specs import SINGLE, Registry, of, softmax
from torch import Tensor

import retrograd as rg

FLA = Registry("fla-core==0.6.0")
_add = FLA.add

_HALF = ("bfloat16",)  # the chunked forms of the delta rule refuse float32
_TIME = dict(B=(1, 2), T=[1, 2, 15, 16, 33, 64, 70], H=[1, 2], K=[16, 32], V=[16, 32])
_SHORT = _TIME | dict(T=[1, 2, 7, 16, 33])

_Q, _V = rg.tensor("B", "T", "H", "K"), rg.tensor("B", "T", "H", "V")
_KEY = rg.tensor("B", "T", "H", "K", scale=0.2)  # about of length 1, as the delta rule wants keys
_GATE = rg.tensor("B", "T", "H", low=-0.5, high=-0.01)
_GATES = rg.tensor("B", "T", "H", "K", low=-0.5, high=-0.01)
_BETA = rg.tensor("B", "T", "H", low=0.1, high=0.9)


def _first(module: str, name: str, *order: str, **fixed: Any) -> Callable[..., Any]:
    """A function of fla.ops that returns (output, state), its arguments by these names; the output alone."""
    function = of(f"fla.ops.{module}", name)

    def call(*args: Tensor) -> Tensor:
        result = function(**dict(zip(order, args, strict=True)), **fixed)
        return result[0] if isinstance(result, tuple) else result

    return call


def _unrolled(step: Callable[..., tuple[Tensor, Tensor]], state: Tensor, *inputs: Tensor) -> Tensor:
    """Outputs of a step (state, inputs at t) -> (state, output), stacked along dimension 1."""
    outputs = []
    for at_t in zip(*(x.unbind(1) for x in inputs), strict=True):
        state, output = step(state, *at_t)
        outputs.append(output)
    return torch.stack(outputs, 1)


def _zero_state(k: Tensor, v: Tensor) -> Tensor:
    return (k[:, 0, ..., None] * v[:, 0, ..., None, :]) * 0


def _outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., None] * v[..., None, :]


def _read(state: Tensor, q: Tensor) -> Tensor:
    return (q[..., None] * state).sum(-2)


def _gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """S = exp(g) S + k v, o = S q / sqrt(K); g [B, T, H, K or 1]."""

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        s = g.exp()[..., None] * s + _outer(k, v)
        return s, _read(s, q)

    return _unrolled(step, _zero_state(k, v), q * q.shape[-1] ** -0.5, k, v, g)


def _linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).tril() @ v


def by_head(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of [B, H, T, D], called with [B, T, H, D]."""
    return lambda *args: function(*(x.transpose(1, 2) for x in args)).transpose(1, 2)


def _decayed(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The parallel form of `_gated` for gates by head: g [B, T, H]."""
    total = g.cumsum(1).transpose(1, 2)
    difference = total[..., :, None] - total[..., None, :]
    later = torch.ones_like(difference, dtype=torch.bool).triu(1)
    weight = difference.masked_fill(later, -torch.inf).exp()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 * weight) @ v).transpose(1, 2)


_QKV = dict(q=_Q, k=_Q, v=_V)
for _form in ("chunk", "fused_chunk", "fused_recurrent"):
    _add(
        f"fla_{_form}_linear_attn",
        _first("linear_attn", f"{_form}_linear_attn", "q", "k", "v", normalize=False),
        by_head(_linear),
        _QKV,
        sizes=_TIME,
    )


def _retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    head = torch.arange(q.shape[2], device=q.device, dtype=q.dtype)
    return _decayed(q, k, v, (1 - 2.0 ** (-5 - head)).log().expand(q.shape[:3]))


for _form in ("chunk", "fused_chunk", "fused_recurrent", "parallel"):
    _add(
        f"fla_{_form}_retention",
        _first("retention", f"{_form}_retention", "q", "k", "v"),
        _retention,
        _QKV,
        sizes=_TIME,
    )


def _lightning(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = q.shape[2]
    head = torch.arange(heads, device=q.device, dtype=q.dtype)
    return _decayed(q, k, v, (-(8 / heads * (1 - 1 / 4)) * head).expand(q.shape[:3]))


for _form in ("chunk", "fused_recurrent"):
    _add(
        f"fla_{_form}_lightning_attn",
        _first("lightning_attn", f"{_form}_lightning_attn", "q", "k", "v", layer_idx=1, num_layers=4),
        _lightning,
        _QKV,
        sizes=_TIME,
    )
for _form in ("chunk", "fused_chunk", "fused_recurrent", "parallel"):
    _add(
        f"fla_{_form}_simple_gla",
        _first("simple_gla", f"{_form}_simple_gla", "q", "k", "v", "g"),
        _decayed,
        _QKV | dict(g=_GATE),
        sizes=_TIME,
    )
_add("fla_chunk_gla", _first("gla", "chunk_gla", "q", "k", "v", "g"), _gated, _QKV | dict(g=_GATES), sizes=_TIME)
_add(
    "fla_fused_recurrent_gla",
    _first("gla", "fused_recurrent_gla", "q", "k", "v", "gk"),
    _gated,
    _QKV | dict(g=_GATES),
    sizes=_SHORT,
)


def _delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """S decays by exp(g), and beta of v less what k reads from S is stored under k; g [B, T, H, K or 1]."""

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        s = g.exp()[..., None] * s
        s = s + _outer(k, beta[..., None] * (v - _read(s, k)))
        return s, _read(s, q)

    return _unrolled(step, _zero_state(k, v), q * q.shape[-1] ** -0.5, k, v, g, beta)


def _comba(q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """As `_delta`, but p reads, and from S before its decay: as both kernels do, not as the naive form."""

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        s = g.exp()[..., None, None] * s + _outer(k, beta[..., None] * (v - _read(s, p)))
        return s, _read(s, q)

    return _unrolled(step, _zero_state(k, v), q * q.shape[-1] ** -0.5, k, v, p, g, beta)


_DELTA = dict(q=_Q, k=_KEY, v=_V)
for _form, _dtypes in (("chunk", _HALF), ("fused_recurrent", ("float32", "bfloat16"))):
    _add(
        f"fla_{_form}_delta_rule",
        _first("delta_rule", f"{_form}_delta_rule", "q", "k", "v", "beta"),
        lambda q, k, v, beta: _delta(q, k, v, torch.zeros_like(beta)[..., None], beta),
        _DELTA | dict(beta=_BETA),
        dtypes=_dtypes,
        sizes=_SHORT,
    )
_add(
    "fla_chunk_gated_delta_rule",
    _first("gated_delta_rule", "chunk_gated_delta_rule", "q", "k", "v", "g", "beta"),
    lambda q, k, v, g, beta: _delta(q, k, v, g[..., None], beta),
    _DELTA | dict(g=_GATE, beta=_BETA),
    dtypes=_HALF,
    sizes=_SHORT,
)
_add(
    "fla_chunk_kda",
    _first("kda", "chunk_kda", "q", "k", "v", "g", "beta"),
    _delta,
    _DELTA | dict(g=_GATES, beta=_BETA),
    dtypes=_HALF,
    sizes=_SHORT,
)
_add(
    "fla_chunk_comba",
    _first("comba", "chunk_comba", "q", "k", "v", "p", "g", "beta"),
    _comba,
    _DELTA | dict(p=_KEY, g=_GATE, beta=_BETA),
    dtypes=_HALF,
    sizes=_SHORT,
)


def _low_rank(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, scale: float | None = None) -> Tensor:
    """S = exp(g) S + b (a S) + k v: diagonal plus low rank."""

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        s = g.exp()[..., None] * s + _outer(b, _read(s, a)) + _outer(k, v)
        return s, _read(s, q)

    return _unrolled(step, _zero_state(k, v), q * (scale or q.shape[-1] ** -0.5), k, v, a, b, g)


_LOW_RANK = _QKV | dict(a=_KEY, b=_KEY)
_DPLR = "generalized_delta_rule"
_add(
    "fla_chunk_dplr_delta_rule",
    _first(_DPLR, "chunk_dplr_delta_rule", "q", "k", "v", "a", "b", "gk"),
    _low_rank,
    _LOW_RANK | dict(g=_GATES),
    dtypes=_HALF,
    sizes=_SHORT,
)
_add(
    "fla_chunk_rwkv7",
    _first("rwkv7", "chunk_rwkv7", "r", "k", "v", "a", "b", "w", scale=1.0),
    lambda q, k, v, a, b, w: _low_rank(q, k, v, a, b, w, 1.0),
    _LOW_RANK | dict(w=_GATES),
    dtypes=_HALF,
    sizes=_SHORT,
)


def _rwkv6(q: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """What is read has the present key with a bonus u [H, K] instead of a decay."""

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        new = _outer(k, v)
        return w.exp()[..., None] * s + new, _read(s + u[..., None] * new, q)

    return _unrolled(step, _zero_state(k, v), q * q.shape[-1] ** -0.5, k, v, w)


for _form in ("chunk", "fused_recurrent"):
    _add(
        f"fla_{_form}_rwkv6",
        lambda q, k, v, w, u, form=_form: of("fla.ops.rwkv6", f"{form}_rwkv6")(
            q, k, v, w, u, scale=q.shape[-1] ** -0.5
        )[0],
        _rwkv6,
        _QKV | dict(w=_GATES, u=rg.tensor("H", "K")),
        sizes=_SHORT,
    )


def _hgrn(x: Tensor, g: Tensor) -> Tensor:
    """h = exp(g) h + x, all [B, T, D]."""

    def step(h: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        h = g.exp() * h + x
        return h, h

    return _unrolled(step, torch.zeros_like(x[:, 0]), x, g)


_HGRN = dict(x=rg.tensor("B", "T", "D"), g=rg.tensor("B", "T", "D", low=-1.0, high=-0.01))
_add(
    "fla_chunk_hgrn",
    lambda x, g: of("fla.ops.hgrn.chunk", "chunk_hgrn")(x, g)[0],
    _hgrn,
    _HGRN,
    sizes=dict(B=(1, 3), T=[1, 2, 16, 33, 130], D=[16, 64, 100]),
)
_add(
    "fla_fused_recurrent_hgrn",
    lambda x, g: of("fla.ops.hgrn", "fused_recurrent_hgrn")(x, g)[0],
    _hgrn,
    _HGRN,
    sizes=dict(B=(1, 3), T=[1, 2, 16, 33], D=[16, 64, 100]),
)


def _slots(q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor) -> Tensor:
    """Keys are gathered in slots s under gates g [B, T, H, M], and values are read by the softmax over them."""
    by_slot = _unrolled(
        lambda h, q, k, s, g: (new := g.exp()[..., None, :] * h + _outer(k, s), _read(new, q)),
        _zero_state(k, s),
        q * q.shape[-1] ** -0.5,
        k,
        s,
        g,
    )
    return _unrolled(
        lambda h, p, s, v, g: (new := g.exp()[..., None] * h + _outer(s, v), _read(new, p)),
        _zero_state(s, v),
        softmax(by_slot),
        s,
        v,
        g,
    )


_SLOTS = _QKV | dict(s=rg.tensor("B", "T", "H", "M"), g=rg.tensor("B", "T", "H", "M", low=-0.5, high=-0.01))
for _form in ("chunk", "fused_recurrent"):
    _add(
        f"fla_{_form}_gsa",
        _first("gsa", f"{_form}_gsa", "q", "k", "v", "s", "g"),
        _slots,
        _SLOTS,
        sizes=_SHORT | dict(M=[16, 32]),
    )


def _normalised(s: Tensor) -> tuple[Tensor, Tensor]:
    """Keys or slots over their running sum of exponentials, and the logarithm of what the sum before was of it."""
    z = torch.stack(list(accumulate(s.unbind(1), torch.logaddexp)), 1)  # the gradient of logcumsumexp loses NaN
    return (s - z).exp(), torch.cat([z[:, :1], z[:, :-1]], 1) - z


def _abc(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
    return _slots(q, k, v, *_normalised(s))


_add(
    "fla_chunk_abc",
    _first("abc", "chunk_abc", "q", "k", "v", "s"),
    _abc,
    _QKV | dict(s=rg.tensor("B", "T", "H", "M")),
    sizes=_SHORT | dict(M=[16, 32]),
    dtypes=SINGLE,
)


def _lightnet(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    share, g = _normalised(k)
    return _gated(q, share, v, g)


_add("fla_chunk_lightnet", _first("lightnet", "chunk_lightnet", "q", "k", "v"), _lightnet, _QKV, sizes=_SHORT)
