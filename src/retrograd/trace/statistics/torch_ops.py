"""Statistics by torch operations, for what has no kernel: devices that are neither CPU nor CUDA, float8, no Triton."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from retrograd.trace.statistics.cpu import StatisticsRow, as_real, byte_size, empty_statistics
from retrograd.trace.statistics.digest import BLOCK, SPREAD_1, SPREAD_2, UNIT, finish, keys
from retrograd.trace.statistics.exponents import BIAS, BUCKETS, OUTSIDE, exponents

# A tensor is counted in pieces of so many elements, and hashed in pieces of so many units, which bounds the memory.
_PIECE = 1 << 20
_LOW = (1 << 32) - 1


def measure(tensor: torch.Tensor, histogram: bool = False) -> StatisticsRow:
    """The statistics of a dense tensor of any dtype, the histogram if wanted; waits for its device."""
    x = as_real(tensor).contiguous().reshape(-1)
    count = x.numel()
    digest = finish(int(block_hash(x.view(torch.uint8))), byte_size(x))
    if not count:
        return empty_statistics(x.is_floating_point(), digest, histogram)
    if not x.is_floating_point():
        return _of_integers(x, digest)
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()  # exact
    low, high = (float(v) for v in torch.aminmax(wide))
    nan = inf = 0
    finite = wide
    if not (low - low == 0 and high - high == 0):
        nan = int(torch.isnan(wide).sum())
        inf = int(torch.isinf(wide).sum())
        finite = wide[torch.isfinite(wide)]
        low, high = (float(v) for v in torch.aminmax(finite)) if finite.numel() else (None, None)
    magnitude = finite.abs()
    zero = finite.numel() - int(torch.count_nonzero(magnitude))
    # The smallest magnitude decides first: subnormal numbers are rare.
    tiny = torch.finfo(x.dtype).tiny
    below = int((magnitude < tiny).sum())
    fields = exponents(count_exponents(wide).cpu().numpy()) if histogram else None
    return low, high, _rms(finite), nan, inf, below - zero, zero, digest, fields


def _of_integers(x: torch.Tensor, digest: int) -> StatisticsRow:
    x = x.to(torch.uint8) if x.dtype == torch.bool else x
    try:
        low, high = (float(v) for v in torch.aminmax(x))
        zero = x.numel() - int(torch.count_nonzero(x))
    except (RuntimeError, NotImplementedError):  # unsigned integers wider than 8 bits have few operators
        return (None,) * 7 + (digest, None)  # type: ignore[return-value]
    return low, high, _rms(x), None, None, None, zero, digest, None


def _rms(x: torch.Tensor) -> float | None:
    if not x.numel():
        return None
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    if not x.is_floating_point():
        x = x.to(wide)
    return float(torch.linalg.vector_norm(x, dtype=wide)) / x.numel() ** 0.5


def count_exponents(x: torch.Tensor) -> torch.Tensor:
    """Counts int64 [BUCKETS] of float32 or float64 numbers [n] by sign and exponent."""
    total = torch.zeros(BUCKETS, dtype=torch.int64, device=x.device)
    for start in range(0, x.numel(), _PIECE):
        piece = x[start : start + _PIECE]
        if x.dtype == torch.float32:
            field = piece.view(torch.int32) >> 23
            sign, exponent = field & 256, field & 255
        else:
            field = piece.view(torch.int64) >> 52
            sign, exponent = (field & 2048) >> 3, (field & 2047) - (1023 - BIAS)
            exponent = exponent.clamp(0, OUTSIDE - 1)
        exponent = torch.where((piece != 0) & torch.isfinite(piece), exponent, OUTSIDE)
        total += torch.bincount(sign + exponent, minlength=BUCKETS)
    return total


def block_hash(x: torch.Tensor) -> torch.Tensor:
    """The sum over blocks of `digest`, int64 []; x [n] of bytes."""
    units = -(-x.numel() // UNIT)
    if x.numel() % UNIT or x.storage_offset() % UNIT:
        padded = torch.zeros(units * UNIT, dtype=torch.uint8, device=x.device)
        padded[: x.numel()] = x
        x = padded
    x = x.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, units, _PIECE):
        piece = x[start : start + _PIECE]
        full = piece.numel() // BLOCK * BLOCK
        parts = [_block_sums(piece[:full].view(-1, BLOCK))] if full else []
        if piece.numel() > full:
            parts.append(_block_sums(piece[full:].view(1, -1)))
        h = torch.cat(parts)
        total += (h * _factors(start // BLOCK, h.numel(), x.device)).sum()
    return total


def _block_sums(rows: torch.Tensor) -> torch.Tensor:
    """The sums of blocks [m, n] of units, mod 2^64: [m]."""
    low, high = (key[: rows.shape[1]] for key in _keys(rows.device))
    return ((((rows & _LOW) + low) & _LOW) * ((((rows >> 32) & _LOW) + high) & _LOW)).sum(1)


def _factors(first: int, count: int, device: Any) -> torch.Tensor:
    """The factors of blocks, int64."""
    x = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device)
    x = ((x ^ (x >> 16)) * SPREAD_1) & _LOW
    x = ((x ^ (x >> 15)) * SPREAD_2) & _LOW
    return (x ^ (x >> 16)) | 1


@cache
def _keys(device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.tensor(keys(), dtype=torch.int64, device=device)
    return both & _LOW, (both >> 32) & _LOW
