"""Comparison of one tensor with its truth: how many elements are out, which is worst, and the picture of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from retrograd.check import tolerance
from retrograd.check.schema import Case, Finding, Profile

_GRID = 40  # cells a side in the heat map: finer is not legible in a report
_EDGES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 1024.0)


@dataclass(frozen=True)
class TensorComparison:
    """Result of `compare`; `ratio` is err / tolerance per element, inf where one side is not finite.

    `worst` is the largest, 0 for an empty tensor. What only a finding says is worked out when it is asked for.
    """

    ratio: torch.Tensor
    value: torch.Tensor
    truth: torch.Tensor
    worst: float

    @cached_property
    def wrong(self) -> int:
        """How many elements are out."""
        return int((self.ratio > 1).sum()) if self.worst > 1 else 0

    @cached_property
    def index(self) -> tuple[int, ...]:
        """The element that is furthest out."""
        if not self.ratio.ndim or not self.ratio.numel():
            return ()
        return tuple(int(i) for i in torch.unravel_index(self.ratio.argmax(), self.ratio.shape))

    @property
    def got(self) -> float:
        """What the element is."""
        return float(self.value[self.index]) if self.ratio.numel() else 0.0

    @property
    def want(self) -> float:
        """What it should be."""
        return float(self.truth[self.index]) if self.ratio.numel() else 0.0

    def finding(self, kind: str, message: str, case: Case, tensor: str, **more: Any) -> Finding:
        """The finding of the element that is furthest out; `more` are other fields."""
        return Finding.of(
            kind, message, case, tensor, index=self.index, got=self.got, want=self.want, excess=self.worst,
            wrong=self.wrong, total=self.ratio.numel(), **more,
        )  # fmt: skip

    def text(self, name: str) -> str:
        """The element of a tensor that is furthest out, and how many are."""
        return (
            f"{name}{list(self.index)} is {self.got:.6g}, expected {self.want:.6g}: "
            f"{self.worst:.3g} times the attainable error ({self.wrong} of {self.ratio.numel()} elements are out)"
        )


def first_index(mask: torch.Tensor) -> tuple[int, ...]:
    """The index of the first element where `mask` is true; there must be one."""
    return tuple(int(i) for i in mask.nonzero()[0])


def compare(got: torch.Tensor, want: torch.Tensor, tol: torch.Tensor) -> TensorComparison:
    """`got` in any dtype against `want` and `tol` in float64, equal shapes. NaN matches NaN, inf the same inf."""
    value = got.detach().to(torch.float64)
    ratio = (value - want).abs_().div_(tol)
    worst = float(ratio.max()) if ratio.numel() else 0.0
    if not math.isfinite(worst):  # a NaN or an Inf, on both sides or on one, or nothing is allowed
        same = (value == want) | (value.isnan() & want.isnan())
        ratio = torch.where(same, 0.0, ratio).nan_to_num(float("inf"), float("inf"))
        worst = float(ratio.max())
    return TensorComparison(ratio, value, want, worst)


def compare_stored(got: torch.Tensor, want: torch.Tensor, tol: torch.Tensor, wanted: str) -> TensorComparison:
    """The same, where `got` may be stored in less than the wanted dtype, which is for the contract to tell."""
    return compare(got, want, tolerance.as_stored(tol, want, got.dtype, wanted))


def _ulp(want: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tiny = torch.finfo(dtype).tiny
    return torch.exp2(torch.floor(torch.log2(want.abs().clamp_min(tiny)))) * torch.finfo(dtype).eps


@dataclass(frozen=True)
class LazyProfile:
    """A profile that is not drawn yet: most are not the worst of their stage, and nobody sees them."""

    tensor: str
    worst: float
    draw: Callable[[], Profile]

    def drawn(self) -> LazyProfile:
        """The same, which holds the picture instead of tensors."""
        picture = self.draw()
        return LazyProfile(self.tensor, self.worst, lambda: picture)


def profile(name: str, got: torch.Tensor, want: torch.Tensor, comparison: TensorComparison, case: Case) -> Profile:
    """The heat map of err / attainable error and the histogram of ULP distances of one tensor."""
    ratio = (
        comparison.ratio.reshape(-1, comparison.ratio.shape[-1])
        if comparison.ratio.ndim
        else comparison.ratio.reshape(1, 1)
    )
    rows, cols = (min(_GRID, n) for n in ratio.shape)
    grid = torch.nn.functional.adaptive_max_pool2d(ratio.clamp(max=1e30)[None].cpu(), (rows, cols))[0]
    ulps = ((got.detach().to(torch.float64) - want).abs() / _ulp(want, got.dtype)).nan_to_num(1e30, 1e30).flatten()
    edges = torch.tensor(_EDGES, dtype=torch.float64, device=ulps.device)
    counts = torch.bincount(torch.bucketize(ulps, edges, right=True), minlength=len(_EDGES) + 1).tolist()[1:]
    return Profile(
        tensor=name,
        case=case,
        shape=tuple(got.shape),
        ratio=tuple(tuple(float(f"{v:.3g}") for v in row) for row in grid.tolist()),
        ulp_edges=_EDGES,
        ulp_counts=tuple(counts),
        worst=comparison.worst,
    )


def worst_profiles(profiles: list[LazyProfile]) -> list[LazyProfile]:
    """The worst profile of each tensor: enough to draw."""
    best: dict[str, LazyProfile] = {}
    for p in profiles:
        if p.tensor not in best or p.worst > best[p.tensor].worst:
            best[p.tensor] = p
    return sorted(best.values(), key=lambda p: -p.worst)


def missing_or_misshapen(case: Case, name: str, got: torch.Tensor | None, want: torch.Tensor | None) -> list[Finding]:
    """The finding for a tensor that is there on one side only (all zeros count as nothing), or of another shape."""
    if got is not None and want is not None:
        message = f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        return [Finding.of("shape", message, case, tensor=name)]
    there = want if got is None else got
    if there is None or not bool(there.ne(0).any()):
        return []
    message = f"{name} is None, the reference has a gradient" if got is None else f"{name} should be zero"
    return [Finding.of("missing-gradient", message, case, tensor=name)]


def without(mask: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tensors, equal where the mask is true."""
    got = torch.where(mask, want.to(got.dtype), got.detach())
    return got, torch.where(mask, got.double(), want)
