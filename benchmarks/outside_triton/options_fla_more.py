"""Options of norms, convolutions, packing, gated units and losses of flash-linear-attention 0.6.0, drawn blind.

Before each spec stands what its source made expect. Formulas are our own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from options_fla import each_sequence, offsets
from options_fla_attention import FLA_OPTIONS, OPTIONS
from specs import SINGLE, apply, log_softmax, of, rms
from torch import Tensor
from torch.nn import functional as F

import retrograd as rg

__all__ = ["FLA_OPTIONS"]
_add = OPTIONS.add
_SOURCE = rg.tensor("B", "T", "D")

# Norms.

_X, _W = rg.tensor("M", "N"), rg.tensor("N")
_ROWS = dict(M=(1, 40), N=(2, 200))
_EIGHTS = dict(M=(1, 40), N=[16, 128, 64])
_NORM, _GATED = "fla.modules.norm.layernorm", "fla.modules.norm.fused_norm_gate"


def _swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _by_groups(x: Tensor, groups: int, eps: float) -> Tensor:
    return rms(x.unflatten(-1, (groups, -1)), None, eps).flatten(-2)


# expected: proved
_add(
    "fla_layer_norm_prenorm",
    lambda x, w, b: of(_NORM, "layer_norm")(x, w, b, prenorm=True, residual_in_fp32=True),
    lambda x, w, b: (rms(x - x.mean(-1, keepdim=True), w, 1e-5) + b, x.float()),
    dict(x=_X, w=_W, b=_W),
    sizes=_ROWS,
)
# expected: proved
_add(
    "fla_group_norm_residual",
    lambda x, w, b, r: of(_NORM, "group_norm")(x, w, b, r, prenorm=True, is_rms_norm=True, num_groups=4),
    lambda x, w, b, r: (_by_groups(x + r, 4, 1e-5) * w + b, x + r),
    dict(x=_X, w=_W, b=_W, r=_X),
    sizes=_EIGHTS,
)
# expected: proved
_add(
    "fla_rms_norm_gated_residual",
    lambda x, g, w, r: of(_GATED, "rms_norm_gated")(x, g, w, None, "sigmoid", r, prenorm=True),
    lambda x, g, w, r: (rms(x + r, w) * torch.sigmoid(g), x + r),
    dict(x=_X, g=_X, w=_W, r=_X),
    sizes=_ROWS,
)
# expected: proved
_add(
    "fla_mamba_rms_norm_groups",
    lambda x, w, b, z: of("fla.modules.norm.layernorm_gated", "rmsnorm_fn")(
        x, w, b, z, group_size=8, norm_before_gate=False
    ),
    lambda x, w, b, z: _by_groups(x * _swish(z), x.shape[-1] // 8, 1e-6) * w + b,
    dict(x=_X, w=_W, b=_W, z=_X),
    sizes=_EIGHTS,
)

# Convolutions, shifts, rotations, pools, packing.


def _convolution(x: Tensor, w: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Swish of x [B, T, D] with w [D, W] over the last W steps, and those at the end; state [B, D, W]."""
    width, history = w.shape[1], torch.cat([state, x.mT], -1)
    y = sum(history[..., i + 1 : i + 1 + x.shape[1]] * w[:, i, None] for i in range(width))
    return _swish(y.mT + b), history[..., -width:]


_CONVOLVE = of("fla.modules.causal_conv1d.ops", "causal_conv1d")
_BTD = dict(B=(1, 2), T=[1, 3, 16, 70, 40], D=[16, 128, 40], W=[3, 4])
_TAPS, _BIAS = rg.tensor("D", "W"), rg.tensor("D")
# expected: finding (the final state's first column is the step W before the end: its gradient is left out)
_add(
    "fla_causal_conv1d_state",
    lambda x, w, b, state: _CONVOLVE(x, w, b, None, state, True, "swish"),
    _convolution,
    dict(x=_SOURCE, w=_TAPS, b=_BIAS, state=rg.tensor("B", "D", "W")),
    sizes=_BTD,
)


