"""Entries of a corpus that carry their own proof: an op, its class of bug, and a call that shows it in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from retrograd.check.spec import OpSpec, TensorSpec, op

RARITIES = (
    "every input",
    "some inputs",
    "sizes",
    "special values",
    "layouts",
    "subsets of gradients",
    "dtypes",
    "parameters",
    "calls",
    "order",  # of differentiation: the gradient is right, its own is not
)


@dataclass(frozen=True)
class Call:
    """A call of an op, compared with its reference in float64.

    `change` edits the inputs that the spec describes, `order` 2 compares gradients of gradients too, `bound` is the error,
    relative to the largest value, that separates right from wrong.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    change: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    wrt: tuple[str, ...] | None = None
    order: int = 1
    bound: float = 1e-3


@dataclass
class Entries:
    """The ops of a file by name, with what proves each of them broken or right."""

    ops: dict[str, OpSpec] = field(default_factory=dict)
    bugs: dict[str, str] = field(default_factory=dict)
    rarity: dict[str, str] = field(default_factory=dict)
    proofs: dict[str, Call | Callable[[], bool]] = field(default_factory=dict)
    not_sayable: dict[str, str] = field(default_factory=dict)

    def broken(self, name: str, bug: str, rarity: str, fn: Callable[..., Any], reference: Callable[..., Any] | None,
               inputs: Any, *, proof: Call | Callable[[], bool] | None = None, **options: Any) -> None:  # fmt: skip
        """A broken op: `proof` is a call that differs from the reference's, or a function that says that it is broken."""
        assert rarity in RARITIES, rarity
        self.ops[name] = op(fn, reference, inputs, name=name, **options)
        self.bugs[name], self.rarity[name], self.proofs[name] = bug, rarity, proof or Call()

    def healthy(self, name: str, fn: Callable[..., Any], reference: Callable[..., Any], inputs: Any,
                *, proof: Call | Callable[[], bool] | None = None, **options: Any) -> None:  # fmt: skip
        """A right op: `proof` is a call that agrees with the reference's, or a function that says that it is right."""
        self.ops[name] = op(fn, reference, inputs, name=name, **options)
        self.proofs[name] = proof or Call(bound=1e-4)

    def refused(self, name: str, reason: str, proof: Callable[[], bool], *, bug: str = "", rarity: str = "") -> None:
        """An op that no spec of today describes, with the reason."""
        self.not_sayable[name], self.proofs[name] = reason, proof
        self.bugs[name], self.rarity[name] = bug, rarity


