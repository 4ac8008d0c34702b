"""The digest of a tensor: 64 bits of its bytes with their positions, the same on every device. No torch.

The bytes of the elements in logical order, with zeros up to a multiple of 8, are units of two 32-bit words (a, b), low
first. In blocks of `BLOCK` units, h = sum of (a + key) (b + key') mod 2^64, with keys of each place and their sums mod
2^32; the blocks are joined as sum of f h mod 2^64, with an odd factor f of 32 bits for each block, and that with the
number of bytes. Only integers with wraparound: no order of additions changes it. A change of one word shows unless the
other word of its unit is its key's complement, 1 of 2^32; two that differ in more share a digest about as often.

A GPU takes two additions and one multiplication for 8 bytes: it is to read at the speed of its memory.

Source: Black, Halevi, Krawczyk, Krovetz and Rogaway, UMAC: fast and secure message authentication, 1999 (NH); Steele,
Lea and Flood, Fast splittable pseudorandom number generators, 2014, and Wellons, Prospecting for hash functions, 2018
(the mixing functions).
"""

from __future__ import annotations

BLOCK = 1024
UNIT = 8  # bytes
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SPREAD_1, SPREAD_2 = 0x7FEB352D, 0x846CA68B
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """A bijection of 64-bit numbers in which each bit of the result depends on each of the argument."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)


def keys() -> list[int]:
    """The keys of a block, those of a unit in one signed 64-bit number: the low half is that of its low word."""
    return [signed(mix((i + 1) * GOLDEN)) for i in range(BLOCK)]


def finish(total: int, size: int) -> int:
    """The digest, 0 to 2^64 - 1.

    Args:
        total: sum over blocks of f h, signed or not.
        size: how many bytes were hashed.
    """
    return mix((total & _MASK) ^ mix(size * GOLDEN))


def signed(value: int) -> int:
    """The 64-bit number with the same bits, from -2^63 on, as torch and Triton have it."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
