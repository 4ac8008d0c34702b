"""Assertion on a backward pass: one comparison of a backward pass with its reference, under the derived tolerance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from retrograd.check.inputs import differentiable
from retrograd.check.op_runner import OpRunner
from retrograd.check.oracle import truth_of
from retrograd.check.outputs import as_real, inexact
from retrograd.check.spec import op
from retrograd.check.tensor_comparison import compare
from retrograd.check.tolerance import CONFIRM_RUNS
from retrograd.errors import UsageError, VerificationError


def _listed(value: Any, argument: str, expected: int) -> list[Any]:
    items = list(value) if isinstance(value, Sequence) else [value]
    if len(items) != expected:
        raise UsageError(f"`{argument}` has {len(items)} tensor(s), expected {expected}")
    return items


def assert_backward(
    reference: Callable[..., Any],
    inputs: Mapping[str, Any],
    grad_out: Any,
    *,
    grads: Mapping[str, torch.Tensor],
    out: Any = None,
    compute: str | None = None,
    **params: Any,
) -> None:
    """Assert that gradients you computed are as right as their precision allows.

    Args:
        reference: the op in plain PyTorch, called `reference(*inputs.values(), **params)`, run in float64.
        inputs: the inputs by name, as your op got them; floating ones share one dtype.
        grad_out: the gradient fed to the backward, a tensor or a sequence with one per floating output.
        grads: your gradients by input name; inputs left out are not compared.
        out: your forward result or results, compared too if given.
        compute: "float32" if 16-bit inputs are computed in float32 and rounded once.
        **params: keyword arguments of the reference.

    Raises:
        VerificationError (an AssertionError): names the tensor, the element, what it is and should be, and
            how many times the attainable error that is.
        UsageError: names in `grads` are not inputs, or shapes do not fit.

    Numerics: truth in float64; attainable error by random rounding with 48 runs (`check.tolerance`).
    """
    __tracebackhide__ = True
    if unknown := set(grads) - set(inputs):
        raise UsageError(f"`grads` names {sorted(unknown)}, the inputs are {list(inputs)}")
    floats = [t for t in inputs.values() if inexact(t)]
    if not floats:
        raise UsageError("`inputs` has no floating tensor; there is nothing to differentiate")
    spec = op(reference, reference, dict(inputs), params={k: [v] for k, v in params.items()},
              dtypes=(floats[0].dtype,), compute=compute)  # fmt: skip
    runner = OpRunner(spec, spec.dtypes[0], 0, str(floats[0].device))
    exact = runner.reference(runner.base)
    outs = exact.outputs().inexact
    shapes = [tuple(t.shape) for t in outs.values()]
    grad_outs = _listed(grad_out, "grad_out", len(shapes))
    if [tuple(g.shape) for g in grad_outs] != shapes:
        raise UsageError(f"`grad_out` has shapes {[tuple(g.shape) for g in grad_outs]}, the outputs {shapes}")
    truth = truth_of(replace(exact, grad_outs=lambda: [g.detach().clone() for g in grad_outs]), CONFIRM_RUNS)
    got = {f"grad {n}": grads[n] for n in differentiable(spec, inputs) if n in grads}
    if out is not None:
        got |= dict(zip(outs, _listed(out, "out", len(shapes)), strict=True))
    lines = []
    for name, value in got.items():
        want = truth.want[name]
        value = value if value is None else as_real(value)
        if value is None or want is None or value.shape != want.shape:
            shape = None if value is None else tuple(value.shape)
            lines.append(f"{name} has shape {shape}, expected {None if want is None else tuple(want.shape)}")
            continue
        comparison = compare(value, want, truth.tol[name])
        if comparison.wrong:
            lines.append(comparison.text(name))
    if lines:
        raise VerificationError("\n".join(lines))
