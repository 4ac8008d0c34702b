"""Benchmark of an op, and who offers the op: what a file of `bench.ops` is made of. Imports no torch.

Saved results are shown on machines without torch, so files of `bench.ops` import it where they compute.
"""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from retrograd import config
from retrograd.env.facts import package_version
from retrograd.errors import NativeBuildError, UsageError

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]
Data = Iterator[tuple[Tensors, Tensors]]
Function = Callable[[Tensors], "tuple[torch.Tensor, ...]"]
# Name of a result or grad_*, rows, and their values in float64.
Pieces = Iterable[tuple[str, slice, "torch.Tensor"]]

OURS = "retrograd"
DEVICES = ("cuda", "cpu")
GPU, CPU = ("cuda",), ("cpu",)
# What sums in float32 may add, relative to the result: nothing beside 16-bit rounding, most of it for float32.
FLOAT32_SUMS = 8 * 2.0**-24


class UnavailableError(Exception):
    """A provider has no such op, or is not installed."""


@dataclass(frozen=True)
class Implementation:
    """A function from inputs by name to results, and whether it has a backward."""

    call: Function
    backward: bool = True


@dataclass(frozen=True)
class Provider:
    """A library, or a mode of this project, that offers ops."""

    name: str  # as `--providers` has it
    ops: tuple[str, ...]  # that it offers
    make: Callable[..., Implementation]  # from what `Benchmark.parameters` returns, and
    options: Mapping[str, Any] = field(default_factory=dict)
    package: str = OURS  # the distribution it comes from; "" is the user's own
    also: tuple[str, ...] = ()  # distributions without which it does not run
    devices: tuple[str, ...] = DEVICES  # where it runs
    usual: tuple[str, ...] = DEVICES  # where it is measured without being asked for by name
    compiled: bool = False  # whether the implementation is then compiled by torch.compile

    @property
    def missing(self) -> tuple[str, ...]:
        """Distributions that are not installed."""
        return (*[self.package] * (not self.version), *(name for name in self.also if not package_version(name)))

    @property
    def version(self) -> str | None:
        """Of its package; None where that is not installed."""
        if not self.package:
            return "yours"
        # A checkout on PYTHONPATH has no metadata, yet is there.
        return package_version(self.package) or ("checkout" if self.package == OURS else None)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An op at one shape and dtype on a device."""

    leaves: tuple[str, ...]  # names of the inputs that get gradients
    results: tuple[str, ...]  # names of what implementations return
    # Makes sets of inputs and of gradients of the results by name, without end; the first is always the same.
    data: Callable[[], Data]
    # (inputs, gradients) to results and grad_* in float64, in pieces that fit beside the inputs.
    truth: Callable[[Tensors, Tensors], Pieces]
    # The least that a forward and a backward must move; decides how many sets keep the cache cold.
    bytes_moved: tuple[int, int]
    slack: float = FLOAT32_SUMS  # relative L2 error that is allowed beside rounding
    coarse: float = 0.0  # relative L2 error up to which 16-bit results are timed, with a note
    reference: Implementation | None = None  # as precise in the op's own dtype as others must be; None: `slack` says it


class Benchmark(ABC):
    """An op as it is timed; ops of one `group` share a table, the names of their results' fields and packages."""

    name: str  # as tables and the command line have it
    signature: str  # how a person's function is called; "" where it is called like the op
    # Measured unless the user names others: on "cuda", on "cpu" and, of shapes, for "host" times.
    usual_shapes: Mapping[str, tuple[str, ...]]
    usual_dtypes: Mapping[str, tuple[str, ...]]
    element_bytes: ClassVar[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    group: ClassVar[str] = "ops"  # or "norm" or "msda"
    # Of a JSON line, before those that all have.
    fields: ClassVar[tuple[str, ...]] = ("op", "shape", "dtype", "provider", "fwd_bytes", "bwd_bytes")
    # Whose versions are kept with a result, by the name to show.
    packages: ClassVar[Mapping[str, str]] = {"torch": "torch", "triton": "triton"}

    @abstractmethod
    def parameters(self, shape: str, dtype: str) -> Any:
        """What makers of implementations are given; raises a UsageError for a shape that the op cannot have."""

    @abstractmethod
    def problem(self, shape: str, dtype: str, beside: str, device: str) -> Problem:
        """The op at a shape and dtype; `beside`: dtype of the inputs that need not be as narrow as the others."""

    @abstractmethod
    def by_user(self, function: Callable[..., Any]) -> Callable[[Any], Implementation]:
        """The maker for a person's function, which is called as `signature` says."""

    def beside(self, dtype: str, locations: str) -> str:
        """Dtype of inputs beside those in `dtype`, by the option `--locations`; "" where there are none."""
        return ""

    def bytes_moved(self, direction: str, shape: str, dtype: str, beside: str) -> int:
        """The least that must move; 0 where only data tell."""
        return 0


def own(provider: str) -> bool:
    """Whether a provider is this project: never the peer that a ratio is taken against."""
    return provider == OURS or provider.startswith(f"{OURS}-")


def two_sizes(shape: str, example: str) -> tuple[int, int]:
    """Two sizes from text such as "32768x4096"; UsageError if it is written otherwise."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
        raise UsageError(f"`--shapes` has {shape!r}, expected {example}")
    first, _, second = shape.partition("x")
    return int(first), int(second)


def build_host_path(module: str) -> None:
    """Have the C++ path of an op, by the name of its module, compiled before anything is measured."""
    import torch

    if torch.cuda.is_available() and config.host() != "off":
        with suppress(NativeBuildError):  # then Python serves, here as anywhere
            importlib.import_module(module).build()
