"""Selection of what to measure: the options of the command, checked, and the rows that are to be filled. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from retrograd.bench import registry
from retrograd.bench.benchmark import Benchmark
from retrograd.bench.rows import Row
from retrograd.errors import UsageError


@dataclass(frozen=True)
class Selection:
    """What a person asked for; what is empty or None is as each op has it.

    UsageError if options do not fit each other, a name is unknown or a shape is not one of an op.
    """

    ops: tuple[str, ...]
    shapes: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    max_seconds: float = float("inf")
    host: bool = False  # measure the host's time of a call instead of the device's
    device: str = "cuda"
    rounds: int | None = None  # how often providers take turns
    locations: str = "float32"  # or "same" as value; of deformable attention only
    timing: str = "graph"  # or "eager" or "do_bench"; on CUDA devices only
    threads: int | None = None  # of torch, on a CPU

    def __post_init__(self) -> None:
        if self.host and self.device == "cpu":
            raise UsageError("`--host` measures what a GPU need not wait for; on a CPU all time is the host's: drop it")
        if self.threads is not None and self.device != "cpu":
            raise UsageError("`--threads` is for times on a CPU; add --device cpu or drop it")
        _check_names("--ops", self.ops, registry.ops())
        for benchmarks in self.groups().values():
            _check_names("--providers", self.providers, registry.names([b.name for b in benchmarks]))
            _check_names("--dtypes", self.dtypes, benchmarks[0].dtypes)
            for benchmark in benchmarks:
                for shape in self.shapes:
                    benchmark.parameters(shape, benchmark.usual_dtypes[self.device][0])

    def groups(self) -> dict[str, list[Benchmark]]:
        """The ops by groups, in the order of the ops; each group is a run with a table of its own."""
        groups: dict[str, list[Benchmark]] = {}
        for op in self.ops:
            groups.setdefault(registry.BENCHMARKS[op].group, []).append(registry.BENCHMARKS[op])
        return groups

    def jobs(self, benchmarks: Sequence[Benchmark]) -> list[Row]:
        """A row without times for each measurement; compiling takes longest and comes last."""
        rows = [
            Row(benchmark.name, shape, dtype, provider, beside=benchmark.beside(dtype, self.locations))
            for benchmark in benchmarks
            for shape in self.shapes or benchmark.usual_shapes["host" if self.host else self.device]
            for dtype in self.dtypes or benchmark.usual_dtypes[self.device]
            for provider in self.providers_of([benchmark])
        ]
        return sorted(rows, key=lambda row: "compile" in row.provider)

    def providers_of(self, benchmarks: Sequence[Benchmark]) -> tuple[str, ...]:
        """Those that were asked for, else the usual ones of these ops on the device."""
        return self.providers or registry.names([benchmark.name for benchmark in benchmarks], self.device)


def _check_names(option: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"`{option}` has {name!r}, expected some of {', '.join(known)}")
