"""Norms: RMSNorm and LayerNorm, with and without a residual, beside torch, Liger and quack.

Inputs by name: x and residual [M, N], weight and bias [N]; results y, and s = x + residual, rounded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from retrograd.bench.benchmark import (
    CPU,
    GPU,
    Benchmark,
    Data,
    Implementation,
    Problem,
    Provider,
    Tensors,
    UnavailableError,
    build_host_path,
    two_sizes,
)
from retrograd.compat import torch_native

if TYPE_CHECKING:
    import torch

# Widths that train today at a constant number of rows, and the narrow ones at 32 Mi elements as well, where a launch
# costs a tenth of the time instead of a quarter; the widest ones, a ragged width, a launch-bound size.
SHAPES = (
    *("32768x256", "131072x256", "32768x512", "65536x512", "32768x1024", "32768x2048", "32768x4096", "32768x8192"),
    *("16384x16384", "8192x32768", "4096x65536", "2048x131072", "4096x2000", "512x4096"),
)
SOME_SHAPES = (
    *("32768x256", "131072x256", "65536x512", "32768x1024", "32768x2048", "32768x4096"),
    *("16384x8192", "16384x16384", "8192x32768", "4096x65536", "2048x131072", "512x4096"),
)
# On a CPU, where a pass over 64 MiB takes 10 ms: square, tall, wide.
CPU_SHAPES = ("4096x4096", "16384x1024", "1024x16384")
HOST_SHAPE = "512x4096"
_CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class Norm(Benchmark):
    """One norm: y = norm(s) * weight + bias, where s is x, or x + residual; gradients of y and s reach the backward."""

    name: str
    signature: str
    centered: bool
    add: bool
    eps: float
    usual_shapes: Mapping[str, tuple[str, ...]]
    usual_dtypes: ClassVar[Mapping[str, tuple[str, ...]]] = {"cuda": ("bfloat16",), "cpu": ("float32", "bfloat16")}
    group: ClassVar[str] = "norm"
    fields: ClassVar[tuple[str, ...]] = ("op", "m", "n", "dtype", "provider")
    packages: ClassVar[Mapping[str, str]] = {
        **{name: name for name in ("torch", "triton")},
        **{"liger": "liger-kernel", "quack": "quack-kernels", "cutlass-dsl": "nvidia-cutlass-dsl"},
    }

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs, all of them leaves."""
        return ("x", *["residual"] * self.add, "weight", *["bias"] * self.centered)

    @property
    def results(self) -> tuple[str, ...]:
        return ("y", "s") if self.add else ("y",)

    def bytes_moved(self, direction: str, shape: str, dtype: str, beside: str = "") -> int:
        """The least a fused kernel must move: each [M, N] tensor once; vectors, statistics, partial sums not counted.

        Forward x, y; backward x, grad_out, grad_x. With an added residual also residual and s, respectively grad_s
        (grad_x and grad_residual are one tensor).
        """
        tensors = 2 + 2 * self.add if direction == "fwd" else 3 + self.add
        m, n = map(int, shape.split("x"))
        return tensors * m * n * Benchmark.element_bytes[dtype]

    def parameters(self, shape: str, dtype: str) -> Norm:
        """The norm itself: implementations take any shape."""
        two_sizes(shape, "MxN such as 32768x4096")
        return self

    def by_user(self, function: Callable[..., Any]) -> Callable[[Norm], Implementation]:

        def call(t: Tensors) -> tuple[torch.Tensor, ...]:
            results = function(*(t[name] for name in self.inputs), eps=self.eps)
            return tuple(results) if isinstance(results, (tuple, list)) else (results,)

        return lambda _: Implementation(call)

    def problem(self, shape: str, dtype: str, beside: str, device: str) -> Problem:
        fwd, bwd = (self.bytes_moved(direction, shape, dtype) for direction in ("fwd", "bwd"))
        m, n = map(int, shape.split("x"))
        return Problem(
            leaves=self.inputs,
            results=self.results,
            data=lambda: self.data(m, n, dtype, device),
            truth=self.truth,
            bytes_moved=(fwd, bwd),
        )

    def data(self, m: int, n: int, dtype_name: str, device: str) -> Data:
        """Sets of inputs and gradients of the results without end; weight and bias are the same in all."""
        import torch

        dtype = getattr(torch, dtype_name)
        # Not torch's own generator: a capture that failed leaves that one unusable.
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, device=device, dtype=dtype, generator=generator)

        weight, bias = (1 + 0.2 * normal(n)).requires_grad_(), (0.2 * normal(n)).requires_grad_()
        while True:
            x, residual = (normal(m, n) for _ in range(2))
            s = x + residual if self.add else x
            # Of the size of s and correlated with it, so that the projection in grad_x is not lost in rounding.
            grads = {name: s + 0.5 * normal(m, n) for name in self.results}
            known = {"x": x.requires_grad_(), "residual": residual.requires_grad_(), "weight": weight, "bias": bias}
            yield {name: known[name] for name in self.inputs}, grads

    def written_out(self, t: Tensors) -> tuple[torch.Tensor, ...]:
        """The op as a user writes it: sum in the dtype of x, statistics in float32 (float64 for float64)."""
        s = t["x"] + t["residual"] if self.add else t["x"]
        inner = s if s.element_size() == 8 else s.float()
        if self.centered:
            inner = inner - inner.mean(-1, keepdim=True)
        y = inner * (inner.square().mean(-1, keepdim=True) + self.eps).rsqrt() * t["weight"].to(inner.dtype)
        if self.centered:
            y = y + t["bias"].to(inner.dtype)
        y = y.to(s.dtype)
        return (y, s) if self.add else (y,)

    def truth(self, inputs: Tensors, grads: Tensors) -> Iterator[tuple[str, slice, torch.Tensor]]:
        """Results in float64 by name and rows, in pieces of bounded size; s is rounded before it is normalised."""
        import torch

        x = inputs["x"].detach()
        without_residual = replace(self, add=False)
        vectors = [name for name in self.inputs if name in ("weight", "bias")]
        sums = {name: torch.zeros_like(inputs[name], dtype=torch.float64) for name in vectors}
        step = max(_CHUNK_ELEMENTS // x.shape[1], 1)
        for start in range(0, x.shape[0], step):
            rows = slice(start, start + step)
            s = x[rows].double()
            if self.add:
                s = s + inputs["residual"].detach()[rows].double()
                yield "s", rows, s
            leaves = {"x": s.to(x.dtype).double(), **{name: inputs[name].detach().double() for name in vectors}}
            for leaf in leaves.values():
                leaf.requires_grad_()
            (y,) = without_residual.written_out(leaves)
            yield "y", rows, y.detach()
            ds, *vector_grads = torch.autograd.grad(y, list(leaves.values()), grads["y"][rows].double())
            for name, grad in zip(vectors, vector_grads, strict=True):
                sums[name] += grad
            if self.add:
                ds = ds + grads["s"][rows].double()
                yield "grad_residual", rows, ds
            yield "grad_x", rows, ds
        for name, total in sums.items():
            yield f"grad_{name}", slice(None), total


_USUAL = {"cuda": SOME_SHAPES, "cpu": CPU_SHAPES, "host": (HOST_SHAPE,)}
BENCHMARKS = (
    Norm("rms_norm", "f(x, weight, eps=) -> y", False, False, 1e-6, {**_USUAL, "cuda": SHAPES}),
    Norm("add_rms_norm", "f(x, residual, weight, eps=) -> (y, x + residual)", False, True, 1e-6, _USUAL),
    Norm("layer_norm", "f(x, weight, bias, eps=) -> y", True, False, 1e-5, _USUAL),
    Norm("add_layer_norm", "f(x, residual, weight, bias, eps=) -> (y, x + residual)", True, True, 1e-5, _USUAL),
)


def retrograd(op: Norm, **options: Any) -> Implementation:
    """This project's; `options` say in which mode."""
    norm = getattr(importlib.import_module("retrograd.ops"), "layer_norm" if op.centered else "rms_norm")
    build_host_path("retrograd.ops.norm.host")

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        out = norm(t["x"], t["weight"], t.get("bias"), t.get("residual"), eps=op.eps, prenorm=op.add, **options)
        return out if op.add else (out,)

    return Implementation(call)


def by_torch(op: Norm) -> Implementation:
    """torch's own functions, after an addition where there is a residual."""
    import torch.nn.functional as F

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        s = t["x"] + t["residual"] if op.add else t["x"]
        if op.centered:
            y = F.layer_norm(s, (s.shape[-1],), t["weight"], t["bias"], op.eps)
        else:
            y = F.rms_norm(s, (s.shape[-1],), t["weight"], op.eps)
        return (y, s) if op.add else (y,)

    return Implementation(call)


def written_out(op: Norm) -> Implementation:
    """The formula in torch operations, as models write it."""
    return Implementation(op.written_out)


def liger(op: Norm) -> Implementation:
    if op.centered:
        layer = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
        return Implementation(lambda t: (layer.apply(t["x"], t["weight"], t["bias"], op.eps),))
    # "llama" casts as in the benchmark of Liger itself; the last argument keeps grad_out from being overwritten.
    if op.add:
        fused = importlib.import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
        return Implementation(lambda t: fused.apply(t["x"], t["residual"], t["weight"], op.eps, 0.0, "llama", False))
    plain = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return Implementation(lambda t: (plain.apply(t["x"], t["weight"], op.eps, 0.0, "llama", False),))


def liger_cutedsl(op: Norm) -> Implementation:
    """What Liger's dispatcher takes for itself on Hopper; where it goes back to Triton, Liger warns of it."""
    name = "layer_norm" if op.centered else "fused_add_rms_norm" if op.add else "rms_norm"
    function = getattr(importlib.import_module(f"liger_kernel.ops.backends._cutedsl.{name}"), f"{name}_cutedsl")
    if op.centered:
        return Implementation(lambda t: (function(t["x"], t["weight"], t["bias"], op.eps),))
    if op.add:
        return Implementation(lambda t: function(t["x"], t["residual"], t["weight"], op.eps, 0.0, "llama", False))
    return Implementation(lambda t: (function(t["x"], t["weight"], op.eps, 0.0, "llama", False),))


def liger_cutedsl_ops(op: Norm) -> Implementation:
    """What LIGER_KERNEL_IMPL=cutedsl puts in place of Liger's RMSNorm."""
    plain = importlib.import_module("liger_kernel.ops.cutedsl.ops.rms_norm").LigerRMSNormFunction
    return Implementation(lambda t: (plain.apply(t["x"], t["weight"], op.eps, 0.0, "llama", False),))


def torch_cutedsl(op: Norm) -> Implementation:
    """torch's functions where they run a kernel in the CuTe DSL; "torch" is then the same."""
    if reason := torch_native.why_not_cutedsl():
        raise UnavailableError(f"torch-cutedsl: {reason}")
    return by_torch(op)


def quack(op: Norm) -> Implementation:
    if op.centered:
        return _quack_layer_norm(op)
    rmsnorm = importlib.import_module("quack").rmsnorm
    if op.add:
        return Implementation(
            lambda t: tuple(rmsnorm(t["x"], t["weight"], residual=t["residual"], eps=op.eps, prenorm=True))
        )
    return Implementation(lambda t: (rmsnorm(t["x"], t["weight"], eps=op.eps),))


def _quack_layer_norm(op: Norm) -> Implementation:
    """Forward only, with weight and bias in float32: quack's LayerNorm takes no other and has no autograd."""
    norm = importlib.import_module("quack.rmsnorm").layernorm_fwd
    # Casts are no part of the op. The vector is kept beside its cast so that its address stays its own.
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def wide(vector: torch.Tensor) -> torch.Tensor:
        if vector.data_ptr() not in kept:
            kept[vector.data_ptr()] = vector, vector.detach().float()
        return kept[vector.data_ptr()][1]

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        return (norm(t["x"].detach(), wide(t["weight"]), wide(t["bias"]), eps=op.eps),)

    return Implementation(call, backward=False)


_ALL = tuple(norm.name for norm in BENCHMARKS)
# Neither Liger nor quack has a fused add + LayerNorm.
_ALL_BUT_ADD_LAYER = _ALL[:3]
_CUTE = ("nvidia-cutlass-dsl", "apache-tvm-ffi")

# In the order in which tables show them. torch.compile of what people write comes last: it takes longest.
PROVIDERS = (
    Provider("retrograd", _ALL, retrograd),
    Provider("retrograd-atomic", _ALL, retrograd, {"deterministic": False}, devices=GPU, usual=GPU),
    Provider("retrograd-triton", _ALL, retrograd, {"impl": "triton"}, devices=GPU, usual=()),
    Provider("retrograd-native", _ALL, retrograd, {"impl": "native"}, devices=CPU, usual=()),
    # Torch operations, for machines without a compiler: 10 times slower than native code on a CPU.
    Provider("retrograd-torch", _ALL, retrograd, {"impl": "torch"}, usual=()),
    Provider("retrograd-compile", _ALL, retrograd, usual=(), compiled=True),
    Provider("torch", _ALL, by_torch, package="torch"),
    Provider("written-out", _ALL, written_out, package="torch", usual=CPU),
    Provider("liger", _ALL_BUT_ADD_LAYER, liger, package="liger-kernel", devices=GPU, usual=GPU),
    *(
        Provider(name, ops, make, package="liger-kernel", also=_CUTE[:1], devices=GPU, usual=GPU)
        for name, ops, make in (
            ("liger-cutedsl", _ALL_BUT_ADD_LAYER, liger_cutedsl),
            ("liger-cutedsl-ops", _ALL[:1], liger_cutedsl_ops),
        )
    ),
    Provider("quack", _ALL_BUT_ADD_LAYER, quack, package="quack-kernels", devices=GPU, usual=GPU),
    Provider("torch-cutedsl", _ALL[:2], torch_cutedsl, package="torch", also=_CUTE, devices=GPU, usual=GPU),
    Provider("compile", _ALL, written_out, package="torch", usual=GPU, compiled=True),
)
