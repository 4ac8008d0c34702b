"""The norms that are timed, and how each provider of `registry` computes one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from retrograd.bench.harness import Provider, Tensors, UnavailableError, compiled_provider


@dataclass(frozen=True)
class NormOp:
    """One op. Inputs by name: x and residual [M, N], weight and bias [N]; results y, and s where `add`.

    s = x + residual, rounded; y = norm(s) * weight + bias; the gradients of both results reach the backward.
    """

    name: str
    centered: bool
    add: bool
    eps: float

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs, all of them leaves."""
        return ("x", *["residual"] * self.add, "weight", *["bias"] * self.centered)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the results."""
        return ("y", "s") if self.add else ("y",)

    def written_out(self, t: Tensors) -> tuple[torch.Tensor, ...]:
        """The op as a user writes it: sum in the dtype of x, statistics in float32 (float64 for float64)."""
        s = t["x"] + t["residual"] if self.add else t["x"]
        inner = s if s.dtype == torch.float64 else s.float()
        if self.centered:
            inner = inner - inner.mean(-1, keepdim=True)
        y = inner * torch.rsqrt(inner.square().mean(-1, keepdim=True) + self.eps) * t["weight"].to(inner.dtype)
        if self.centered:
            y = y + t["bias"].to(inner.dtype)
        y = y.to(s.dtype)
        return (y, s) if self.add else (y,)


OPS = {
    op.name: op
    for op in (
        NormOp("rms_norm", False, False, 1e-6),
        NormOp("add_rms_norm", False, True, 1e-6),
        NormOp("layer_norm", True, False, 1e-5),
        NormOp("add_layer_norm", True, True, 1e-5),
    )
}


def retrograd(op: NormOp, **options: Any) -> Provider:
    """This project's; `options` say in which mode."""
    norm = getattr(importlib.import_module("retrograd.ops"), "layer_norm" if op.centered else "rms_norm")

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        out = norm(t["x"], t["weight"], t.get("bias"), t.get("residual"), eps=op.eps, prenorm=op.add, **options)
        return out if op.add else (out,)

    return Provider(call)


def compiled_retrograd(op: NormOp) -> Provider:
    """This project's in a graph of torch.compile."""
    return compiled_provider(retrograd(op).call)


def users(op: NormOp, function: Callable[..., Any]) -> Provider:
    """A person's function, called as `registry.CALLS` says."""

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        out = function(*(t[name] for name in op.inputs), eps=op.eps)
        return (out,) if isinstance(out, torch.Tensor) else tuple(out)

    return Provider(call)


def by_torch(op: NormOp) -> Provider:
    """torch's own functions, after an addition where there is a residual."""

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        s = t["x"] + t["residual"] if op.add else t["x"]
        if op.centered:
            y = F.layer_norm(s, (s.shape[-1],), t["weight"], t["bias"], op.eps)
        else:
            y = F.rms_norm(s, (s.shape[-1],), t["weight"], op.eps)
        return (y, s) if op.add else (y,)

    return Provider(call)


def written_out(op: NormOp) -> Provider:
    """The formula in torch operations, as models write it."""
    return Provider(op.written_out)


def compiled(op: NormOp) -> Provider:
    """The formula in a graph of torch.compile."""
    return compiled_provider(op.written_out)


def liger(op: NormOp) -> Provider:
    """Liger's functions."""
    if op.centered:
        if op.add:
            raise UnavailableError("liger has no fused add + LayerNorm")
        layer = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
        return Provider(lambda t: (layer.apply(t["x"], t["weight"], t["bias"], op.eps),))
    # "llama" casts as in the benchmark of Liger itself; the last argument keeps grad_out from being overwritten.
    if op.add:
        fused = importlib.import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
        return Provider(lambda t: fused.apply(t["x"], t["residual"], t["weight"], op.eps, 0.0, "llama", False))
    plain = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return Provider(lambda t: (plain.apply(t["x"], t["weight"], op.eps, 0.0, "llama", False),))


def quack(op: NormOp) -> Provider:
    """quack's functions."""
    if op.centered:
        return _quack_layer_norm(op)
    rmsnorm = importlib.import_module("quack").rmsnorm
    if op.add:
        return Provider(lambda t: tuple(rmsnorm(t["x"], t["weight"], residual=t["residual"], eps=op.eps, prenorm=True)))
    return Provider(lambda t: (rmsnorm(t["x"], t["weight"], eps=op.eps),))


def _quack_layer_norm(op: NormOp) -> Provider:
    """Forward only, with weight and bias in float32: quack's LayerNorm takes no other and has no autograd."""
    if op.add:
        raise UnavailableError("quack has no fused add + LayerNorm")
    norm = importlib.import_module("quack.rmsnorm").layernorm_fwd
    # Casts are no part of the op. The vector is kept beside its cast so that its address stays its own.
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def wide(vector: torch.Tensor) -> torch.Tensor:
        if vector.data_ptr() not in kept:
            kept[vector.data_ptr()] = vector, vector.detach().float()
        return kept[vector.data_ptr()][1]

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        return (norm(t["x"].detach(), wide(t["weight"]), wide(t["bias"]), eps=op.eps),)

    return Provider(call, backward=False)
