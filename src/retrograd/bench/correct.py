"""Whether a provider's results are right, before its time is worth anything: relative L2 error against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from retrograd.bench.providers import NormOp, Provider, Tensors

# A correctly rounded result has relative error 1 floor; one that normalises an unrounded s has 1.4.
_FLOORS = 2.0
# What sums in float32 may add, relative to the result: nothing beside 16-bit rounding, most of it for float32.
_SUMS = 8 * 2.0**-24
_CHUNK_ELEMENTS = 2**24


def wrong_results(provider: Provider, op: NormOp, inputs: Tensors, grads: Tensors) -> str:
    """Names of results whose error exceeds twice that of rounding the truth; "" if none.

    Args:
        provider: what is checked.
        op: what it should compute.
        inputs: leaves by name, as `op.inputs`.
        grads: gradients of the results by name, as `op.results`.
    """
    got = _computed(provider, op, inputs, grads)
    errors = dict.fromkeys(got, 0.0)
    floors = dict.fromkeys(got, 0.0)
    norms = dict.fromkeys(got, 0.0)
    for name, rows, want in _truth(op, inputs, grads):
        if name in got:
            value = got[name][rows]
            errors[name] = errors[name] + (value.double() - want).square().sum()
            floors[name] = floors[name] + (want.to(value.dtype).double() - want).square().sum()
            norms[name] = norms[name] + want.square().sum()
    bad = []
    for name in got:
        error, floor, norm = (float(sums[name]) ** 0.5 for sums in (errors, floors, norms))
        if not error <= _FLOORS * (floor + _SUMS * norm):
            bad.append(f"{name} (relative L2 {error / (norm or 1.0):.1e}, rounding {floor / (norm or 1.0):.1e})")
    return ", ".join(bad)


def _computed(provider: Provider, op: NormOp, inputs: Tensors, grads: Tensors) -> Tensors:
    results = provider.norm(inputs)
    got = {name: result.detach().clone() for name, result in zip(op.results, results, strict=True)}
    if provider.backward:
        leaves = [inputs[name] for name in op.inputs]
        # Some libraries reuse the buffer of grad_out.
        found = torch.autograd.grad(results, leaves, [grads[name].clone() for name in op.results])
        got |= {f"grad_{name}": grad for name, grad in zip(op.inputs, found, strict=True)}
    return got


def _truth(op: NormOp, inputs: Tensors, grads: Tensors) -> Iterator[tuple[str, slice, torch.Tensor]]:
    """Results in float64 by name and rows, in pieces of bounded size; s is rounded before it is normalised."""
    x = inputs["x"].detach()
    plain = replace(op, add=False)
    vectors = [name for name in op.inputs if name in ("weight", "bias")]
    sums = {name: torch.zeros_like(inputs[name], dtype=torch.float64) for name in vectors}
    step = max(_CHUNK_ELEMENTS // x.shape[1], 1)
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        s = x[rows].double()
        if op.add:
            s = s + inputs["residual"].detach()[rows].double()
            yield "s", rows, s
        leaves = {"x": s.to(x.dtype).double(), **{name: inputs[name].detach().double() for name in vectors}}
        for leaf in leaves.values():
            leaf.requires_grad_()
        (y,) = plain.written_out(leaves)
        yield "y", rows, y.detach()
        ds, *vector_grads = torch.autograd.grad(y, list(leaves.values()), grads["y"][rows].double())
        for name, grad in zip(vectors, vector_grads, strict=True):
            sums[name] += grad
        if op.add:
            ds = ds + grads["s"][rows].double()
            yield "grad_residual", rows, ds
        yield "grad_x", rows, ds
    for name, total in sums.items():
        yield f"grad_{name}", slice(None), total
