"""Record of what kernels were compiled to, from something that launches them, for one GPU after another."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from retrograd.codegen.compile import Launch, distinct, place_of, recording, require_triton
from retrograd.codegen.hazards import hazards
from retrograd.codegen.kernel_facts import attempts
from retrograd.codegen.schema import Codegen, Facts, Kernel
from retrograd.errors import UndecidedError
from retrograd.runtime.gpu_targets import Target, target_named

Progress = Callable[[str, str], None]
Workload = Callable[[Target], object]


def cross_compiled(
    name: str,
    workload: Workload,
    architectures: Sequence[str],
    *,
    only: Sequence[str] = (),
    workers: int = 1,
    progress: Progress | None = None,
) -> Codegen:
    """Compile every kernel that a workload launches, without a GPU.

    Args:
        name: what the record calls it.
        workload: called once for each architecture; what it launches is recorded and not executed.
        architectures: names of targets.
        only: kernels with one of these words in their name; all if empty.
        workers: processes that compile; 0 compiles in this one, which a crash of the compiler ends.
        progress: told what is compiled.

    Raises:
        UndecidedError: no kernel is launched, or none with such a name.
        UsageError: there is no such architecture.
        MissingExtraError: Triton is not installed.
        RetrogradError: this process interprets kernels.
    """
    began = time.perf_counter()
    recorded: list[Launch] = []
    for architecture in architectures:
        with recording(architecture) as launches:
            workload(target_named(architecture))
        recorded += launches
    names = sorted({launch.kernel for launch in recorded})
    recorded = [launch for launch in recorded if not only or any(word in launch.kernel for word in only)]
    if not recorded:
        raise UndecidedError(_nothing(name, names))
    launches = distinct(recorded)
    results: list[Facts | str] = [""] * len(launches)
    for done, (position, result) in enumerate(attempts(launches, workers), 1):
        results[position] = result
        if progress is not None:
            launch = launches[position]
            progress(f"{done} of {len(launches)}", f"{launch.kernel} for {launch.target.name}")
    counts = Counter(launch.identity for launch in recorded)
    kernels = [
        kernel_record(launch, result, launch.kernel, launch.target.name, counts[launch.identity])
        for launch, result in zip(launches, results, strict=True)
    ]
    return Codegen(
        target=name,
        architectures=tuple(architectures),
        kernels=tuple(kernels),
        versions={"triton": require_triton().__version__},
        seconds=time.perf_counter() - began,
    )


def _nothing(name: str, names: list[str]) -> str:
    if names:
        return f"{name} launches no kernel of that name; it launches {', '.join(names)}"
    return (
        f"{name} launches no Triton kernel; expected something that calls kernel[grid](...) at least once (what an op "
        "chooses on a CPU may be another implementation: name the Triton one)"
    )


def kernel_record(launch: Any, result: Facts | str, name: str, target: str, count: int, code: str = "") -> Kernel:
    """What a record says of a kernel: a `Launch` or a launch that ran, and its facts or why it does not compile."""
    facts, error = (None, result) if isinstance(result, str) else (result, "")
    return Kernel(
        name=name,
        target=target,
        place=place_of(launch.fn),
        launches=count,
        grid=launch.grid,
        facts=facts,
        error=error,
        tuning=launch.tuning,
        hazards=hazards(facts, launch.tuning, _source_of(launch.fn)) if facts is not None else (),
        code=code,
    )


def _source_of(fn: Any) -> str:
    """The Python text of a kernel function, "" if it cannot be had."""
    try:
        return inspect.getsource(fn.fn)
    except (OSError, TypeError):
        return ""
