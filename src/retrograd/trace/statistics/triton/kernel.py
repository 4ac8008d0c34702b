"""All statistics of a tensor in one pass, as one Triton kernel: the same bits at every run.

A program takes every P-th tile and writes its own partial results, which are joined when a step ends. Of the histogram,
whose partial results would be 1 MiB a tensor, the programs add what they counted atomically: whole numbers, so that no
order of additions changes them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from retrograd.ops._triton.launch import Handle, launch, on_device_of, relaunch, relaunchable
from retrograd.trace.statistics.digest import BLOCK, GOLDEN, MIX_1, MIX_2
from retrograd.trace.statistics.exponents import BIAS, BUCKETS, OUTSIDE

PROGRAMS = 256  # at most: two for each multiprocessor of a large GPU
INTS, FLOATS = 5, 3  # columns: hash, nan, inf, subnormal, zero; low, high, sum of squares
_ROWS = 2  # blocks of the digest a tile: 8 elements of 32 bits a thread, which leaves room for two programs on an SM
_WARPS = 8

# dtype -> how the bits are read, bits of the least normal number and of infinity; integers have neither
_KINDS = {
    torch.float32: ("f32", 0x00800000, 0x7F800000),
    torch.bfloat16: ("bf16", 0x0080, 0x7F80),
    torch.float16: ("f16", 0x0400, 0x7C00),
    torch.float64: ("f64", 0x0010000000000000, 0x7FF0000000000000),
    torch.int64: ("i64", 0, 0),
    torch.int32: ("i32", 0, 0),
    torch.int16: ("i16", 0, 0),
    torch.int8: ("i8", 0, 0),
    torch.uint8: ("u8", 0, 0),
    torch.bool: ("u8", 0, 0),
}
# Triton takes no other globals.
_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
_BUCKETS, _OUTSIDE, _SHIFT = tl.constexpr(BUCKETS), tl.constexpr(OUTSIDE), tl.constexpr(1023 - BIAS)
DTYPES = tuple(_KINDS)
_handles: dict[tuple[torch.dtype, torch.device, int, bool, bool], Handle] = {}
_FEW = 16  # programs a tensor of so many tiles at most, where many are measured together


def takes(dtype: torch.dtype) -> bool:
    """Whether the kernel knows the dtype; complex numbers come as pairs of real ones."""
    return dtype in _KINDS


def measure(
    x: torch.Tensor,
    ints: torch.Tensor,
    floats: torch.Tensor,
    keys: torch.Tensor,
    row: int,
    counts: torch.Tensor | None = None,
) -> None:
    """Write the partial results of a tensor into its row; on the current stream, nothing waits for it.

    Args:
        x: contiguous, of a dtype that `takes` knows, not empty.
        ints: [R, PROGRAMS, INTS] int64, zeros.
        floats: [R, PROGRAMS, FLOATS] float64: inf, -inf, 0.
        keys: [BLOCK] int64.
        row: where to write.
        counts: [R, BUCKETS] int64, zeros: the histogram of a floating dtype; None leaves it out.
    """
    kind, tiny, infinity = _KINDS[x.dtype]
    count = x.numel()
    grid = (min(-(-count // _tile(x)), PROGRAMS), 1, 1)
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)
    # Loads are as wide as the count allows; the kernel is told what divides it.
    unit = math.gcd(count, 16)
    histogram = counts is not None and infinity > 0
    fields = counts if histogram else ints  # where nothing is counted, nothing is written
    facts = unit, kind, tiny, infinity, _ROWS, BLOCK, histogram, False
    args = (x, ints, floats, fields, keys, count // unit, row, *facts)
    # Beyond 2^31 the argument has another type, so another kernel is compiled.
    aligned = count // unit < 1 << 31 and relaunchable(x, ints, floats, fields)
    _launch((x.dtype, x.device, unit, histogram, False), grid, args, aligned)


def measure_all(
    xs: list[tuple[torch.Tensor, int]],
    ints: torch.Tensor,
    floats: torch.Tensor,
    keys: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> None:
    """`measure` for many tensors of one device, with a launch for each dtype and class of sizes: the same bits.

    Args:
        xs: tensors and their rows, each as in `measure`; they must live until this returns.
        ints: as in `measure`.
        floats: as in `measure`.
        keys: as in `measure`.
        counts: as in `measure`.
    """
    groups: dict[tuple[torch.dtype, int, bool], list[tuple[int, int, int]]] = {}
    for x, row in xs:
        count, address = x.numel(), x.data_ptr()
        few = count <= _FEW * _tile(x)
        if address % 16:  # the kernel is told that all are aligned
            measure(x, ints, floats, keys, row, counts)
            continue
        unit = math.gcd(count, 16)
        groups.setdefault((x.dtype, unit, few), []).append((address, count // unit, row))
    for (dtype, unit, few), rows in groups.items():
        kind, tiny, infinity = _KINDS[dtype]
        table = torch.tensor(rows, dtype=torch.int64).to(ints.device, non_blocking=True)
        grid = (_FEW if few else PROGRAMS, len(rows), 1)
        histogram = counts is not None and infinity > 0
        fields = counts if histogram else ints
        args = (table, ints, floats, fields, keys, 0, 0, unit, kind, tiny, infinity, _ROWS, BLOCK, histogram, True)
        _launch((dtype, ints.device, unit, histogram, True), grid, args, relaunchable(table, ints, floats, fields))


def _tile(x: torch.Tensor) -> int:
    """Elements of a tile."""
    return _ROWS * BLOCK // (2 if x.element_size() == 8 else 1)


def _launch(key: Any, grid: tuple[int, int, int], args: tuple[Any, ...], again: bool) -> None:
    """Launch, past Triton's look at the arguments where it was launched before with such."""
    handle = _handles.get(key) if again else None
    if handle is not None:
        relaunch(handle._replace(grid=grid), args, args[0].device.index)
        return
    with on_device_of(args[0]):
        made = launch(statistics_kernel, grid, args, num_warps=_WARPS)
    if made is not None and again:
        _handles[key] = made


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _pointer(address, KIND: tl.constexpr):
    """To elements of so many bits, aligned to 16 bytes; what is said of a call's result would be lost."""
    if KIND == "f32" or KIND == "i32":
        return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    elif KIND == "bf16" or KIND == "f16" or KIND == "i16":
        return tl.multiple_of(address.to(tl.pointer_type(tl.int16)), 16)
    elif KIND == "f64" or KIND == "i64":
        return tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
    elif KIND == "i8":
        return tl.multiple_of(address.to(tl.pointer_type(tl.int8)), 16)
    else:
        return tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def _read(x_ptr, offsets, mask, KIND: tl.constexpr):
    """Elements as signed 64-bit integers of their bits, and as float64; their magnitude without the sign bit."""
    if KIND == "f32":
        raw = tl.load(x_ptr + offsets, mask=mask, other=0).to(tl.int32, bitcast=True)
        return raw.to(tl.int64), raw.to(tl.float32, bitcast=True).to(tl.float64), raw.to(tl.int64) & 0x7FFFFFFF
    elif KIND == "bf16":
        raw = tl.load(x_ptr + offsets, mask=mask, other=0).to(tl.int16, bitcast=True)
        wide = raw.to(tl.int32) << 16  # a bfloat16 is the upper half of a float32
        return raw.to(tl.int64), wide.to(tl.float32, bitcast=True).to(tl.float64), raw.to(tl.int64) & 0x7FFF
    elif KIND == "f16":
        raw = tl.load(x_ptr + offsets, mask=mask, other=0).to(tl.int16, bitcast=True)
        return raw.to(tl.int64), raw.to(tl.float16, bitcast=True).to(tl.float64), raw.to(tl.int64) & 0x7FFF
    elif KIND == "f64":
        raw = tl.load(x_ptr + offsets, mask=mask, other=0).to(tl.int64, bitcast=True)
        return raw, raw.to(tl.float64, bitcast=True), raw & 0x7FFFFFFFFFFFFFFF
    elif KIND == "u8":
        raw = tl.load(x_ptr + offsets, mask=mask, other=0)
        return raw.to(tl.int64), raw.to(tl.float64), raw.to(tl.int64)
    else:
        raw = tl.load(x_ptr + offsets, mask=mask, other=0)
        return raw.to(tl.int64), raw.to(tl.float64), raw.to(tl.int64)


