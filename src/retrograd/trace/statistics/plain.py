"""Statistics by torch operations, for what has no kernel: devices that are neither CPU nor CUDA, float8, no Triton."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from retrograd.trace.statistics.digest import BLOCK, GOLDEN, MIX_1, MIX_2, finish, keys, signed
from retrograd.trace.statistics.exponents import BIAS, BUCKETS, OUTSIDE, exponents
from retrograd.trace.statistics.host import Row, as_real, bits, of_none, words

# A tensor is hashed in pieces of so many elements, which bounds the memory: 8 MiB as int64.
_PIECE = 1 << 20


def measure(tensor: torch.Tensor, histogram: bool = False) -> Row:
    """The statistics of a dense tensor of any dtype, the histogram if wanted; waits for its device."""
    x = as_real(tensor).contiguous().reshape(-1)
    count = x.numel()
    digest = finish(int(hashed(bits(x))), words(x))
    if not count:
        return of_none(x.is_floating_point(), digest, histogram)
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
    found = exponents(counted(wide).cpu().numpy()) if histogram else None
    return low, high, _rms(finite), nan, inf, below - zero, zero, digest, found


def _of_integers(x: torch.Tensor, digest: int) -> Row:
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


def counted(x: torch.Tensor) -> torch.Tensor:
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


def hashed(x: torch.Tensor) -> torch.Tensor:
    """The sum over blocks of `digest`, int64 []; x [n] of signed integers."""
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    key = _keys(x.device)
    for start in range(0, x.numel(), _PIECE):
        piece = x[start : start + _PIECE].to(torch.int64)
        whole = piece.numel() // BLOCK * BLOCK
        parts = [dots(piece[:whole].view(-1, BLOCK), key)] if whole else []
        if piece.numel() > whole:
            rest = piece[whole:]
            parts.append((rest * key[: rest.numel()]).sum(0, keepdim=True))
        h = torch.cat(parts)
        number = torch.arange(start // BLOCK + 1, start // BLOCK + 1 + h.numel(), dtype=torch.int64, device=x.device)
        total += _mix(h + number * signed(GOLDEN)).sum()
    return total


def dots(rows: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """rows [m, n] times key [n], both int64, modulo 2^64: [m]."""
    # A matrix product of integers is for the CPU alone; elsewhere the products take room of their own.
    return torch.mv(rows, key) if rows.device.type == "cpu" else (rows * key).sum(1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 30)) * signed(MIX_1)
    x = (x ^ _shifted(x, 27)) * signed(MIX_2)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, zeros coming in: torch's shift copies the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


@cache
def _keys(device: Any) -> torch.Tensor:
    return torch.tensor(keys(), dtype=torch.int64, device=device)
