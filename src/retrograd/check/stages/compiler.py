"""compiler: what torch.compile, fake tensors and torch.func make of the op is what eager makes of it.

Custom operators that the op calls are looked at whatever it declares: an operator whose schema or fake lies is wrong
for whoever compiles a model around it. Compiling and transforming is tried where the op says that it can
(`transforms=`), with the same random grad_out as everywhere: a loss of `out.sum()` hides what depends on grad_out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from retrograd.check import cpu_kernels, forward_mode
from retrograd.check.op_runner import OpRun
from retrograd.check.outputs import Outputs, as_real
from retrograd.check.own_mistakes import calls_theirs, is_own_mistake, may_refuse
from retrograd.check.reference import OpRaised
from retrograd.check.schema import Case
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext
from retrograd.compat.torch_dispatch import EagerMode, resolved, tree_leaves, tree_map
from retrograd.compat.torch_opcheck import agrees

_TORCH = ("aten", "prims", "prim", "c10d", "_c10d_functional", "inductor", "higher_order")
_BACKENDS = {"compile": "aot_eager", "inductor": "inductor"}
_TESTS = {"test_schema": "schema", "test_faketensor": "fake"}


class Calls(EagerMode):
    """Keeps the arguments of the first call of each custom operator."""

    supports_higher_order_operators = True  # which have a namespace too, that is torch's own

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    @resolved
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in _TORCH and func not in self.first:
            copy = lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t  # noqa: E731
            self.first[func] = tree_map(copy, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _operators(context: StageContext, case: Case, out: CaseOutcome) -> int:
    """Schema and fake of every custom operator in forward and backward, with the arguments it really gets."""
    gs = context.runner.grad_outs(case)
    with Calls() as calls:
        context.runner.run(case, grad_outs=gs)
    for func, (args, kwargs) in calls.first.items():
        with warnings.catch_warnings(), cpu_kernels.pretended(context.spec.fn):  # what launches inside asks for a GPU
            warnings.simplefilter("ignore")
            if context.level == "quick" and agrees(func, args, kwargs):
                continue
            results = torch.library.opcheck(func, args, kwargs, test_utils=tuple(_TESTS), raise_exception=False)
        for test, result in results.items():
            if isinstance(result, Exception):
                line = next((text for text in str(result).splitlines() if text.strip()), type(result).__name__)
                message = f"operator {func} fails {test} of torch.library.opcheck: {line.strip()}"
                out.find(_TESTS.get(test, "operator"), message, case, str(func))
        if not any(f.tensor == str(func) for f in out.findings) and (difference := _strides(func, args, kwargs)):
            out.find("fake", f"operator {func} has another fake than kernel: {difference}", case, str(func))
    return len(calls.first)


def _strides(func: Any, args: Any, kwargs: Any) -> str:
    """Which result of an operator has other strides than its fake says, which opcheck of PyTorch 2.11 leaves out."""
    faked = None
    with may_refuse(), FakeTensorMode() as mode:  # its shapes depend on data; opcheck has told what else may be wrong
        fake = lambda t: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t  # noqa: E731
        faked = func(*tree_map(fake, args), **tree_map(fake, kwargs))
    if faked is None:
        return ""
    copy = lambda t: t.clone() if isinstance(t, torch.Tensor) else t  # noqa: E731
    got = func(*tree_map(copy, args), **tree_map(copy, kwargs))
    for i, (a, b) in enumerate(zip(tree_leaves(got), tree_leaves(faked), strict=True)):
        # Of one element, and along a dimension of one, strides mean nothing.
        if isinstance(a, torch.Tensor) and a.numel() > 1 and _steps(a) != _steps(b):
            return f"result {i} has strides {a.stride()}, its fake {tuple(b.stride())}"
    return ""


def _steps(t: torch.Tensor) -> list[int]:
    return [int(step) for size, step in zip(t.shape, t.stride(), strict=True) if size > 1]


def _compare(context: StageContext, case: Case, run: OpRun, eager: OpRun, how: str, out: CaseOutcome) -> None:
    """What `how` gives must be eager's bits, or as right as eager must be: compilers may reorder."""
    name = run.first_difference(eager)
    if not name:
        return
    got, want = run.tensors[name], eager.tensors[name]
    if got is None or want is None or got.shape != want.shape or got.dtype != want.dtype:
        forms = [None if t is None else (tuple(t.shape), t.dtype) for t in (got, want)]
        out.find("form", f"{name} is {forms[0]} {how}, {forms[1]} in eager", case, name)
        return
    if context.spec.reference is None:
        out.notes.append(
            f"{name} has other bits {how} than in eager; without a reference nobody can say which is right"
        )
        return
    for finding in context.judge.against_truth(case, run)[0]:
        out.findings.append(replace(finding, kind=how.split()[-1], what=f"{how}: {finding.what}"))


