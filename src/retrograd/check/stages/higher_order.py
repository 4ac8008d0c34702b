"""higher_order: gradients of gradients are right, or asking for them raises. Silence is the bug.

A backward that keeps an intermediate or detaches something treats as a constant what is none: a gradient penalty then
trains on a wrong gradient, without a word. One that writes all of its results into fresh memory, as kernels do, offers
no double backward: a note, unless the op promises it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from retrograd.check.cpu_kernels import pretended
from retrograd.check.op_runner import OpRun
from retrograd.check.oracle import Truth
from retrograd.check.outputs import as_real
from retrograd.check.own_mistakes import is_own_mistake
from retrograd.check.reference import NotApplicable, Results, directions, grads_of
from retrograd.check.schema import Case
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext
from retrograd.compat.torch_library import is_of_register_autograd

_RUNS = 3  # noise runs, each a second derivative: an alarm is confirmed with more


def second_order(
    case: Case, seed: int, outs: dict[str, torch.Tensor], leaves: dict[str, torch.Tensor], gs: list[torch.Tensor],
    runs: int = 0,
) -> Results:  # fmt: skip
    """Gradients of `sum_i <u_i, grad_i>` for fixed random u, with respect to the inputs and to each grad_out."""
    gs, first = _first_order(outs, leaves, gs)
    return _second_order(case, seed, leaves, gs, first, runs)


def _first_order(
    outs: dict[str, torch.Tensor], leaves: dict[str, torch.Tensor], gs: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Each grad_out, as something to differentiate with respect to, and the gradients that depend on it."""
    gs = [g.detach().requires_grad_() for g in gs]
    return gs, grads_of(list(outs.values()), list(leaves.values()), gs, create_graph=True)


def _second_order(
    case: Case, seed: int, leaves: dict[str, torch.Tensor], gs: list[torch.Tensor], first: list[torch.Tensor | None],
    runs: int = 0,
) -> Results:  # fmt: skip
    names = [*(f"second {n}" for n in leaves), *(f"second grad_out {i}" for i in range(len(gs)))]
    used = [(name, g) for name, g in zip(leaves, first, strict=True) if g is not None and g.requires_grad]
    if not used:
        return dict.fromkeys(names)
    us = list(directions(case, seed, "second", dict(used), runs).values())
    # Not torch.autograd.grad(..., allow_unused=True): it walks only the paths that lead to its inputs, so passes by the
    # node with which once_differentiable raises, and answers None.
    for leaf in leaves.values():
        leaf.grad = None
    torch.autograd.backward([g for _, g in used], us)
    return dict(zip(names, [t.grad for t in (*leaves.values(), *gs)], strict=True))


def _functions(outs: Iterable[torch.Tensor]) -> list[type[torch.autograd.Function]]:
    """The classes of `torch.autograd.Function` that gave outputs, or what went into them."""
    nodes, names, seen = [t.grad_fn for t in outs], set[str](), set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(type(node).__name__)
            nodes += [before for before, _ in node.next_functions]
    known, every = list[type[torch.autograd.Function]](), torch.autograd.Function.__subclasses__()
    while every:
        function = every.pop()
        every += function.__subclasses__()
        if f"{function.__name__}Backward" in names:
            known.append(function)
    return known


def _line(outs: Iterable[torch.Tensor]) -> str:
    """How somebody puts once_differentiable on what has no double backward, and where that stands."""
    decorator = "@torch.autograd.function.once_differentiable"
    places: list[str] = []
    for function in _functions(outs):
        if is_of_register_autograd(function):
            return f"put {decorator} on the backward that register_autograd is given"
        backward = inspect.unwrap(function.backward)
        code = getattr(backward, "__code__", None)
        at = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
        places.append(f"{function.__name__}.backward{at}")
    return f"put {decorator}, below @staticmethod, on " + (", ".join(sorted(set(places))) or "the backward")


def _not_offered(context: StageContext, truth: Truth, got: Results, outs: Iterable[torch.Tensor]) -> str:
    """A note, if no gradient depends on anything: then there is no double backward, and none was promised."""
    missing = [n for n, want in truth.want.items() if want is not None and bool((want != 0).any())]
    if context.spec.double_backward is not None or not missing or any(t is not None for t in got.values()):
        return ""
    return (
        "no double backward: gradients taken with create_graph=True are constants, so a penalty on them trains on "
        f"nothing; {_line(outs)}, and asking for more is an error instead; double_backward=True promises it"
    )