def _packed_residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor, state: Tensor) -> Tensor:
    at = x.shape[1] // 3
    parts = [_convolution(x[:, :at], w, b, state[:1])[0], _convolution(x[:, at:], w, b, state[1:])[0]]
    return torch.cat(parts, 1) + r


# expected: proved
_add(
    "fla_causal_conv1d_packed",
    lambda x, w, b, r, state: _CONVOLVE(
        x, w, b, r, state, activation="swish", cu_seqlens=offsets(x.shape[1], x.device)
    )[0],
    _packed_residual,
    dict(x=rg.tensor(1, "T", "D"), w=_TAPS, b=_BIAS, r=rg.tensor(1, "T", "D"), state=rg.tensor(2, "D", "W")),
    sizes=dict(T=[3, 16, 100, 70], D=[16, 128, 40], W=[3, 4]),
)


def _shifted(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([cache[:, None], x[:, :-1]], 1) - x, x[:, -1]


# expected: proved
_add(
    "fla_token_shift_packed",
    lambda x, cache: of("fla.modules.token_shift", "token_shift")(
        x, offsets(x.shape[1], x.device), cache, output_cache=True
    ),
    each_sequence(_shifted),
    dict(x=rg.tensor(1, "T", "D"), cache=rg.tensor(2, "D")),
    sizes=dict(T=[3, 16, 70, 33], D=[16, 128, 40]),
)


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    """x [B, T, H, K] by angles [T, R]: the first 2 R channels in halves, the others as they are."""
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    a, b, rest = x.split([angle.shape[1], angle.shape[1], x.shape[-1] - 2 * angle.shape[1]], -1)
    return torch.cat([a * c - b * s, a * s + b * c, rest], -1)


_ROTATE = of("fla.modules.rotary.ops", "rotary_embedding")
# expected: proved
_add(
    "fla_rotary_partial",
    lambda x, angle: _ROTATE(x, angle.cos(), angle.sin(), seqlen_offsets=5),
    lambda x, angle: _turned(x, angle[5:]),
    dict(x=rg.tensor("B", "T", "H", "K"), angle=rg.tensor("T+5", "K//4", grad=False)),
    sizes=dict(B=(1, 2), T=(1, 20), H=[1, 3], K=[16, 64, 32]),
)


def _turned_packed(x: Tensor, angle: Tensor) -> Tensor:
    at = x.shape[1] // 3
    return torch.cat([_turned(x[:, :at], angle[2 : 2 + at]), _turned(x[:, at:], angle[: x.shape[1] - at])], 1)


# expected: proved
_add(
    "fla_rotary_packed",
    lambda x, angle: _ROTATE(
        x,
        angle.cos(),
        angle.sin(),
        seqlen_offsets=torch.tensor([2, 0], device=x.device),
        cu_seqlens=offsets(x.shape[1], x.device),
    ),
    _turned_packed,
    dict(x=rg.tensor(1, "T", "H", "K"), angle=rg.tensor("T", "K//2", grad=False)),
    sizes=dict(T=(3, 40), H=[1, 3], K=[16, 64, 32]),
)
# expected: proved
_add(
    "fla_mean_pooling_packed",
    lambda x: of("fla.ops.utils.pooling", "mean_pooling")(x, 16, offsets(x.shape[1], x.device)),
    each_sequence(lambda x: torch.stack([part.mean(1) for part in x.split(16, 1)], 1), 0),
    dict(x=rg.tensor(1, "T", "H", "K")),
    sizes=dict(T=(3, 90), H=[1, 2], K=[16, 40]),
)


def _halves(x: Tensor) -> Tensor:
    """Where sequences of half and of all of x's steps begin and end."""
    half = x.shape[1] // 2
    return torch.tensor([0, half, half + x.shape[1]], device=x.device)


# expected: proved
_add(
    "fla_pack_sequence",
    lambda x: of("fla.ops.utils.pack", "pack_sequence")(x, _halves(x)),
    lambda x: torch.cat([x[0, x.shape[1] - x.shape[1] // 2 :], x[1]]),
    dict(x=rg.tensor(2, "T", "D")),
    sizes=dict(T=(2, 40), D=[16, 100, 40]),
)
# expected: proved
_add(
    "fla_unpack_sequence",
    lambda x: of("fla.ops.utils.pack", "unpack_sequence")(
        x, torch.tensor([0, x.shape[0] // 3, x.shape[0]], device=x.device), "right"
    ),
    lambda x: torch.stack([F.pad(x[: len(x) // 3], (0, 0, 0, len(x) - 2 * (len(x) // 3))), x[len(x) // 3 :]]),
    dict(x=rg.tensor("T", "D")),
    sizes=dict(T=(3, 40), D=[16, 100, 40]),
)


def _sinkhorn(x: Tensor) -> Tensor:
    """Columns, then rows, of exponentials over their sums, five times."""
    for _ in range(5):
        x = x - x.logsumexp(-2, keepdim=True)
        x = x - x.logsumexp(-1, keepdim=True)
    return x.exp().float()


# expected: proved
_add(
    "fla_sinkhorn",
    lambda x: apply("fla.ops.utils.sinkhorn.ops", "SinkhornFunction")(x, 5),
    _sinkhorn,
    dict(x=rg.tensor("M", "N", "N")),
    sizes=dict(M=(1, 30), N=(1, 8, 4)),
)

# Activations, channel mixing.

_ACTIVATIONS = "fla.modules.activations.ops"


def _tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x.pow(3))))


# expected: finding (extremes: the derivative is 0 times the square of a large x, NaN where it overflows)
_add("fla_fast_gelu", of(_ACTIVATIONS, "fast_gelu_impl"), _tanh_gelu, dict(x=_X), sizes=_ROWS)
# expected: proved
_add("fla_sqrelu", of(_ACTIVATIONS, "sqrelu"), lambda x: x.relu().square(), dict(x=_X), sizes=_ROWS)


def _mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (_swish(x @ gate.mT) * (x @ up.mT)) @ down.mT


def _gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, fused: bool) -> Tensor:
    mlp = of("fla.modules.mlp", "GatedMLP")(x.shape[-1], intermediate_size=len(gate), fuse_swiglu=fused)
    weights = {f"{name}_proj.weight": w for name, w in (("gate", gate), ("up", up), ("down", down))}
    return torch.func.functional_call(mlp, weights, (x,))


_MLP = dict(x=_X, gate=rg.tensor("D", "N", scale=0.2), up=rg.tensor("D", "N", scale=0.2))
for _fused in (False, True):
    # expected: proved without `fused`; with it finding (higher_order: the gradient of the last weight is a product
    # that autograd can differentiate, of an activation that a kernel made again)
    _add(
        "fla_gated_mlp" + "_fused" * _fused,
        partial(_gated_mlp, fused=_fused),
        _mlp,
        _MLP | dict(down=rg.tensor("N", "D", scale=0.2)),
        sizes=dict(M=(1, 30), N=[16, 40, 32], D=[16, 64, 40]),
    )


def _mixing(x: Tensor, before: Tensor, mix: Tensor, key: Tensor, value: Tensor) -> Tensor:
    past = torch.cat([before[:, None], x[:, :-1]], 1)
    return ((x + (past - x) * mix) @ key).relu().square() @ value


# expected: finding (higher_order: gradients of the weights are products that autograd can differentiate, of what
# kernels made; the rest proved)
_add(
    "fla_channel_mixing_rwkv7",
    lambda *args: of("fla.ops.rwkv7.channel_mixing", "channel_mixing_rwkv7")(*args, inplace=False)[0],
    _mixing,
    dict(
        x=_SOURCE,
        before=rg.tensor("B", "D"),
        mix=rg.tensor(1, 1, "D"),
        key=rg.tensor("D", "E", scale=0.2),
        value=rg.tensor("E", "D", scale=0.2),
    ),
    sizes=dict(B=(1, 2), T=(1, 20), D=[16, 40, 32], E=[16, 64]),
)

# Losses.

_LABELS = rg.tensor("M", dtype="int64", high="N")


def _loss(x: Tensor, target: Tensor, *, z: float) -> Tensor:
    """Smoothed cross entropy of capped scores by row, and z times the square of their logsumexp; label 0 counts not."""
    x = 5 * torch.tanh(0.5 * x / 5)
    logp = log_softmax(x)
    each = -0.9 * logp.gather(1, target[:, None])[:, 0] - 0.1 * logp.mean(-1) + z * x.logsumexp(-1).square()
    return each * (target != 0)


_OPTIONS: dict[str, Any] = dict(label_smoothing=0.1, logit_scale=0.5, logit_softcapping=5.0, ignore_index=0)
# expected: proved
_add(
    "fla_cross_entropy_capped",
    lambda x, target: of("fla.modules.fused_cross_entropy.ops", "cross_entropy_loss")(
        x, target, lse_square_scale=0.01, **_OPTIONS
    )[0],
    lambda x, target: _loss(x, target, z=0.01).float(),
    dict(x=_X, target=_LABELS),
    sizes=_ROWS,
)
# expected: finding (state: the backward multiplies the kept gradients by grad_out where they lie)
_add(
    "fla_fused_linear_cross_entropy_capped",
    lambda x, target, w: of("fla.modules.fused_linear_cross_entropy.ops", "fused_linear_cross_entropy_loss")(
        x, target, w, reduction="sum", num_chunks=4, **_OPTIONS
    ),
    lambda x, target, w: _loss(x @ w.mT, target, z=0.0).sum(),
    dict(x=rg.tensor("M", "D"), target=_LABELS, w=rg.tensor("N", "D", scale=0.2)),
    sizes=dict(M=(1, 33), N=(2, 100), D=(1, 48)),
    dtypes=SINGLE,
)


def _grpo(logits: Tensor, ref: Tensor, ids: Tensor, gain: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and divergence by token of a completion, after a prompt of two; the ratio of policies is 1, its own value.

    The derivative is of that ratio, and not of the value.
    """
    logp = log_softmax(logits[:, :-1]).gather(2, ids[:, 2:, None])[..., 0]
    apart = ref - logp
    divergence = apart.exp() - apart - 1
    ratio = (logp - logp.detach()).exp()
    return ((0.1 * divergence - ratio * gain[:, None]) * mask).float(), (divergence * mask).float()


# expected: proved
_add(
    "fla_grpo",
    lambda logits, ref, ids, gain, mask: of("fla.modules.grpo.ops", "fused_grpo_loss")(
        logits, ref, ids, gain, completion_mask=mask, save_kl=True
    ),
    _grpo,
    dict(
        logits=rg.tensor("B", "L+1", "N"),
        ref=rg.tensor("B", "L", low=-4.0, high=-1.0, dtype="float32", grad=False),
        ids=rg.tensor("B", "L+2", dtype="int64", high="N"),
        gain=rg.tensor("B", dtype="float32", grad=False),
        mask=rg.tensor("B", "L", dtype="int64", high=2),
    ),
    sizes=dict(B=(1, 3), L=(1, 16), N=(2, 100)),
    surrogate=True,
)


def _warped(x: Tensor, logits: Tensor) -> Tensor:
    """The loss, whose gradient has that of a penalty of the largest logits besides."""
    penalty = 0.05 * logits.amax(-1).square().mean()
    return x.square().mean() + (penalty - penalty.detach())  # at first without brackets: the sum was rounded


# expected: finding (higher_order, if a surrogate's is looked at: the largest logits are kept as constants)
_add(
    "fla_l2_warp",
    lambda x, logits: of("fla.modules.l2warp", "l2_warp")(x.square().mean(), logits, 0.1),
    _warped,
    dict(x=rg.tensor("M"), logits=rg.tensor("B", "T", "N")),
    sizes=dict(M=(1, 20), B=(1, 2), T=(1, 20), N=(2, 60)),
    surrogate=True,
)
