"""Probe kernel that is compiled to see how the compilers' tools write."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.JITFunction  # triton.jit interprets where TRITON_INTERPRET is set, and this is for the compiler
def doubling_kernel(x_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * 2.0)


FACTOR = tl.constexpr(2.0)


@triton.JITFunction
def scaled(x):
    return x * FACTOR


@triton.JITFunction
def scaling_kernel(x_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + at, scaled(tl.load(x_ptr + at)))
