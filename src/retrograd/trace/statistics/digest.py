"""The digest of a tensor: 64 bits of its bytes with their positions, the same on every device. No torch.

The elements in logical order are signed integers of their width (of 64-bit elements two 32-bit halves, low first). In
blocks of `BLOCK`, h = sum of key[i] x[i] mod 2^64 with fixed odd keys; the blocks are joined by mixing h with the
number of the block and adding mod 2^64, and the sum with the number of elements. Only integers with wraparound: no
order of additions changes it. A product of a 64-bit key with a 32-bit difference vanishes mod 2^64 with a probability
of about 2^-32, so two tensors that differ share a digest about that often (2^-48 for elements of 16 bits).

Source: Lemire and Kaser, Strongly universal string hashing is fast, 2014 (multilinear hashing); Steele, Lea and Flood,
Fast splittable pseudorandom number generators, 2014 (the mixing function).
"""

from __future__ import annotations

BLOCK = 1024
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """A bijection of 64-bit numbers in which each bit of the result depends on each of the argument."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)


def keys() -> list[int]:
    """The keys of a block: odd, as signed 64-bit numbers."""
    return [signed(mix((i + 1) * GOLDEN) | 1) for i in range(BLOCK)]


def finish(total: int, words: int) -> int:
    """The digest, 0 to 2^64 - 1.

    Args:
        total: sum over blocks of mix(h + (block + 1) GOLDEN), signed or not.
        words: how many elements were hashed.
    """
    return mix((total & _MASK) ^ mix(words * GOLDEN))


def signed(value: int) -> int:
    """The 64-bit number with the same bits, from -2^63 on, as torch and Triton have it."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
