"""Whether two runs of one op gave the same, by as much as the op promises."""

from __future__ import annotations

import torch

from retrograd.check import tolerance
from retrograd.check.op_runner import Trial, Workbench, same_bits
from retrograd.check.oracle import Results
from retrograd.check.schema import Case

# Runs that show whether an op differs from itself, on a CPU and on a GPU, where few runs in a hundred may do.
_RUNS = (20, 100)


def noisy(bench: Workbench, case: Case) -> bool:
    """Whether the op differs from itself run to run on this case, once per verify; so it does if it says so."""
    if bench.noise is None:
        runs = _RUNS[torch.device(bench.device).type == "cuda"]
        first = bench.run(case)
        bench.noise = bench.spec.deterministic is False or any(bench.run(case).same_bits(first) for _ in range(runs))
    return bench.noise


def another(bench: Workbench, stage: str, case: Case, got: Trial, want: Trial) -> str:
    """Name of a tensor that is not what it is in `want`, a run of the same case, by more than the op promises.

    Any bit counts if it promises its bits; without a reference also where repeats show no noise. Elsewhere bits are no
    evidence, however many repeats had the same: atomics meet in another order on another stream, or when another
    process has the GPU. Then the truth decides, if the op is right at all.
    """
    name = got.same_bits(want)
    if not name or bench.spec.deterministic:
        return name
    if bench.spec.reference is None:
        return "" if noisy(bench, case) else name
    if bench.judge(stage, case, want)[0]:
        return apart(bench, got.tensors, want.tensors)
    findings, _ = bench.judge(stage, case, got)
    return findings[0].tensor if findings else ""


def apart(bench: Workbench, got: Results, want: Results) -> str:
    """Name of a tensor that is another where there is no truth to ask: by any bit if the op promises its bits.

    Else in the first half of its digits, which the order of a sum does not reach and other data does.
    """
    for name, a in got.items():
        b = want.get(name)
        if same_bits(a, b):
            continue
        if bench.spec.deterministic or a is None or b is None or a.shape != b.shape:
            return name
        slack = tolerance.UNIT[bench.dtype] ** 0.5 * b.abs().nan_to_num(0.0).max()
        if not bool(((a - b).abs() <= slack).logical_or(a.isnan() & b.isnan()).all()):
            return name
    return ""
