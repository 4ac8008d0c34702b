"""calls: the ways in which an op is called besides the ordinary one, which must come to the same.

Without gradients, in inference mode, from another thread, with one tensor in two places, with its result changed in
place before the backward, under autocast. An op may refuse any of them aloud.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from retrograd.check import constraints, tolerance
from retrograd.check.callable_state import without_traces
from retrograd.check.case_sharding import shard
from retrograd.check.op_runner import OpRun
from retrograd.check.outputs import Outputs, as_real
from retrograd.check.reference import NotApplicable, OpRaised
from retrograd.check.schema import Case
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext

_FACTOR = 1.5  # what a result is multiplied by in place


def _values(outputs: Outputs) -> dict[str, torch.Tensor]:
    return {name: as_real(t.detach()) for name, t in {**outputs.inexact, **outputs.exact}.items()}


def _without_grad(context: StageContext, case: Case, alone: OpRun, out: CaseOutcome) -> None:
    """The forward where nobody wants a gradient: another path of the op, often."""
    modes: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "under torch.no_grad": torch.no_grad,
        "under torch.inference_mode": torch.inference_mode,
    }
    for label, mode in modes.items():
        try:
            with without_traces(context.spec.fn), mode():
                results = _values(context.runner.call(case, context.runner.inputs(case)))
        except OpRaised as error:
            out.find("raises", f"{label} {error}", case)
            continue
        outs = {name: t.clone() for name, t in results.items() if name in alone.outs}
        run = OpRun(outs, {}, alone.inputs, [], {n: t.clone() for n, t in results.items() if n in alone.exact})
        if name := context.judge.changed(case, run, OpRun(alone.outs, {}, alone.inputs, [], alone.exact)):
            message = f"{name} is another {label} than where gradients are wanted"
            if _by_rounding(context, run, alone):
                out.notes.append(f"{message}, as by another order of sums: a reference would say what is right")
            else:
                out.find("without-grad", message, case, name)
        if out.findings:
            return


def _by_rounding(context: StageContext, got: OpRun, want: OpRun) -> bool:
    """Whether results differ as two kernels for one thing may, of an op that promises no bits and has no reference."""
    if context.spec.reference is not None or context.spec.deterministic or got.exact.keys() != want.exact.keys():
        return False
    pairs = [(t, want.outs[name]) for name, t in got.outs.items()]
    return all(torch.equal(t, want.exact[name]) for name, t in got.exact.items()) and all(
        a.shape == b.shape and bool(((a - b).abs() <= tolerance.another_path(b, tf32=context.runner.tf32)).all())
        for a, b in pairs
    )


def _in_thread(context: StageContext, case: Case, alone: OpRun, out: CaseOutcome) -> None:
    """Forward and backward in a thread of their own, as data loaders and pipelines call."""
    runs: list[OpRun] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            runs.append(context.runner.run(case))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors and not isinstance(errors[0], OpRaised):
        raise errors[0]
    if errors:
        out.find("thread", f"in a thread that is not the main one {errors[0]}", case)
    elif name := context.judge.changed(case, runs[0], alone):
        out.find("thread", f"{name} is another in a thread that is not the main one", case, name)


def _one_tensor_twice(context: StageContext, case: Case, alone: OpRun, out: CaseOutcome) -> None:
    """Two inputs of one shape and dtype are one tensor: its gradient is the sum of both, which have one constraint."""
    names, keeps = list(alone.inputs), constraints.constrained(context.spec)
    tensors = {n: t for n, t in alone.inputs.items() if f"grad {n}" in alone.grads}
    pairs = ((a, b) for a in tensors for b in tensors if names.index(a) < names.index(b))
    kinds = {n: (t.shape, t.dtype, keeps.get(n)) for n, t in tensors.items()}
    alike = [(a, b) for a, b in pairs if kinds[a] == kinds[b]]
    for first, second in alike[:1]:
        try:
            want = _with_equal(context, case, first, second, torch.clone)
            got = _with_equal(context, case, first, second, lambda t: t)
        except OpRaised:
            return  # it refuses them, or values that are alike
        a, b = parts = [want.grads[f"grad {n}"] for n in (first, second)]
        total = b if a is None else a if b is None else a + b
        label = f"grad {first}"
        now, before = {**got.outs, label: got.grads[label]}, {**want.outs, label: total}
        left = {label: (sum(map(_largest, parts)), _left(context, case, first, second, parts))}
        if name := context.judge.clearly_changed(now, before, left):
            problem = f"is another when `{first}` and `{second}` are one tensor than when they are equal ones"
            out.find("one-tensor", f"{name} {problem}", case, name)


def _with_equal(
    context: StageContext, case: Case, first: str, second: str, copy: Callable[[torch.Tensor], torch.Tensor]
) -> OpRun:
    inputs = context.runner.inputs(case)
    inputs[second] = copy(inputs[first])
    return context.runner.forward(case, inputs=inputs).backward()


def _largest(grad: torch.Tensor | None) -> float:
    return 0.0 if grad is None or not grad.numel() else float(grad.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())


def _left(context: StageContext, case: Case, first: str, second: str, parts: list[torch.Tensor | None]) -> float:
    """What terms that cancel may leave of two gradients, as at an optimum: what a step away from it changes them by."""

    def beside(t: torch.Tensor) -> torch.Tensor:
        sides = 1 - 2 * (torch.arange(t.numel(), device=t.device) % 2)  # a function may not notice a step to one
        return t * (1 + tolerance.first_half(case.dtype) * sides.reshape(t.shape))

    try:
        moved = _with_equal(context, case, first, second, beside)
    except OpRaised:  # beyond its domain
        return 0.0
    pairs = zip(parts, (moved.grads[f"grad {n}"] for n in (first, second)), strict=True)
    return sum(_largest(after - before) for before, after in pairs if before is not None and after is not None)


def _result_changed(context: StageContext, case: Case, alone: OpRun, out: CaseOutcome) -> None:
    """A result that is changed in place before the backward: autograd refuses, or the gradient follows."""
    forward = context.runner.forward(case)
    if any(isinstance(t, torch.Tensor) and t is o for t in forward.inputs.values() for o in forward.outs):
        return
    gs = [g.clone() for g in forward.grad_outs]
    try:
        changed = {n: t.mul_(_FACTOR) if t.requires_grad else t for n, t in forward.results.inexact.items()}
        forward.results = Outputs(changed, forward.results.exact, forward.results.other)
        got = forward.backward()
    except (OpRaised, RuntimeError):
        return  # what the version counter of autograd is for
    want = context.runner.run(case, grad_outs=[g * _FACTOR for g in gs])
    if name := context.judge.clearly_changed(got.grads, want.grads):
        problem = (
            "is silently wrong when the result is changed in place before the backward, which uses it: "
            "save it with ctx.save_for_backward so that autograd raises"
        )
        out.find("result-changed", f"{name} {problem}", case, name)


def _under_autocast(context: StageContext, case: Case, alone: OpRun, out: CaseOutcome) -> None:
    """Under autocast operators inside may take bfloat16, no more: gradients keep their dtype and half of its digits."""
    kind = torch.device(context.runner.device).type
    if case.dtype != "float32":
        return
    try:
        with torch.autocast(kind, torch.bfloat16):
            forward = context.runner.forward(case)
        got = forward.backward()
    except OpRaised as error:
        out.notes.append(f"refuses torch.autocast: {str(error).splitlines()[0]}")
        return
    for name, grad in got.grads.items():
        want = alone.grads[name]
        if grad is None or want is None:
            continue
        if grad.dtype != want.dtype:
            problem = f"has dtype {grad.dtype} under torch.autocast, {want.dtype} without"
            out.find("autocast", f"{name} {problem}", case, name)
        elif bool((want.isfinite() & ~grad.isfinite()).any()):
            out.find("autocast", f"{name} is not finite under torch.autocast", case, name)


def check(context: StageContext, case: Case) -> CaseOutcome:
    """Some eight runs, each beside the ordinary one."""
    out = CaseOutcome(power_text="exact where bits are promised, else what the truth shows")
    alone = context.runner.run(case)
    parts: list[Callable[[StageContext, Case, OpRun, CaseOutcome], None]] = [
        _without_grad, _one_tensor_twice, _result_changed, _in_thread, _under_autocast,
    ]  # fmt: skip
    for part in shard(context, parts, "ways of calling"):
        try:
            part(context, case, alone, out)
        except NotApplicable:
            continue
    return out


STAGE = Stage(
    "calls", "without grad, in threads, in place: the same", 22, check, after=("contract",), shrinks=False,
)  # fmt: skip
