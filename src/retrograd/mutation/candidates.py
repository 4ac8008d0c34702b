"""Candidates: every mutant that an op's functions and operations have, and those that a seed draws."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from retrograd.check.calling import Call
from retrograd.check.cpu_kernels import executed
from retrograd.check.op_runner import OpRunner
from retrograd.check.spec import OpSpec
from retrograd.compat import triton_source
from retrograd.core.loading import near
from retrograd.core.wording import some
from retrograd.errors import UsageError
from retrograd.mutation.backward_operations import BackwardOperations
from retrograd.mutation.edits import Edit
from retrograd.mutation.functions import MutationTarget, functions_of, named
from retrograd.mutation.kernel_operations import KernelOperations
from retrograd.mutation.operators import WEIGHTS
from retrograd.mutation.schema import Mutant
from retrograd.ttir.kept_texts import EDITS

SOURCES = ("python", "triton")
LEVELS = (*SOURCES, "ttir", "operation")
AnyTarget = MutationTarget | KernelOperations | BackwardOperations


@dataclass(frozen=True)
class MutantCandidate:
    """A mutant that may be made."""

    target: AnyTarget
    edit: Edit
    mutant: Mutant


def check_levels(levels: Sequence[str], tests: str | None) -> None:
    """UsageError for a level that there is not, or that the tests cannot be given."""
    if isinstance(levels, str) or (unknown := [level for level in levels if level not in LEVELS]):
        raise UsageError(f"`levels` is {levels!r}, expected some of {', '.join(LEVELS)}; unknown: {unknown}")
    if tests and (unseen := [level for level in levels if level not in SOURCES]):
        raise UsageError(
            f"`levels` has {unseen}, which the processes of `tests` cannot be given; leave one of them out"
        )


def targets_of(
    spec: OpSpec, seed: int, functions: Sequence[str], levels: Sequence[str]
) -> tuple[OpSpec, list[AnyTarget]]:
    """What can be mutated of an op, and the spec of the op in which it can."""
    own = [] if set(levels) == {"operation"} else _run_by(spec, seed)
    targets: list[AnyTarget] = [t for t in _named_among(own, functions, spec.name) if t.kind in levels]
    kernels = [t.function for t in own if t.kind == "triton"]
    if "ttir" in levels and kernels:
        targets.append(_kernel_operations(spec, seed, kernels))
    if "operation" in levels:
        spec, operations = _with_operations(spec, seed)
        targets.append(operations)
    return spec, targets


def _named_among(own: Sequence[MutationTarget], names: Sequence[str], op: str) -> list[MutationTarget]:
    """The functions of these names, of those that the op runs or any; all that it runs where no name is given."""
    targets = named(name for name in names if ":" in name)
    known = list(dict.fromkeys(t.name for t in own))
    for name in (n for n in names if ":" not in n):
        if name not in known:
            raise UsageError(
                f"`functions` names {name!r}, which {op} does not run{near(name, known)}; it runs {some(known)}"
            )
    return [*targets, *(t for t in own if not names or t.name in names)]


def _run_by(spec: OpSpec, seed: int) -> list[MutationTarget]:
    """Functions that an ordinary call of the op runs."""
    runner = OpRunner(spec, spec.dtypes[0], seed, "cpu")
    with executed("cpu", None):
        runner.grad_outs(runner.base)  # runs the reference

        def without() -> None:
            if spec.reference is not None:
                runner.reference(runner.base).run(torch.float64)

        return functions_of(lambda: runner.run(runner.base), without)


def _kernel_operations(spec: OpSpec, seed: int, kernels: list[Any]) -> KernelOperations:
    """The operations of the kernels that an ordinary call launches."""
    runner = OpRunner(spec, spec.dtypes[0], seed, "cpu")
    operations = KernelOperations(kernels)
    with executed("cpu", None):
        triton_source.forget(kernels)
        EDITS.append(operations.note)
        try:
            runner.run(runner.base)
        finally:
            EDITS.remove(operations.note)
    return operations


def _with_operations(spec: OpSpec, seed: int) -> tuple[OpSpec, BackwardOperations]:
    """The spec with an op whose backward is watched, and the operations of an ordinary one."""
    call = spec.fn if isinstance(spec.fn, Call) else None
    function = call.fn if call else spec.fn
    if spec.state and isinstance(function, torch.nn.Module):
        function = partial(_of_state, function, spec.state)
    operations = BackwardOperations(function)
    spec = replace(spec, fn=replace(call, fn=operations) if call else operations)
    runner = OpRunner(spec, spec.dtypes[0], seed, "cpu")
    with executed("cpu", None):
        forward = runner.forward(runner.base)
        operations.recorded = recorded = []
        forward.backward()
        operations.recorded = None
    operations.listed = tuple(recorded)
    return spec, operations


def _of_state(module: torch.nn.Module, names: Sequence[str], *args: Any, **keywords: Any) -> Any:
    """A module's result with its parameters and buffers among the keywords, as any function has them."""
    state = {name: keywords.pop(name) for name in names}
    return torch.func.functional_call(module, state, args, keywords)


def candidates_of(
    targets: Sequence[AnyTarget], lines: Callable[[str, int], bool] | None = None
) -> list[MutantCandidate]:
    """Every mutant of these targets, in the order of their places; of chosen lines, if `lines` chooses some."""
    taken = Counter[str]()
    return [
        candidate
        for target in targets
        for edit in target.edits()
        # Described first, so that an id does not depend on the lines that are chosen.
        if (candidate := MutantCandidate(target, edit, _described(target, edit, taken)))
        and (lines is None or lines(target.file, target.line + edit.line))
    ]


def choose(
    spec: OpSpec, targets: Sequence[AnyTarget], count: int, seed: int, lines: Callable[[str, int], bool] | None
) -> tuple[list[MutantCandidate], int]:
    """Mutants in the order of their places, drawn without replacement, and how many there are.

    Raises:
        UsageError: there is none.
    """
    every = candidates_of(targets, lines)
    if not every:
        raise UsageError(
            f"there is nothing to mutate in {spec.name}: {len(targets)} functions with source, none with a change in "
            "the lines asked for; name some with functions=['package.module:f']"
        )
    draw = random.Random(seed)
    # Weighted, without replacement (Efraimidis and Spirakis, 2006).
    keys = [draw.random() ** (1 / WEIGHTS.get(c.edit.operator, 1)) for c in every]
    order = sorted(range(len(every)), key=lambda i: -keys[i])[:count]
    return [every[i] for i in sorted(order)], len(every)


def _described(target: AnyTarget, edit: Edit, taken: Counter[str]) -> Mutant:
    path = _relative(target.file)
    diff = edit.diff(target.source, path, target.line)
    change = f"{target.name}\n{edit.operator}\n{edit.start}\n{edit.text}"
    digest = hashlib.sha256(change.encode()).hexdigest()[:8]
    taken[digest] += 1
    number = f".{taken[digest]}" if taken[digest] > 1 else ""
    line = target.line + edit.line
    return Mutant(f"{target.name}-{digest}{number}", target.kind, target.name, edit.operator, path, line, diff)


def _relative(file: str) -> str:
    if not file:
        return file
    with contextlib.suppress(ValueError):
        return str(Path(file).resolve().relative_to(Path.cwd()))
    return file
