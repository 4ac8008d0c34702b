"""Arithmetic that the norm kernels share, where what the compiler makes of the plain expression is wrong or slow."""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_wait
except ImportError:  # a build without NVIDIA's backend, where nothing is launched early
    gdc_wait = None


@triton.jit
def reciprocal_root(value, S_DTYPE: tl.constexpr, PTX: tl.constexpr):
    """1 / sqrt(value), both rounded where s is float32; else within 2 ulp on NVIDIA.

    The rounded root and division are 28 instructions a row, in every thread; this is 5. tl.rsqrt would flush subnormal
    values to 0.
    """
    if PTX and tl.float32 != S_DTYPE:
        return tl.inline_asm_elementwise(
            "rsqrt.approx.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(1.0, tl.sqrt_rn(value))


@triton.jit
def over(total, count, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, S_DTYPE: tl.constexpr):
    """total / count, correctly rounded where s is float32: a plain division is off by up to 2 ulp on NVIDIA.

    WHOLE: count is BLOCK_N, a power of two, by whose reciprocal a product is exact.
    """
    if WHOLE:
        return total * (1.0 / BLOCK_N)
    elif tl.float32 == S_DTYPE:
        return tl.div_rn(total, count * 1.0)
    else:
        return total / count


@triton.jit
def wait_for_kernels_ahead():
    """Until what ran before has ended and can be seen, where a kernel is launched before that (sm_90 and later)."""
    gdc_wait()


@triton.jit
def widen(values, PTX: tl.constexpr):
    """`values` in float32.

    With PTX a pair of bfloat16 takes two instructions; what the compiler makes of the cast on sm_90 takes five.
    """
    if PTX and values.dtype == tl.bfloat16 and values.numel > 1:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [values],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return values.to(tl.float32)


@triton.jit
def sum_both(first, second, axis: tl.constexpr, PTX: tl.constexpr):
    """Sums of two tensors over `axis`: one pass through shared memory for both, where Triton's interpreter is not."""
    if PTX:
        return tl.reduce((first, second), axis, add_both)
    else:
        return tl.sum(first, axis=axis), tl.sum(second, axis=axis)


@triton.jit
def add_both(a, b, c, d):
    """(a + c, b + d)."""
    return a + c, b + d


@triton.jit
def plus(stored, offset: tl.constexpr):
    """stored + offset; no addition for an offset of 0."""
    if offset != 0.0:
        stored += offset
    return stored


@triton.jit
def load_columns(ptrs, exists, WHOLE: tl.constexpr, KEEP: tl.constexpr):
    """What is at `ptrs`, zeros for columns that do not exist; all do if WHOLE. KEEP is the eviction policy."""
    return tl.load(ptrs, mask=None if WHOLE else exists, other=None if WHOLE else 0.0, eviction_policy=KEEP)


@triton.jit
def store_columns(ptrs, values, exists, WHOLE: tl.constexpr, CACHE: tl.constexpr, KEEP: tl.constexpr):
    """Put `values` to `ptrs`, but for columns that do not exist; all do if WHOLE.

    CACHE is the cache modifier, KEEP the eviction policy.
    """
    tl.store(ptrs, values, mask=None if WHOLE else exists, cache_modifier=CACHE, eviction_policy=KEEP)
