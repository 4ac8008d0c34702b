"""Test that would have noticed a mutant, as text to be pasted: in plain PyTorch, with the line for retrograd."""

from __future__ import annotations

import re
from typing import Any

import torch

from retrograd.check.op_runner import OpRunner
from retrograd.check.schema import Case

_LITERAL = 64  # elements of a tensor that is written out; a larger one is drawn


def text_of(runner: OpRunner, case: Case, only: tuple[str, ...] | None, name: str) -> str:
    """A test function of the inputs of a case.

    Args:
        runner: of the op in the dtype of the case.
        case: which inputs; layouts are said in a comment.
        only: the inputs that want a gradient, where these are not all.
        name: of the mutant.
    """
    inputs = runner.inputs(case)
    names = [n for n in runner.differentiable(case) if only is None or n in only]
    params = "".join(f", {key}={value!r}" for key, value in case.params)
    lines = [f"def test_{re.sub(r'[^0-9a-z]+', '_', name.lower()).strip('_')}():", "    torch.manual_seed(0)"]
    lines += [f"    # {key} is {layout} in memory" for key, layout in case.layouts]
    lines += [f"    {key} = {_value(value, key in names)}" for key, value in inputs.items()]
    lines += [
        f"    wanted = [{', '.join(names)}]",
        f"    out = fn({', '.join(inputs)}{params})",
        "    grad_out = torch.randn_like(out)  # of an op with several outputs: one each",
        "    grads = torch.autograd.grad(out, wanted, grad_out)",
        "    exact = [t.detach().double().requires_grad_() for t in wanted]",
        f"    {', '.join(f'{n}_' for n in names)}{',' * (len(names) == 1)} = exact",
        f"    true = reference({', '.join(f'{n}_' if n in names else n for n in inputs)}{params})",
        "    expected = (true, *torch.autograd.grad(true, exact, grad_out.double()))",
        "    for got, want in zip((out, *grads), expected):",
        "        torch.testing.assert_close(got, want.to(got.dtype))",
        "    # Under a derived tolerance instead: rg.assert_backward(reference,",
        f"    #     dict({', '.join(f'{n}={n}' for n in inputs)}), grad_out, grads=dict(zip({names}, grads)){params})",
    ]
    return "\n".join(lines)


def _value(value: Any, wanted: bool) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    dtype, needs = f"dtype={value.dtype}", ", requires_grad=True" if wanted else ""
    if value.numel() <= _LITERAL:
        return f"torch.tensor({_literal(value.tolist())}, {dtype}{needs})"
    shape = ", ".join(map(str, value.shape))
    if value.is_floating_point() or value.is_complex():
        return f"torch.randn({shape}, {dtype}{needs})"
    return f"torch.randint({int(value.min())}, {int(value.max()) + 1}, ({shape},), {dtype})"


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return f"float('{text}')" if text in ("nan", "inf", "-inf") else text
