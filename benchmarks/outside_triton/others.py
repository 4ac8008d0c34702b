"""Ops of smaller Triton libraries: norms, activations, losses, scans and linear attention. The formulas are ours."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from specs import Registry, apply, causal, log_softmax, of, rms, softmax
from torch import Tensor
from torch.nn import functional as F

import retrograd as rg

TRINIX = Registry("trinix==0.1.4")
TRIFORMER = Registry("triformer==3.0.7")
TORCHNORM = Registry("torchnorm==0.1.2")
MAMBA = Registry("mamba-ssm==2.3.2.post1")
LIGHTNING = Registry("lightning-attn==0.0.5")
SINGLES = {
    "crossentropy": Registry("crossentropy-triton==0.1.2"),
    "scan": Registry("accelerated-scan==0.3.1"),
    "adasplash": Registry("adasplash==0.2.2"),
    "siglip": Registry("siglip-kernel==0.1.2"),
    "memeff": Registry("memeff==0.3.1"),
}
OTHERS = {"trinix": TRINIX, "triformer": TRIFORMER, "torchnorm": TORCHNORM, "mamba": MAMBA, "lightning": LIGHTNING}
OTHERS |= SINGLES

_X, _W = rg.tensor("M", "N"), rg.tensor("N")
_ROWS = dict(M=(1, 40), N=(2, 200))
_PAIRS = rg.tensor("M", 2, "N")  # both halves of a row
_LABELS = rg.tensor("M", dtype="int64", high="N")


def _layer(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    return rms(x - x.mean(-1, keepdim=True), w, eps) + b


def _swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _halves(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of rows whose halves are one after the other."""
    return lambda x: function(x.flatten(1))


# trinix

_KERNELS = "trinix.kernels"
TRINIX.add(
    "trinix_layer_norm",
    lambda x, w, b: apply(f"{_KERNELS}.layernorm_kernel", "TritonLayerNormFunction")(x, w, b, 1e-5),
    _layer,
    dict(x=_X, w=_W, b=_W),
    sizes=_ROWS,
)
TRINIX.add(
    "trinix_rms_norm",
    lambda x, w: apply(f"{_KERNELS}.rmsnorm_kernel", "TritonRMSNormFunction")(x, w, 1e-6),
    rms,
    dict(x=_X, w=_W),
    sizes=_ROWS,
)
_GATED: dict[str, tuple[str, str, Callable[[Tensor], Tensor]]] = {
    "geglu": ("geglu_kernel", "TritonGeGLUFunction", _gelu_tanh),
    "swiglu": ("swigelu_kernel", "TritonSwiGLUFunction", _swish),
    "reglu": ("reglu_kernel", "TritonReGLUFunction", torch.relu),
}
for _name, (_file, _class, _formula) in _GATED.items():
    TRINIX.add(
        f"trinix_{_name}",
        _halves(apply(f"{_KERNELS}.{_file}", _class)),
        lambda x, f=_formula: x[:, 0] * f(x[:, 1]),
        dict(x=_PAIRS),
        sizes=_ROWS,
    )
_UNARY: dict[str, tuple[str, str, Callable[[Tensor], Tensor]]] = {
    "mish": ("mish_kernel", "TritonMishFunction", lambda x: x * torch.tanh(torch.logaddexp(x, torch.zeros_like(x)))),
    "quick_gelu": ("quickgelu_kernel", "TritonQuickGELUFunction", lambda x: x * torch.sigmoid(1.702 * x)),
    "squared_relu": ("squared_relu_kernel", "TritonSquaredReLUFunction", lambda x: torch.relu(x) ** 2),
}
for _name, (_file, _class, _formula) in _UNARY.items():
    TRINIX.add(f"trinix_{_name}", apply(f"{_KERNELS}.{_file}", _class), _formula, dict(x=_X), sizes=_ROWS)


def _rotated(x: Tensor, angle: Tensor) -> Tensor:
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * c - b * s, a * s + b * c], -1)


