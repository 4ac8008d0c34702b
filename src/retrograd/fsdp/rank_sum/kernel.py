"""The ordered sum as one Triton kernel: a program takes a tile of columns and walks over the ranks."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from retrograd.runtime.triton.gpu import Backend
from retrograd.runtime.triton.launch import gpu_of, launch, on_device_of

# A thread of either maker has 8 elements: at least one load of 16 bytes of every dtype. 16 elements take up to 128
# registers where rows are unaligned, and spill on sm_80.
_WARPS, _BLOCK, _BLOCK_HIP = 4, 1024, 2048  # AMD's warps have 64 threads


def rank_sum_triton(
    received: torch.Tensor, output: torch.Tensor, mode: str, value: float, flags: torch.Tensor | None
) -> None:
    """See `rank_sum`; received [W, N], output [N], flags [W]. One launch on the current stream, nothing waits for it.

    Raises:
        RuntimeError: the tensors are on the CPU outside `retrograd.cpu_triton`.
    """
    block = _BLOCK_HIP if gpu_of(output).backend is Backend.HIP else _BLOCK
    ranks, count = received.shape
    if not count:
        return
    # Rows start at multiples of N, so loads are as wide as N allows; the kernel is told what divides it.
    unit = math.gcd(count, 16)
    if mode == "divide" and math.frexp(value)[0] == 0.5:
        # By a power of two: the same bits as the division, without its call of 40 instructions.
        mode, value = "multiply", 1 / value
    grid = (-(-count // block),)
    with on_device_of(output):
        launch(
            rank_sum_kernel,
            grid,
            (received, output, flags, count // unit, float(value), ranks, unit, mode, block),
            num_warps=_WARPS,
        )


@triton.jit(do_not_specialize=["units"])
def rank_sum_kernel(
    received_ptr,  # [RANKS, units * UNIT]
    out_ptr,  # [units * UNIT]
    flags_ptr,  # [RANKS] int32, or None
    units,
    value,
    RANKS: tl.constexpr,
    UNIT: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program p sums columns p * BLOCK, ... of all rows in the order of rows, in float32."""
    count = units.to(tl.int64) * UNIT  # RANKS * count may exceed 2^31
    cols = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = cols < count
    total = tl.load(received_ptr + cols, mask=mask, other=0.0).to(tl.float32)  # from x0, so that -0 stays -0
    note_if_bad(flags_ptr, total)
    for rank in tl.range(1, RANKS, loop_unroll_factor=4):
        row = tl.load(received_ptr + rank * count + cols, mask=mask, other=0.0).to(tl.float32)
        if flags_ptr is not None:
            note_if_bad(flags_ptr + rank, row)
        total += row
    if MODE == "divide":
        total = tl.div_rn(total, value)  # `/` is off by up to 2 units in the last place
    if MODE == "multiply":
        total = total * value
    tl.store(out_ptr + cols, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def note_if_bad(flag_ptr, row):
    """Set a flag where an element [BLOCK] is NaN or Inf: stores that are masked off cost no traffic, and all that are
    not write the same 1, so no atomic is needed.
    """
    if flag_ptr is not None:
        bad = (tl.abs(row) < float("inf")) == 0
        tl.store(flag_ptr + tl.zeros_like(row).to(tl.int32), bad.to(tl.int32), mask=bad)
