"""Statistics kernel: all statistics of a tensor in one pass of one Triton kernel, the same bits at every run.

Elements are read as 64-bit units, the words of the digest, and taken apart in registers; each thread adds up for
itself, and a program once at its end. A program takes every P-th tile and writes its own partial results, which are
joined when a step ends. Of the histogram, whose partial results would be 1 MiB a tensor, the programs add what they
counted atomically: whole numbers, so that no order of additions changes them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from retrograd.runtime.triton.launch import KernelHandle, gpu_of, launch, on_device_of, relaunch, relaunchable
from retrograd.trace.statistics.digest import BLOCK, SPREAD_1, SPREAD_2, UNIT
from retrograd.trace.statistics.exponents import BIAS, BUCKETS, OUTSIDE

PROGRAMS = 512  # at most: four for each multiprocessor of a large GPU, which has room for as many
# Columns: hash, and how many are NaN, NaN or infinite, normal or those, not zero; low, high, sum of squares.
INTS, FLOATS = 5, 3
_ROWS = 4  # of a tile, which is a block of the digest: each thread has 64 bytes on their way
_WARPS = 4

# dtype -> how the bits are read, bits of the least normal number and of infinity; integers have neither. Triton would
# take "bf16" for a type where it compiles what was recorded.
_KINDS = {
    torch.float32: ("f32", 0x00800000, 0x7F800000),
    torch.bfloat16: ("b16", 0x0080, 0x7F80),
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
_SPREAD_1, _SPREAD_2 = tl.constexpr(SPREAD_1), tl.constexpr(SPREAD_2)
_PROGRAMS, _INTS, _FLOATS = tl.constexpr(PROGRAMS), tl.constexpr(INTS), tl.constexpr(FLOATS)
_BUCKETS, _OUTSIDE, _SHIFT = tl.constexpr(BUCKETS), tl.constexpr(OUTSIDE), tl.constexpr(1023 - BIAS)
DTYPES = tuple(_KINDS)
_handles: dict[tuple[torch.dtype, torch.device, bool, bool, bool], KernelHandle] = {}
_FEW = 32  # programs a tensor of so many tiles at most, where many are measured together
FEW_BYTES = _FEW * BLOCK * UNIT


def takes(dtype: torch.dtype) -> bool:
    """Whether the kernel knows the dtype; complex numbers come as pairs of real ones."""
    return dtype in _KINDS


class PartialResults(NamedTuple):
    """Memory of one device that programs write to, a row for each tensor, and the keys of the digest.

    Attributes:
        ints: [R, PROGRAMS, INTS] int64, zeros.
        floats: [R, PROGRAMS, FLOATS] float64: inf, -inf, 0.
        counts: [R, BUCKETS] int64, zeros: the histograms of floating dtypes; None leaves them out.
        keys: [BLOCK] int64.
    """

    ints: torch.Tensor
    floats: torch.Tensor
    counts: torch.Tensor | None
    keys: torch.Tensor


def measure(x: torch.Tensor, results: PartialResults, row: int) -> None:
    """Write the partial results of a tensor into its row; on the current stream, nothing waits for it.

    `x` is contiguous, of a dtype that `takes` knows, and not empty.
    """
    count = x.numel()
    tiles = -(-count * x.element_size() // (BLOCK * UNIT))
    grid = min(tiles, PROGRAMS), 1, 1
    _launch(x.dtype, _reads_unit_pairs(x), grid, (x.data_ptr(), count, row), results, False)


# dtype, whether it is read in units, whether of few tiles, how many tensors
Group = tuple[torch.dtype, bool, bool, int]


def grouped(xs: list[torch.Tensor]) -> tuple[torch.Tensor, list[Group]]:
    """What `measure_all` takes for tensors as in `measure`, on the CPU; the last column is their place in the list."""
    groups: dict[tuple[torch.dtype, bool, bool], list[tuple[int, int, int]]] = {}
    for number, x in enumerate(xs):
        key = x.dtype, _reads_unit_pairs(x), x.numel() * x.element_size() <= FEW_BYTES
        groups.setdefault(key, []).append((x.data_ptr(), x.numel(), number))
    rows = [(address, count, at, n) for at, (address, count, n) in enumerate(r for g in groups.values() for r in g)]
    return torch.tensor(rows, dtype=torch.int64), [(*key, len(group)) for key, group in groups.items()]


def measure_all(table: torch.Tensor, groups: list[Group], results: PartialResults, first: int) -> None:
    """`measure` for many tensors of one device, with a launch for each group: the same bits.

    Args:
        table: [N, 4] int64 on their device, of tensors as in `measure`: address, elements, row after `first`, anything.
        groups: what they have in common, group by group.
        results: as in `measure`.
        first: where to write.
    """
    address = table.data_ptr()
    for dtype, whole, few, many in groups:
        grid = _FEW if few else PROGRAMS, many, 1
        _launch(dtype, whole, grid, (address, 0, first), results, True)
        address += 32 * many


def _reads_unit_pairs(x: torch.Tensor) -> bool:
    """Whether it consists of pairs of units, which a thread reads at once."""
    return (x.data_ptr() | x.numel() * x.element_size()) % (2 * UNIT) == 0


def _launch(
    dtype: torch.dtype,
    whole: bool,
    grid: tuple[int, int, int],
    source: tuple[int, int, int],
    results: PartialResults,
    table: bool,
) -> None:
    """Launch, past Triton's look at the arguments where it was launched before with such."""
    ints, floats, counts, keys = results
    kind, tiny, infinity = _KINDS[dtype]
    histogram = counts is not None and infinity > 0
    fields = counts if histogram else ints  # where nothing is counted, nothing is written
    per = UNIT // dtype.itemsize
    args = (*source, ints, floats, fields, keys, kind, per, tiny, infinity, _ROWS, BLOCK, whole, histogram, table)
    key = dtype, ints.device, whole, histogram, table
    # Beyond 2^31 an argument has another type, so another kernel is compiled.
    again = source[0] >= 1 << 31 > source[1] and relaunchable(ints, floats, fields, keys)
    handle = _handles.get(key) if again else None
    if handle is not None:
        relaunch(handle._replace(grid=grid), args, ints.device.index)
        return
    gpu_of(ints)  # refuses a tensor on the CPU in words
    with on_device_of(ints):
        launched = launch(statistics_kernel, grid, args, num_warps=_WARPS)
    if launched is not None and again:
        _handles[key] = launched


