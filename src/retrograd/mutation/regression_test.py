"""Tests that would have noticed a mutant, as text to be pasted: in plain PyTorch, and with `rg.assert_backward`.

A text is shown once it has run here: it passes with the original in place, and fails with the mutant. What launches
kernels of Triton is imported and called inside `rg.cpu_triton`, since inputs are on the CPU.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from retrograd.check.asserts import assert_backward
from retrograd.check.cpu_kernels import executed
from retrograd.check.op_runner import OpRunner
from retrograd.check.reference import NotApplicable, OpRaised
from retrograd.check.schema import Case
from retrograd.check.spec import OpSpec
from retrograd.compat.triton_launch import around_launches
from retrograd.errors import RetrogradError
from retrograd.mutation.search import TriedInput

_LITERAL = 64  # elements of a tensor that is written out; a larger one is drawn
_FLOATS = "[out for out in {} if out.requires_grad]"
_SEEDS = 8  # of grad_out, tried in turn: at some the difference may hide below the tolerance


def verified_tests(
    runner: OpRunner, trial: TriedInput, name: str, original: Callable[[], AbstractContextManager[None]]
) -> str:
    """Test functions of a trial's inputs that fail now and pass in the context `original`; "" if none does.

    Args:
        runner: of the op in the dtype of the case.
        trial: the case, whose layouts are told in a comment, and the inputs that want a gradient.
        name: of the mutant.
        original: in which the mutant is not in place.
    """
    tests: list[str] = []
    kernels = _launches(runner, trial.case)
    for plain in (True, False):
        texts = (text_of(runner, trial, name, plain, seed, kernels) for seed in range(_SEEDS))
        failing = (text for text in texts if not _passes(text, runner.spec))
        for text in failing:
            with original():
                passes = _passes(text, runner.spec)
            if passes:
                tests.append(text)
                break
    return "\n\n\n".join(["\n".join(_imports(runner.spec, kernels)), *tests]) if tests else ""


def _launches(runner: OpRunner, case: Case) -> bool:
    """Whether the op launches kernels of Triton at a case."""
    names: list[str] = []

    def launched(launch: Any, proceed: Callable[..., Any]) -> Any:
        names.append(launch.function.__name__)
        return proceed()

    raising = contextlib.suppress(OpRaised, NotApplicable, RetrogradError)
    with executed("cpu"), around_launches(launched), raising:
        runner.run(case)
    return bool(names)


def _passes(text: str, spec: OpSpec) -> bool:
    from retrograd.ttir.launch import cpu_triton

    scope = {"torch": torch, "fn": spec.fn, "reference": spec.reference}
    scope["rg"] = SimpleNamespace(assert_backward=assert_backward, cpu_triton=cpu_triton)
    defined: dict[str, Any] = {}
    try:
        with executed("cpu", {}), torch.random.fork_rng([]):
            exec(text, scope, defined)
            (test,) = defined.values()
            test()
    except Exception:
        return False
    return True


def _imports(spec: OpSpec, kernels: bool) -> Iterator[str]:
    """Lines that a file of the tests begins with; a library of `kernels` may decide where it runs as it is imported."""
    yield from ("import retrograd as rg", "import torch")
    if kernels:
        yield from ("", "with rg.cpu_triton():", *(f"    {line}" for line in _imported(spec)))
    else:
        yield from _imported(spec)


def _imported(spec: OpSpec) -> Iterator[str]:
    unnamed = []
    for name, function in {"fn": spec.fn, "reference": spec.reference}.items():
        path = str(getattr(function, "__qualname__", "<"))
        module = sys.modules.get(str(getattr(function, "__module__", "")))
        if path.isidentifier() and module and getattr(module, path, None) is function:
            yield _import(module, path, name)
        else:
            unnamed.append(f"{name} = spec.{name}")
    if unnamed:
        modules = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
        every = ((m, key, v) for m in modules for key, v in list(vars(m).items()) if isinstance(v, OpSpec))
        # Its op stands in for itself where operations of the backward are mutated.
        where = next(((m, k) for m, k, v in every if v.name == spec.name and v.reference is spec.reference), None)
        yield _import(*where, "spec") if where else f"# the spec {spec.name}"
        yield from unnamed


def _import(module: ModuleType, path: str, name: str) -> str:
    # A file that was named by its path is a module of another name here.
    place = Path(module.__file__ or "").stem if module.__name__.startswith("_retrograd") else module.__name__
    return f"from {place} import {path}" + (f" as {name}" if path != name else "")


def text_of(
    runner: OpRunner, trial: TriedInput, name: str, plain: bool = True, seed: int = 0, kernels: bool = False
) -> str:
    """A test of a trial; arguments as of `verified_tests`, `plain` without retrograd, `seed` of what is drawn."""
    case = trial.case
    inputs = runner.inputs(case)
    row = ", ".join(inputs)
    names = [n for n in runner.differentiable(case) if trial.only is None or n in trial.only]
    params = "".join(f", {key}={value!r}" for key, value in case.params)
    returned = runner.reference(case).outputs()
    several = len(returned.inexact) + len(returned.exact) + len(returned.other) > 1
    title = re.sub(r"[^0-9a-z]+", "_", name.lower()).strip("_") + ("" if plain else "_by_attainable_error")
    lines = [f"def test_{title}():", f"    torch.manual_seed({seed})"]
    lines += [f"    # {key} is {layout} in memory" for key, layout in case.layouts]
    lines += [f"    {key} = {_value(value, key in names)}" for key, value in inputs.items()]
    calls = [
        f"    outs = {_outputs(f'fn({row}{params})', several)}",
        f"    floats = {_FLOATS.format('outs')}",
        "    grad_outs = [torch.randn_like(out) for out in floats]",
        "    grads = torch.autograd.grad(floats, wanted, grad_outs)",
    ]
    lines.append(f"    wanted = [{', '.join(names)}]")
    lines += ["    with rg.cpu_triton():", *(f"    {line}" for line in calls)] if kernels else calls
    if plain:
        exact = ", ".join(f"{n}_" if n in names else n for n in inputs)
        return "\n".join([
            *lines,
            "    exact = [t.detach().double().requires_grad_() for t in wanted]",
            f"    {', '.join(f'{n}_' for n in names)}{',' * (len(names) == 1)} = exact",
            f"    true = {_outputs(f'reference({exact}{params})', several)}",
            f"    true_grads = torch.autograd.grad({_FLOATS.format('true')}, exact, [g.double() for g in grad_outs])",
            "    for got, want in zip((*outs, *grads), (*true, *true_grads), strict=True):",
            "        torch.testing.assert_close(got, want.to(got.dtype))",
        ])  # fmt: skip
    tensors = f"dict({', '.join(f'{n}={n}' for n in inputs)}), grad_outs, grads=dict(zip({names}, grads)), out=floats"
    params += f", compute={runner.spec.compute!r}" if runner.spec.compute else ""
    return "\n".join([*lines, f"    rg.assert_backward(reference, {tensors}{params})"])


def _outputs(call: str, several: bool) -> str:
    return call if several else f"({call},)"


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