TRINIX.add(
    "trinix_rope",
    lambda q, k, angle: apply(f"{_KERNELS}.rope_kernel", "TritonRoPEFunction")(q, k, angle.cos(), angle.sin()),
    lambda q, k, angle: (_rotated(q, angle), _rotated(k, angle)),
    dict(q=rg.tensor("B", "T", "H", 32), k=rg.tensor("B", "T", "H", 32), angle=rg.tensor("T", 16, grad=False)),
    sizes=dict(B=(1, 2), T=(1, 20), H=[1, 3]),
)

# triformer

TRIFORMER.add(
    "triformer_layer_norm",
    lambda x, w, b: apply("triformer.layernorm", "Fast_Layernorm")(x, w, b, 1e-5),
    _layer,
    dict(x=_X, w=_W, b=_W),
    sizes=_ROWS,
)
TRIFORMER.add(
    "triformer_rms_norm",
    lambda x, w: apply("triformer.rms_norm", "FastRMSNorm")(x, w, 1e-6),
    rms,
    dict(x=_X, w=_W),
    sizes=_ROWS,
)
TRIFORMER.add(
    "triformer_swiglu",
    apply("triformer.swiglu", "FastSwigluFunction"),
    lambda e, g: _swish(e) * g,
    dict(e=_X, g=_X),
    sizes=_ROWS,
)
TRIFORMER.add(
    "triformer_softmax",
    lambda x: apply("triformer.softmax", "SoftmaxFunction")(x, False),
    softmax,
    dict(x=_X),
    sizes=_ROWS,
)
TRIFORMER.add(
    "triformer_softmax_causal",
    lambda x: apply("triformer.softmax", "SoftmaxFunction")(x, True),
    lambda x: softmax(causal(x)),
    dict(x=rg.tensor("B", "T", "T")),
    sizes=dict(B=(1, 4), T=(1, 70)),
)
TRIFORMER.add(
    "triformer_cross_entropy",
    lambda x, y: apply("triformer.cross_entropy", "CrossEntropyLossFunction")(x.clone(), y, -100, "mean", 1),
    lambda x, y: -log_softmax(x).gather(1, y[:, None]).mean(),
    dict(x=_X, y=_LABELS),
    sizes=_ROWS,
)

# torchnorm

_TORCHNORM = "torchnorm._triton"
TORCHNORM.add(
    "torchnorm_rms_norm",
    lambda x, w: of(_TORCHNORM, "fused_rms_norm")(x, w, 1e-6),
    rms,
    dict(x=_X, w=_W),
    sizes=_ROWS,
)
TORCHNORM.add(
    "torchnorm_add_rms_norm",
    lambda x, r, w: of(_TORCHNORM, "fused_add_rms_norm")(x, r, w, 1e-6),
    lambda x, r, w: (rms(x + r, w), x + r),
    dict(x=_X, r=_X, w=_W),
    sizes=_ROWS,
)
TORCHNORM.add(
    "torchnorm_layer_norm",
    lambda x, w, b: of(_TORCHNORM, "fused_layer_norm")(x, w, b, 1e-5),
    _layer,
    dict(x=_X, w=_W, b=_W),
    sizes=_ROWS,
)

# mamba-ssm: its own __init__ imports what is compiled for CUDA.


