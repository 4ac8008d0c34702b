"""Launch plans of RMSNorm: tile sizes, warps and numbers of programs. Pure arithmetic, no torch, no triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

# Widest row a forward program holds at once: 0 spills at 32768 columns and 16 warps (Triton 3.6, sm_90).
FORWARD_TILE_LIMIT = 32768
# The backward holds x, grad_out, weight and the sum for grad_weight: 16384 columns spill about 100 bytes per
# thread at 32 warps, 32768 columns more than 600 (Triton 3.6, sm_90).
BACKWARD_TILE_LIMIT = 16384
# Columns per step when a row is walked in pieces.
LOOP_BLOCK_N = 4096

_TILE_ELEMENTS = 4096
# An interpreted operation costs 60-100 us up to about this many elements.
_INTERPRETER_TILE_ELEMENTS = 32768
_INTERPRETER_MAX_ROWS = 16
_PIPELINE_BYTES = 64 * 1024


@dataclass(frozen=True)
class ForwardPlan:
    """How the forward runs: `programs` programs of [block_m, block_n] tiles; `looped` walks columns twice."""

    looped: bool
    block_m: int
    block_n: int
    num_warps: int
    programs: int


@dataclass(frozen=True)
class BackwardPlan:
    """How the backward runs.

    Fused (`looped` false): `programs` persistent programs compute grad_x and the sums for grad_weight together.
    Looped: `programs` programs compute grad_x in two column passes; then grad_weight comes from a grid of
    (columns / `block_n`, `parts`). `parts` is the number of rows of the float32 partial buffer either way, and
    0 when sums are added atomically into one row.
    """

    looped: bool
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    row_groups: int
    dw_block_m: int
    dw_block_n: int
    parts: int
    finalize_block_p: int
    finalize_block_n: int


@lru_cache(maxsize=4096)
def plan_forward(
    m: int, n: int, itemsize: int, num_sms: int, interpreting: bool, *, max_tile_n: int | None = None
) -> ForwardPlan:
    """Plan the forward of an [m, n] input; `max_tile_n` lowers the width above which columns are looped over."""
    del itemsize, num_sms  # the grid is one program per tile; kept so that both plans are asked alike
    limit = FORWARD_TILE_LIMIT if max_tile_n is None else max_tile_n
    looped = next_power_of_2(n) > limit
    block_n = min(LOOP_BLOCK_N, limit) if looped else next_power_of_2(n)
    block_m = _rows_per_tile(m, block_n, looped, interpreting)
    return ForwardPlan(
        looped=looped,
        block_m=block_m,
        block_n=block_n,
        num_warps=_warps(block_m * block_n, 16),
        programs=ceil_div(m, block_m),
    )


@lru_cache(maxsize=4096)
def plan_backward(
    m: int,
    n: int,
    itemsize: int,
    num_sms: int,
    deterministic: bool,
    interpreting: bool,
    *,
    max_tile_n: int | None = None,
) -> BackwardPlan:
    """Plan the backward of an [m, n] input; `max_tile_n` lowers the width above which columns are looped over."""
    limit = BACKWARD_TILE_LIMIT if max_tile_n is None else max_tile_n
    looped = next_power_of_2(n) > limit
    block_n = min(LOOP_BLOCK_N, limit) if looped else next_power_of_2(n)
    block_m = _rows_per_tile(m, block_n, looped, interpreting)
    tiles = ceil_div(m, block_m)
    num_warps = _warps(block_m * block_n, 32)
    # Registers of the fused kernel (Triton 3.6, sm_90): 64 at 4 warps, 106 at 8, 108 at 16 allow 4-8, 2 and 1
    # resident programs per multiprocessor.
    resident = {1: 8, 2: 8, 4: 4, 8: 2}.get(num_warps, 1)
    persistent = num_sms * (1 if interpreting else resident)
    # Column kernel for grad_weight: narrow column blocks, so that many row groups are not needed to fill the GPU.
    dw_block_n = min(block_n, _INTERPRETER_TILE_ELEMENTS if interpreting else 256)
    dw_block_m = block_m if interpreting else min(next_power_of_2(m), 16)
    if looped:
        wanted = max(ceil_div(4 * num_sms, max(ceil_div(n, dw_block_n), 1)), min(num_sms, 2))
        row_groups = min(wanted, ceil_div(m, dw_block_m))
        programs = tiles
    else:
        programs = row_groups = min(persistent, tiles)
    # x and grad_out, two stages: a second stage is only asked for where it fits shared memory with room to spare.
    pipelined = not looped and 2 * 2 * block_m * block_n * itemsize <= _PIPELINE_BYTES
    return BackwardPlan(
        looped=looped,
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=2 if pipelined else 1,
        programs=programs,
        row_groups=row_groups,
        dw_block_m=dw_block_m,
        dw_block_n=dw_block_n,
        parts=row_groups if deterministic else 0,
        finalize_block_p=32,
        finalize_block_n=4096 if interpreting else 64,
    )


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def _rows_per_tile(m: int, block_n: int, looped: bool, interpreting: bool) -> int:
    if interpreting:
        rows = min(_INTERPRETER_MAX_ROWS, _INTERPRETER_TILE_ELEMENTS // block_n)
    else:
        rows = 1 if looped else _TILE_ELEMENTS // block_n
        # Below 1024 columns the float32 sums of a 4096-element tile crowd the registers (201 at N=512, R=8).
        rows = rows // 2 if block_n >= 256 else min(rows, 64)
    return max(1, min(rows, next_power_of_2(m)))


def _warps(elements: int, most: int) -> int:
    return max(1, min(most, elements // 512))
