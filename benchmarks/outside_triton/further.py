"""Specs of ops that had no row: of fla-core 0.6.0, liger-kernel 0.8.5 and four further packages. Our formulas.

What each should say was written down before any had run, beside it as `# expected:`.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from fla_recurrences import _BETA, _DELTA, _GATES, _KEY, _Q, _SHORT, _V, FLA, _outer, _read, _unrolled, _zero_state
from liger_attention import LIGER
from specs import SINGLE, apply, of, registries, softmax
from torch import Tensor

import retrograd as rg

_HALF = ("bfloat16",)
FURTHER = registries(
    {
        "moe": "moe-ops==0.1.0",
        "saga": "saga-activation==0.2.0",
        "localcorr": "localcorr==0.1.1",
        "mingru": "mingru-scans==0.2.0",
    }
)

# fla: recurrences.


def _erase_and_write(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """S decays by exp(g); what b k reads from S is taken from w v, and the rest stored under k."""

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = g.exp()[..., None] * s
        s = s + _outer(k, w * v - _read(s, b * k))
        return s, _read(s, q)

    return _unrolled(step, _zero_state(k, v), q * q.shape[-1] ** -0.5, k, v, g, b, w)


# expected: proved
FLA.add(
    "fla_chunk_gdn2",
    lambda q, k, v, g, b, w: of("fla.ops.gdn2", "chunk_gdn2")(q, k, v, g, b, w)[0],
    _erase_and_write,
    _DELTA
    | dict(
        g=_GATES,
        b=rg.tensor("B", "T", "H", "K", low=0.1, high=0.9),
        w=rg.tensor("B", "T", "H", "V", low=0.1, high=0.9),
    ),
    dtypes=_HALF,
    sizes=_SHORT,
)


def _oja(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """As the delta rule with keys and values exchanged: S decays by exp(g) along V, and v reads from it."""

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        s = g.exp()[..., None, :] * s
        s = s + _outer(beta[..., None] * (k - (s * v[..., None, :]).sum(-1)), v)
        return s, _read(s, q)

    return _unrolled(step, _zero_state(k, v), q * q.shape[-1] ** -0.5, k, v, g, beta)


# expected: proved
FLA.add(
    "fla_chunk_gated_oja_rule",
    lambda q, k, v, g, beta: of("fla.ops.gated_oja_rule", "chunk_gated_oja_rule")(q, k, v, g, beta)[0],
    _oja,
    dict(
        q=_Q,
        k=_Q,
        v=rg.tensor("B", "T", "H", "V", scale=0.2),
        g=rg.tensor("B", "T", "H", "V", low=-0.5, high=-0.01),
        beta=_BETA,
    ),
    dtypes=_HALF,
    sizes=_SHORT,
)


def _product(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Two steps of the delta rule for each query, the decay before the first."""
    k, v, beta = (x.unflatten(1, (-1, 2)) for x in (k, v, beta))

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        s = g.exp()[..., None, None] * s
        for i in range(2):
            s = s + _outer(k[:, i], beta[:, i, :, None] * (v[:, i] - _read(s, k[:, i])))
        return s, _read(s, q)

    return _unrolled(step, _zero_state(k[:, :, 0], v[:, :, 0]), q * q.shape[-1] ** -0.5, k, v, g, beta)


# expected: proved
FLA.add(
    "fla_chunk_gated_delta_product",
    lambda q, k, v, g, beta: of("fla.ops.gated_delta_product", "chunk_gated_delta_product")(q, k, v, g, beta, 2)[0],
    _product,
    dict(
        q=_Q,
        k=rg.tensor("B", "2*T", "H", "K", scale=0.2),
        v=rg.tensor("B", "2*T", "H", "V"),
        g=rg.tensor("B", "T", "H", low=-0.5, high=-0.01),
        beta=rg.tensor("B", "2*T", "H", low=0.1, high=0.9),
    ),
    dtypes=_HALF,
    sizes=_SHORT,
)


def _low_rank_after(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """S + b (a S) + k v: identity plus low rank."""

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        s = s + _outer(b, _read(s, a)) + _outer(k, v)
        return s, _read(s, q)

    return _unrolled(step, _zero_state(k, v), q * q.shape[-1] ** -0.5, k, v, a, b)


# expected: proved
FLA.add(
    "fla_fused_recurrent_iplr_delta_rule",
    lambda *args: of("fla.ops.generalized_delta_rule", "fused_recurrent_iplr_delta_rule")(*args)[0],
    _low_rank_after,
    dict(q=_Q, k=_KEY, v=_V, a=_KEY, b=_KEY),
    sizes=_SHORT,
)


def _layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-6) * w + b


