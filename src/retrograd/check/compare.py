"""Compare one tensor with its truth: how many elements are out, which is worst, and the picture of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from retrograd.record import Case, Profile

_GRID = 40  # cells a side in the heat map: finer is not legible in a report
_EDGES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 1024.0)


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`; `ratio` is err / tolerance per element, inf where one side is not finite."""

    ratio: torch.Tensor
    index: tuple[int, ...]
    got: float
    want: float
    wrong: int

    @property
    def worst(self) -> float:
        """Largest ratio; 0 for an empty tensor."""
        return float(self.ratio.max()) if self.ratio.numel() else 0.0


def compare(got: torch.Tensor, want: torch.Tensor, tol: torch.Tensor) -> Comparison:
    """`got` in any dtype against `want` and `tol` in float64, equal shapes. NaN matches NaN, inf the same inf."""
    value = got.detach().to(torch.float64)
    same = (value == want) | (value.isnan() & want.isnan())
    ratio = torch.where(same, 0.0, (value - want).abs() / tol).nan_to_num(float("inf"), float("inf"))
    if not ratio.numel():
        return Comparison(ratio, (), 0.0, 0.0, 0)
    flat = int(ratio.argmax())
    index: list[int] = []
    rest = flat
    for size in reversed(ratio.shape):  # torch.unravel_index takes as long as all the rest of this
        rest, place = divmod(rest, size)
        index.insert(0, place)
    at = tuple(index)
    return Comparison(ratio, at, float(value[at]), float(want[at]), int((ratio > 1).sum()))


def _ulp(want: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tiny = torch.finfo(dtype).tiny
    return torch.exp2(torch.floor(torch.log2(want.abs().clamp_min(tiny)))) * torch.finfo(dtype).eps


def profile(name: str, got: torch.Tensor, want: torch.Tensor, found: Comparison, case: Case) -> Profile:
    """The heat map of err / attainable error and the histogram of ULP distances of one tensor."""
    ratio = found.ratio.reshape(-1, found.ratio.shape[-1]) if found.ratio.ndim else found.ratio.reshape(1, 1)
    rows, cols = (min(_GRID, n) for n in ratio.shape)
    grid = torch.nn.functional.adaptive_max_pool2d(ratio.clamp(max=1e30)[None].cpu(), (rows, cols))[0]
    ulps = ((got.detach().to(torch.float64) - want).abs() / _ulp(want, got.dtype)).nan_to_num(1e30, 1e30).flatten()
    counts = [int(((ulps >= a) & (ulps < b)).sum()) for a, b in itertools.pairwise(_EDGES)]
    counts.append(int((ulps >= _EDGES[-1]).sum()))
    return Profile(
        tensor=name,
        case=case,
        shape=tuple(got.shape),
        ratio=tuple(tuple(float(f"{v:.3g}") for v in row) for row in grid.tolist()),
        ulp_edges=_EDGES,
        ulp_counts=tuple(counts),
        worst=found.worst,
    )
