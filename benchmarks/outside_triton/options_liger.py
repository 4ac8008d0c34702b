"""Options of liger-kernel 0.8.5, and modules called as functions: norms, activations, rotations.

Written from its source before any of them ran: what was expected stands above each spec. The formulas are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from specs import apart, apply, of, registries, rms, softmax
from torch import Tensor

import retrograd as rg

LIGER_OPTIONS = registries({"liger-options": "liger-kernel==0.8.5 options"})
OPTIONS = LIGER_OPTIONS["liger-options"]
_add = OPTIONS.add
_OPS, _MODULES = "liger_kernel.ops", "liger_kernel.transformers"


def on_meta(module: str, name: str, *args: Any, **options: Any) -> torch.nn.Module:
    """A module of the library without numbers of its own."""
    with torch.device("meta"):
        return getattr(import_module(f"{_MODULES}.{module}"), name)(*args, **options)


def called(module: torch.nn.Module, weights: dict[str, Tensor], *inputs: Any) -> Any:
    """The module with these weights."""
    return torch.func.functional_call(module, weights, inputs)


def sparsemax(x: Tensor) -> Tensor:
    """Along the last dimension."""
    ordered = x.sort(-1, descending=True).values
    rank = torch.arange(1, x.shape[-1] + 1, device=x.device)
    inside = ordered * rank > ordered.cumsum(-1) - 1
    # At first without this: a NaN is inside of nothing, and of the rest of its row nothing could be said.
    lost = torch.where(x.isnan(), x, 0).sum(-1, keepdim=True)
    tau = (torch.where(inside, ordered, 0).sum(-1, keepdim=True) + lost - 1) / inside.sum(-1, keepdim=True)
    return (x - tau).relu()


_X, _W = rg.tensor("M", "N"), rg.tensor("N")
_BATCHED = rg.tensor("B", "M", "N")
_ROWS = dict(M=(1, 40), N=(1, 300))
_IMAGES = rg.tensor("B", "P", "M", "N")
_IMAGE_SIZES = dict(B=(1, 3), P=(1, 3), M=(1, 9), N=(1, 130))
_RMS = apply(_OPS, "LigerRMSNormFunction")

# Norms.

# expected: finding (in_place: the backward writes over grad_out and returns it, so the second order is wrong)
_add(
    "liger_rms_norm_gemma_in_place_4d",
    apart(lambda x, w: _RMS(x, w, 1e-6, 1.0, "gemma", True)),
    lambda x, w: rms(x, w + 1, 1e-6),
    dict(x=_IMAGES, w=_W),
    sizes=_IMAGE_SIZES,
)
# expected: proved
_add(
    "liger_rms_norm_none_offset_row_mode",
    lambda x, w: _RMS(x, w, 1e-2, 0.5, "none", False, True),
    lambda x, w: rms(x, w + 0.5, 1e-2),
    dict(x=_BATCHED, w=_W),
    sizes=_ROWS | dict(B=(1, 4)),
)
# expected: proved
_add(
    "liger_rms_norm_gemma_no_weight_4d",
    lambda x: _RMS(x, None, 1e-6, 0.0, "gemma", False),
    lambda x: rms(x, None, 1e-6),
    dict(x=_IMAGES),
    sizes=_IMAGE_SIZES,
)


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return rms(x - x.mean(-1, keepdim=True), w, 1e-6) + b


# expected: proved
_add(
    "liger_layer_norm_module_4d",
    lambda x, w, b: called(on_meta("layer_norm", "LigerLayerNorm", x.shape[-1]), dict(weight=w, bias=b), x),
    _layer_norm,
    dict(x=_IMAGES, w=_W, b=_W),
    sizes=_IMAGE_SIZES,
)


def _instance_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = rms((x - x.mean((-2, -1), keepdim=True)).flatten(2), None, 1e-5).reshape(x.shape)
    return y * w[:, None, None] + b[:, None, None]


def _liger_instance_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    module = on_meta("group_norm", "LigerGroupNorm", x.shape[1], x.shape[1], eps=1e-5)
    return called(module, dict(weight=w, bias=b), x)


_CHANNEL = rg.tensor("C")
# expected: finding in float32 (extremes: variance as E[x^2] - E[x]^2), proved in bfloat16
_add(
    "liger_group_norm_module_by_channel",
    _liger_instance_norm,
    _instance_norm,
    dict(x=rg.tensor("B", "C", "P", "Q"), w=_CHANNEL, b=_CHANNEL),
    sizes=dict(B=(1, 4), C=(1, 5), P=(1, 7), Q=(2, 9)),
)
_SINGLE_CHANNEL = rg.tensor("C", dtype="float32")
# expected: finding (mean and 1/std are kept in bfloat16, and the parts of float32 gradients of w and b rounded to it)
_add(
    "liger_group_norm_float32_weights",
    lambda x, w, b: apply(_OPS, "LigerGroupNormFunction")(x, w, b, x.shape[1], 1, 1e-5),
    lambda x, w, b: (_layer_norm_of_all(x) * w[:, None] + b[:, None]).to(x.dtype),
    dict(x=rg.tensor("B", "C", "N"), w=_SINGLE_CHANNEL, b=_SINGLE_CHANNEL),
    sizes=dict(B=(1, 5), C=(1, 5), N=(2, 60)),
    dtypes=("bfloat16",),
)


def _layer_norm_of_all(x: Tensor) -> Tensor:
    flat = x.flatten(1)
    return rms(flat - flat.mean(-1, keepdim=True), None, 1e-5).reshape(x.shape)


def _added(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return rms(x + r, w + 1, 1e-6), x + r


# expected: finding (in_place, second order)
_add(
    "liger_fused_add_rms_norm_offset_in_place",
    apart(lambda x, r, w: apply(_OPS, "LigerFusedAddRMSNormFunction")(x, r, w, 1e-6, 1.0, "gemma", True)),
    _added,
    dict(x=_BATCHED, r=_BATCHED, w=_W),
    sizes=_ROWS | dict(B=(1, 4)),
)
_MODULATED = apply(_OPS, "LigerModulatedRMSNormFunction")
_SHIFT = rg.tensor("B", "N")
# expected: proved
_add(
    "liger_modulated_rms_norm_by_batch",
    lambda x, w, scale, shift: _MODULATED(x, w, scale, shift, 1e-6, 0.5, "llama", False),
    lambda x, w, scale, shift: (1 + scale[:, None]) * rms(x, w + 0.5, 1e-6) + shift[:, None],
    dict(x=_BATCHED, w=_W, scale=_SHIFT, shift=_SHIFT),
    sizes=_ROWS | dict(B=(1, 4), M=(1, 20)),
)
# expected: finding (in_place, second order)
_add(
    "liger_modulated_rms_norm_no_weight_in_place",
    apart(lambda x, scale, shift: _MODULATED(x, None, scale, shift, 1e-6, 0.0, "gemma", True)),
    lambda x, scale, shift: (1 + scale) * rms(x, None, 1e-6) + shift,
    dict(x=_X, scale=_W, shift=_W),
    sizes=_ROWS,
)


def _poly_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return w[0] * rms(x**3) + w[1] * rms(x**2) + w[2] * rms(x) + b


# expected: finding (in_place by default, second order)
_add(
    "liger_poly_norm_module_in_place",
    apart(lambda x, w, b: called(on_meta("poly_norm", "LigerPolyNorm"), dict(weight=w, bias=b), x)),
    _poly_norm,
    dict(x=_BATCHED, w=rg.tensor(3), b=rg.tensor()),
    sizes=_ROWS | dict(B=(1, 4)),
)

# Activations.

# expected: proved
_add(
    "liger_softmax_4d",
    lambda x: on_meta("softmax", "LigerSoftmax")(x),
    softmax,
    dict(x=_IMAGES),
    sizes=_IMAGE_SIZES,
)
# expected: finding (extremes: NaN becomes 0)
_add(
    "liger_sparsemax_of_the_middle",
    lambda x: on_meta("sparsemax", "LigerSparsemax", dim=1)(x),
    lambda x: sparsemax(x.movedim(1, -1)).movedim(-1, 1),
    dict(x=_BATCHED),
    sizes=dict(B=(1, 4), M=(1, 60), N=(1, 12)),
)


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


def _mlp(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, gate, up, down: (act(x @ gate.t()) * (x @ up.t())) @ down.t()


def _config(hidden: int, inner: int, act: str) -> SimpleNamespace:
    return SimpleNamespace(hidden_size=hidden, intermediate_size=inner, hidden_act=act)


def _liger_mlp(module: str, name: str, act: str) -> Callable[..., Tensor]:
    def call(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        weights = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}
        return called(on_meta(module, name, _config(*down.shape, act)), weights, x)

    return call


_TOKENS, _PROJECTION = rg.tensor("B", "T", "H"), rg.tensor("I", "H", scale=0.3)
_MLP = dict(x=_TOKENS, gate=_PROJECTION, up=_PROJECTION, down=rg.tensor("H", "I", scale=0.3))
_MLP_SIZES = dict(B=(1, 3), T=(1, 20), H=(1, 40), I=(1, 70))
# expected: finding (state: the backward writes gradients over the saved halves, and a second one reads these)
_add("liger_swiglu_mlp", _liger_mlp("swiglu", "LigerSwiGLUMLP", "silu"), _mlp(_silu), _MLP, sizes=_MLP_SIZES)
# expected: finding (state, as above)
_add("liger_geglu_mlp", _liger_mlp("geglu", "LigerGEGLUMLP", "gelu"), _mlp(_gelu), _MLP, sizes=_MLP_SIZES)


def _phi3(x: Tensor, both: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ both.t()).chunk(2, -1)
    return (_silu(gate) * up) @ down.t()


# expected: finding (state, as above, on copies of the halves)
_add(
    "liger_phi3_mlp",
    lambda x, both, down: called(
        on_meta("swiglu", "LigerPhi3SwiGLUMLP", _config(*down.shape, "silu")),
        {"gate_up_proj.weight": both, "down_proj.weight": down},
        x,
    ),
    _phi3,
    dict(x=_TOKENS, both=rg.tensor("2*I", "H", scale=0.3), down=rg.tensor("H", "I", scale=0.3)),
    sizes=_MLP_SIZES,
)


def _tiled(name: str, act: str) -> Callable[..., Tensor]:
    """The weights are attributes: the backward calls the module again, and functional_call is over then."""

    def call(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        module = on_meta("tiled_mlp", name, _config(*down.shape, act), num_shards=2)
        for part, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            layer = getattr(module, part)
            del layer.weight
            layer.weight = weight
        return module(x)

    return call


_FROZEN = rg.tensor("I", "H", scale=0.3, grad=False)
# expected: finding (layouts: a copy of x requires no gradient, so there is none; zeros with create_graph=True)
_add(
    "liger_tiled_swiglu_of_frozen_weights",
    _tiled("LigerTiledSwiGLUMLP", "silu"),
    _mlp(_silu),
    dict(x=_TOKENS, gate=_FROZEN, up=_FROZEN, down=rg.tensor("H", "I", scale=0.3, grad=False)),
    sizes=_MLP_SIZES,
)
# expected: finding (contract: weights get no gradient but what is added to their .grad behind autograd)
_add("liger_tiled_geglu", _tiled("LigerTiledGEGLUMLP", "gelu"), _mlp(_gelu), _MLP, sizes=_MLP_SIZES)

# Rotations.

_Q, _K = rg.tensor("B", "H", "T", "D"), rg.tensor("B", "G", "T", "D")
_HEADS = dict(B=(1, 3), H=[3, 6], G=[1, 3], T=(2, 20), D=[8, 16, 64])


def _rotated(x: Tensor, angle: Tensor) -> Tensor:
    """x [..., T, D] by angles [..., T, D / 2], halves together."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def _waves(half: Tensor) -> tuple[Tensor, Tensor]:
    whole = torch.cat([half, half], -1)
    return whole.cos(), whole.sin()


