"""poison: memory from torch.empty is filled with NaN, then with a huge value; results must not notice."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.check.stages._base import Outcome, Stage
from retrograd.check.workbench import Workbench
from retrograd.record import Case

_ID = "poison"
_EMPTY = {
    f"aten::{n}" for n in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
}


class Fill(TorchDispatchMode):
    """Fill every floating tensor that comes uninitialised with `value`, every integer one with `whole`."""

    def __init__(self, value: float, whole: int) -> None:
        super().__init__()
        self.value, self.whole = value, whole

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in _EMPTY and out.numel():
            if out.is_floating_point():
                big = torch.finfo(out.dtype).max / 8
                out.fill_(big if self.value > 0 else float("nan"))
            elif out.dtype != torch.bool:
                out.fill_(self.whole)
        return out


def check(bench: Workbench, case: Case) -> Outcome:
    """Three runs: plain, NaN, huge."""
    out = Outcome()
    gs = bench.grad_outs(case)  # made before the fill: only the op's own memory is poisoned
    plain = bench.run(case, grad_outs=gs)
    for label, value, whole in (("NaN", float("nan"), 0), ("huge values", 1.0, 1)):
        with Fill(value, whole):
            poisoned = bench.run(case, grad_outs=gs)
        name = poisoned.same_bits(plain)
        if not name:
            continue
        got, want = poisoned.tensors[name], plain.tensors[name]
        assert got is not None
        assert want is not None
        gone = int((~got.isfinite() & want.isfinite()).sum())
        if gone or not bench.noisy(case):
            what = f"{name} depends on uninitialised memory: torch.empty filled with {label} changes it"
            out.findings.append(
                bench.finding(_ID, "uninitialised", what, case, tensor=name, wrong=gone or None, total=got.numel())
            )
            break
    return out


STAGE = Stage(_ID, "no uninitialised memory is read", 30, lambda b: [b.base], check)