def _ttt(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor, eta: Tensor) -> Tensor:
    """Blocks of 16 steps: a linear layer under a norm learns v - k from k, all of a block from its beginning."""
    q, k, v, eta = (x.transpose(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v, eta))
    w, b = w[:, None], b[:, None]
    state, bias, outputs = (k[..., :1, :, None] * v[..., :1, None, :])[:, :, 0] * 0, v[:, :, :1] * 0, []
    for q_i, k_i, v_i, eta_i in zip(*(x.split(16, 2) for x in (q, k, v, eta)), strict=True):
        inner = k_i @ state + bias
        centred = inner - inner.mean(-1, keepdim=True)
        rstd = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-6)
        hat = centred * rstd
        g = (w * hat + b - (v_i - k_i)) * w
        step = (g - g.mean(-1, keepdim=True) - hat * (g * hat).mean(-1, keepdim=True)) * rstd
        weights = (q_i @ k_i.transpose(-1, -2)).tril() * eta_i
        outputs.append(q_i @ state - weights @ step + bias - (eta_i * torch.ones_like(weights).tril()) @ step)
        state = state - (eta_i[:, :, -1:] * k_i).transpose(-1, -2) @ step
        bias = bias - (eta_i[:, :, -1:] * step).sum(-2, keepdim=True)
    o = torch.cat(outputs, 2)
    return (o + _layer(o, w, b)).transpose(1, 2)


# expected: proved
FLA.add(
    "fla_chunk_ttt_linear",
    lambda *args: of("fla.ops.ttt", "chunk_ttt_linear")(*args)[0],
    _ttt,
    dict(
        q=rg.tensor("B", "T", "H", "D"),
        k=rg.tensor("B", "T", "H", "D", scale=0.2),
        v=rg.tensor("B", "T", "H", "D"),
        w=rg.tensor("H", "D", low=0.5, high=1.5),
        b=rg.tensor("H", "D", scale=0.1),
        eta=rg.tensor("B", "T", "H", 1, low=0.01, high=0.1),
    ),
    dtypes=_HALF,
    sizes=dict(B=(1, 2), T=[1, 2, 16, 33], H=[1, 2], D=[16, 32]),
)


# fla: attention.


