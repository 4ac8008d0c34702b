"""flag-gems 5.0.2 and cut-cross-entropy 25.1.1: gates, norms, outer products, losses. The formulas are ours."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from specs import Registry, log_softmax, of, rms
from torch import Tensor

import retrograd as rg

GEMS = Registry("flag-gems==5.0.2")
CUT = Registry("cut-cross-entropy==25.1.1")
os.environ.setdefault("GEMS_VENDOR", "nvidia")  # it asks nvidia-smi otherwise
_add = GEMS.add


def _gems(name: str) -> Any:
    """A function of its; it knows the arguments of compiled kernels up to Triton 3.6, which have not changed since."""

    def call(*args: Any) -> Any:
        importlib.import_module("flag_gems.utils.libentry").minor_version = 6
        return of("flag_gems.fused", name)(*args)

    return call


_X, _N = rg.tensor("M", "N"), rg.tensor("N")
_ROWS = dict(M=(1, 40), N=(1, 200))

_add(
    "gems_silu_and_mul",
    lambda x, y: _gems("silu_and_mul")(x, y),
    lambda x, y: x * torch.sigmoid(x) * y,
    dict(x=_X, y=_X),
    sizes=_ROWS,
)


def _gelu(x: Tensor, approximate: str) -> Tensor:
    if approximate == "none":
        return 0.5 * x * (1 + torch.erf(x * 0.7071067811865476))
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


for _approximate in ("none", "tanh"):
    _add(
        f"gems_gelu_and_mul_{_approximate}",
        lambda x, y, a=_approximate: _gems("gelu_and_mul")(x, y, a),
        lambda x, y, a=_approximate: _gelu(x, a) * y,
        dict(x=_X, y=_X),
        sizes=_ROWS,
    )


def _weight_norm(v: Tensor, g: Tensor, dim: int) -> Tensor:
    others = [d for d in range(v.ndim) if d != dim % v.ndim]
    return g * v / v.square().sum(others, keepdim=True).sqrt()


_V = rg.tensor("A", "B", "C")
_SIDES = dict(A=(1, 12), B=(1, 20), C=(1, 40))
for _dim, _g in ((0, rg.tensor("A", 1, 1)), (1, rg.tensor(1, "B", 1)), (2, rg.tensor(1, 1, "C"))):
    _add(
        f"gems_weight_norm_{_dim}",
        lambda v, g, dim=_dim: _gems("weight_norm")(v, g, dim),
        lambda v, g, dim=_dim: _weight_norm(v, g, dim),
        dict(v=_V, g=_g),
        sizes=_SIDES,
    )
_add(
    "gems_outer",
    lambda a, b: _gems("outer")(a, b),
    lambda a, b: a[:, None] * b,
    dict(a=rg.tensor("M"), b=_N),
    sizes=dict(M=(1, 60), N=(1, 200)),
)


def _instance_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return rms(x - x.mean(-1, keepdim=True), None, 1e-5) * w[:, None] + b[:, None]


_add(
    "gems_instance_norm",
    lambda x, w, b: _gems("instance_norm")(x, w, b),
    _instance_norm,
    dict(x=rg.tensor("M", "C", "N"), w=rg.tensor("C"), b=rg.tensor("C")),
    sizes=dict(M=(1, 5), C=(1, 6), N=(2, 90)),
)


def _cross_entropy(x: Tensor, target: Tensor, *, smoothing: float = 0.0, mean: bool = True) -> Tensor:
    logp = log_softmax(x)
    each = (smoothing - 1) * logp.gather(1, target[:, None])[:, 0] - smoothing * logp.mean(-1)
    return each.mean() if mean else each.sum()


_LABELS = dict(x=_X, target=rg.tensor("M", dtype="int64", high="N"))
_CLASSES = dict(M=(1, 33), N=(2, 300))
_add(
    "gems_cross_entropy",
    lambda x, target: _gems("cross_entropy_loss")(x, target),
    _cross_entropy,
    _LABELS,
    sizes=_CLASSES,
)
_add(
    "gems_cross_entropy_smoothing",
    lambda x, target: _gems("cross_entropy_loss")(x, target, None, "sum", -100, 0.1),
    lambda x, target: _cross_entropy(x, target, smoothing=0.1, mean=False),
    _LABELS,
    sizes=_CLASSES,
)
_add(
    "gems_cross_entropy_of_probabilities",
    lambda x, p: _gems("cross_entropy_loss")(x, p),
    lambda x, p: -(p * log_softmax(x)).sum(-1).mean(),
    dict(x=_X, p=rg.tensor("M", "N", low=0.0, high=1.0, grad=False)),
    sizes=_CLASSES,
)


def _linear(e: Tensor, c: Tensor, target: Tensor, cap: float | None = None) -> Tensor:
    x = e @ c.t()
    x = x if cap is None else cap * torch.tanh(x / cap)
    return -log_softmax(x).gather(1, target[:, None])[:, 0].mean().float()


def _cut(e: Tensor, c: Tensor, target: Tensor, **options: Any) -> Tensor:
    return of("cut_cross_entropy", "linear_cross_entropy")(e, c, target, filter_eps=None, impl="cce", **options)


_HEAD = dict(e=rg.tensor("M", "D"), c=rg.tensor("V", "D", scale=0.2), target=rg.tensor("M", dtype="int64", high="V"))
for _suffix, _cap in (("", None), ("_softcap", 5.0)):
    CUT.add(
        f"cut_cross_entropy{_suffix}",
        lambda e, c, target, cap=_cap: _cut(e, c, target, softcap=cap),
        lambda e, c, target, cap=_cap: _linear(e, c, target, cap),
        _HEAD,
        sizes=dict(M=(1, 40), V=(2, 200), D=[16, 32, 64]),
        dtypes=("bfloat16",),  # the backward refuses float32
    )