@triton.jit
def _hash(bits, keys_ptr, columns, WORDS: tl.constexpr):
    """Products [ROWS, WIDTH] of bits with the keys of their positions, mod 2^64."""
    if WORDS == 1:
        return bits * tl.load(keys_ptr + columns)
    else:
        low = (bits << 32) >> 32
        return low * tl.load(keys_ptr + 2 * columns) + (bits >> 32) * tl.load(keys_ptr + 2 * columns + 1)


@triton.jit
def _bucket(bits, KIND: tl.constexpr):
    """The exponent field as float32 has it, and 256 more of a negative number; what is special or zero is anything."""
    if KIND == "f64":
        field = tl.minimum(tl.maximum(((bits >> 52) & 2047) - _SHIFT, 0), _OUTSIDE - 1)
        return (field | ((bits >> 55) & 256)).to(tl.int32)
    elif KIND == "f32":
        return ((bits >> 23) & 511).to(tl.int32)
    elif KIND == "bf16":
        return ((bits >> 7) & 511).to(tl.int32)
    else:  # f16: its subnormal numbers are normal in float32
        wide = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
        return (wide >> 23) & 511


@triton.jit(do_not_specialize=["units", "row"])
def statistics_kernel(
    x_ptr,  # [units * UNIT]; of a TABLE [N, 3]: address, units and row of N tensors
    ints_ptr,  # [R, 256, 5]
    floats_ptr,  # [R, 256, 3]
    counts_ptr,  # [R, 512]
    keys_ptr,  # [BLOCK]
    units,
    row,
    UNIT: tl.constexpr,
    KIND: tl.constexpr,
    TINY: tl.constexpr,
    INFINITY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Program p counts and hashes tiles p, p + P, ... of ROWS blocks; of a table program (p, n) those of tensor n."""
    if TABLE:
        entry = x_ptr + tl.program_id(1) * 3
        units = tl.load(entry + 1)
        row = tl.load(entry + 2)
        x_ptr = _pointer(tl.load(entry), KIND)
    WORDS: tl.constexpr = 2 if KIND == "f64" or KIND == "i64" else 1  # of 32 bits, an element
    WIDTH: tl.constexpr = BLOCK // WORDS
    program = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, ROWS).to(tl.int64)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, WIDTH)[None, :]  # [1, WIDTH]
    hashed = tl.zeros([ROWS], tl.uint64)
    nan = tl.zeros([ROWS], tl.int64)
    inf = tl.zeros([ROWS], tl.int64)
    subnormal = tl.zeros([ROWS], tl.int64)
    zero = tl.zeros([ROWS], tl.int64)
    squares = tl.zeros([ROWS], tl.float64)
    low = tl.full([ROWS], float("inf"), tl.float64)
    high = tl.full([ROWS], float("-inf"), tl.float64)
    fields = tl.zeros([_BUCKETS], tl.int32)
    total = units.to(tl.int64) * UNIT
    for tile in range(program, tl.cdiv(total, ROWS * WIDTH), tl.num_programs(0)):
        blocks = tile * ROWS + rows
        offsets = blocks * WIDTH + columns  # [ROWS, WIDTH]
        mask = offsets < total
        bits, value, magnitude = _read(x_ptr, offsets, mask, KIND)
        h = tl.sum(_hash(bits, keys_ptr, columns, WORDS), axis=1)  # [ROWS]
        number = (blocks + 1).to(tl.uint64) * _GOLDEN  # [ROWS, 1]
        # A block beyond the end is none: its hash would not be 0.
        there = tl.reshape(blocks * WIDTH < total, [ROWS])
        hashed += tl.where(there, _mix(h.to(tl.uint64) + tl.reshape(number, [ROWS])), tl.zeros([ROWS], tl.uint64))
        finite = mask
        if INFINITY > 0:
            finite = mask & (magnitude < INFINITY)
            nan += tl.sum((mask & (magnitude > INFINITY)).to(tl.int64), axis=1)
            inf += tl.sum((mask & (magnitude == INFINITY)).to(tl.int64), axis=1)
            subnormal += tl.sum((mask & (magnitude > 0) & (magnitude < TINY)).to(tl.int64), axis=1)
        zero += tl.sum((mask & (magnitude == 0)).to(tl.int64), axis=1)
        if HISTOGRAM:
            bucket = tl.where(finite & (magnitude > 0), _bucket(bits, KIND), _OUTSIDE)
            fields += tl.histogram(tl.reshape(bucket, [ROWS * WIDTH]), _BUCKETS)
        low = tl.minimum(low, tl.min(tl.where(finite, value, float("inf")), axis=1))
        high = tl.maximum(high, tl.max(tl.where(finite, value, float("-inf")), axis=1))
        squares += tl.sum(tl.where(finite, value * value, 0.0), axis=1)
    at = (row.to(tl.int64) * 256 + program) * 5
    tl.store(ints_ptr + at, tl.sum(hashed.to(tl.int64), axis=0))
    tl.store(ints_ptr + at + 1, tl.sum(nan, axis=0))
    tl.store(ints_ptr + at + 2, tl.sum(inf, axis=0))
    tl.store(ints_ptr + at + 3, tl.sum(subnormal, axis=0))
    tl.store(ints_ptr + at + 4, tl.sum(zero, axis=0))
    at = (row.to(tl.int64) * 256 + program) * 3
    tl.store(floats_ptr + at, tl.min(low, axis=0))
    tl.store(floats_ptr + at + 1, tl.max(high, axis=0))
    tl.store(floats_ptr + at + 2, tl.sum(squares, axis=0))
    if HISTOGRAM:
        places = tl.arange(0, _BUCKETS)
        filled = (fields > 0) & (places != _OUTSIDE)
        at = row.to(tl.int64) * _BUCKETS + places
        tl.atomic_add(counts_ptr + at, fields.to(tl.int64), mask=filled, sem="relaxed")
