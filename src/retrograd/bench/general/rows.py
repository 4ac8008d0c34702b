"""One measured row of an op that the benchmark knows by its tensors only. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from retrograd.bench.rows import Measured


@dataclass(frozen=True)
class Row(Measured):
    """One shape and provider.

    Attributes:
        shape: sizes in words.
        dtype: of floating inputs.
        fwd_bytes: inputs and results, each once.
        bwd_bytes: the same with gradients of results, and the gradients of inputs.
    """

    op: str
    shape: str
    dtype: str
    provider: str
    fwd_bytes: int = 0
    bwd_bytes: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two rows measurements of the same thing."""
        host = self.host_us is not None
        return self.device_name, self.op, self.shape, self.dtype, self.provider, self.fwd_how, host

    @property
    def place(self) -> tuple[str, str, str]:
        """Op, shape and dtype, in words."""
        return self.op, self.shape, self.dtype

    def useful_bytes(self, direction: str) -> int:
        """The least that must move if nothing is computed twice."""
        return self.fwd_bytes if direction == "fwd" else self.bwd_bytes
