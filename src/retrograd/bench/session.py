"""One run of the command: which ops in which order, and what of the options each benchmark is told. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from retrograd.bench.cpu import threads
from retrograd.bench.families import MSDA, NORM, Family, family_of
from retrograd.bench.harness import make_timer
from retrograd.bench.rows import Measured, device_of, shape_of
from retrograd.bench.timing import Timer
from retrograd.env.facts import busy_cpus, cpu_count
from retrograd.errors import UsageError

_BUSY = 0.25


@dataclass(frozen=True)
class Request:
    """What a person asked for; what is empty or None is as each benchmark has it.

    Attributes:
        ops: names of ops, see `registry.ops`.
        locations: of deformable attention only.
        timing: "graph" or "eager", on CUDA devices only.
        threads: of torch, on a CPU.
    """

    ops: tuple[str, ...]
    shapes: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    max_seconds: float = float("inf")
    host: bool = False
    device: str = "cuda"
    rounds: int | None = None
    locations: str = "float32"
    timing: str = "graph"
    threads: int | None = None

    def families(self) -> list[Family]:
        """The benchmarks that are needed, in the order of the ops."""
        return list(dict.fromkeys(map(family_of, self.ops)))

    def settings(self, family: Family) -> Any:
        """What a benchmark is told.

        Raises:
            UsageError: a name is unknown or a shape is not one of this benchmark.
        """
        given: dict[str, Any] = {"ops": tuple(op for op in self.ops if family_of(op) is family), "shapes": self.shapes}
        for name in ("providers", "dtypes", "max_seconds", "host", "device", "rounds"):
            given[name] = getattr(self, name)
        if family is NORM:
            given["shapes"] = tuple(map(shape_of, self.shapes))
        if family is MSDA:
            given["locations"] = self.locations
            del given["ops"]
        # An option that was not given keeps the default of the settings.
        return family.measures().Settings(**{name: value for name, value in given.items() if value != ()})


class Session:
    """A request that has been checked, and its timer.

    Raises:
        UsageError: options do not fit each other, a name is unknown, or there is no such device.
    """

    def __init__(self, request: Request) -> None:
        if request.host and request.device == "cpu":
            raise UsageError("`--host` measures what a GPU need not wait for; on a CPU all time is the host's: drop it")
        if request.threads is not None and request.device != "cpu":
            raise UsageError("`--threads` is for times on a CPU; add --device cpu or drop it")
        self._request = request
        self._settings = {family: request.settings(family) for family in request.families()}
        self.timer: Timer = make_timer(request.device, request.timing)

    @property
    def name(self) -> str:
        """What a file of results is called without more: families, what was special, device."""
        families = "-".join(family.name for family in self._settings)
        request = self._request
        special = "-host" * request.host + "-eager" * (request.timing == "eager" and not request.host)
        device = device_of(self.timer.facts()).split(" (")[0]
        return f"{families}{special}-{device.lower().replace(' ', '-')}"

    def run(self, tell: Callable[[str], None], keep: Callable[[Measured], None]) -> list[Measured]:
        """Measure everything; arguments as for `retrograd.bench.harness.run`."""
        rows: list[Measured] = []
        busy = busy_cpus()
        if self._request.device == "cpu" and busy is not None and busy > _BUSY * cpu_count():
            tell(f"other processes load {cpu_count()} CPUs by {busy:.1f}: times will be long and spreads wide")
        with threads(self._request.threads):
            for family, settings in self._settings.items():
                rows += family.measures().run(settings, self.timer, tell, keep)
        return rows
