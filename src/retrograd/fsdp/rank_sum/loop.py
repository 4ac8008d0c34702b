"""The ordered sum as a loop of torch operations: any device, any floating dtype."""

from __future__ import annotations

import torch


def rank_sum_loop(
    received: torch.Tensor, output: torch.Tensor, mode: str, value: float, flags: torch.Tensor | None
) -> None:
    """See `rank_sum`; received [W, N], output [N], flags [W]."""
    wide = torch.float64 if received.dtype == torch.float64 else torch.float32
    # Starts at x0, not at 0 + x0: that would turn -0 into +0.
    total = output.copy_(received[0]) if output.dtype == wide else received[0].to(wide, copy=True)
    for row in received[1:]:
        total.add_(row)  # a 16-bit row is widened, which is exact, then added with one rounding
    if mode != "none":
        factor = torch.tensor(value, dtype=wide, device=total.device)
        total = total.div_(factor) if mode == "divide" else total.mul_(factor)
    if total is not output:
        output.copy_(total)
    if flags is not None:
        for rank, row in enumerate(received):
            flags[rank] |= ~torch.isfinite(row).all()
