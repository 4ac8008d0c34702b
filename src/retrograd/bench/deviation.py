"""How far results are from a truth in float64: relative L2 errors, beside those of rounding the truth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from retrograd.bench.harness import Provider, Tensors

# A correctly rounded result has relative error 1 floor; one that rounds once more on the way has 1.4.
_FLOORS = 2.0
Pieces = Iterable[tuple[str, slice, torch.Tensor]]


@dataclass(frozen=True)
class Deviation:
    """The error of one result.

    Attributes:
        name: of the result.
        relative: its L2 error over the L2 norm of the truth.
        rounding: the same of the truth rounded to the result's dtype.
        excess: its L2 error over what is allowed; not a number where the result is not one.
    """

    name: str
    relative: float
    rounding: float
    excess: float

    def __str__(self) -> str:
        return f"{self.name} (relative L2 {self.relative:.1e}, rounding {self.rounding:.1e})"


def computed(
    provider: Provider, leaves: tuple[str, ...], results: tuple[str, ...], inputs: Tensors, grads: Tensors
) -> Tensors:
    """Results, and gradients as grad_*, by name.

    Args:
        provider: what is run.
        leaves: names of the inputs that get gradients.
        results: names of what it returns.
        inputs: by name.
        grads: gradients of the results by name.
    """
    found = provider.call(inputs)
    got = {name: result.detach().clone() for name, result in zip(results, found, strict=True)}
    if provider.backward:
        # Some libraries reuse the buffer of grad_out.
        grad_outs = [grads[name].clone() for name in results]
        back = torch.autograd.grad(found, [inputs[name] for name in leaves], grad_outs)
        got |= {f"grad_{name}": grad for name, grad in zip(leaves, back, strict=True)}
    return got


def deviations(got: Tensors, truth: Pieces, slack: float) -> Iterator[Deviation]:
    """The error of each result; twice the error of rounding the truth plus `slack` is allowed.

    Args:
        got: results by name.
        truth: name, rows and their float64 values, in pieces; names that `got` lacks do not count.
        slack: what computing in float32 may add, relative to the L2 norm.
    """
    errors, floors, norms = ({name: torch.zeros(()) for name in got} for _ in range(3))
    for name, rows, want in truth:
        if name in got:
            value = got[name][rows]
            errors[name] = errors[name] + (value.double() - want).square().sum()
            floors[name] = floors[name] + (want.to(value.dtype).double() - want).square().sum()
            norms[name] = norms[name] + want.square().sum()
    for name in got:
        error, floor, norm = (float(sums[name]) ** 0.5 for sums in (errors, floors, norms))
        allowed = _FLOORS * (floor + slack * norm)
        excess = error / allowed if allowed else float("inf") if error else 0.0
        yield Deviation(name, error / (norm or 1.0), floor / (norm or 1.0), excess)
