"""Probe kernel that is compiled to see how the compilers' tools write."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def doubling_kernel(x_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * 2.0)
