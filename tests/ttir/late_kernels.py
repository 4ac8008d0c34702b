"""The kernel of late_imports.py, which imports it as late as in a call."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n) if MASKED else tl.load(x_ptr + i)
    tl.store(y_ptr + i, 2 * x, i < n)


def double(x: torch.Tensor, masked: bool) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    double_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), 64, masked)
    return y