def function(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """An op with a backward of its own: `backward(grad_out, output, *inputs, **params)` gives a gradient per input.

    With several outputs grad_out and output are tuples. Gradients nobody asked for are dropped.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, params: dict[str, Any], *inputs: Any) -> Any:
            out = forward(*inputs, **params)
            outs = out if isinstance(out, tuple) else (out,)
            ctx.params, ctx.many, ctx.count = params, isinstance(out, tuple), len(inputs)
            ctx.mark_non_differentiable(*[t for t in outs if not (t.is_floating_point() or t.is_complex())])
            ctx.save_for_backward(*inputs, *outs)
            return out

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
            inputs, outs = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
            grads = backward(dy if ctx.many else dy[0], outs if ctx.many else outs[0], *inputs, **ctx.params)
            grads = grads if isinstance(grads, tuple) else (grads,)
            needs = ctx.needs_input_grad[1:]
            return None, *(g if need else None for g, need in zip(grads, needs, strict=True))

    def call(*inputs: Any, **params: Any) -> Any:
        return Function.apply(params, *inputs)

    return call


def gradients(fn: Callable[..., Any], dy: Any, *inputs: Any, **params: Any) -> tuple[Tensor | None, ...]:
    """The gradients of a plain function, one per input: the core of a backward that recomputes its forward."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() if differentiable(t) else t for t in inputs]
        out = fn(*leaves, **params)
        kept = [(o, g) for o, g in zip(flat(out), flat(dy), strict=True) if o.requires_grad]
    wanted = [t for t in leaves if differentiable(t)]
    found = iter(torch.autograd.grad([o for o, _ in kept], wanted, [g for _, g in kept], allow_unused=True,
                                     materialize_grads=True))  # fmt: skip
    return tuple(next(found) if differentiable(t) else None for t in leaves)


def differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def flat(out: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(out, Tensor):
        return [out]
    members = out.values() if isinstance(out, Mapping) else out
    return [t for member in members for t in flat(member)]


def drawn(spec: OpSpec, call: Call, seed: int = 0) -> dict[str, Any]:
    """The inputs of a call, by a generator of its own."""
    sizes = {name: call.sizes.get(name, allowed(spec.sizes.get(name))) for name in spec.size_names}
    if callable(spec.inputs):
        inputs = spec.inputs(seed, call.dtype, sizes)
        inputs = dict(inputs) if isinstance(inputs, Mapping) else {f"input{i}": t for i, t in enumerate(inputs)}
    else:
        assert isinstance(spec.inputs, Mapping)
        gen = torch.Generator().manual_seed(seed)
        inputs = {k: tensor_of(v, sizes, call.dtype, gen) for k, v in spec.inputs.items()}
    return {**inputs, **(call.change(inputs) if call.change else {})}


def allowed(rule: Any) -> int:
    if isinstance(rule, tuple):
        return min(max(5, rule[0]), rule[1])
    return rule[-1] if isinstance(rule, list) else 5 if rule is None else rule


def tensor_of(spec: Any, sizes: Mapping[str, int], dtype: torch.dtype, gen: torch.Generator) -> Any:
    if not isinstance(spec, TensorSpec):
        return spec
    shape = [d if isinstance(d, int) else sizes[d.removesuffix("...")] for d in spec.dims]
    kind = getattr(torch, spec.dtype) if spec.dtype else dtype
    if kind == torch.bool:
        return torch.rand(shape, generator=gen) < 0.5
    high = sizes[spec.high] if isinstance(spec.high, str) else spec.high
    if not kind.is_floating_point:
        return torch.randint(int(spec.low or 0), int(high), shape, generator=gen).to(kind)
    if high is not None:
        return (torch.rand(shape, generator=gen) * (high - spec.low) + spec.low).to(kind)
    return (torch.randn(shape, generator=gen) * (spec.scale if isinstance(spec.scale, float) else 1)).to(kind)


def wide(value: Any) -> Any:
    """A value in float64 or complex128, integers as they are."""
    if not differentiable(value):
        return value
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def results(fn: Callable[..., Any], spec: OpSpec, inputs: Mapping[str, Any], call: Call) -> list[Tensor | None]:
    """Outputs and gradients for a random grad_out, the same values for each dtype; gradients of gradients at order 2."""
    params = {k: v[0] for k, v in spec.params.items()} | dict(call.params)
    specs = spec.tensor_specs or {}
    names = call.wrt or tuple(
        k for k, v in inputs.items() if differentiable(v) and getattr(specs.get(k), "grad", None) is not False
    )
    leaves = {k: v.detach().requires_grad_(k in names) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    outs = flat(fn(*leaves.values(), **params))
    values: list[Tensor | None] = [t.detach().clone() for t in outs]
    heads = [t for t in outs if t.requires_grad]
    gen = torch.Generator().manual_seed(1_000_003)  # no input of a small seed again
    grad_outs = [draw_like(t, gen) for t in heads]
    if not heads:
        return values + [None] * len(names)
    wanted = [leaves[k] for k in names]
    grads = torch.autograd.grad(heads, wanted, grad_outs, allow_unused=True, create_graph=call.order > 1)
    values += [None if g is None else g.detach() for g in grads]
    if call.order > 1:
        kept = [g for g in grads if g is not None and g.requires_grad]
        again = torch.autograd.grad(kept, wanted, [draw_like(g, gen) for g in kept], allow_unused=True)
        values += list(again)
    return values


def draw_like(t: Tensor, gen: torch.Generator) -> Tensor:
    kind = torch.complex64 if t.is_complex() else torch.float32
    return torch.randn(t.shape, dtype=kind, generator=gen).to(t.dtype)


def error(spec: OpSpec, call: Call, seed: int = 0) -> float:
    """The largest error of the op's outputs and gradients relative to the reference's largest; inf if it raises."""
    assert spec.reference is not None
    exact = {k: wide(v) for k, v in drawn(spec, call, seed).items()}
    want = results(spec.reference, spec, exact, call)
    try:
        got = results(spec.fn, spec, drawn(spec, call, seed), call)
    except (RuntimeError, IndexError, ValueError):
        return math.inf
    floor = max((1e-3 * largest(t) for t in want if t is not None), default=0.0)  # beside it zeros may have a rounding
    return max((apart(a, b, floor) for a, b in zip(got, want, strict=True)), default=0.0)


def largest(t: Tensor) -> float:
    return float(t.abs().nan_to_num(0.0, 1.0).max()) if differentiable(t) and t.numel() else 0.0


def apart(got: Tensor | None, want: Tensor | None, floor: float) -> float:
    """The largest difference relative to the largest value, or to `floor`; None counts as zeros, NaN beside NaN as equal."""
    if got is None or want is None:
        other = want if got is None else got
        return 0.0 if other is None or not other.any() else math.inf
    if got.shape != want.shape:
        return math.inf
    if not want.numel():
        return 0.0
    if not differentiable(want):
        return 0.0 if torch.equal(got.long(), want.long()) else math.inf
    got = wide(got)
    if not torch.equal(got.isnan(), want.isnan()):
        return math.inf
    difference = torch.where(got == want, 0, (got - want).abs()).nan_to_num(0.0, math.inf)
    return float(difference.max()) / max(largest(want), floor, 1e-12)
