"""One measured row of deformable attention. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from retrograd.bench import rows
from retrograd.bench.msda.shapes import shape_of
from retrograd.bench.rows import Measured

OP = "ms_deform_attn"
BASE = "grid_sample"  # the peer that runs everywhere, which times are held against


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
    provider: str  # pyright: ignore[reportIncompatibleMethodOverride]
    op: str = OP  # pyright: ignore[reportIncompatibleMethodOverride]
    fwd_extra_bytes: int | None = None
    bwd_extra_bytes: int | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two rows measurements of the same thing."""
        host = self.host_us is not None
        return self.device_name, self.shape, self.dtype, self.beside, self.provider, self.fwd_how, host

    @property
    def place(self) -> tuple[str, str, str]:
        """Op, shape and dtypes, in words."""
        return self.op, self.shape, self.dtype if self.dtype == self.beside else f"{self.dtype}, {self.beside}"

    def useful_bytes(self, direction: str) -> int:
        """The least that must move."""
        return shape_of(self.shape).useful_bytes(direction, self.dtype, self.beside)


def load(paths: Iterable[str | os.PathLike[str]]) -> list[Row]:
    """Read JSON lines of `retrograd bench msda`; of rows that measure the same thing the last one counts.

    Raises:
        UsageError: a file cannot be read or is not such a file.
    """
    return rows.load_as(lambda _: Row, "msda", paths)
