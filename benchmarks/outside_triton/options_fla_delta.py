"""Options of delta rules and of other recurrences of flash-linear-attention 0.6.0, drawn blind. Our own formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from options_fla import (
    _BETA,
    _GATE,
    _GATE1,
    _GATES,
    _GATES1,
    _HALF,
    _KEY,
    _PACKED_SHORT,
    _Q,
    _Q1,
    _QKV,
    _QKV1,
    _SHORT,
    _STATE,
    _STATE2,
    _V1,
    FLA_OPTIONS,
    OPTIONS,
    _op,
    _outer,
    _read,
    _scan,
    _unit,
    each_sequence,
)
from specs import apply, of, softmax
from torch import Tensor

import retrograd as rg

__all__ = ["FLA_OPTIONS", "OPTIONS"]
_add = OPTIONS.add
_KEY1 = rg.tensor(1, "T", "H", "K", scale=0.2)
_BETA1 = rg.tensor(1, "T", "H", low=0.1, high=0.9)
_DELTA1 = dict(q=_Q1, k=_KEY1, v=_V1)


def _delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor, *, unit: bool = False
) -> tuple[Tensor, Tensor]:
    """S decays by exp(g), and beta of v less what k reads from S is stored under k.

    g [B, T, H] or [B, T, H, K], beta [B, T, H] or [B, T, H, V]; more heads of values than of keys share these.
    """
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    q, k = (_unit(q), _unit(k)) if unit else (q, k)
    beta = beta if beta.dim() == 4 else beta[..., None]
    g = torch.zeros_like(beta[..., 0]) if g is None else g
    g = g[..., None] if g.dim() == 4 else g[..., None, None]

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        s = g.exp() * s
        s = s + _outer(k, beta * (v - _read(s, k)))
        return s, _read(s, q)

    o, s = _scan(step, state, q * q.shape[-1] ** -0.5, k, v, g, beta)
    return o.to(v.dtype), s.float()


def _plain_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return _delta(q, k, v, None, beta, state, unit=True)


# expected: proved
_add(
    "fla_chunk_delta_rule_unit",
    _op("delta_rule", "chunk_delta_rule", "q k v beta initial_state", use_qk_l2norm_in_kernel=True, chunk_size=16),
    _plain_delta,
    _QKV | dict(beta=_BETA, state=_STATE),
    dtypes=_HALF,
    sizes=_SHORT,
)
# expected: finding (from V = 33 on: each block of 32 channels writes its gradient of beta to the first 32 of an array
# that nobody filled, so that it is wrong from channel 32 on)
_add(
    "fla_fused_recurrent_delta_rule_values",
    _op("delta_rule", "fused_recurrent_delta_rule", "q k v beta initial_state", use_qk_l2norm_in_kernel=True),
    _plain_delta,
    _QKV | dict(beta=rg.tensor("B", "T", "H", "V", low=0.1, high=0.9), state=_STATE),
    sizes=_SHORT | dict(V=[16, 32, 64]),
)
# expected: finding (without a gradient for the state there is no dh0, to which the kernel stores all the same, since
# it asks for h0 alone: an error)
_add(
    "fla_fused_recurrent_delta_rule_frozen",
    _op("delta_rule", "fused_recurrent_delta_rule", "q k v beta initial_state", use_qk_l2norm_in_kernel=True),
    _plain_delta,
    _QKV | dict(beta=_BETA, state=rg.tensor("B", "H", "K", "V", dtype="float32", grad=False)),
    sizes=_SHORT,
)
_MANY = dict(
    q=_Q,
    k=_Q,
    v=rg.tensor("B", "T", "2*H", "V"),
    g=rg.tensor("B", "T", "2*H", low=-0.5, high=-0.01),
    beta=rg.tensor("B", "T", "2*H", low=0.1, high=0.9),
    state=rg.tensor("B", "2*H", "K", "V", dtype="float32"),
)
_ORDER = "q k v g beta initial_state"
# expected: proved
_add(
    "fla_chunk_gated_delta_rule_grouped",
    _op("gated_delta_rule", "chunk_gated_delta_rule", _ORDER, use_qk_l2norm_in_kernel=True),
    partial(_delta, unit=True),
    _MANY,
    dtypes=_HALF,
    sizes=_SHORT,
)
# expected: proved
_add(
    "fla_chunk_gated_delta_rule_packed",
    _op("gated_delta_rule", "chunk_gated_delta_rule", _ORDER, packed=True, chunk_size=32),
    each_sequence(_delta),
    _DELTA1 | dict(g=_GATE1, beta=_BETA1, state=_STATE2),
    dtypes=_HALF,
    sizes=_PACKED_SHORT,
)


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _raw_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, a: Tensor, b: Tensor, s: Tensor) -> Any:
    return _delta(q, k, v, -a.exp() * _softplus(g + b), 2 * torch.sigmoid(beta), s, unit=True)


_RAW = dict(
    use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True
)
_LOG_A = rg.tensor("H", dtype="float32", scale=0.5)
# expected: proved
_add(
    "fla_chunk_gated_delta_rule_raw",
    _op("gated_delta_rule", "chunk_gated_delta_rule", "q k v g beta A_log dt_bias initial_state", **_RAW),
    _raw_delta,
    _QKV
    | dict(
        g=rg.tensor("B", "T", "H", low=-4.0, high=0.0),
        beta=rg.tensor("B", "T", "H"),
        a=_LOG_A,
        b=rg.tensor("H", dtype="float32", scale=0.5),
        state=_STATE,
    ),
    dtypes=_HALF,
    sizes=_SHORT,
)


def _bounded_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, a: Tensor, b: Tensor, s: Tensor) -> Any:
    """A gate by channel that is never below -2."""
    g = -2 * torch.sigmoid(a.exp()[:, None] * (g + b.unflatten(0, g.shape[2:])))
    return _delta(q, k, v, g, 2 * torch.sigmoid(beta), s, unit=True)


# expected: proved
_add(
    "fla_chunk_kda_bounded",
    _op("kda", "chunk_kda", "q k v g beta A_log dt_bias initial_state", safe_gate=True, lower_bound=-2.0, **_RAW),
    _bounded_delta,
    _QKV
    | dict(
        g=rg.tensor("B", "T", "H", "K", low=-3.0, high=0.0),
        beta=rg.tensor("B", "T", "H"),
        a=_LOG_A,
        b=rg.tensor("H*K", dtype="float32", scale=0.5),
        state=_STATE,
    ),
    dtypes=_HALF,
    sizes=_SHORT,
)
# expected: proved
_add(
    "fla_chunk_kda_packed",
    _op("kda", "chunk_kda", _ORDER, packed=True, disable_recompute=True, chunk_size=32),
    each_sequence(_delta),
    _DELTA1 | dict(g=_GATES1, beta=_BETA1, state=_STATE2),
    dtypes=_HALF,
    sizes=_PACKED_SHORT,
)


def _comba(q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
    """As the delta rule, but p reads, and from S before its decay: as the kernels do, not as the naive form."""

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        s = g.exp()[..., None, None] * s + _outer(k, beta[..., None] * (v - _read(s, p)))
        return s, _read(s, q)

    q, k, p = _unit(q), _unit(k), _unit(p)
    o, s = _scan(step, state, q * q.shape[-1] ** -0.5, k, v, p, g, beta)
    return o.to(v.dtype), s.float()


# expected: proved
_add(
    "fla_chunk_comba_unit",
    _op("comba", "chunk_comba", "q k v p g beta initial_state", use_qk_l2norm_in_kernel=True),
    _comba,
    _QKV | dict(p=_Q, g=_GATE, beta=_BETA, state=_STATE),
    dtypes=_HALF,
    sizes=_SHORT,
)


def _low_rank(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor, state: Tensor) -> Any:
    """S = exp(g) S + b (a S) + k v, o = S q without a scale."""

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        s = g.exp()[..., None] * s + _outer(b, _read(s, a)) + _outer(k, v)
        return s, _read(s, q)

    o, s = _scan(step, state, q, k, v, a, b, g)
    return o.to(v.dtype), s.float()


# expected: proved
_add(
    "fla_chunk_dplr_delta_rule_state",
    _op("generalized_delta_rule", "chunk_dplr_delta_rule", "q k v a b gk initial_state", scale=1.0, safe_gate=True),
    _low_rank,
    _QKV | dict(a=_KEY, b=_KEY, g=_GATES, state=_STATE),
    dtypes=_HALF,
    sizes=_SHORT,
)
# expected: proved
_add(
    "fla_chunk_rwkv7_packed",
    _op("rwkv7", "chunk_rwkv7", "r k v a b w initial_state", packed=True, disable_recompute=True),
    each_sequence(_low_rank),
    _QKV1 | dict(a=_KEY1, b=_KEY1, w=_GATES1, state=_STATE2),
    dtypes=_HALF,
    sizes=_PACKED_SHORT,
)


def _slots(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, g: Tensor, keys: Tensor, values: Tensor, *, reverse: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys are gathered in slots s under gates g [B, T, H, M], and values are read by the softmax over them."""
    by_slot, keys = _scan(
        lambda h, q, k, s, g: (new := g.exp()[..., None, :] * h + _outer(k, s), _read(new, q)),
        keys, q * q.shape[-1] ** -0.5, k, s, g, reverse=reverse,
    )  # fmt: skip
    o, values = _scan(
        lambda h, p, s, v, g: (new := g.exp()[..., None] * h + _outer(s, v), _read(new, p)),
        values, softmax(by_slot), s, v, g, reverse=reverse,
    )  # fmt: skip
    return o.to(v.dtype), keys.float(), values.float()


