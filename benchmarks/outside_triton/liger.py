"""liger-kernel 0.8.5: norms, activations, rotations. The formulas are ours, read off its docstrings and kernels."""

from __future__ import annotations

from typing import Any

import torch
from specs import SINGLE, Registry, apart, apply, rms, softmax
from torch import Tensor

import retrograd as rg

LIGER = Registry("liger-kernel==0.8.5")
_add = LIGER.add
_OPS = "liger_kernel.ops"
_EPS = [1e-6, 1e-2]

_X, _W = rg.tensor("M", "N"), rg.tensor("N")
_ROWS = dict(M=(1, 40), N=(1, 300))

# Norms.


def _rms_norm(mode: str, offset: float, in_place: bool) -> Any:
    function = apply(_OPS, "LigerRMSNormFunction")
    call = lambda x, w, eps: function(x, w, eps, offset, mode, in_place)  # noqa: E731
    return apart(call) if in_place else call


for _mode, _offset, _in_place in (
    ("llama", 0.0, False),
    ("gemma", 1.0, False),
    ("none", 0.0, False),
    ("llama", 0.5, True),
):
    _name = f"liger_rms_norm_{_mode}" + ("_in_place" if _in_place else "")
    _add(
        _name,
        _rms_norm(_mode, _offset, _in_place),
        lambda x, w, eps, offset=_offset: rms(x, w + offset, eps),
        dict(x=_X, w=_W),
        params=dict(eps=_EPS),
        sizes=_ROWS,
    )
_add(
    "liger_rms_norm_no_weight",
    lambda x, eps: apply(_OPS, "LigerRMSNormFunction")(x, None, eps, 0.0, "llama", False),
    lambda x, eps: rms(x, None, eps),
    dict(x=_X),
    params=dict(eps=_EPS),
    sizes=_ROWS,
)
_add(
    "liger_rms_norm_batched",
    _rms_norm("llama", 0.0, False),
    lambda x, w, eps: rms(x, w, eps),
    dict(x=rg.tensor("B", "M", "N"), w=_W),
    params=dict(eps=_EPS),
    sizes=_ROWS | dict(B=(1, 4)),
)


