"""Runs in a row of a randomly rounded reference: what each leaves to the next, where they are not made at once."""

from __future__ import annotations

import math

import torch

# Of a tensor's size, that which other roundings may change: more is another dimension than that of the runs.
_ANOTHER_RUN = 0.05
_FEW = 2048  # elements: the norms of all took a tenth of an attention's time, which has half a million


class LastRun:
    """The randomly rounded run before the present one, where they are not made at once: its operands, and its factors.

    A run takes of the one before what that had taken or computed, so that what differs between two lives on; where they
    are to stay `apart`, as in `Float64`, what that had computed itself.
    """

    def __init__(self, apart: bool = False) -> None:
        self._apart = apart
        self._before: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self._now: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def end(self) -> None:
        """The present run is the last one now."""
        self._before, self._now = self._now, ([], [])

    def operand(self, t: torch.Tensor, *, taken: bool) -> torch.Tensor:
        """An operand, or if it is `taken` what the last run had in its place."""
        known, now = self._before[0], self._now[0]
        other = known[len(now)] if taken and len(now) < len(known) else None
        used = other if other is not None and other.shape == t.shape and near(other, t) else t
        now.append((t if self._apart else used).clone())  # it may be changed in place
        return used

    def factor(self, own: torch.Tensor) -> torch.Tensor:
        """A number that multiplies a whole product, the same as in the last run."""
        known, now = self._before[1], self._now[1]
        now.append(known[len(now)] if len(now) < len(known) and known[len(now)].shape == own.shape else own)
        return now[-1]


def near(other: torch.Tensor, t: torch.Tensor) -> bool:
    """Whether one tensor is another one but for roundings; of what is not a number in both, the rest says so.

    Of large ones a few thousand elements say it; where these do not, all are asked: rounding may be all that they hold.
    """
    if t.numel() > 4 * _FEW and other.is_contiguous() and t.is_contiguous():
        step = t.numel() // _FEW | 1  # odd, so that dimensions which are powers of two are crossed
        if _near(*(x.view(-1)[::step] for x in (other, t)), least=0.0):
            return True
    return _near(other, t)


def _near(other: torch.Tensor, t: torch.Tensor, least: float = -1.0) -> bool:
    apart, size = torch.dist(other, t).item(), torch.linalg.vector_norm(t).item()
    if not math.isfinite(apart):
        other, t = (x.nan_to_num(0.0, 0.0, 0.0) for x in (other, t))
        apart, size = torch.dist(other, t).item(), torch.linalg.vector_norm(t).item()
    return size > least and apart <= _ANOTHER_RUN * size