# expected: finding (the backward writes over grad_out and returns it, so the second order is wrong)
_add(
    "liger_rope_by_batch",
    apart(lambda q, k, angle: apply(_OPS, "LigerRopeFunction")(q, k, *_waves(angle)), 0, 1),
    lambda q, k, angle: (_rotated(q, angle[:, None]), _rotated(k, angle[:, None])),
    dict(q=_Q, k=_K, angle=rg.tensor("B", "T", "D//2", grad=False)),
    sizes=_HEADS,
)
_ROPE = f"{_MODULES}.rope"
# expected: finding (second order; and one step of several sequences, by stride(1) of [B, 1, H, D])
_add(
    "liger_rope_gpt_oss",
    apart(lambda q, k, a: of(_ROPE, "liger_rotary_pos_emb_gpt_oss")(q, k, a.cos()[None], a.sin()[None]), 0, 1),
    lambda q, k, a: (_rotated(q, a), _rotated(k, a)),
    dict(q=_Q, k=_K, a=rg.tensor("T", "D//2", grad=False)),
    sizes=_HEADS | dict(T=(1, 20)),
)
_FLAT_Q = rg.tensor("T", "H", "D")
# expected: finding (second order in float32; proved in bfloat16, where casts make copies)
_add(
    "liger_rope_vision",
    apart(lambda q, k, a: of(_ROPE, "liger_rotary_pos_emb_vision")(q, k, *_waves(a)), 0, 1),
    lambda q, k, a: (_rotated(q, a[:, None]), _rotated(k, a[:, None])),
    dict(q=_FLAT_Q, k=_FLAT_Q, a=rg.tensor("T", "D//2", grad=False)),
    sizes=_HEADS | dict(T=(1, 20)),
)


def _sections(half: Tensor) -> Tensor:
    """Angles [3, B, T, D / 2] of time, height and width, for 1, 1.5 and 1.5 parts of four."""
    first, second = half.shape[-1] // 4, half.shape[-1] * 5 // 8
    return torch.cat([half[0, ..., :first], half[1, ..., first:second], half[2, ..., second:]], -1)


def _liger_mrope(q: Tensor, k: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    width = q.shape[-1]
    sections = [width // 8, width * 3 // 16, width * 3 // 16]
    return apply(_OPS, "LigerQwen2VLMRopeFunction")(q, k, *_waves(half), sections)


# expected: finding (second order, as of every rotation)
_add(
    "liger_qwen2vl_mrope_sections",
    apart(_liger_mrope, 0, 1),
    lambda q, k, half: (_rotated(q, _sections(half)[:, None]), _rotated(k, _sections(half)[:, None])),
    dict(q=_Q, k=_K, half=rg.tensor(3, "B", "T", "D//2", grad=False)),
    sizes=_HEADS | dict(D=[16, 64], T=(1, 20)),
)
