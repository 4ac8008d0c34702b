"""state: what one call leaves behind must not reach another: second calls, other parameters, two graphs alive at once.

Everything is compared with a call that ran alone: bit for bit where the op promises its bits, else by the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from retrograd.check import inputs as make
from retrograd.check.case_sharding import shard
from retrograd.check.op_runner import ForwardPass, OpRun, same_bits
from retrograd.check.outputs import inexact
from retrograd.check.reference import NotApplicable, OpRaised
from retrograd.check.schema import Case
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext
from retrograd.compat.torch_cuda import keep_busy

_CYCLES = 100_000_000  # 50 ms on a GPU: longer than Python takes for a forward and a backward
_STEP = 0.75  # what an input is multiplied by: changes every value but zero, and leaves no range around zero


def _others(context: StageContext, case: Case) -> Iterator[tuple[str, Case]]:
    """Calls that may disturb: other data, each other combination of parameters, each other dtype of the spec."""
    yield "other data", case.but(draw=case.draw + 1)
    for other in make.param_cases(context.spec, case):
        if other.params != case.params:
            yield other.but(sizes=()).text(), other
    for dtype in context.spec.dtypes:
        if dtype != case.dtype:
            yield dtype, case.but(dtype=dtype)


def _between_calls(context: StageContext, case: Case, alone: OpRun, out: CaseOutcome) -> None:
    """A, B, A: the second A must be the first, and B must leave alone what the first A returned."""
    for label, other in _others(context, case):
        kept = alone.copy()
        try:
            context.runner.run(other)
        except (OpRaised, NotApplicable):
            continue  # what this other call does is for the stages that are about it
        if name := alone.first_difference(kept):
            problem = f"of a call is overwritten by the next call ({label}): it is a buffer that the op keeps"
            out.find("kept-buffer", f"{name} {problem}", case, name)
            return
        if name := context.judge.changed(case, context.runner.run(case), kept):
            out.find("carried-over", f"{name} is not what it was before a call with {label}", case, name)
            return


def _twice(context: StageContext, case: Case, alone: OpRun, out: CaseOutcome) -> None:
    """Two backwards over one graph, as `retain_graph=True` promises."""
    graph = context.runner.forward(case)
    again = [g.clone() for g in graph.grad_outs]
    first = graph.backward()
    kept = first.copy()
    graph.grad_outs = again  # the first backward may have overwritten its own, which another stage tells
    try:
        second = graph.backward()
    except OpRaised as error:
        out.find("second-backward", f"a second backward over the same graph (retain_graph=True) fails: {error}", case)
        return
    if name := first.first_difference(kept):
        problem = "of the first backward is overwritten by a second one over the same graph"
        out.find("kept-buffer", f"{name} {problem}", case, name)
    elif name := context.judge.changed(case, second, alone):
        problem = "is another at a second backward over the same graph (retain_graph=True)"
        out.find("second-backward", f"{name} {problem}", case, name)


def _two_graphs(context: StageContext, case: Case, alone: OpRun, out: CaseOutcome) -> None:
    """Two forwards, then two backwards, in either order."""
    other = make.param_cases(context.spec, case)[-1].but(draw=case.draw + 1)
    try:
        other_alone = context.runner.run(other)
    except NotApplicable:
        return
    for order in ("first", "last"):
        graph, beside = context.runner.forward(case), context.runner.forward(other)
        runs = {}
        for forward in (graph, beside) if order == "first" else (beside, graph):
            runs[forward is graph] = forward.backward()
        for is_graph, which, want in ((True, case, alone), (False, other, other_alone)):
            if name := context.judge.changed(which, runs[is_graph], want):
                problem = f"is another when two graphs are alive and the {order} one's backward runs first"
                out.find("two-graphs", f"{name} {problem}", case, name)
                return


def _updated(context: StageContext, case: Case, out: CaseOutcome) -> None:
    """An input changed in place between two calls, as an optimizer does, counts like a new tensor."""
    for name in shard(context, context.runner.differentiable(case), "inputs that are updated in place"):
        fresh, inputs = context.runner.inputs(case), context.runner.inputs(case)
        fresh[name] = fresh[name] * _STEP
        kept = {key: value.detach().clone() for key, value in fresh.items() if isinstance(value, torch.Tensor)}
        try:
            want = context.runner.forward(case, inputs=fresh).backward()
        except OpRaised:
            continue  # the op refuses such values, which is no matter of state
        context.runner.forward(case, inputs=inputs).backward()
        with torch.no_grad():
            for other, value in kept.items():  # what the op has overwritten itself is for another stage to tell
                if not same_bits(inputs[other].detach(), value):
                    inputs[other].copy_(value)
        got = context.runner.forward(case, inputs=inputs).backward()
        if changed := context.judge.clearly_changed(got.tensors, want.tensors):
            problem = f"does not follow `{name}` when that is updated in place between two calls: a copy of it is kept"
            out.find("stale-copy", f"{changed} {problem}", case, changed)


def _late(context: StageContext, case: Case, where: torch.device, stream: torch.cuda.Stream) -> ForwardPass:
    """A forward whose inputs and grad_out are written on a stream behind a slow kernel: NaN to who does not wait."""
    sources = [*context.runner.inputs(case).items(), *enumerate(context.runner.grad_outs(case))]
    ready = {k: v.to(where) for k, v in sources if isinstance(v, torch.Tensor)}
    late: dict[Any, Any] = dict(sources)
    for name, t in ready.items():
        late[name] = torch.full_like(t, float("nan")) if inexact(t) else torch.zeros_like(t)
    torch.cuda.synchronize(where)
    with torch.cuda.stream(stream):
        keep_busy(_CYCLES)
        for name, t in ready.items():
            late[name].copy_(t)
    gs = [t for name, t in late.items() if isinstance(name, int)]
    return context.runner.forward(case, inputs={n: v for n, v in late.items() if not isinstance(n, int)}, grad_outs=gs)


def _on_stream(context: StageContext, case: Case, alone: OpRun, out: CaseOutcome) -> None:
    """The same on a stream of its own: what is not ordered by it reads its inputs too early."""
    device = alone.grad_outs[0].device if alone.grad_outs else torch.device(context.runner.device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        got = _late(context, case, device, stream).backward()
    torch.cuda.synchronize(device)
    if name := context.judge.changed(case, got, alone):
        out.find("stream", f"{name} is another on a stream that is not the default one", case, name)


def _on_device(context: StageContext, case: Case, alone: OpRun, out: CaseOutcome) -> None:
    """The same on another GPU while this one is current, then here again."""
    here = torch.device(context.runner.device).index or 0
    there = torch.device("cuda", (here + 1) % torch.cuda.device_count())
    stream = torch.cuda.current_stream(there)
    try:
        with torch.cuda.device(here):
            # The stream's own context makes its device current; the op is called outside of it.
            far = _late(context, case, there, stream).backward()
    except OpRaised as error:
        out.find("device", f"on {there}, while another device is current, {error}", case)
        return
    torch.cuda.synchronize(there)
    torch.cuda.synchronize(here)
    near = {k: None if t is None else t.to(context.runner.device) for k, t in far.tensors.items()}
    outs = {k: near[k] for k in far.outs}
    exact = {k: near[k] for k in far.exact}
    moved = OpRun(outs, {k: near[k] for k in far.grads}, alone.inputs, alone.grad_outs, exact)  # type: ignore[arg-type]
    runs = {f"is another on {there}": moved, f"is another after a call on {there}": context.runner.run(case)}
    for problem, run in runs.items():
        if name := context.judge.changed(case, run, alone):
            out.find("device", f"{name} {problem}", case, name)
            return


def check(context: StageContext, case: Case) -> CaseOutcome:
    """About a dozen runs; a carried-over result in one of the parts does not stop the others."""
    out = CaseOutcome(power_text="exact: any bit carried from one call into another")
    alone = context.runner.run(case)
    parts: list[Callable[[StageContext, Case, OpRun, CaseOutcome], None]] = [_between_calls, _twice, _two_graphs]
    if context.emulated():
        parts = shard(context, parts, "second calls, second backwards and two graphs at once")
    if torch.device(context.runner.device).type == "cuda":
        parts += [_on_stream] + ([_on_device] if torch.cuda.device_count() > 1 else [])
    for part in parts:
        part(context, case, alone, out)
    _updated(context, case, out)
    return out


STAGE = Stage("state", "no call leaves a trace in another", 75, check, after=("contract",))
