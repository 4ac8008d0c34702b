"""Tuning on a GPU: each autotuned kernel is timed once in a verification, and runs with the fastest from then on.

An autotuner times all configurations for each size, which takes minutes. Which of them is the fastest is chance at the
sizes of a verification; any may be what a user runs, and `configs="all"` compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from retrograd import config
from retrograd.check import cpu_kernels
from retrograd.compat import triton_autotuning
from retrograd.compat.registry import works
from retrograd.compat.triton_launch import KernelLaunch, Proceed, around_autotuning

TIMED: list[Callable[[str, str], None]] = []  # told of a kernel's name and its fastest configuration
_TUNINGS: list[GpuTuning] = []  # the innermost last


@dataclass(frozen=True)
class FastestConfiguration:
    """The configuration of a kernel that was the fastest where it first ran, of how many."""

    config: Any
    of: int


Fastest = dict[str, FastestConfiguration]  # by name of the kernel


class GpuTuning:
    """The configurations that autotuned kernels run with on a GPU.

    Args:
        fastest: of kernels that were timed; those that are timed here are added.
        configuration: number of the one to run with instead, modulo how many pruning leaves; None for the fastest.
        tuned_kernel: the only kernel of which it is; "" for all.

    Attributes:
        configurations, chosen: as of `ttir.session.Session`.
    """

    faults, undecided = (), ()  # memory is not watched on a GPU

    def __init__(self, fastest: Fastest, configuration: int | None = None, tuned_kernel: str = "") -> None:
        self.fastest = fastest
        self._configuration, self._tuned_kernel = configuration, tuned_kernel
        self._timed = self._settled = False
        self.choices = triton_autotuning.ChosenConfigurations(self._start, self._bench)
        self.configurations, self.chosen = self.choices.known, self.choices.latest

    def launch(self, launch: KernelLaunch, proceed: Proceed) -> Any:
        """A launch of an autotuned kernel begins."""
        if _TUNINGS[-1] is not self or cpu_kernels.current() is not None or not works(triton_autotuning.TUNING):
            return proceed()
        name = triton_autotuning.kernel_name(launch.function)
        self._settled, self._timed = False, self._configuration is None and name not in self.fastest
        result = self.choices.launch(launch.function, proceed)
        if self._timed and name in self.chosen:
            self.fastest[name] = FastestConfiguration(self.chosen[name], len(self.configurations[name]))
            for told in TIMED:
                told(name, triton_autotuning.written(self.chosen[name]))
        return result

    def _start(self, name: str, configs: list[Any]) -> int:
        if self._configuration is not None and self._tuned_kernel in ("", name):
            return self._configuration % len(configs)
        known, alike = self.fastest.get(name), list(map(triton_autotuning.settings, configs))
        wanted = known and triton_autotuning.settings(known.config)
        return alike.index(wanted) if wanted in alike else 0

    def _bench(self, call: Any, quantiles: Any = None, **_: Any) -> Any:
        if self._timed:
            return triton_autotuning.timed_shortly(call, quantiles)
        if not self._settled:
            call()  # raises where it does not compile, and the autotuner goes on to the next
            self._settled = True
        return 0.0 if quantiles is None else [0.0] * len(quantiles)


def current() -> GpuTuning | None:
    """What chooses configurations on a GPU now; None where their autotuners do."""
    return _TUNINGS[-1] if _TUNINGS else None


def pinned(device: str, fastest: Fastest) -> AbstractContextManager[GpuTuning | None]:
    """Inside, autotuned kernels on a GPU run with the fastest configuration; nothing happens on other devices."""
    real = torch.device(device).type == "cuda" and not config.interpreting()
    return choosing(fastest) if real else nullcontext()


@contextmanager
def choosing(fastest: Fastest, configuration: int | None = None, tuned_kernel: str = "") -> Iterator[GpuTuning]:
    """Inside, launches of autotuned kernels on a GPU are those of a `GpuTuning`; arguments as there."""
    tuning = GpuTuning(fastest, configuration, tuned_kernel)
    with around_autotuning(tuning.launch):
        _TUNINGS.append(tuning)
        try:
            yield tuning
        finally:
            _TUNINGS.remove(tuning)
            tuning.choices.close()


def notes(fastest: Fastest, every: bool) -> tuple[str, ...]:
    """What a report says of each autotuned kernel that ran on a GPU; `every`: whether all configurations were run."""
    others = "all were compared" if every else "the others were not looked at (--configs all compares them)"
    return tuple(
        f"kernel {name} ran with {triton_autotuning.written(timed.config)}, the fastest of {timed.of} configurations "
        f"where it first ran; {others}"
        for name, timed in fastest.items()
        if timed.of > 1
    )
