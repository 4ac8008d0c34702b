"""Ops of any kind: an op that has a reference and draws its own inputs, timed beside that reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from retrograd.bench.benchmark import GPU, Benchmark, Data, Implementation, Pieces, Problem, Provider, Tensors

if TYPE_CHECKING:
    import torch

# Values by name in the order of the op's arguments, on the CPU, and the names of those that get gradients; none means
# forward only.
Drawn = tuple[dict[str, Any], tuple[str, ...]]


@dataclass(frozen=True)
class ReferencedOp(Benchmark):
    name: str
    usual_shapes: Mapping[str, tuple[str, ...]]
    usual_dtypes: Mapping[str, tuple[str, ...]]
    draw: Callable[[str, str], Drawn]  # from shape and dtype
    reference: Callable[..., Any]  # the same function in torch operations, in whatever precision its inputs have
    # Arguments from shape and dtype; raises a UsageError for a shape that the op cannot have.
    keywords: Callable[[str, str], dict[str, Any]]
    signature: str = ""
    dtypes: ClassVar[tuple[str, ...]] = (*Benchmark.dtypes, "float64")

    def parameters(self, shape: str, dtype: str) -> dict[str, Any]:
        return self.keywords(shape, dtype)

    def by_user(self, function: Callable[..., Any]) -> Callable[[dict[str, Any]], Implementation]:
        """The maker for a person's function, which is called like the op."""
        return lambda keywords: calling(keywords, function)

    def problem(self, shape: str, dtype: str, beside: str, device: str) -> Problem:
        """Bytes are those of inputs, results and gradients, once each."""
        import torch

        drawn, leaves = self.draw(shape, dtype)
        reference = replace(calling(self.parameters(shape, dtype), self.reference), backward=bool(leaves))
        inputs = _placed(drawn, leaves, device)
        outs = {f"out{i}": out.detach() for i, out in enumerate(reference.call(inputs))}
        # Of the size of the results and correlated with them, so that no projection is lost in rounding.
        grads = {name: out + 0.5 * torch.randn_like(out) for name, out in outs.items()}
        moved = sum(map(_bytes, (*inputs.values(), *outs.values())))

        def data() -> Data:
            while True:
                yield _placed(drawn, leaves, device), {name: grad.clone() for name, grad in grads.items()}

        def truth(inputs: Tensors, grads: Tensors) -> Pieces:
            wide = {name: _wide(value) for name, value in inputs.items()}
            results = reference.call(wide)
            yield from ((name, slice(None), result.detach()) for name, result in zip(grads, results, strict=True))
            if leaves:
                wide_grads = [grad.double() for grad in grads.values()]
                gradients = torch.autograd.grad(results, [wide[name] for name in leaves], wide_grads)
                yield from ((f"grad_{name}", slice(None), grad) for name, grad in zip(leaves, gradients, strict=True))

        return Problem(
            leaves=leaves,
            results=tuple(outs),
            data=data,
            truth=truth,
            bytes_moved=(moved, moved + sum(_bytes(inputs[name]) for name in leaves)),
            reference=reference,
        )


def calling(keywords: dict[str, Any], function: Callable[..., Any]) -> Implementation:
    """Calls `function(*inputs, **keywords)`; of what it returns the floating tensors count, which have gradients."""
    import torch

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        out = function(*t.values(), **keywords)
        results = (out,) if isinstance(out, torch.Tensor) else tuple(out)
        return tuple(result for result in results if isinstance(result, torch.Tensor) and result.is_floating_point())

    return Implementation(call)


def providers(name: str, function: Callable[..., Any], reference: Callable[..., Any]) -> tuple[Provider, ...]:
    """Who offers an op of a person's own: itself, its reference, and its reference compiled."""
    return (
        Provider("op", (name,), calling, {"function": function}, ""),
        Provider("reference", (name,), calling, {"function": reference}, "torch"),
        Provider("reference-compile", (name,), calling, {"function": reference}, "torch", usual=GPU, compiled=True),
    )


def _placed(drawn: dict[str, Any], leaves: tuple[str, ...], device: str) -> dict[str, Any]:
    """Fresh copies of the inputs on a device; the leaves ask for gradients."""
    import torch

    placed = {}
    for name, value in drawn.items():
        placed[name] = value.detach().to(device, copy=True) if isinstance(value, torch.Tensor) else value
        if name in leaves:
            placed[name].requires_grad_()
    return placed


def _wide(value: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _bytes(value: Any) -> int:
    # Arguments that are no tensors move nothing.
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0
