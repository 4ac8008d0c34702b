"""Times of other libraries from an earlier run on one H200, to be shown beside a measurement and never mixed with it.

torch 2.11, Triton 3.6, medians of triton.testing.do_bench around eager calls; one run. No torch.
"""

from __future__ import annotations

from typing import NamedTuple

WHERE = "an earlier run on one NVIDIA H200 (torch 2.11, Triton 3.6, medians of eager calls), not measured here"


class Best(NamedTuple):
    """Microseconds and the name of the fastest library of that run, by direction."""

    fwd_us: float
    fwd: str
    bwd_us: float
    bwd: str

    def of(self, direction: str) -> tuple[float, str]:
        """(microseconds, library)."""
        return (self.fwd_us, self.fwd) if direction == "fwd" else (self.bwd_us, self.bwd)


_TRITON, _CUDA, _HALF = "msda-triton", "Deformable-DETR CUDA", "msda-triton in float16"
_SINGLES = {
    "enc800": Best(950, _TRITON, 3537, _TRITON),
    "enc800b1": Best(232, _TRITON, 895, _TRITON),
    "bench10k": Best(431, _TRITON, 1618, _TRITON),
    "dec300": Best(25.5, _TRITON, 119, _CUDA),
    "dec900b16": Best(163, _TRITON, 775, _TRITON),
}
# Of the libraries of that run only grid_sample took bfloat16, so float16 stands for both.
_HALVES = {
    "enc800": Best(812, _HALF, 2057, _HALF),
    "enc800b1": Best(209, _HALF, 533, _HALF),
    "bench10k": Best(369, _HALF, 1037, _HALF),
    "dec300": Best(19, _HALF, 243, _HALF),
    "dec900b16": Best(140, _HALF, 439, _HALF),
}


def best(shape: str, dtype: str) -> Best | None:
    """The fastest library of the earlier run; None where nothing was timed."""
    return (_SINGLES if dtype == "float32" else _HALVES).get(shape)
