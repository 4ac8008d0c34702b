"""One measured row of deformable attention. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from retrograd.bench import rows
from retrograd.bench.msda.shapes import shape_of
from retrograd.bench.rows import OURS, Measured

OP = "ms_deform_attn"
BASE = "grid_sample"  # the peer that runs everywhere, which times are held against
# Providers of this project: never a peer.
OWN = (OURS, "retrograd-deterministic", "retrograd-triton", "retrograd-torch")


@dataclass(frozen=True)
class Row(Measured):
    """One shape and provider.

    Attributes:
        shape: a name of `shapes`, or sizes spelled out.
        dtype: of value and out.
        beside: of locations and weights.
        fwd_extra_bytes: the most memory a forward held beyond inputs and output, what it saved included; None:
            unknown. Likewise bwd_extra_bytes beyond what the forward had left and the gradients.
    """

    shape: str
    dtype: str
    beside: str
    provider: str
    op: str = OP
    fwd_extra_bytes: int | None = None
    bwd_extra_bytes: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two rows measurements of the same thing."""
        return self.machine.get("gpu", ""), self.shape, self.dtype, self.beside, self.provider, self.fwd_how

    def ms(self, direction: str) -> float | None:
        """Time of "fwd" or "bwd"."""
        return self.fwd_ms if direction == "fwd" else self.bwd_ms

    def useful_bytes(self, direction: str) -> int:
        """The least that must move."""
        return shape_of(self.shape).useful_bytes(direction, self.dtype, self.beside)

    def gb_per_s(self, direction: str) -> float | None:
        """Useful bandwidth of "fwd" or "bwd"."""
        time = self.ms(direction)
        return self.useful_bytes(direction) / time / 1e6 if time else None


def load(paths: Iterable[str | os.PathLike[str]]) -> list[Row]:
    """Read JSON lines of `retrograd bench msda`; of rows that measure the same thing the last one counts.

    Raises:
        UsageError: a file cannot be read or is not such a file.
    """
    return rows.load_as(Row, "msda", paths)
