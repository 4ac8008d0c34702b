"""Named, derived seeds: the same names give the same stream on any machine and in any order of use."""

from __future__ import annotations

import hashlib


def derive(seed: int, *names: object) -> int:
    """A 63-bit seed for the stream with these names."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
