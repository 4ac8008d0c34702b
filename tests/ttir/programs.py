"""Triton programs by which the checker of races is judged: racy ones, and healthy ones that look like them.

They say what Triton and the memory model of a GPU mean, not what any tool does with them. Each is a function
`run(device)` that makes its tensors and launches its kernels, on "cuda" or wherever launches are executed otherwise.
A grid has at most 64 programs.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent

# Two programs touch a byte, in no order by atomics, flags or kernel boundaries; "same value" if it can make no difference.
# "autotune": no race, but the configurations that are tried leave their mark in the result.
KINDS = ("write/write", "read/write", "atomic/read", "atomic/write", "atomic/atomic", "same value", "autotune")


@dataclass(frozen=True)
class RacyProgram:
    """A program with a race.

    Attributes:
        name: unique among the racy ones.
        run: called with a device; launches.
        arguments: parameters of the kernel whose memory is raced for; a finding has to name one of them.
        kinds: which conflicts there are, of KINDS; a finding has to be one of them.
        why: what a GPU may do, in a sentence.
    """

    name: str
    run: Callable[[str], None]
    arguments: tuple[str, ...]
    kinds: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class HealthyProgram:
    """A program without a race, and what it computes.

    Attributes:
        name: unique among the healthy ones.
        run: called with a device; launches and returns what is to be compared.
        why: why there is no race, or what the program exercises.
    """

    name: str
    run: Callable[[str], list[Check]]
    why: str


@dataclass(frozen=True)
class Check:
    """A result beside what it has to be.

    Attributes:
        actual: the tensor that kernels wrote.
        expected: of the same shape and dtype, or float64 where there is a bound; on the CPU.
        bound: most that they may differ by, absolute, elementwise. None: equal values, NaN where NaN is.
    """

    actual: Tensor
    expected: Tensor
    bound: Tensor | float | None = None

    def difference(self) -> str:
        """What differs, empty if nothing."""
        actual, expected = self.actual.detach().cpu(), self.expected
        if actual.shape != expected.shape:
            return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        if self.bound is None:
            if actual.dtype != expected.dtype:
                return f"dtype {actual.dtype}, expected {expected.dtype}"
            wrong = ~((actual == expected) | ((actual != actual) & (expected != expected)))
        else:
            error = (actual.double() - expected.double()).abs()
            wrong = ~(error <= self.bound)
        if not bool(wrong.any()):
            return ""
        place = tuple(int(i) for i in wrong.nonzero()[0])
        return f"{int(wrong.sum())} of {wrong.numel()} elements, first {place}: {actual[place]}, expected {expected[place]}"


RACY: dict[str, RacyProgram] = {}
HEALTHY: dict[str, HealthyProgram] = {}


def racy(arguments: str, kinds: str, why: str) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """Register a function under its name; arguments and kinds are separated by commas."""

    def register(run: Callable[[str], None]) -> Callable[[str], None]:
        name = run.__name__
        assert name not in RACY, f"two racy programs are called {name}"
        RACY[name] = RacyProgram(name, run, tuple(arguments.split(",")), tuple(kinds.split(",")), why)
        assert set(RACY[name].kinds) <= set(KINDS), f"{name} has the kinds {kinds}"
        return run

    return register


def healthy(why: str) -> Callable[[Callable[[str], list[Check]]], Callable[[str], list[Check]]]:
    """Register a function under its name."""

    def register(run: Callable[[str], list[Check]]) -> Callable[[str], list[Check]]:
        assert run.__name__ not in HEALTHY, f"two healthy programs are called {run.__name__}"
        HEALTHY[run.__name__] = HealthyProgram(run.__name__, run, why)
        return run

    return register


def load() -> None:
    """Fill RACY and HEALTHY from the files of the two folders; Triton is imported here."""
    for path in sorted([*(HERE / "kernels_racy").glob("*.py"), *(HERE / "kernels_healthy").glob("*.py")]):
        name = f"{path.parent.name}_{path.stem}"
        if name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec
        assert spec.loader
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


U32 = 2.0**-24  # unit roundoff of float32


def integers(*shape: int, low: int = -8, high: int = 8, seed: int = 0, dtype: Any = torch.float32) -> Tensor:
    """Whole numbers low <= x < high on the CPU. Sums and products of few of them are exact in float32 in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def normal(*shape: int, seed: int = 0, dtype: Any = torch.float32) -> Tensor:
    """Standard normal numbers on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def multiprocessors() -> int:
    """Of the GPU that is there or pretended, else 6."""
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 6
