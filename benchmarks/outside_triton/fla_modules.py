"""fla-core 0.6.0, norms, activations, convolutions, gates and losses. The formulas are ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fla_attention import FLA
from specs import SINGLE, log_softmax, of, rms
from torch import Tensor
from torch.nn import functional as F

import retrograd as rg

_add = FLA.add
_HEADS = dict(B=(1, 2), T=[1, 2, 16, 33, 64, 70], H=[1, 2], K=[16, 32])
_Q = rg.tensor("B", "T", "H", "K")

# Norms.

_X, _W = rg.tensor("M", "N"), rg.tensor("N")
_ROWS = dict(M=(1, 40), N=(2, 200))
_NORM = "fla.modules.norm.layernorm"


def _layer(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    return rms(x - x.mean(-1, keepdim=True), w, eps) + b


def _rms5(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return rms(x, w, 1e-5) + b


_XWB = dict(x=_X, w=_W, b=_W)
_add("fla_layer_norm", lambda x, w, b: of(_NORM, "layer_norm")(x, w, b), _layer, _XWB, sizes=_ROWS)
_add("fla_rms_norm", lambda x, w, b: of(_NORM, "rms_norm")(x, w, b), _rms5, _XWB, sizes=_ROWS)
_add(
    "fla_rms_norm_no_bias",
    lambda x, w: of(_NORM, "rms_norm")(x, w, None),
    lambda x, w: rms(x, w, 1e-5),
    dict(x=_X, w=_W),
    sizes=_ROWS,
)
_add(
    "fla_rms_norm_residual",
    lambda x, w, r: of(_NORM, "rms_norm")(x, w, None, r, prenorm=True),
    lambda x, w, r: (rms(x + r, w, 1e-5), x + r),
    dict(x=_X, w=_W, r=_X),
    sizes=_ROWS,
)


def _groups(x: Tensor, w: Tensor, b: Tensor, *, groups: int) -> Tensor:
    parts = x.unflatten(-1, (groups, -1))
    return rms(parts - parts.mean(-1, keepdim=True), None, 1e-5).flatten(-2) * w + b


_add(
    "fla_group_norm",
    lambda x, w, b: of(_NORM, "group_norm")(x, w, b, num_groups=4),
    lambda x, w, b: _groups(x, w, b, groups=4),
    _XWB,
    sizes=_ROWS | dict(N=[16, 64, 128]),
)
_add(
    "fla_rms_norm_linear",
    lambda x, w, b, m, c: of(_NORM, "rms_norm_linear")(x, w, b, m, c),
    lambda x, w, b, m, c: _rms5(x, w, b) @ m.t() + c,
    _XWB | dict(m=rg.tensor("O", "N", scale=0.2), c=rg.tensor("O")),
    sizes=_ROWS | dict(O=(1, 40)),
)
_GATED = "fla.modules.norm.fused_norm_gate"


def _swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


_XGWB = dict(x=_X, g=_X, w=_W, b=_W)
_add(
    "fla_rms_norm_gated",
    lambda x, g, w, b: of(_GATED, "rms_norm_gated")(x, g, w, b),
    lambda x, g, w, b: (rms(x, w) + b) * _swish(g),
    _XGWB,
    sizes=_ROWS,
)
_add(
    "fla_layer_norm_gated",
    lambda x, g, w, b: of(_GATED, "layer_norm_gated")(x, g, w, b, activation="sigmoid"),
    lambda x, g, w, b: _layer(x, w, b, 1e-6) * torch.sigmoid(g),
    _XGWB,
    sizes=_ROWS,
)
_add(
    "fla_rms_norm_swish_gate_linear",
    lambda x, g, w, b, m, c: of(_GATED, "rms_norm_swish_gate_linear")(x, g, w, b, m, c),
    lambda x, g, w, b, m, c: ((rms(x, w) + b) * _swish(g)) @ m.t() + c,
    _XGWB | dict(m=rg.tensor("O", "N", scale=0.2), c=rg.tensor("O")),
    sizes=_ROWS | dict(O=(1, 40)),
)
_MAMBA = "fla.modules.norm.layernorm_gated"
_add(
    "fla_mamba_rms_norm",
    lambda x, w, z: of(_MAMBA, "rmsnorm_fn")(x, w, None, z),
    lambda x, w, z: rms(x, w) * _swish(z),
    dict(x=_X, w=_W, z=_X),
    sizes=_ROWS,
)
_add(
    "fla_mamba_layer_norm_after_gate",
    lambda x, w, b, z: of(_MAMBA, "layernorm_fn")(x, w, b, z, norm_before_gate=False),
    lambda x, w, b, z: _layer(x * _swish(z), w, b, 1e-6),
    _XWB | dict(z=_X),
    sizes=_ROWS,
)
_add(
    "fla_l2norm",
    lambda x: of("fla.modules.norm.l2norm", "l2norm")(x),
    lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6),
    dict(x=_X),
    sizes=_ROWS,
)

# Activations.

_ACTIVATIONS = "fla.modules.activations.ops"


def _power(x: Tensor, y: Tensor) -> Tensor:
    positive = torch.where(x > 0, x, 1)
    exponent = 3 / (positive.sqrt() + 1)
    return torch.where(x > 0, (exponent * positive.log()).exp(), x) * torch.sigmoid(x) * y


_UNARY: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "swish": (of(_ACTIVATIONS, "swish"), _swish),
    "sigmoid": (of(_ACTIVATIONS, "sigmoid"), torch.sigmoid),
    "logsigmoid": (of(_ACTIVATIONS, "logsigmoid"), lambda x: -torch.logaddexp(torch.zeros_like(x), -x)),
    "logsigmoid_temperature": (
        lambda x: of(_ACTIVATIONS, "logsigmoid")(x, 16.0),
        lambda x: -torch.logaddexp(torch.zeros_like(x), -x) / 16,
    ),
}
for _name, (_function, _formula) in _UNARY.items():
    _add(f"fla_{_name}", _function, _formula, dict(x=_X), sizes=_ROWS)
_XY = dict(x=_X, y=_X)
_add("fla_swiglu", of(_ACTIVATIONS, "swiglu"), lambda x, y: _swish(x) * y, _XY, sizes=_ROWS)
_add("fla_sigmoidglu", of(_ACTIVATIONS, "sigmoidglu"), lambda x, y: torch.sigmoid(x) * y, _XY, sizes=_ROWS)
_add("fla_powglu", of(_ACTIVATIONS, "powglu"), _power, _XY, sizes=_ROWS, dtypes=SINGLE)
_LINEAR = _XY | dict(m=rg.tensor("O", "N", scale=0.2), c=rg.tensor("O"))
_add(
    "fla_swiglu_linear",
    of(_ACTIVATIONS, "swiglu_linear"),
    lambda x, y, m, c: (_swish(x) * y) @ m.t() + c,
    _LINEAR,
    sizes=_ROWS | dict(O=(1, 40)),
)
_add(
    "fla_sigmoidglu_linear",
    of(_ACTIVATIONS, "sigmoidglu_linear"),
    lambda x, y, m, c: (torch.sigmoid(x) * y) @ m.t() + c,
    _LINEAR,
    sizes=_ROWS | dict(O=(1, 40)),
)

# Convolutions, shifts, rotations, pools, gates.


def _convolution(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """x [B, T, D] with w [D, W] over the last W steps, channel by channel."""
    width = w.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    y = torch.stack([padded[:, i : i + x.shape[1]] * w[:, i] for i in range(width)]).sum(0)
    return y if b is None else y + b


_CONVOLVE = of("fla.modules.causal_conv1d.ops", "causal_conv1d")
_BTD = dict(B=(1, 2), T=[1, 3, 16, 64, 70], D=[16, 40, 128], W=[3, 4])
_SEQUENCE, _TAPS = rg.tensor("B", "T", "D"), rg.tensor("D", "W")
_add("fla_causal_conv1d", lambda x, w: _CONVOLVE(x, w)[0], _convolution, dict(x=_SEQUENCE, w=_TAPS), sizes=_BTD)
_add(
    "fla_causal_conv1d_swish",
    lambda x, w, b: _CONVOLVE(x, w, b, activation="swish")[0],
    lambda x, w, b: _swish(_convolution(x, w, b)),
    dict(x=_SEQUENCE, w=_TAPS, b=rg.tensor("D")),
    sizes=_BTD,
)
_add(
    "fla_token_shift",
    lambda x: of("fla.modules.token_shift", "token_shift")(x),
    lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1] - x,
    dict(x=_SEQUENCE),
    sizes=dict(B=(1, 2), T=[1, 2, 16, 70], D=[16, 40, 128]),
)


def _rotary(x: Tensor, angle: Tensor, *, interleaved: bool) -> Tensor:
    c, s = (f(angle[:, : x.shape[-1] // 2])[:, None] for f in (torch.cos, torch.sin))
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def _fla_rotary(x: Tensor, angle: Tensor, *, interleaved: bool) -> Tensor:
    half = angle[:, : x.shape[-1] // 2]
    return of("fla.modules.rotary.ops", "rotary_embedding")(x, half.cos(), half.sin(), interleaved)


for _interleaved in (False, True):
    _add(
        "fla_rotary" + "_interleaved" * _interleaved,
        lambda x, angle, i=_interleaved: _fla_rotary(x, angle, interleaved=i),
        lambda x, angle, i=_interleaved: _rotary(x, angle, interleaved=i),
        dict(x=rg.tensor("B", "T", "H", "K"), angle=rg.tensor("T", "K", grad=False)),
        sizes=dict(B=(1, 2), T=(1, 20), H=[1, 3], K=[16, 32, 64]),
    )


def _pool(x: Tensor, *, size: int) -> Tensor:
    return torch.stack([part.mean(1) for part in x.split(size, 1)], 1)


_add(
    "fla_mean_pooling",
    lambda x: of("fla.ops.utils.pooling", "mean_pooling")(x, 16),
    lambda x: _pool(x, size=16),
    dict(x=_Q),
    sizes=dict(B=(1, 2), T=(1, 70), H=[1, 2], K=[16, 40]),
)
_MIX = rg.tensor(1, 1, "D")
_add(
    "fla_fused_addcmul_rwkv7",
    lambda *args: of("fla.ops.rwkv7.fused_addcmul", "fused_addcmul_rwkv7")(*args),
    lambda h, delta, *mixes: tuple(h + delta * m for m in mixes),
    dict(h=_SEQUENCE, delta=_SEQUENCE) | {f"x{i}": _MIX for i in "rwkvag"},
    sizes=dict(B=(1, 2), T=(2, 30), D=[16, 64, 128]),
)
_add(
    "fla_fused_k_rwkv7",
    lambda k, a, ka: of("fla.ops.rwkv7.fused_k_update", "fused_k_rwkv7")(k, a, ka),
    lambda k, a, ka: k + k * (a - 1) * ka,
    dict(k=_SEQUENCE, a=_SEQUENCE, ka=_MIX),
    sizes=dict(B=(1, 2), T=(2, 30), D=[16, 64, 128]),
)


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


_add(
    "fla_fused_kda_gate",
    lambda g, a, b: of("fla.ops.kda.gate", "fused_kda_gate")(g, a, b.flatten()),
    lambda g, a, b: (-a.exp()[:, None] * _softplus(g + b)).float(),
    dict(g=_Q, a=rg.tensor("H", dtype="float32"), b=rg.tensor("H", "K", dtype="float32")),
    sizes=_HEADS,
)
_add(
    "fla_fused_gdn_gate",
    lambda g, a, b: of("fla.ops.gated_delta_rule.gate", "fused_gdn_gate")(g, a, b),
    lambda g, a, b: (-a.exp() * _softplus(g + b)).float(),
    dict(g=rg.tensor("B", "T", "H"), a=rg.tensor("H", dtype="float32"), b=rg.tensor("H", dtype="float32")),
    sizes=_HEADS,
)

# Losses.

_LOGITS, _LABELS = rg.tensor("M", "N"), rg.tensor("M", dtype="int64", high="N")


def _each(x: Tensor, target: Tensor, *, smoothing: float = 0.0, scale: float = 1.0, z: float = 0.0) -> Tensor:
    logp = log_softmax(scale * x)
    nll = -logp.gather(1, target[:, None])[:, 0]
    return (1 - smoothing) * nll - smoothing * logp.mean(-1) + z * (scale * x).logsumexp(-1) ** 2


for _suffix, _theirs, _ours in (
    ("", {}, {}),
    ("_smoothing", dict(label_smoothing=0.1), dict(smoothing=0.1)),
    ("_z_loss", dict(lse_square_scale=1e-2, logit_scale=0.5), dict(z=1e-2, scale=0.5)),
):
    _add(
        f"fla_cross_entropy{_suffix}",
        lambda x, target, o=_theirs: of("fla.modules.fused_cross_entropy.ops", "cross_entropy_loss")(x, target, **o)[0],
        lambda x, target, o=_ours: _each(x, target, **o).float(),
        dict(x=_LOGITS, target=_LABELS),
        sizes=_ROWS,
    )
_HIDDEN, _HEAD = rg.tensor("M", "D"), rg.tensor("N", "D", scale=0.2)
_PROJECTED = dict(M=(1, 33), N=(2, 100), D=(1, 48))
_add(
    "fla_fused_linear_cross_entropy",
    lambda x, target, w, b: of("fla.modules.fused_linear_cross_entropy.ops", "fused_linear_cross_entropy_loss")(
        x, target, w, b
    ),
    lambda x, target, w, b: _each(x @ w.t() + b, target).mean(),
    dict(x=_HIDDEN, target=_LABELS, w=_HEAD, b=rg.tensor("N")),
    sizes=_PROJECTED,
    dtypes=SINGLE,
)


def _divergence(x: Tensor, tx: Tensor, w: Tensor, tw: Tensor) -> Tensor:
    logp, logq = log_softmax(tx @ tw.t()), log_softmax(x @ w.t())
    return (logp.exp() * (logp - logq)).sum() / x.shape[0]


_add(
    "fla_fused_kl_div",
    lambda x, tx, w, tw: of("fla.modules.fused_kl_div.ops", "fused_kl_div_loss")(x, tx, w, tw),
    _divergence,
    dict(x=_HIDDEN, tx=rg.tensor("M", "D", grad=False), w=_HEAD, tw=rg.tensor("N", "D", scale=0.2, grad=False)),
    sizes=_PROJECTED,
    dtypes=SINGLE,
)