def _of_slots(name: str, **fixed: Any) -> Callable[..., Any]:
    def call(*args: Tensor) -> Any:
        o, states = of("fla.ops.gsa", name)(*args[:5], initial_state=args[5:], output_final_state=True, **fixed)
        return o, *states

    return call


_SLOTS = _QKV | dict(
    s=rg.tensor("B", "T", "H", "M"),
    g=rg.tensor("B", "T", "H", "M", low=-0.5, high=-0.01),
    keys=rg.tensor("B", "H", "K", "M", dtype="float32"),
    values=rg.tensor("B", "H", "M", "V", dtype="float32"),
)
# expected: proved
_add(
    "fla_chunk_gsa_state",
    _of_slots("chunk_gsa", checkpoint_level=0),
    _slots,
    _SLOTS,
    sizes=_SHORT | dict(M=[16, 32]),
)
# expected: proved
_add(
    "fla_fused_recurrent_gsa_reverse",
    _of_slots("fused_recurrent_gsa", reverse=True),
    partial(_slots, reverse=True),
    _SLOTS,
    sizes=_SHORT | dict(M=[16, 32]),
)


def _momentum(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, mu: Tensor, beta: Tensor, eta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """M = mu M - eta k (v - alpha p S), S = alpha S - beta M, with p = k and gates by their logarithms."""

    def step(states: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Any:
        s, m = states
        alpha, mu, beta, eta = (g[..., None] for g in gates)
        alpha = alpha.exp()
        m = mu.exp()[..., None] * m - _outer(eta * k, v - alpha * _read(s, k))
        s = alpha[..., None] * s - beta[..., None] * m
        return (s, m), _read(s, q)

    o, states = _scan(step, tuple(state), _unit(q) * q.shape[-1] ** -0.5, _unit(k), v, alpha, mu, beta, eta)
    return o.to(v.dtype), torch.stack(states).float()


# expected: proved
_add(
    "fla_fused_recurrent_momentum_delta_rule",
    _op("momentum_delta_rule", "fused_recurrent_momentum_delta_rule", "q k v log_alpha log_mu beta eta initial_state"),
    _momentum,
    _QKV
    | dict(alpha=_GATE, mu=_GATE, beta=_BETA, eta=_BETA)
    | dict(state=rg.tensor(2, "B", "H", "K", "V", dtype="float32")),
    sizes=_SHORT,
)


def _deltaformer(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """u_t = v_t less beta_t of the softmax attention of q_t over the u before; q, k and v [B, T, H, D]."""
    q, k, v, beta = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), beta.transpose(1, 2)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    u = [v[:, :, 0]]
    for t in range(1, v.shape[2]):
        share = softmax(scores[:, :, t, :t])
        u.append(v[:, :, t] - beta[:, :, t, None] * (share[..., None] * torch.stack(u, 2)).sum(2))
    return torch.stack(u, 1)


_U = rg.tensor("B", "T", "H", "D")
for _name, _size in (("fla_deltaformer", 512), ("fla_deltaformer_chunks", 16)):
    # expected: finding (in chunks of 16 the backward counts them from the end, the forward from the start: right only
    # where 16 divides T, and the first steps are never written; in both, no input is made contiguous, u is read past
    # its end without a mask, and of higher_order the solved triangle forgets what it came from)
    _add(
        _name,
        lambda *args, size=_size: apply("fla.ops.deltaformer.parallel", "ParallelDeltaformerFunction")(
            *args, size, None
        ),
        _deltaformer,
        dict(q=_U, k=_U, v=_U, beta=_BETA),
        sizes=dict(B=(1, 2), T=[2, 16, 33, 64, 70], H=[1, 2], D=[16, 32]),
    )
