"""Plan of the runs: seeds, repeats in fresh processes, settings, orders. Pure: nothing is run here."""

# What people pass is checked, whatever the hints say.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from retrograd.errors import UsageError

# Every pool of threads that a test on a CPU may start reads one of these when it is loaded.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class FlakeTarget:
    """What is run: the test `item` among what pytest collects for `argument`, or a callable `module:function`."""

    argument: str
    item: str = ""

    @property
    def is_test(self) -> bool:
        return "::" in self.argument or self.argument.endswith(".py") or ":" not in self.argument

    @property
    def name(self) -> str:
        """As it is called in reports."""
        return self.item or self.argument


@dataclass(frozen=True)
class ProcessSetting:
    """Threads and environment variables of a process; the plain one has neither."""

    threads: int | None = None
    env: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """ "threads=2 NAME=value", quoted as a shell wants it; "" for the plain one."""
        words = [] if self.threads is None else [f"threads={self.threads}"]
        return shlex.join(words + [f"{key}={value}" for key, value in self.env])

    def variables(self) -> dict[str, str]:
        """What the process finds in its environment."""
        return dict(self.env) | ({} if self.threads is None else dict.fromkeys(_THREADS, str(self.threads)))


@dataclass(frozen=True)
class Trial:
    """One run: its seed, the tests that go before it in the process, what fresh memory is filled with."""

    seed: int
    before: tuple[str, ...] = ()
    fill: str = ""


@dataclass(frozen=True)
class Batch:
    """Trials that one process makes, one after the other. A process that dies is started again for the rest."""

    target: FlakeTarget
    trials: tuple[Trial, ...]
    stage: str = "seeds"
    setting: ProcessSetting = field(default_factory=ProcessSetting)
    hash_seed: int | None = None

    def job(self) -> dict[str, Any]:
        """The batch as the worker reads it; pytest collects the test, or its whole file where others go before it."""
        argument = self.target.argument
        return {
            "target": asdict(self.target) | {"is_test": self.target.is_test},
            "trials": [asdict(trial) for trial in self.trials],
            "threads": self.setting.threads,
            "collected": argument.partition("::")[0] if any(t.before for t in self.trials) else argument,
        }


@dataclass(frozen=True)
class FlakeOptions:
    """What `retrograd.flake.run` was asked for; UsageError where a value makes no sense."""

    seeds: int = 30
    first: int = 0
    repeats: int = 2
    threads: tuple[int, ...] = ()
    env: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    orders: int = 0
    timeout: float = 300.0
    jobs: int = 1
    fresh: bool = False
    pytest_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("seeds", 1), ("first", 0), ("repeats", 1), ("orders", 0), ("jobs", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                option = "seed" if name == "first" else name
                raise UsageError(f"`{option}` is {value!r}, expected a whole number of at least {least}")
        if not self.timeout > 0:
            raise UsageError(f"`timeout` is {self.timeout!r}, expected seconds above 0")
        for count in self.threads:
            if not isinstance(count, int) or count < 1:
                raise UsageError(f"`threads` has {count!r}, expected whole numbers of at least 1 such as 1,2")
        for key, values in self.env.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", key) or isinstance(values, str) or not values:
                raise UsageError(f"`env` has {key!r}: {values!r}, expected a variable with its values: NAME=a,b")

    def settings(self) -> list[ProcessSetting]:
        """Every combination of threads and variables; the first is what rates are given for."""
        choices = itertools.product(*([(key, value) for value in values] for key, values in self.env.items()))
        return [ProcessSetting(count, env) for env in choices for count in (self.threads or (None,))]

    def main(self, target: FlakeTarget) -> list[Batch]:
        """All seeds, `repeats` times, each time in a fresh process and every other time backwards.

        Each repeat has a PYTHONHASHSEED of its own, so that what depends on the order of sets differs and can be had
        again.
        """
        forward = tuple(Trial(seed) for seed in range(self.first, self.first + self.seeds))
        batches: list[Batch] = []
        for setting, repeat in itertools.product(self.settings(), range(self.repeats)):
            trials = forward if repeat % 2 == 0 else forward[::-1]
            for place, part in enumerate([(t,) for t in trials] if self.fresh else [trials]):
                batches.append(Batch(target, part, "seeds", setting, repeat + 1 + place * self.repeats))
        return batches


def parse(argument: str) -> FlakeTarget:
    """The target that an argument of the command line names; UsageError if that is neither of its forms."""
    forms = "expected a node id of pytest (tests/test_x.py::test_y) or a callable (package.module:name, file.py:name)"
    target = FlakeTarget(argument)
    place, _, name = argument.rpartition(":")
    if target.is_test:
        place = argument.partition("::")[0]
        if not Path(place).exists():
            raise UsageError(f"unknown test {argument!r}: there is no {place!r} here; {forms}")
    elif not place or not name.isidentifier():
        raise UsageError(f"unknown target {argument!r}; {forms}")
    elif place.endswith(".py") and not Path(place).is_file():
        raise UsageError(f"unknown target {argument!r}: there is no file {place!r}; {forms}")
    return target