def _compiled(context: StageContext, case: Case, eager: OpRun, backend: str, out: CaseOutcome) -> None:
    how = f"with torch.compile(fullgraph=True, backend={backend!r})"
    torch.compiler.reset()
    try:
        # An op that launches kernels is told of a GPU all the same, as its launchers ask for one.
        with warnings.catch_warnings(), nullcontext() if context.emulated() else cpu_kernels.without_pretending():
            warnings.simplefilter("ignore")
            fn = torch.compile(context.spec.fn, backend=backend, fullgraph=True)
            run = replace(context.runner, spec=replace(context.spec, fn=fn)).run(case)
    except OpRaised as error:
        line = str(error).strip().splitlines()[0]
        out.find("raises", f"{how}: {line}", case)
        return
    finally:
        torch.compiler.reset()
    _compare(context, case, run, eager, how, out)


def _vjp(call: Callable[..., Any], leaves: list[torch.Tensor], gs: list[torch.Tensor]) -> tuple[Any, Any]:
    outs, pull = torch.func.vjp(call, *leaves)[:2]
    return outs, pull(tuple(gs))


def _vmap(call: Callable[..., Any], leaves: list[torch.Tensor], gs: list[torch.Tensor]) -> tuple[Any, Any]:
    outs = torch.func.vmap(call)(*leaves)
    grads = torch.autograd.grad(outs, leaves, gs, allow_unused=True)
    return [t[0].detach() for t in outs], [None if g is None else g[0] for g in grads]


def _batched(call: Callable[..., Any], leaves: list[torch.Tensor], gs: list[torch.Tensor]) -> tuple[Any, Any]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    outs = call(*leaves)
    pairs = [(out, torch.stack([g, g.flip(0) if g.ndim else -g])) for out, g in zip(outs, gs, strict=True)]
    roots, batches = zip(*((out, batch) for out, batch in pairs if out.requires_grad), strict=True)
    grads = torch.autograd.grad(roots, leaves, batches, is_grads_batched=True, allow_unused=True)
    return [out.detach() for out in outs], [None if g is None else g[0] for g in grads]


_WAYS = {"vjp": _vjp, "vmap": _vmap, "batched_grad": _batched}


def _transformed(context: StageContext, case: Case, eager: OpRun, transform: str, out: CaseOutcome) -> None:
    """torch.func.vjp with the case's grad_out, or vmap over two draws, of which the first must be what eager gives."""
    runner, spec = context.runner, context.spec
    how = (
        "with torch.autograd.grad(is_grads_batched=True)"
        if transform == "batched_grad"
        else f"with torch.func.{transform}"
    )
    inputs, names, gs = runner.inputs(case), runner.differentiable(case), eager.grad_outs
    leaves = [inputs[name] for name in names]
    if transform == "vmap":
        other = case.but(draw=case.draw + 1)
        others = runner.inputs(other)
        leaves = [torch.stack([inputs[name], others[name]]).requires_grad_() for name in names]
        gs = [torch.stack(pair) for pair in zip(runner.grad_outs(case), runner.grad_outs(other), strict=True)]

    @calls_theirs
    def call(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = spec.fn(*{**inputs, **dict(zip(names, leaves, strict=True))}.values(), **dict(case.params))
        return tuple(Outputs.of(result, spec, "fn").inexact.values())

    try:
        outs, grads = _WAYS[transform](call, leaves, gs)
    except Exception as error:
        if is_own_mistake(error):
            raise
        out.find("raises", f"{how}: {type(error).__name__}: {str(error).splitlines()[0]}", case)
        return
    named = {f"grad {name}": grad for name, grad in zip(names, grads, strict=True)}
    named = {name: None if grad is None else as_real(grad) for name, grad in named.items()}
    outs = [as_real(out) for out in outs]
    run = OpRun(dict(zip(eager.outs, outs, strict=True)), named, eager.inputs, eager.grad_outs, eager.exact)
    _compare(context, case, run, eager, how, out)


def check(context: StageContext, case: Case) -> CaseOutcome:
    """Custom operators always, the rest as declared; at level quick those operators are not compiled."""
    out = CaseOutcome()
    count = _operators(context, case, out)
    declared = context.spec.transforms
    if count and context.level == "quick":
        # Of a custom operator the compiler sees schema and fake, which were just looked at; to compile takes a second.
        declared = tuple(name for name in declared if name not in _BACKENDS)
    graph = context.runner.forward(case)
    gs = [g.clone() for g in graph.grad_outs]  # the backward may overwrite them
    eager = replace(graph.backward(), grad_outs=gs)
    for name in declared:
        if name in _BACKENDS:
            _compiled(context, case, eager, _BACKENDS[name], out)
        elif name == "jvp":
            forward_mode.check(context, case, out)
        else:
            _transformed(context, case, eager, name, out)
    parts = [f"{count} custom operator{'s' if count != 1 else ''}"] if count else []
    out.power_text = ", ".join([*parts, *declared]) or "no custom operator; declares nothing (transforms=)"
    out.power = 0.0 if parts or declared else None
    return out


def _cases(context: StageContext) -> list[Case]:
    """The ordinary case in the first dtype."""
    return [context.base] if context.runner.dtype == context.spec.dtypes[0] else []


STAGE = Stage(
    "compiler", "the same compiled and transformed", 95, check, _cases,
    after=("contract",), shrinks=False,
)  # fmt: skip