def _mamba(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "mamba_ssm" not in sys.modules and (spec := importlib.util.find_spec("mamba_ssm")):
            package = sys.modules["mamba_ssm"] = ModuleType("mamba_ssm")
            package.__path__ = spec.submodule_search_locations or []
        return of(f"mamba_ssm.ops.triton.{module}", name)(*args, **kwargs)

    return call


MAMBA.add(
    "mamba_layer_norm",
    lambda x, w, b: _mamba("layer_norm", "layer_norm_fn")(x, w, b, eps=1e-5),
    _layer,
    dict(x=_X, w=_W, b=_W),
    sizes=_ROWS,
)
MAMBA.add(
    "mamba_rms_norm_residual",
    lambda x, w, r: _mamba("layer_norm", "rms_norm_fn")(x, w, None, r, prenorm=True),
    lambda x, w, r: (rms(x + r, w), x + r),
    dict(x=_X, w=_W, r=_X),
    sizes=_ROWS,
)
MAMBA.add(
    "mamba_rms_norm_gated",
    lambda x, w, z: _mamba("layernorm_gated", "rmsnorm_fn")(x, w, None, z),
    lambda x, w, z: rms(x, w) * _swish(z),
    dict(x=_X, w=_W, z=_X),
    sizes=_ROWS,
)
MAMBA.add(
    "mamba_layer_norm_after_gate",
    lambda x, w, b, z: _mamba("layernorm_gated", "layernorm_fn")(x, w, b, z, norm_before_gate=False),
    lambda x, w, b, z: _layer(x * _swish(z), w, b, 1e-6),
    dict(x=_X, w=_W, b=_W, z=_X),
    sizes=_ROWS,
)
MAMBA.add(
    "mamba_swiglu",
    _halves(_mamba("k_activations", "swiglu")),
    lambda x: _swish(x[:, 0]) * x[:, 1],
    dict(x=_PAIRS),
    sizes=_ROWS,
)


def _ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """S = exp(dt a) S + dt b x, y = c S; x [B, T, H, P], dt [B, T, H], a [H], b and c [B, T, 1, N]."""
    state, ys = (x[:, 0, :, :, None] * b[:, 0, :, None]) * 0, []
    for x_t, dt_t, b_t, c_t in zip(x.unbind(1), dt.unbind(1), b.unbind(1), c.unbind(1), strict=True):
        state = (dt_t * a).exp()[..., None, None] * state + (dt_t[..., None] * x_t)[..., None] * b_t[:, :, None]
        ys.append((state * c_t[:, :, None]).sum(-1))
    return torch.stack(ys, 1)


_STATE = rg.tensor("B", "T", 1, 16)
MAMBA.add(
    "mamba_chunk_scan_combined",
    lambda *args: _mamba("ssd_combined", "mamba_chunk_scan_combined")(*args, chunk_size=16),
    _ssd,
    dict(
        x=rg.tensor("B", "T", "H", 16),
        dt=rg.tensor("B", "T", "H", low=0.1, high=1.0),
        a=rg.tensor("H", low=-1.0, high=-0.1),
        b=_STATE,
        c=_STATE,
    ),
    sizes=dict(B=(1, 2), T=[1, 2, 16, 33], H=[1, 2]),
)

# lightning-attn

_LIGHTNING = "lightning_attn.ops.triton"
LIGHTNING.add(
    "lightning_srms_norm",
    lambda x: apply(f"{_LIGHTNING}.srmsnorm", "_SrmsNorm")(x, 1e-6),
    rms,
    dict(x=_X),
    sizes=_ROWS,
)


def _decayed(q: Tensor, k: Tensor, v: Tensor, s: Tensor | None = None) -> Tensor:
    """Causal q k v, by exp(-s) less a step; [B, H, T, D], s [H]."""
    steps = torch.arange(q.shape[2], device=q.device)
    apart = steps[:, None] - steps
    weight = (q @ k.transpose(-1, -2)).tril()
    return (weight if s is None else weight * (-s[:, None, None] * apart.clamp_min(0)).exp()) @ v


_HEADED = rg.tensor("B", "H", "T", "D")
_HEADS = dict(B=(1, 2), H=[1, 2], T=[1, 2, 16, 33, 64, 70], D=[16, 32])
LIGHTNING.add(
    "lightning_attn2",
    lambda q, k, v, s: apply(f"{_LIGHTNING}.lightning_attn2", "LightningAttention2")(q, k, v, s),
    _decayed,
    dict(q=_HEADED, k=_HEADED, v=_HEADED, s=rg.tensor("H", low=0.1, high=0.9, grad=False, dtype="float32")),
    sizes=_HEADS,
)
LIGHTNING.add(
    "lightning_attn2_no_decay",
    lambda q, k, v: apply(f"{_LIGHTNING}.lightning_attn2_no_decay", "LightningAttention2NoDecay")(q, k, v),
    _decayed,
    dict(q=_HEADED, k=_HEADED, v=_HEADED),
    sizes=_HEADS,
)

# One or two ops of a library

SINGLES["crossentropy"].add(
    "crossentropy_triton",
    lambda x, y: apply("crossentropy_triton.crossentropy_tl", "CrossEntropyFunction")(x, y, -100),
    lambda x, y: -log_softmax(x[:, :-1]).gather(2, y[:, 1:, None]).mean(),
    dict(x=rg.tensor("B", "T", "N"), y=rg.tensor("B", "T", dtype="int64", high="N")),
    sizes=dict(B=(1, 3), T=(2, 20), N=(2, 100)),
)


def _recurrence(f: Tensor, x: Tensor) -> Tensor:
    state, states = torch.zeros_like(x[..., 0]), []
    for f_t, x_t in zip(f.unbind(-1), x.unbind(-1), strict=True):
        state = f_t * state + x_t
        states.append(state)
    return torch.stack(states, -1)


SINGLES["scan"].add(
    "accelerated_scan",
    of("accelerated_scan.scalar", "scan"),
    _recurrence,
    dict(f=rg.tensor("B", "C", "T", low=0.2, high=0.95), x=rg.tensor("B", "C", "T")),
    sizes=dict(B=(1, 2), C=(1, 3), T=(1, 40)),
)


def _entmax(x: Tensor) -> Tensor:
    """1.5-entmax: the square of what of x / 2 is above a threshold, which makes the sum 1."""
    half = x / 2
    top = half.sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    mean, square = top.cumsum(-1) / count, (top * top).cumsum(-1) / count
    tau = mean - ((1 - count * (square - mean * mean)) / count).clamp_min(0).sqrt()
    kept = (tau <= top).sum(-1, keepdim=True)
    return torch.relu(half - tau.gather(-1, kept - 1)) ** 2


for _version in (1, 2):
    SINGLES["adasplash"].add(
        f"adasplash_entmax_v{_version}",
        lambda x, v=_version: of("adasplash", f"triton_entmax_v{v}")(x.contiguous(), alpha=1.5),
        _entmax,
        dict(x=_X),
        sizes=_ROWS,
    )


def _siglip(image: Tensor, text: Tensor, temperature: Tensor, bias: Tensor) -> Tensor:
    logits = image @ text.t() * temperature.exp() + bias
    signs = 2 * torch.eye(len(image), dtype=image.dtype, device=image.device) - 1
    return torch.logaddexp(torch.zeros_like(logits), -signs * logits).sum() / len(image)


_FEATURES = rg.tensor("M", "D", scale=0.3)
SINGLES["siglip"].add(
    "siglip_fully_fused",
    lambda *args: of("siglip_kernel.fused_siglip_kernel", "fully_fused_siglip_loss")(*args),
    _siglip,
    dict(image=_FEATURES, text=_FEATURES, temperature=rg.tensor(), bias=rg.tensor()),
    sizes=dict(M=(1, 40), D=[16, 64]),
)


def _clip(x: Tensor, y: Tensor, *, both: bool) -> Tensor:
    logits = F.normalize(x, dim=1) @ F.normalize(y, dim=1).t() / 0.5
    rows = log_softmax(logits).diagonal().mean()
    return -(rows + log_softmax(logits.t()).diagonal().mean()) / 2 if both else -rows


for _name, _class in (("clip", "MemoryEfficientCLIPLoss"), ("lit", "MemoryEfficientLiTLoss")):
    SINGLES["memeff"].add(
        f"memeff_{_name}",
        lambda x, y, f=f"memeff.{_name}_loss", c=_class: of(f, c)(temperature=0.5, stable=False)(x, y),
        lambda x, y, both=_name == "clip": _clip(x, y, both=both).float(),
        dict(x=rg.tensor("M", "D"), y=rg.tensor("M", "D", grad=_name == "clip")),
        sizes=dict(M=(1, 40), D=[16, 64]),
    )
