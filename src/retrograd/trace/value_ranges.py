"""Ranges of values, in words, and of which inputs they are known. No torch."""

from __future__ import annotations

from retrograd.trace.schema import Op, Stats


def known_input(op: Op, at: int) -> Stats | None:
    """An input of which the range is known."""
    return op.inputs[at] if at < len(op.inputs) and op.inputs[at].low is not None else None


def spread(stats: Stats) -> str:
    """ "-3.1e+04 to 12" of the finite elements; "" where nobody counted."""
    if stats.low is None or stats.high is None:
        return ""
    return f"{stats.low:.4g}" if stats.low == stats.high else f"{stats.low:.4g} to {stats.high:.4g}"


def magnitudes(stats: Stats) -> str:
    """ "2^-9 to 2^3": powers of two at or below the magnitudes of the finite elements but zeros; "" if uncounted."""
    fields = stats.exponents
    if not fields:
        return ""
    return f"2^{fields.least}" + ("" if fields.least == fields.greatest else f" to 2^{fields.greatest}")
