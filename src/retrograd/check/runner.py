"""Runner of the stages of `verify`, one after another, and what they come to."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrograd.check.acceptance import settle
from retrograd.check.devices import lost
from retrograd.check.schema import Report, StageResult
from retrograd.check.stages import Stage, choose
from retrograd.check.time_budget import Portion
from retrograd.check.verification import Progress, Verification, Watch
from retrograd.core import gc_pause
from retrograd.errors import RetrogradError, UndecidedError

GPU_LOST = "the GPU no longer answers this process"


def verify(
    target: Any, *, level: str = "full", seed: int = 0, only: Sequence[str] = (), skip: Sequence[str] = (),
    dtypes: Sequence[Any] | None = None, device: str = "cpu", case: str | None = None, name: str | None = None,
    progress: Progress | None = None, failed: Mapping[str, Sequence[str]] | None = None, watch: Watch | None = None,
    share: tuple[int, int] = (0, 1), baseline: str | Path | None = None, budget: float | None = None,
    configs: str = "some", **describe: Any,
) -> Report:  # fmt: skip
    """Prove the backward pass of an op right, or say what is wrong, where and how to see it again.

    Args:
        target: what `retrograd.op` returned; or a callable, with the arguments of `retrograd.op` beside it.
        level: "quick" (a second or two) or "full".
        seed: of all data; the same seed gives the same report, races apart.
        only, skip: stage ids.
        dtypes: instead of those of the spec.
        device: "cpu", "cuda" or "cuda:1". On "cpu" Triton kernels are executed as a GPU would run them.
        case: one case as `Case.text` writes it, instead of the cases of each stage.
        name: how repro lines call the target.
        progress: called with a stage id and a line of text as each stage starts and ends, and when it finds something.
        failed: ids of stages that an earlier process found wrong, by dtype; what they make meaningless is skipped.
        watch: told of everything that begins and ends (`Watch`), for who has to know where a process was when it died.
        share: (i, n): every n-th dtype from number i on, for processes that share the work; none may be left.
        baseline: a file of accepted findings (`retrograd-baseline.toml`), which counts like `accept=` of the op.
        budget: seconds after which no case begins; the ordinary case of each stage runs first, in all dtypes. A stage
            that ran no case in a dtype is undecided. What was left out depends on the machine, what was found does not.
        configs: "all" compares all configurations of autotuned kernels, "some" those of the level on a CPU, and on a
            GPU runs each kernel with the fastest alone, which is timed once.

    Returns:
        A Report; true if proved.

    Raises:
        UsageError: an argument is wrong.
        SpecError: the description does not work (the reference raises on ordinary inputs, the op returns nothing).

    UndecidedError is not raised but reported as a verdict.

    Numerics: truth in float64 by the reference; tolerance from random rounding (`check.tolerance`).
    """
    start = time.perf_counter()
    chosen = choose(only, skip)

    def verified() -> Report:
        verification = Verification(
            target, level=level, seed=seed, dtypes=dtypes, device=device, case=case, name=name, failed=failed,
            watch=watch, progress=progress, share=share, baseline=baseline, budget=budget, configs=configs, **describe,
        )  # fmt: skip
        if watch:
            watch("begin", verification.report([] if budget is None else verification.waiting(chosen), 0.0))
        results = _run(verification, chosen if verification.contexts else ())
        return verification.report(results, time.perf_counter() - start)

    with gc_pause.frozen():  # which drops what cases held in cycles, once the verification itself is gone
        report = verified()
    return settle(report) if share == (0, 1) else report


def _run(verification: Verification, chosen: Sequence[Stage]) -> list[StageResult]:
    """The results of these stages, one after another; the others are left out once the GPU is lost."""
    watch, progress, budget = verification.watch, verification.progress, verification.budget
    results: dict[str, StageResult] = {}
    left_out = verification.waiting(chosen)
    for portion, stage in (
        (portion, stage) for portion in budget.portions(tuple(verification.contexts)) for stage in chosen
    ):
        if budget.over() or not verification.has_left(stage, portion):
            continue
        if progress:
            progress(stage.id, "running")
        watch("start", stage)
        result = results[stage.id] = _run_portion(verification, stage, portion, results.get(stage.id))
        watch("stage", verification.report([result], result.seconds))
        if progress:
            progress(stage.id, f"{result.status} ({result.seconds:.2f} s)")
        if result.findings and (reason := lost(verification.device)):
            left_out = [StageResult(s.id, s.title, "skipped", reason=f"{GPU_LOST}: {reason}") for s in chosen]
            break
    return [results.get(other.id, other) for other in left_out]


def _run_portion(
    verification: Verification, stage: Stage, portion: Portion, earlier: StageResult | None
) -> StageResult:
    """The result of a stage; what goes wrong in the check itself, or cannot be decided, ends the stage."""
    try:
        return verification.run_stage(stage, portion, earlier)
    except UndecidedError as error:
        reason = str(error)
    except RetrogradError:
        raise
    except Exception as error:  # what the op raises is a finding already: this is a fault of the checker's own
        frame = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        reason = f"the check itself failed, not the op: {problem}"
    verification.end(stage)
    return StageResult(stage.id, stage.title, "undecided", reason=reason)
