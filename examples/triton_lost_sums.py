"""Sums of columns that lose rows on a GPU, and nowhere else: `retrograd run-kernel examples/triton_lost_sums.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()


@triton.jit
def column_sums_kernel(x_ptr, sum_ptr, cols, BLOCK: tl.constexpr):
    j = tl.arange(0, BLOCK)
    row = tl.load(x_ptr + tl.program_id(0) * cols + j, mask=j < cols)
    total = tl.load(sum_ptr + j, mask=j < cols)
    tl.store(sum_ptr + j, total + row, mask=j < cols)  # the bug: tl.atomic_add(sum_ptr + j, row, mask=j < cols)


if __name__ == "__main__":
    x = torch.ones(64, 100, device=DEVICE)
    sums = torch.zeros(100, device=DEVICE)
    column_sums_kernel[(64,)](x, sums, 100, BLOCK=128)
    print("should be 64:", sums[0].item())
