"""poison: memory from torch.empty is filled with NaN, then with a huge value; results must not notice."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from retrograd.check import cpu_kernels
from retrograd.check.inputs import resized
from retrograd.check.op_runner import OpRun
from retrograd.check.reference import OpRaised
from retrograd.check.schema import Case, Size
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext
from retrograd.compat.torch_dispatch import EagerMode, HigherOrderOperator, resolved, schema

_RUNS = 5  # at most: plain, NaN, huge, and two in deterministic mode
_EMPTY = {
    f"aten::{n}" for n in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
}
_TORCH = ("aten", "prims", "prim", "c10d", "_c10d_functional")


class Fill(EagerMode):
    """Fill floating tensors that come uninitialised with `value`, integer ones with `integer`; None fills neither."""

    supports_higher_order_operators = True

    def __init__(self, value: float | None, integer: int = 0) -> None:
        super().__init__()
        self.value, self.integer = value, integer
        self.operators = False  # whether custom operators ran, inside of which no mode sees torch.empty

    @resolved
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators |= func.namespace not in _TORCH
        out = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):
            return out
        if self.value is not None and schema(func).name in _EMPTY and out.numel():
            if out.is_floating_point():
                big = torch.finfo(out.dtype).max / 8
                out.fill_(big if self.value > 0 else float("nan"))
            elif out.dtype != torch.bool:
                out.fill_(self.integer)
        return out


@contextmanager
def deterministic(fill: bool) -> Iterator[None]:
    """PyTorch's deterministic mode, which fills fresh memory with NaN (whole numbers with the largest) if `fill`.

    It works below the dispatcher, so inside custom operators too; but ops may choose other kernels in it.
    """
    saved = torch.get_deterministic_debug_mode()
    settings: Any = torch.utils.deterministic  # its attributes are properties of the module, unknown to type checkers
    filled = settings.fill_uninitialized_memory
    # The same as use_deterministic_algorithms(True, warn_only=True), which first imports inductor: two seconds.
    torch.set_deterministic_debug_mode("warn")
    settings.fill_uninitialized_memory = fill
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(saved)
        settings.fill_uninitialized_memory = filled


@cpu_kernels.own_filling()
def check(context: StageContext, case: Case) -> CaseOutcome:
    """Three runs: plain, NaN, huge; where custom operators ran, two more in deterministic mode."""
    out = CaseOutcome()
    # Made before the fill, so that only the op's own memory is poisoned, and for each run, as one may overwrite them.
    grad_outs = iter([context.runner.grad_outs(case) for _ in range(_RUNS)])
    # In a mode too: an op may take another path where somebody watches its operators.
    with Fill(None):
        plain = context.runner.run(case, grad_outs=next(grad_outs))
    operators = False
    for label, value, integer in (("NaN", float("nan"), 0), ("huge values", 1.0, 1)):
        with Fill(value, integer) as mode:
            poisoned = context.runner.run(case, grad_outs=next(grad_outs))
        operators |= mode.operators
        if _compare(context, case, out, plain, poisoned, label):
            return out
    if operators:
        try:
            with deterministic(fill=False):
                plain = context.runner.run(case, grad_outs=next(grad_outs))
        except OpRaised as error:
            # Ops that add atomically refuse this mode.
            out.notes.append(f"memory inside custom operators was not filled: {str(error).splitlines()[0]}")
            return out
        with deterministic(fill=True):
            poisoned = context.runner.run(case, grad_outs=next(grad_outs))
        _compare(context, case, out, plain, poisoned, "NaN")
    return out


def _compare(context: StageContext, case: Case, out: CaseOutcome, plain: OpRun, poisoned: OpRun, label: str) -> bool:
    """Add a finding if the runs differ by more than noise; whether they do."""
    name = poisoned.first_difference(plain)
    if not name:
        return False
    got, want = poisoned.tensors[name], plain.tensors[name]
    assert got is not None
    assert want is not None
    gone = int((~got.isfinite() & want.isfinite()).sum())
    if not gone and not (name := context.judge.changed(case, poisoned, plain)):
        return False
    message = f"{name} depends on uninitialised memory: torch.empty filled with {label} changes it"
    out.find("uninitialised", message, case, name, wrong=gone or None, total=got.numel())
    return True


def cases(context: StageContext) -> list[Case]:
    """The ordinary case and one with every size that may be one more or less: what a stride of 2 does not reach."""
    base = context.base
    other = base
    for name, size in base.sizes:
        moved = (resized(context.spec, other, name, _near(size, by)) for by in (1, -1))
        other = next((case for case in moved if case is not None), other)
    return [base] if other == base else [base, other]


def _near(size: Size, by: int) -> Size:
    if isinstance(size, tuple):
        return (*size[:-1], size[-1] + by) if size else size
    return max(size + by, 0)


STAGE = Stage("poison", "no uninitialised memory is read", 30, check, cases, sharded=True)
