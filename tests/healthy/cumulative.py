"""Gradients that a healthy op adds up from others, so that what is small is off by what cancels."""

from __future__ import annotations

from _gated_sums import gated, packed

HEALTHY = {
    "gates by suffix sums": gated(lambda read, written: read - written, "gates_by_suffix_sums"),
    "gates of packed sequences by suffix sums": packed(lambda read, written: read - written, "packed_gates"),
}
