"""Statistics of tensors without a kernel, on the CPU by NumPy: 64 elements take a tenth of torch's time.

Measured on one core of a shared machine, `python benchmarks/trace.py --parts`: 75 us and 4 ns an element of float32,
with the histogram 120 us and 6 ns.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch

from retrograd.trace.schema import Exponents
from retrograd.trace.statistics.digest import BLOCK, GOLDEN, MIX_1, MIX_2, SPREAD_1, SPREAD_2, UNIT, finish, keys
from retrograd.trace.statistics.exponents import count_exponents, exponents

# low, high, rms, nan, inf, subnormal, zero, digest, histogram
_Float: TypeAlias = float | None
_Int: TypeAlias = int | None
StatisticsRow: TypeAlias = tuple[_Float, _Float, _Float, _Int, _Int, _Int, _Int, _Int, Exponents | None]
NO_STATISTICS: StatisticsRow = (None, None, None, None, None, None, None, None, None)
NO_EXPONENTS = Exponents(0, (), ())
# An array is hashed in pieces of so many units, which stay in a core's cache.
_PIECE = 8 * BLOCK
_LANES = 32


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it reads: conjugation and sign done, complex numbers as pairs."""
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def byte_size(x: torch.Tensor) -> int:
    """How many bytes are hashed of a tensor."""
    return x.numel() * x.element_size()


def measure(tensor: torch.Tensor, histogram: bool = False) -> StatisticsRow:
    """The statistics of a dense tensor of any dtype; the histogram, if wanted, of floating ones.

    A tensor elsewhere is copied to the CPU, for which its device is waited for.
    """
    x = as_real(tensor).cpu().contiguous()
    # Not by numpy(), after which nobody may resize the memory, as FSDP2 does when it frees its gathered parameters.
    octets = np.from_dlpack(x.reshape(-1).view(torch.uint8))
    digest = finish(block_hash(octets), byte_size(x))
    count, floating = x.numel(), x.dtype.is_floating_point
    if not count:
        bad = 0 if floating else None
        return None, None, None, bad, bad, bad, 0, digest, NO_EXPONENTS if floating and histogram else None
    if not floating:
        values = octets.view(str(x.dtype).removeprefix("torch."))
        zero = count - int(np.count_nonzero(values))
        return float(values.min()), float(values.max()), _rms(values, count), None, None, None, zero, digest, None
    # Exact: every narrow number is a float32.
    wide = x.dtype in (torch.float32, torch.float64)
    values = octets.view(str(x.dtype).removeprefix("torch.")) if wide else x.float().reshape(-1).numpy()
    fields = exponents(count_exponents(values)) if histogram else None
    return (*_of_floats(values, torch.finfo(x.dtype).tiny), digest, fields)


def _of_floats(values: np.ndarray[Any, Any], tiny: float) -> tuple[Any, ...]:
    count, nan, inf, finite = values.size, 0, 0, values
    with np.errstate(all="ignore"):
        low, high = float(values.min()), float(values.max())
        if not (low - low == 0 and high - high == 0):
            nan = int(np.count_nonzero(np.isnan(values)))
            good = np.isfinite(values)
            finite, values = values[good], np.where(good, values, values.dtype.type(0))
            inf = count - nan - finite.size
            if not finite.size:
                return None, None, None, nan, inf, 0, 0
            low, high = float(finite.min()), float(finite.max())
        below = int(np.count_nonzero(np.abs(finite) < tiny))
        zero = int(np.count_nonzero(finite == 0)) if below else 0
        # A zero is told without its sign: which of two is the least depends on the order of comparisons.
        return low + 0.0, high + 0.0, _rms(values, finite.size), nan, inf, below - zero, zero


def _rms(values: np.ndarray[Any, Any], count: int) -> float:
    """The root of the mean of squares, of so many elements and of zeros for the others.

    Squares are added in float64 in 32 lanes, element i in lane i % 32, and the lanes halved: the same bits on every
    machine and from the tape's compiled code.
    """
    wide = values.astype(np.float64)
    wide *= wide
    rest = wide.size % _LANES
    lanes = wide[: wide.size - rest].reshape(-1, _LANES).sum(0)
    lanes[:rest] += wide[wide.size - rest :]
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(np.sqrt(lanes[0] / count))


def block_hash(x: np.ndarray[Any, Any]) -> int:
    """The sum over blocks of `digest`; x [n] of bytes."""
    if x.size % UNIT:
        x = np.pad(x, (0, -x.size % UNIT))
    words = x.view(np.uint32)  # [units * 2]
    key, total = _keys(), 0
    for start in range(0, words.size, 2 * _PIECE):
        piece = words[start : start + 2 * _PIECE]
        blocks = piece.size // (2 * BLOCK)
        sums = np.empty(-(-piece.size // (2 * BLOCK)), np.uint64)
        if blocks:
            _products(piece[: blocks * 2 * BLOCK].reshape(blocks, -1) + key).sum(1, out=sums[:blocks])
        if blocks < sums.size:
            rest = piece[blocks * 2 * BLOCK :]
            sums[-1] = _products(rest + key[: rest.size]).sum()
        total += int((sums * _factors(start // (2 * BLOCK), sums.size)).sum())
    return total


def finish_all(total: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`digest.finish` of many, both [n] int64: uint64."""
    return _mix(total.view(np.uint64) ^ _mix(sizes.astype(np.uint64) * np.uint64(GOLDEN)))


def _mix(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))


def _products(keyed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of the two words of each unit, mod 2^64: [..., units]."""
    units = keyed.view(np.uint64)
    low = units & np.uint64(0xFFFFFFFF)
    low *= units >> np.uint64(32)
    return low


def _factors(first: int, count: int) -> np.ndarray[Any, Any]:
    """The factors of blocks, uint64."""
    x = np.arange(first + 1, first + 1 + count, dtype=np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(SPREAD_1)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(SPREAD_2)
    return ((x ^ (x >> np.uint32(16))) | np.uint32(1)).astype(np.uint64)


@cache
def _keys() -> np.ndarray[Any, Any]:
    return np.array(keys(), dtype=np.int64).view(np.uint32)
