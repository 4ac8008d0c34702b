"""The sum over ranks in rank order: by a loop anywhere, by a Triton kernel on a GPU, with the same bits.

An element of the result depends on its own W values and on nothing else: not on how many elements there are, where it
lies among them, or what adds them. Neither torch.sum nor a ring has this property (torch.sum of float32 over dim 0 on
a CPU: 12 of 55,126 elements of 8 rows change when the rows are cut elsewhere).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from retrograd.compat.versions import installed
from retrograd.errors import MissingExtraError, UsageError

Impl = Literal["loop", "triton"]
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Scale:
    """What is done once to each sum, in the precision of the sum, before it is rounded to the output.

    Attributes:
        mode: "none", "divide" (IEEE division, rounded once) or "multiply".
        value: the divisor or factor; rounded to float32 where sums are float32.
    """

    mode: Literal["none", "divide", "multiply"] = "none"
    value: float = 1.0


def rank_sum(
    received: torch.Tensor,
    output: torch.Tensor,
    scale: Scale = Scale(),
    flags: torch.Tensor | None = None,
    impl: Impl | None = None,
) -> None:
    """output = scale(((x0 + x1) + x2) + ...), the rows of `received` in their order.

    Args:
        received: [W, N] contiguous; float32, bfloat16, float16 or float64; row r comes from rank r.
        output: [N] contiguous on the same device, any of these dtypes.
        scale: what happens to each sum before it is rounded to the output's dtype.
        flags: [W] int32 or None; element r becomes 1 if row r has a NaN or Inf, and is not touched otherwise.
        impl: None for the kernel on a CUDA or ROCm device and the loop elsewhere, for float64 and without Triton;
            both give the same bits.

    Sums are float32, float64 for float64 rows. The result is bitwise the same for every N, split and implementation
    (payloads of NaN excepted).

    Raises:
        UsageError: impl="triton" and a tensor is float64, or the name is unknown.
        RuntimeError: impl="triton" on a CPU tensor outside `retrograd.cpu_triton`.
        MissingExtraError: impl="triton" without Triton.
    """
    if impl is None:
        fits = output.is_cuda and received.dtype in _KERNEL_DTYPES and output.dtype in _KERNEL_DTYPES
        impl = "triton" if fits and installed("triton") else "loop"
    if impl == "loop":
        _loop(received, output, scale, flags)
    elif impl == "triton":
        if not installed("triton"):
            raise MissingExtraError("triton", "triton", "impl='triton'")
        if torch.float64 in (received.dtype, output.dtype):
            raise UsageError(
                "impl='triton' got float64, expected float32, bfloat16 or float16; use impl='loop' or None"
            )
        from retrograd.fsdp.rank_sum.kernel import rank_sum_triton

        rank_sum_triton(received, output, scale.mode, scale.value, flags)
    else:
        raise UsageError(f"impl={impl!r}, expected 'loop', 'triton' or None")


def _loop(received: torch.Tensor, output: torch.Tensor, scale: Scale, flags: torch.Tensor | None) -> None:
    """As torch operations: any device, any floating dtype."""
    wide = torch.float64 if received.dtype == torch.float64 else torch.float32
    # Starts at x0, not at 0 + x0: that would turn -0 into +0.
    total = output.copy_(received[0]) if output.dtype == wide else received[0].to(wide, copy=True)
    for row in received[1:]:
        total.add_(row)  # a 16-bit row is widened, which is exact, then added with one rounding
    if scale.mode != "none":
        # A tensor on the device: by a number torch divides on CUDA as a product with its inverse, off by one rounding.
        factor = torch.full((), scale.value, dtype=wide, device=total.device)
        total = total.div_(factor) if scale.mode == "divide" else total.mul_(factor)
    if total is not output:
        output.copy_(total)
    if flags is not None:
        for rank, row in enumerate(received):
            flags[rank] |= ~torch.isfinite(row).all()
