"""Accuracy of an implementation, before its time is worth anything: relative L2 errors beside float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from retrograd.bench.benchmark import Implementation, Pieces, Problem, Tensors

# A correctly rounded result has relative error 1 floor; one that rounds once more on the way has 1.4.
_FLOORS = 2.0


@dataclass(frozen=True)
class Deviation:
    name: str
    relative: float  # its L2 error over the L2 norm of the truth
    rounding: float  # the same of the truth rounded to the result's dtype

    def __str__(self) -> str:
        return f"{self.name} (relative L2 {self.relative:.1e}, rounding {self.rounding:.1e})"


def judge(implementation: Implementation, problem: Problem, inputs: Tensors, grads: Tensors) -> tuple[str, str]:
    """(what is wrong, what is merely coarse), each "" if nothing.

    An error may be twice the sum of that of rounding the truth, of the problem's slack, and of the error of its
    reference where it has one.
    """
    outs = implementation.call(inputs)
    shapes = zip(problem.results, outs, strict=True)
    if odd := [name for name, out in shapes if out.shape != grads[name].shape]:
        return f"{', '.join(odd)} (not in the shape of the reference's)", ""
    results = computed(implementation, outs, problem, inputs, grads)
    truth = problem.truth(inputs, grads)
    usual: dict[str, float] = {}
    if problem.reference:
        truth = list(truth)
        reference = computed(problem.reference, problem.reference.call(inputs), problem, inputs, grads)
        usual = {deviation.name: deviation.relative for deviation in deviations(reference, truth)}
    wrong, coarse = [], []
    for deviation in deviations(results, truth):
        allowed = _FLOORS * (deviation.rounding + usual.get(deviation.name, 0.0) + problem.slack)
        if not deviation.relative <= allowed:  # not a number is wrong, too
            lenient = results[deviation.name].dtype.itemsize == 2 and deviation.relative <= problem.coarse
            (coarse if lenient else wrong).append(str(deviation))
    return ", ".join(wrong), ", ".join(coarse)


def computed(
    implementation: Implementation, outs: Sequence[torch.Tensor], problem: Problem, inputs: Tensors, grads: Tensors
) -> Tensors:
    """Results by name, and gradients of the leaves as grad_*, of a forward that has run."""
    results = {name: out.detach().clone() for name, out in zip(problem.results, outs, strict=True)}
    if implementation.backward:
        # Some libraries reuse the buffer of grad_out.
        grad_outs = [grads[name].clone() for name in problem.results]
        leaves = [inputs[name] for name in problem.leaves]
        # A backward that torch.compile makes for a first run which keeps the graph runs again and again; for another it
        # overwrites what the forward saved (donated buffers).
        gradients = torch.autograd.grad(outs, leaves, grad_outs, retain_graph=True)
        results |= {f"grad_{name}": grad for name, grad in zip(problem.leaves, gradients, strict=True)}
    return results


def deviations(results: Tensors, truth: Pieces) -> Iterator[Deviation]:
    """The error of each result; names that `results` lacks do not count."""
    errors, floors, norms = ({name: torch.zeros(()) for name in results} for _ in range(3))
    for name, rows, want in truth:
        if name in results:
            value = results[name][rows]
            errors[name] = errors[name] + (value.double() - want).square().sum()
            floors[name] = floors[name] + (want.to(value.dtype).double() - want).square().sum()
            norms[name] = norms[name] + want.square().sum()
    for name in results:
        error, floor, norm = (float(sums[name]) ** 0.5 for sums in (errors, floors, norms))
        yield Deviation(name, error / (norm or 1.0), floor / (norm or 1.0))