@triton.jit
def _factor(block):
    x = tl.cast(block + 1, tl.uint32)
    x = (x ^ (x >> 16)) * _SPREAD_1
    x = (x ^ (x >> 15)) * _SPREAD_2
    return ((x ^ (x >> 16)) | 1).to(tl.uint64)


@triton.jit
def _units(address, tile, left, rows, columns, BLOCK: tl.constexpr, WHOLE: tl.constexpr, PER: tl.constexpr,
           PART: tl.constexpr):  # fmt: skip
    """The units [ROWS, COLUMNS] of a tile, `left` elements of which are there; the others are 0."""
    offsets = rows * columns.shape[1] + columns
    if WHOLE:
        # What is said of a call's result would be lost, so it is said here.
        first = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16) + tile * BLOCK
        if PART:
            return tl.load(first + offsets, mask=offsets < tl.multiple_of(left // PER, 2), other=0)
        else:
            return tl.load(first + offsets)
    else:
        inside = tl.arange(0, PER)[None, None, :]
        at = tl.expand_dims(offsets, 2) * PER + inside
        if PER == 1:
            first = address.to(tl.pointer_type(tl.uint64)) + tile * BLOCK
        elif PER == 2:
            first = address.to(tl.pointer_type(tl.uint32)) + tile * (BLOCK * 2)
        elif PER == 4:
            first = address.to(tl.pointer_type(tl.uint16)) + tile * (BLOCK * 4)
        else:
            first = address.to(tl.pointer_type(tl.uint8)) + tile * (BLOCK * 8)
        raw = tl.load(first + at, mask=at < left, other=0).to(tl.uint64)
        return tl.sum(raw << (inside * (64 // PER)).to(tl.uint64), axis=2)


@triton.jit
def _element(units, K: tl.constexpr, KIND: tl.constexpr):
    """Element K of units as a float32 that holds it exactly, or as float64."""
    if KIND == "f64":
        value = units.to(tl.float64, bitcast=True)
    elif KIND == "i64":
        value = units.to(tl.int64, bitcast=True).to(tl.float64)
    elif KIND == "f32":
        value = (units >> (32 * K)).to(tl.uint32).to(tl.float32, bitcast=True)
    elif KIND == "i32":
        value = (units >> (32 * K)).to(tl.uint32).to(tl.int32, bitcast=True).to(tl.float64)
    elif KIND == "b16":  # the upper half of a float32
        word = (units >> (32 * (K // 2))).to(tl.uint32)
        value = (word << 16 if K % 2 == 0 else word & 0xFFFF0000).to(tl.float32, bitcast=True)
    elif KIND == "f16":
        value = (units >> (16 * K)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "i16":
        value = (units >> (16 * K)).to(tl.uint16).to(tl.int16, bitcast=True).to(tl.float32)
    elif KIND == "i8":
        value = (units >> (8 * K)).to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        value = (units >> (8 * K)).to(tl.uint8).to(tl.float32)
    return value


@triton.jit
def _flags(word, TINY: tl.constexpr, INFINITY: tl.constexpr):
    """Of the two 16-bit numbers in a word, 4 bits each: whether NaN, NaN or infinite, below the normal numbers, zero.

    In each half the 16th bit is set by adding what a magnitude lacks to 2^15, which carries nothing into the other.
    """
    magnitude = word & 0x7FFF7FFF
    nan = ((magnitude + (0x7FFF - INFINITY) * 0x10001) >> 15) & 0x00010001
    special = ((magnitude + (0x8000 - INFINITY) * 0x10001) >> 11) & 0x00100010
    normal = ((magnitude + (0x8000 - TINY) * 0x10001) >> 7) & 0x01000100
    other = ((magnitude + 0x7FFF7FFF) >> 3) & 0x10001000
    return nan | special | normal | other


@triton.jit
def _tally(flags, AT: tl.constexpr):
    """Of a kind of flags, added up, how many there are."""
    return ((flags >> (4 * AT)) & 15).to(tl.int32) + ((flags >> (16 + 4 * AT)) & 15).to(tl.int32)


@triton.jit
def _counts(units, KIND: tl.constexpr, PER: tl.constexpr, TINY: tl.constexpr, INFINITY: tl.constexpr):
    """Of units [ROWS, COLUMNS] how many elements of a column are NaN, NaN or infinite, normal or those, not zero."""
    low, high = units.to(tl.uint32), (units >> 32).to(tl.uint32)
    if KIND == "b16" or KIND == "f16":
        flags = tl.sum(_flags(low, TINY, INFINITY) + _flags(high, TINY, INFINITY), axis=0)
        return _tally(flags, 0), _tally(flags, 1), _tally(flags, 2), _tally(flags, 3)
    elif KIND == "f32":
        a, b = low & 0x7FFFFFFF, high & 0x7FFFFFFF
        nan = tl.sum((a > INFINITY).to(tl.int32) + (b > INFINITY).to(tl.int32), axis=0)
        special = tl.sum((a >= INFINITY).to(tl.int32) + (b >= INFINITY).to(tl.int32), axis=0)
        normal = tl.sum((a >= TINY).to(tl.int32) + (b >= TINY).to(tl.int32), axis=0)
        return nan, special, normal, tl.sum((a > 0).to(tl.int32) + (b > 0).to(tl.int32), axis=0)
    elif KIND == "f64":
        a = units & 0x7FFFFFFFFFFFFFFF
        nan, special = tl.sum((a > INFINITY).to(tl.int32), axis=0), tl.sum((a >= INFINITY).to(tl.int32), axis=0)
        return nan, special, tl.sum((a >= TINY).to(tl.int32), axis=0), tl.sum((a > 0).to(tl.int32), axis=0)
    else:
        other = tl.zeros([units.shape[1]], tl.int32)
        for k in tl.static_range(PER):
            other += tl.sum(((units >> (k * (64 // PER))) & ((1 << (64 // PER)) - 1) != 0).to(tl.int32), axis=0)
        return tl.zeros_like(other), tl.zeros_like(other), other, other


@triton.jit
def _sums(value, K: tl.constexpr, left, low, high, squares, fields, offsets, KIND: tl.constexpr, PER: tl.constexpr,
          PART: tl.constexpr, FLOATING: tl.constexpr, HISTOGRAM: tl.constexpr):  # fmt: skip
    """Least, greatest and sum of squares with element K of each unit; what is not finite or not there counts as NaN."""
    if FLOATING:
        value = value * 0 + value
    if PART:
        value = tl.where(offsets * PER + K < left, value, float("nan"))
    low, high = tl.minimum(low, tl.min(value, axis=0)), tl.maximum(high, tl.max(value, axis=0))
    wide = tl.maximum(tl.abs(value), 0.0).to(tl.float64)
    squares += tl.sum(wide * wide, axis=0)
    if HISTOGRAM:
        if KIND == "f64":
            upper = (value.to(tl.uint64, bitcast=True) >> 52).to(tl.int32)  # sign and exponent
            field = tl.minimum(tl.maximum((upper & 2047) - _SHIFT, 0), _OUTSIDE - 1)
            bucket = field | ((upper & 2048) >> 3)
        else:  # every number of 16 bits is normal in float32, or has its exponent
            bucket = (value.to(tl.uint32, bitcast=True) >> 23).to(tl.int32)
        bucket = tl.where(wide > 0, bucket, _OUTSIDE)
        fields += tl.histogram(tl.reshape(bucket, [bucket.shape[0] * bucket.shape[1]]), _BUCKETS)
    return low, high, squares, fields


@triton.jit
def _tile(sums, address, tile, left, rows, columns, key_low, key_high, KIND: tl.constexpr, TINY: tl.constexpr,
          INFINITY: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, PER: tl.constexpr, PART: tl.constexpr,
          HISTOGRAM: tl.constexpr):  # fmt: skip
    """The sums with a tile, of which `left` elements are there."""
    hashed, nan, special, normal, other, low, high, squares, fields = sums
    units = _units(address, tile, left, rows, columns, BLOCK, WHOLE, PER, PART)
    offsets = rows * columns.shape[1] + columns
    product = (units.to(tl.uint32) + key_low).to(tl.uint64) * ((units >> 32).to(tl.uint32) + key_high).to(tl.uint64)
    if PART:
        product = tl.where(offsets * PER < left, product, 0)
    hashed += tl.sum(product, axis=0) * _factor(tile)
    a, b, c, d = _counts(units, KIND, PER, TINY, INFINITY)
    nan, special, normal, other = nan + a, special + b, normal + c, other + d
    for k in tl.static_range(PER):
        low, high, squares, fields = _sums(_element(units, k, KIND), k, left, low, high, squares, fields, offsets, KIND,
                                           PER, PART, INFINITY > 0, HISTOGRAM)  # fmt: skip
    return hashed, nan, special, normal, other, low, high, squares, fields


@triton.jit(do_not_specialize=["source", "count", "row"])
def statistics_kernel(
    source: tl.int64,  # address of a tensor, or of a TABLE [N, 4]: addresses, elements and rows of N tensors
    count,
    row,
    ints_ptr,  # [R, PROGRAMS, INTS]
    floats_ptr,  # [R, PROGRAMS, FLOATS]
    counts_ptr,  # [R, 512]
    keys_ptr,  # [BLOCK]
    KIND: tl.constexpr,
    PER: tl.constexpr,  # elements a unit
    TINY: tl.constexpr,
    INFINITY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Program p counts and hashes tiles p, p + P, ... of a block each; of a table program (p, n) those of tensor n."""
    address = source
    if TABLE:
        entry = source.to(tl.pointer_type(tl.int64)) + tl.program_id(1) * 4
        address, count, row = tl.load(entry), tl.load(entry + 1), row + tl.load(entry + 2)
    COLUMNS: tl.constexpr = BLOCK // ROWS
    VALUE: tl.constexpr = tl.float64 if PER == 1 or KIND == "i32" else tl.float32
    program = tl.program_id(0).to(tl.int64)
    count = count.to(tl.int64)
    tiles = tl.cdiv(count, BLOCK * PER)
    if program >= tiles:
        return  # its partial results are there: those of nothing
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    keys = tl.load(keys_ptr + rows * COLUMNS + columns).to(tl.uint64)
    key_low, key_high = keys.to(tl.uint32), (keys >> 32).to(tl.uint32)
    none = tl.zeros([COLUMNS], tl.int32)
    sums = (
        tl.zeros([COLUMNS], tl.uint64), none, none, none, none,
        tl.full([COLUMNS], float("inf"), VALUE), tl.full([COLUMNS], float("-inf"), VALUE),
        tl.zeros([COLUMNS], tl.float64), tl.zeros([_BUCKETS], tl.int32),
    )  # fmt: skip
    # Whole tiles need no mask; the last may be part of one.
    whole = count // (BLOCK * PER) if WHOLE else 0
    step = tl.num_programs(0)
    for tile in range(program, whole, step):
        sums = _tile(sums, address, tile, BLOCK * PER, rows, columns, key_low, key_high, KIND, TINY, INFINITY, BLOCK,
                     WHOLE, PER, False, HISTOGRAM)  # fmt: skip
    done = program + tl.cdiv(tl.maximum(whole - program, 0), step) * step
    for tile in range(done, tiles, step):
        left = tl.minimum(count - tile * (BLOCK * PER), BLOCK * PER).to(tl.int32)
        sums = _tile(sums, address, tile, left, rows, columns, key_low, key_high, KIND, TINY, INFINITY, BLOCK, WHOLE,
                     PER, True, HISTOGRAM)  # fmt: skip
    hashed, nan, special, normal, other, low, high, squares, fields = sums
    at = ints_ptr + (row.to(tl.int64) * _PROGRAMS + program) * _INTS
    tl.store(at, tl.sum(hashed.to(tl.int64), axis=0))
    tl.store(at + 1, tl.sum(nan.to(tl.int64), axis=0))
    tl.store(at + 2, tl.sum(special.to(tl.int64), axis=0))
    tl.store(at + 3, tl.sum(normal.to(tl.int64), axis=0))
    tl.store(at + 4, tl.sum(other.to(tl.int64), axis=0))
    at = floats_ptr + (row.to(tl.int64) * _PROGRAMS + program) * _FLOATS
    tl.store(at, tl.min(low, axis=0).to(tl.float64))
    tl.store(at + 1, tl.max(high, axis=0).to(tl.float64))
    tl.store(at + 2, tl.sum(squares, axis=0))
    if HISTOGRAM:
        places = tl.arange(0, _BUCKETS)
        filled = (fields > 0) & (places != _OUTSIDE)
        at = counts_ptr + row.to(tl.int64) * _BUCKETS + places
        tl.atomic_add(at, fields.to(tl.int64), mask=filled, sem="relaxed")
