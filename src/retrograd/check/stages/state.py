"""state: what one call leaves behind must not reach another: second calls, other parameters, two graphs alive at once.

Everything is compared with a call that ran alone: bit for bit where the op promises its bits, else by the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from retrograd.check import inputs as make
from retrograd.check.case_sharding import share
from retrograd.check.op_runner import Graph, NotApplicable, OpRaised, Trial, Workbench
from retrograd.check.repeatability import another, apart
from retrograd.check.schema import Case, Finding
from retrograd.check.stages._base import Outcome, Stage

_ID = "state"
_CYCLES = 100_000_000  # 50 ms on a GPU: longer than Python takes for a forward and a backward
_STEP = 0.75  # what an input is multiplied by: changes every value but zero, and leaves no range around zero


def _found(bench: Workbench, case: Case, kind: str, name: str, said: str) -> Finding:
    return bench.finding(_ID, kind, f"{name} {said}", case, tensor=name)


def _others(bench: Workbench, case: Case) -> Iterator[tuple[str, Case]]:
    """Calls that may disturb: other data, each other combination of parameters, each other dtype of the spec."""
    yield "other data", case.but(draw=case.draw + 1)
    for other in make.param_cases(bench.spec, case):
        if other.params != case.params:
            yield other.but(sizes=()).text(), other
    for dtype in bench.spec.dtypes:
        if dtype != case.dtype:
            yield dtype, case.but(dtype=dtype)


def _between_calls(bench: Workbench, case: Case, alone: Trial, out: Outcome) -> None:
    """A, B, A: the second A must be the first, and B must leave alone what the first A returned."""
    for label, other in _others(bench, case):
        kept = alone.copy()
        try:
            bench.run(other)
        except (OpRaised, NotApplicable):
            continue  # what this other call does is for the stages that are about it
        if name := alone.same_bits(kept):
            said = f"of a call is overwritten by the next call ({label}): it is a buffer that the op keeps"
            out.findings.append(_found(bench, case, "kept-buffer", name, said))
            return
        if name := another(bench, _ID, case, bench.run(case), kept):
            said = f"is not what it was before a call with {label}"
            out.findings.append(_found(bench, case, "carried-over", name, said))
            return


def _twice(bench: Workbench, case: Case, alone: Trial, out: Outcome) -> None:
    """Two backwards over one graph, as `retain_graph=True` promises."""
    graph = bench.open(case)
    again = [g.clone() for g in graph.grad_outs]
    first = graph.backward()
    kept = first.copy()
    graph.grad_outs = again  # the first backward may have overwritten its own, which another stage tells
    try:
        second = graph.backward()
    except OpRaised as error:
        what = f"a second backward over the same graph (retain_graph=True) fails: {error}"
        out.findings.append(bench.finding(_ID, "second-backward", what, case))
        return
    if name := first.same_bits(kept):
        said = "of the first backward is overwritten by a second one over the same graph"
        out.findings.append(_found(bench, case, "kept-buffer", name, said))
    elif name := another(bench, _ID, case, second, alone):
        said = "is another at a second backward over the same graph (retain_graph=True)"
        out.findings.append(_found(bench, case, "second-backward", name, said))


def _two_graphs(bench: Workbench, case: Case, alone: Trial, out: Outcome) -> None:
    """Two forwards, then two backwards, in either order."""
    params = make.param_cases(bench.spec, case)[-1].params
    other = case.but(draw=case.draw + 1, params=params)
    try:
        other_alone = bench.run(other)
    except NotApplicable:
        return
    for order in ("first", "last"):
        graph, beside = bench.open(case), bench.open(other)
        trials = {}
        for it in (graph, beside) if order == "first" else (beside, graph):
            trials[it is graph] = it.backward()
        for is_graph, which, want in ((True, case, alone), (False, other, other_alone)):
            if name := another(bench, _ID, which, trials[is_graph], want):
                said = f"is another when two graphs are alive and the {order} one's backward runs first"
                out.findings.append(_found(bench, case, "two-graphs", name, said))
                return


def _updated(bench: Workbench, case: Case, out: Outcome) -> None:
    """An input changed in place between two calls, as an optimizer does, counts like a new tensor."""
    names, note = share(bench, make.differentiable(bench.spec, bench.inputs(case)), "inputs that are updated in place")
    out.notes += [note] * bool(note)
    for name in names:
        fresh, inputs = bench.inputs(case), bench.inputs(case)
        fresh[name] = fresh[name] * _STEP
        try:
            want = bench.open(case, inputs=fresh).backward()
        except OpRaised:
            continue  # the op refuses such values, which is no matter of state
        bench.open(case, inputs=inputs).backward()
        with torch.no_grad():
            inputs[name].mul_(_STEP)
        if odd := apart(bench, bench.open(case, inputs=inputs).backward().tensors, want.tensors):
            said = f"does not follow `{name}` when that is updated in place between two calls: a copy of it is kept"
            out.findings.append(_found(bench, case, "stale-copy", odd, said))


def _late(bench: Workbench, case: Case, where: torch.device, stream: torch.cuda.Stream) -> Graph:
    """A forward whose inputs and grad_out are written on a stream behind a slow kernel: NaN to who does not wait."""
    sources = [*bench.inputs(case).items(), *enumerate(bench.grad_outs(case))]
    ready = {k: v.to(where) for k, v in sources if isinstance(v, torch.Tensor)}
    given: dict[Any, Any] = dict(sources)
    for name, t in ready.items():
        given[name] = torch.full_like(t, float("nan")) if t.is_floating_point() else torch.zeros_like(t)
    torch.cuda.synchronize(where)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_CYCLES)
        for name, t in ready.items():
            given[name].copy_(t)
    gs = [t for name, t in given.items() if isinstance(name, int)]
    return bench.open(case, inputs={n: v for n, v in given.items() if not isinstance(n, int)}, grad_outs=gs)


def _on_stream(bench: Workbench, case: Case, alone: Trial, out: Outcome) -> None:
    """The same on a stream of its own: what is not ordered by it reads its inputs too early."""
    device = alone.grad_outs[0].device if alone.grad_outs else torch.device(bench.device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        got = _late(bench, case, device, stream).backward()
    torch.cuda.synchronize(device)
    if name := another(bench, _ID, case, got, alone):
        out.findings.append(_found(bench, case, "stream", name, "is another on a stream that is not the default one"))


def _on_device(bench: Workbench, case: Case, alone: Trial, out: Outcome) -> None:
    """The same on another GPU while this one is current, then here again."""
    here = torch.device(bench.device).index or 0
    there = torch.device("cuda", (here + 1) % torch.cuda.device_count())
    stream = torch.cuda.current_stream(there)
    try:
        with torch.cuda.device(here):
            # The stream's own context makes its device current; the op is called outside of it.
            far = _late(bench, case, there, stream).backward()
    except OpRaised as error:
        what = f"on {there}, while another device is current, {error}"
        out.findings.append(bench.finding(_ID, "device", what, case))
        return
    torch.cuda.synchronize(there)
    torch.cuda.synchronize(here)
    near = {k: None if t is None else t.to(bench.device) for k, t in far.tensors.items()}
    outs = {k: near[k] for k in far.outs}
    moved = Trial(outs, {k: near[k] for k in far.grads}, alone.inputs, alone.grad_outs)  # type: ignore[arg-type]
    for said, trial in ((f"is another on {there}", moved), (f"is another after a call on {there}", bench.run(case))):
        if name := another(bench, _ID, case, trial, alone):
            out.findings.append(_found(bench, case, "device", name, said))
            return


def check(bench: Workbench, case: Case) -> Outcome:
    """About a dozen runs; a carried-over result in one of the parts does not stop the others."""
    out = Outcome(power_text="exact: any bit carried from one call into another")
    alone = bench.run(case)
    parts: list[Callable[[Workbench, Case, Trial, Outcome], None]] = [_between_calls, _twice, _two_graphs]
    if bench.interpreted:
        parts, note = share(bench, parts, "second calls, second backwards and two graphs at once")
        out.notes += [note] * bool(note)
    if torch.device(bench.device).type == "cuda":
        parts += [_on_stream] + ([_on_device] if torch.cuda.device_count() > 1 else [])
    for part in parts:
        part(bench, case, alone, out)
    _updated(bench, case, out)
    return out


STAGE = Stage(_ID, "no call leaves a trace in another", 75, lambda b: [b.base], check, after=("contract",))