def _trap(name: str, want: torch.Tensor) -> str:
    """What is wrong where a gradient of a gradient is no tensor, and should be one."""
    return (
        f"{name} is silently missing: a gradient taken with create_graph=True does not depend on it, though its own "
        f"derivative is as large as {float(want.abs().max()):.3g}; decorate the backward with once_differentiable, "
        "so that asking raises, or make it differentiable"
    )


def _compared(case: Case, truth: Truth, got: Results, out: CaseOutcome) -> Results:
    """What is compared with the truth; what is silently missing is found."""
    results: Results = {}
    for name, want in truth.want.items():
        if got[name] is None and want is not None and bool((want != 0).any()):
            out.find("silently-constant", _trap(name, want), case, name)
        elif want is not None:
            results[name] = torch.zeros_like(want) if got[name] is None else got[name]
        elif got[name] is not None and bool((got[name] != 0).any()):  # type: ignore[union-attr]
            results[name] = got[name]
    return results


def _reals(results: Iterable[tuple[str, torch.Tensor | None]]) -> Results:
    return {name: None if t is None else as_real(t) for name, t in results}


def _other_gradients(context: StageContext, case: Case, first: Results, out: CaseOutcome) -> bool:
    """Whether the gradients themselves are wrong with create_graph=True, and right without, which is found.

    A backward that differentiates anew, and hands on what lies in `.grad`, may leave zeros there under a graph.
    """
    plain = context.runner.run(case)
    beside = replace(plain, grads={f"grad {name}": grad for name, grad in first.items()})
    if not beside.first_difference(plain) or context.judge.against_truth(case, plain)[0]:
        return False
    findings, _ = context.judge.against_truth(case, beside)
    out.findings += [replace(f, what=f"with create_graph=True {f.what}") for f in findings]
    return bool(findings)


def check(context: StageContext, case: Case) -> CaseOutcome:
    """One run with a graph over the backward, and its gradients."""
    out = CaseOutcome(power_text="refused, as it should be where it is not offered")
    promise = context.spec.double_backward
    forward = context.runner.forward(case)
    leaves = {n: forward.inputs[n] for n in forward.names}
    try:
        with pretended(context.spec.fn):  # else what its backward has compiled is, for the CPU: 38 s
            gs, first = _first_order(forward.results.inexact, leaves, forward.grad_outs)
            kept = _reals(zip(leaves, (None if g is None else g.detach().clone() for g in first), strict=True))
            got = _second_order(case, context.runner.seed, leaves, gs, first)
        got = _reals(got.items())
    except Exception as error:
        if is_own_mistake(error):
            raise
        if promise == "right":
            out.find("raises", f"gradients of gradients are promised, but raise {type(error).__name__}: {error}", case)
        return out
    if _other_gradients(context, case, kept, out):
        return out
    if promise == "raises":
        message = "gradients of gradients do not raise, as the op promises (double_backward=False)"
        out.find("does-not-raise", message, case)
        return out
    try:
        truth = context.oracle.truth(case, _RUNS, second_order)
    except NotApplicable as error:
        out.notes.append(f"gradients of gradients are not refused and cannot be judged: {error}")
        return out
    if note := _not_offered(context, truth, got, forward.outs):
        out.notes.append(note)
        out.power, out.power_text = None, "no double backward"
        return out
    results = _compared(case, truth, got, out)
    if out.findings:  # what else is off lacks those terms, and would take second derivatives of many rounded runs
        return out
    run = OpRun({}, results, forward.inputs, forward.grad_outs)
    try:
        findings, out.profiles = context.judge.against_truth(case, run, order=second_order, noise_runs=_RUNS)
        out.power = truth.power
    except NotApplicable as error:
        out.notes.append(f"gradients of gradients cannot be judged: {error}")
        return out
    out.findings += findings
    out.power_text = f"relative error {out.power:.1e}"
    return out


STAGE = Stage(
    "higher_order", "gradients of gradients right or refused", 85, check,
    needs_reference=True, after=("oracle", "contract"),
)  # fmt: skip
