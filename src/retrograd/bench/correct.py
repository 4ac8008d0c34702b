"""Whether a norm is right, before its time is worth anything: its truth in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from retrograd.bench.deviation import computed, deviations
from retrograd.bench.harness import Provider, Tensors
from retrograd.bench.providers import NormOp

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
    got = computed(provider, op.inputs, op.results, inputs, grads)
    return ", ".join(str(d) for d in deviations(got, _truth(op, inputs, grads), _SUMS) if not d.excess <= 1)


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