def _added_norm(x: Tensor, r: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    s = x + r
    return rms(s, w, eps), s


for _mode in ("llama", "gemma"):
    _add(
        f"liger_fused_add_rms_norm_{_mode}",
        lambda x, r, w, eps, mode=_mode: apply(_OPS, "LigerFusedAddRMSNormFunction")(x, r, w, eps, 0.0, mode, False),
        _added_norm,
        dict(x=_X, r=_X, w=_W),
        params=dict(eps=_EPS),
        sizes=_ROWS,
    )


def _layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return rms(centred, w, eps) + b


_add(
    "liger_layer_norm",
    lambda x, w, b, eps: apply(_OPS, "LigerLayerNormFunction")(x, w, b, eps),
    _layer_norm,
    dict(x=_X, w=_W, b=_W),
    params=dict(eps=[1e-5, 1e-2]),
    sizes=_ROWS,
)


def _group_norm(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> Tensor:
    grouped = x.reshape(x.shape[0], groups, -1)
    y = rms(grouped - grouped.mean(-1, keepdim=True), None, eps).reshape(x.shape)
    return y * w[:, None] + b[:, None]


_add(
    "liger_group_norm",
    lambda x, w, b, groups, eps: apply(_OPS, "LigerGroupNormFunction")(x, w, b, x.shape[1], groups, eps),
    _group_norm,
    dict(x=rg.tensor("M", "C", "N"), w=rg.tensor("C"), b=rg.tensor("C")),
    params=dict(groups=[1, 2], eps=1e-5),
    sizes=dict(M=(1, 5), C=[2, 4, 6], N=(2, 60)),
)


def _poly_norm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return w[0] * rms(x**3, None, eps) + w[1] * rms(x**2, None, eps) + w[2] * rms(x, None, eps) + b


_add(
    "liger_poly_norm",
    lambda x, w, b, eps: apply(_OPS, "LigerPolyNormFunction")(x, w, b, eps, False),
    _poly_norm,
    dict(x=_X, w=rg.tensor(3), b=rg.tensor()),
    params=dict(eps=_EPS),
    sizes=_ROWS,
)


def _modulated(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor | None = None, *, eps: float) -> Tensor:
    y = (1 + scale) * rms(x, w, eps)
    return y if shift is None else y + shift


_MODULATED = apply(_OPS, "LigerModulatedRMSNormFunction")
_add(
    "liger_modulated_rms_norm",
    lambda x, w, scale, eps: _MODULATED(x, w, scale, None, eps, 0.0, "llama", False),
    _modulated,
    dict(x=_X, w=_W, scale=_W),
    params=dict(eps=_EPS),
    sizes=_ROWS,
)
_add(
    "liger_modulated_rms_norm_shifted_by_token",
    lambda x, w, scale, shift, eps: _MODULATED(x, w, scale, shift, eps, 0.0, "gemma", False),
    _modulated,
    dict(x=_X, w=_W, scale=_X, shift=_X),
    params=dict(eps=_EPS),
    sizes=_ROWS,
)

# Activations.


def _dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None = None) -> Tensor:
    y = torch.tanh(alpha * x) * gamma
    return y if beta is None else y + beta


_DYT = apply(_OPS, "LigerDyTFunction")
_add(
    "liger_dyt",
    lambda x, alpha, gamma, beta: _DYT(x, alpha, gamma, beta),
    _dyt,
    dict(x=_X, alpha=rg.tensor(1), gamma=_W, beta=_W),
    sizes=_ROWS,
)
_add(
    "liger_dyt_no_beta",
    lambda x, alpha, gamma: _DYT(x, alpha, gamma, None),
    _dyt,
    dict(x=_X, alpha=rg.tensor(1), gamma=_W),
    sizes=_ROWS,
)
# SwiGLU and GeGLU write their gradients over a and b.
_SILU = apart(apply(_OPS, "LigerSiLUMulFunction"), 0, 1)
_add("liger_swiglu", lambda a, b: _SILU(a, b), lambda a, b: a * torch.sigmoid(a) * b, dict(a=_X, b=_X), sizes=_ROWS)
_add(
    "liger_swiglu_batched",
    lambda a, b: _SILU(a, b),
    lambda a, b: a * torch.sigmoid(a) * b,
    dict(a=rg.tensor("B", "M", "N"), b=rg.tensor("B", "M", "N")),
    sizes=_ROWS | dict(B=(1, 4)),
)
_add(
    "liger_swiglu_multipliers",
    lambda a, b: _SILU(a, b, 0.5, 2.0),
    lambda a, b: 2 * (0.5 * a * torch.sigmoid(0.5 * a) * b),
    dict(a=_X, b=_X),
    sizes=_ROWS,
)


def _gate_up(y: Tensor) -> Tensor:
    a, b = y.chunk(2, -1)
    return a * torch.sigmoid(a) * b


_add(
    "liger_swiglu_fused_gate_up",
    lambda y: apply(_OPS, "LigerFusedGateUpSiLUMulFunction")(y),
    _gate_up,
    dict(y=rg.tensor("M", "N")),
    sizes=dict(M=(1, 40), N=[2, 16, 34, 64, 130, 256]),
)


def _gelu(a: Tensor) -> Tensor:
    return 0.5 * a * (1 + torch.tanh(0.7978845608028654 * (a + 0.044715 * a**3)))


_add(
    "liger_geglu",
    lambda a, b: apart(apply(_OPS, "LigerGELUMulFunction"), 0, 1)(a, b),
    lambda a, b: _gelu(a) * b,
    dict(a=_X, b=_X),
    sizes=_ROWS,
)
_add(
    "liger_relu_squared",
    lambda x: apply(_OPS, "LigerReLUSquaredFunction")(x),
    lambda x: x.relu() ** 2,
    dict(x=_X),
    sizes=_ROWS,
)
_add("liger_softmax", lambda x: apply(_OPS, "LigerSoftmaxFunction")(x), softmax, dict(x=_X), sizes=_ROWS)


def _sparsemax(x: Tensor) -> Tensor:
    ordered = x.sort(-1, descending=True).values
    rank = torch.arange(1, x.shape[-1] + 1, device=x.device)
    inside = ordered * rank > ordered.cumsum(-1) - 1
    count = inside.sum(-1, keepdim=True)
    tau = ((ordered * inside).sum(-1, keepdim=True) - 1) / count
    return (x - tau).relu()


_add("liger_sparsemax", lambda x: apply(_OPS, "LigerSparsemaxFunction")(x, -1), _sparsemax, dict(x=_X), sizes=_ROWS)
_add(
    "liger_sparsemax_of_columns",
    lambda x: apply(_OPS, "LigerSparsemaxFunction")(x, 0),
    lambda x: _sparsemax(x.t()).t(),
    dict(x=_X),
    sizes=dict(M=(1, 100), N=(1, 30)),
)

# Rotations write over q and k where these need not be copied first.

_Q, _K = rg.tensor("B", "H", "T", "D"), rg.tensor("B", "G", "T", "D")
_HEADS = dict(B=(1, 3), H=[1, 2, 4], G=[1, 2], T=(1, 20), D=[2, 8, 16, 64])


def _rotated(x: Tensor, angle: Tensor) -> Tensor:
    """x [..., T, D] by angles [..., T, D / 2], halves together."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def _rope(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    half = angle[:, : q.shape[-1] // 2]
    return _rotated(q, half), _rotated(k, half)


def _liger_rope(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    half = angle[:, : q.shape[-1] // 2]
    whole = torch.cat([half, half], -1)[None]
    return apply(_OPS, "LigerRopeFunction")(q, k, whole.cos(), whole.sin())


_ANGLE = rg.tensor("T", "D", grad=False)
_add("liger_rope", apart(_liger_rope, 0, 1), _rope, dict(q=_Q, k=_K, angle=_ANGLE), sizes=_HEADS)


def _partial_rope(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, ...]:
    width = q.shape[-1] // 2
    return tuple(torch.cat([_rotated(x[..., :width], angle[:, : width // 2]), x[..., width:]], -1) for x in (q, k))


def _liger_partial_rope(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    half = angle[:, : q.shape[-1] // 4]
    whole = torch.cat([half, half], -1)[None]
    return apply(_OPS, "LigerRopeFunction")(q, k, whole.cos(), whole.sin())


_add(
    "liger_rope_of_half_the_head",
    apart(_liger_partial_rope, 0, 1),
    _partial_rope,
    dict(q=_Q, k=_K, angle=_ANGLE),
    sizes=_HEADS | dict(D=[8, 16, 64]),
)


def _sections(angle: Tensor, width: int) -> Tensor:
    """Angles [3, B, T, D] of time, height and width, each for its part of D / 2."""
    first, second = width // 4, width // 4 + width // 8
    return torch.cat([angle[0, ..., :first], angle[1, ..., first:second], angle[2, ..., second : width // 2]], -1)


def _mrope(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    each = _sections(angle, q.shape[-1])[:, None]
    return _rotated(q, each), _rotated(k, each)


def _liger_mrope(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    width = q.shape[-1]
    whole = torch.cat([angle[..., : width // 2]] * 2, -1)
    sections = [width // 4, width // 8, width // 8]
    return apply(_OPS, "LigerQwen2VLMRopeFunction")(q, k, whole.cos(), whole.sin(), sections)


_add(
    "liger_qwen2vl_mrope",
    apart(_liger_mrope, 0, 1),
    _mrope,
    dict(q=_Q, k=_K, angle=rg.tensor(3, "B", "T", "D", grad=False)),
    sizes=_HEADS | dict(D=[8, 16, 64]),
)


def _turned_pairs(x: Tensor, angle: Tensor) -> Tensor:
    """x [B, T, H, D] by angles [T, D / 2], neighbours together."""
    a, b = x[..., ::2], x[..., 1::2]
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)


def _llama4(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    half = angle[:, : q.shape[-1] // 2]
    return _turned_pairs(q, half), _turned_pairs(k, half)


def _liger_llama4(q: Tensor, k: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    half = angle[:, : q.shape[-1] // 2]
    return apply(_OPS, "LigerLlama4RopeFunction")(q, k, torch.stack([half.cos(), half.sin()], -1))


_add(
    "liger_llama4_rope",
    apart(_liger_llama4, 0, 1),
    _llama4,
    dict(q=rg.tensor("B", "T", "H", "D"), k=rg.tensor("B", "T", "G", "D"), angle=_ANGLE),
    sizes=_HEADS,
    dtypes=SINGLE,
)