def _wall(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Softmax attention in which each channel of a score decays by its gates from key to query."""
    total = g.cumsum(1)
    apart = (total[:, :, None] - total[:, None]).exp()
    scores = (q[:, :, None] * k[:, None] * apart).sum(-1) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[1:3], dtype=torch.bool, device=q.device).triu(1)[..., None]
    share = softmax(scores.masked_fill(later, -torch.inf).permute(0, 3, 1, 2))
    return (share.to(v.dtype) @ v.transpose(1, 2)).transpose(1, 2)


_SEQUENCES = dict(B=(1, 2), T=[1, 2, 16, 33, 64, 70], H=[1, 2], K=[16, 32], V=[16, 32])
# expected: proved
FLA.add(
    "fla_parallel_wall_attn",
    lambda q, k, v, g: of("fla.ops.wall_attn", "parallel_wall_attn")(q, k, v, g),
    _wall,
    dict(q=_Q, k=_Q, v=_V, g=rg.tensor("B", "T", "H", "K", low=-0.1, high=-0.01, dtype="float32")),
    sizes=_SEQUENCES,
)


def _parallax(q: Tensor, r: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention, and what the values differ from it, weighted once more by r k."""
    q, r, k, v = (x.transpose(1, 2) for x in (q, r, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    share = softmax(scores.masked_fill(later, -torch.inf))
    second = share * (r @ k.transpose(-1, -2))
    return (share @ v * (1 + second.sum(-1, keepdim=True)) - second @ v).transpose(1, 2)


_WIDE = rg.tensor("B", "T", "H", "K")
# expected: proved
FLA.add(
    "fla_parallel_parallax",
    lambda q, r, k, v: of("fla.ops.parallax", "parallel_parallax")(q, r, k, v),
    _parallax,
    dict(q=_WIDE, r=rg.tensor("B", "T", "H", "K", scale=0.2), k=_WIDE, v=_WIDE),
    dtypes=_HALF,
    sizes=_SEQUENCES | dict(K=[32, 64], V=1),
)


def _path(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """Softmax attention whose keys are reflected, I - beta w w^T, at each step after their own."""
    q, k, v, w, beta = (x.transpose(1, 2) for x in (q, k, v, w, beta))
    outputs, keys = [], k[:, :, :0]
    for t in range(q.shape[2]):
        seen = (keys * w[:, :, t, None]).sum(-1, keepdim=True) * beta[:, :, t, None, None]
        keys = torch.cat([keys - seen * w[:, :, t, None], k[:, :, t, None]], 2)
        share = softmax((keys * q[:, :, t, None]).sum(-1) * q.shape[-1] ** -0.5)
        outputs.append((share[..., None] * v[:, :, : t + 1]).sum(2))
    return torch.stack(outputs, 1)


# expected: proved
FLA.add(
    "fla_parallel_path_attn",
    lambda q, k, v, w, beta: of("fla.ops.path_attn", "parallel_path_attn")(q, k, v, w, beta)[0],
    _path,
    dict(
        q=_Q,
        k=_Q,
        v=_V,
        w=rg.tensor("B", "T", "H", "K", scale=0.2, dtype="float32"),
        beta=rg.tensor("B", "T", "H", low=0.1, high=0.9, dtype="float32"),
    ),
    dtypes=_HALF,
    sizes=_SHORT,
)
_BLOCK = 16


def _chosen(steps: int, device: torch.device) -> Tensor:
    """Blocks that a step attends to: its own and the first; -1 where these are one. [T, 2]."""
    own = torch.arange(steps, device=device) // _BLOCK
    return torch.stack([own, torch.where(own == 0, -1, 0)], -1)


def _selected(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    steps = torch.arange(q.shape[1], device=q.device)
    block = steps // _BLOCK
    seen = (steps[:, None] >= steps) & ((block[:, None] == block) | (block == 0))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    share = softmax((q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf))
    return (share @ v).transpose(1, 2) * g[..., None]


def _parallel_nsa(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    batch, steps = q.shape[:2]
    blocks = _chosen(steps, q.device)[None, :, None].expand(batch, steps, 1, 2).contiguous()
    nsa = of("fla.ops.nsa", "parallel_nsa")
    return nsa(q, k, v, g_slc=g, block_indices=blocks, block_counts=2, block_size=_BLOCK)


# expected: proved
FLA.add(
    "fla_parallel_nsa_selected",
    _parallel_nsa,
    _selected,
    dict(
        q=rg.tensor("B", "T", 16, "K"),
        k=rg.tensor("B", "T", 1, "K"),
        v=rg.tensor("B", "T", 1, "V"),
        g=rg.tensor("B", "T", 16, low=0.1, high=0.9),
    ),
    sizes=dict(B=(1, 2), T=[1, 2, 16, 33, 50], K=[16, 32], V=[16, 32]),
)

# fla: modules.


def _corrected(o: Tensor, r: Tensor, k: Tensor, r_k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return (o + ((r * k * r_k).sum(-1, keepdim=True) * v).flatten(2)) * g


_HEADED = rg.tensor("B", "T", "H", "D")
_FLAT = rg.tensor("B", "T", "H*D")
# expected: proved
FLA.add(
    "fla_gate_output_correction",
    lambda *args: of("fla.ops.rwkv7.gate_output_correction", "gate_output_correction")(*args),
    _corrected,
    dict(o=_FLAT, r=_HEADED, k=_HEADED, r_k=rg.tensor("H", "D"), v=_HEADED, g=_FLAT),
    sizes=dict(B=(1, 2), T=(1, 20), H=(1, 3), D=[16, 32]),
)


def _additive(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z = torch.stack(list(accumulate(x.unbind(1), torch.logaddexp)), 1)
    decay = torch.cat([z[:, :1] * 0, z[:, :-1] - z[:, 1:]], 1)
    return (x - z).exp(), decay, z[:, -1:].float()


# expected: proved
FLA.add(
    "fla_fused_additive_gate",
    lambda x: of("fla.ops.gsa.gate", "fused_additive_gate")(x),
    _additive,
    dict(x=rg.tensor("B", "T", "H", "D")),
    sizes=dict(B=(1, 2), T=[1, 2, 16, 33, 70], H=[1, 2], D=[16, 32]),
)

# Liger.


def _grpo(logits: Tensor, old: Tensor, ref: Tensor, chosen: Tensor, advantage: Tensor) -> Tensor:
    """The clipped loss of each step and 0.04 of the divergence from ref; logits over 0.9."""
    x = logits[:, :-1] / 0.9
    logp = x.gather(-1, chosen[..., None])[..., 0] - x.logsumexp(-1)
    ratio, a = (logp - old).exp(), advantage[:, None]
    clipped = torch.minimum(ratio * a, ratio.clamp(0.8, 1.4) * a)
    return -clipped + 0.04 * ((ref - logp).exp() - (ref - logp) - 1)


_LOGP = rg.tensor("B", "L", low=-5.0, high=-1.0, grad=False, dtype="float32")
# expected: layouts: raises, the library wants contiguous logits and logarithms
LIGER.add(
    "liger_grpo_loss",
    lambda *args: of("liger_kernel.transformers.grpo_loss", "triton_grpo_loss")(*args, inplace=False)[0],
    _grpo,
    dict(
        logits=rg.tensor("B", "L+1", "V"),
        old=_LOGP,
        ref=_LOGP,
        chosen=rg.tensor("B", "L", dtype="int64", high="V"),
        advantage=rg.tensor("B", grad=False, dtype="float32"),
    ),
    sizes=dict(B=(1, 3), L=(1, 12), V=[8, 50]),
)

# Others.


def _top_two(x: Tensor) -> Tensor:
    return softmax(x.topk(2, -1).values)


# expected: layouts: wrong-value, bounds or address-read: the kernels take rows of E for granted, in both directions
FURTHER["moe"].add(
    "moe_fused_topk_softmax",
    lambda x: of("moe_ops", "fused_topk_softmax")(x, 2)[0],
    _top_two,
    dict(x=rg.tensor("M", "E")),
    sizes=dict(M=(1, 40), E=(2, 20)),
)


def _source(tokens: int, device: torch.device) -> Tensor:
    """Where the two copies of each token lie: [2 * tokens], a permutation."""
    return (torch.arange(2 * tokens, device=device) * 2 + 1) % (2 * tokens + 1)


def _unpermuted(x: Tensor, p: Tensor) -> Tensor:
    copies = x[_source(len(p), x.device)].unflatten(0, (2, -1))
    return (copies * p.t()[..., None]).sum(0)


# expected: proved
FURTHER["moe"].add(
    "moe_unpermute",
    lambda x, p: of("moe_ops", "unpermute")(x, _source(len(p), x.device).int(), p, len(p), 2),
    _unpermuted,
    dict(x=rg.tensor("2*M", "N"), p=rg.tensor("M", 2, low=0.1, high=0.9)),
    sizes=dict(M=(1, 20), N=(1, 100)),
)


def _gated_relu(x: Tensor, t: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    gate = torch.sigmoid(g / 0.7)
    return x + gate * torch.relu(t - x), gate


_PLANE = rg.tensor("B", "C", "N")
# expected: extremes: vanished, tl.maximum(NaN, 0) is 0
FURTHER["saga"].add(
    "saga_fused",
    lambda x, t, g: apply("saga.activation", "SAGAFusedFunction")(x, t, g, 0.7),
    _gated_relu,
    dict(x=_PLANE, t=_PLANE, g=_PLANE),
    sizes=dict(B=(1, 2), C=(1, 4), N=(1, 100)),
)


def _correlated(a: Tensor, b: Tensor) -> Tensor:
    """Sums over channels of a at a place times b up to two places beside it, zero outside: [B, 5, 5, H, W]."""
    height, width = a.shape[-2:]
    padded = torch.nn.functional.pad(b, (2, 2, 2, 2))
    rows = [[(a * padded[..., y : y + height, x : x + width]).sum(1) for x in range(5)] for y in range(5)]
    return torch.stack([torch.stack(row, 1) for row in rows], 1)


_IMAGE = rg.tensor("B", "C", "H", "W")
# expected: proved
FURTHER["localcorr"].add(
    "localcorr_spatial",
    lambda a, b: apply("localcorr.triton.spatial_corr", "TritonSpatialCorrelationFunction")(a, b, 2),
    _correlated,
    dict(a=_IMAGE, b=_IMAGE),
    sizes=dict(B=(1, 2), C=[1, 16, 70], H=(1, 18), W=(1, 18)),
)


def _scan(log_a: Tensor, log_b: Tensor) -> Tensor:
    """h = a h + b in logarithms, the first of log_b being log h before."""
    h, states = log_b[:, 0], []
    for a, b in zip(log_a.unbind(1), log_b[:, 1:].unbind(1), strict=True):
        h = torch.logaddexp(h + a, b)
        states.append(h.exp())
    return torch.stack(states, 1)


# expected: proved
FURTHER["mingru"].add(
    "mingru_parallel_scan_log",
    lambda a, b: of("mingru.triton_scans", "parallel_scan_log_fwd")(a, b),
    _scan,
    dict(a=rg.tensor("B", "T", "D", low=-1.0, high=-0.01), b=rg.tensor("B", "T+1", "D")),
    sizes=dict(B=(1, 2), T=(1, 40), D=(1, 40)),
    dtypes=SINGLE,
)
