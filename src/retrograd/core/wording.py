"""Wording that messages of several rooms share: counts, durations, lists of names."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: int, noun: str) -> str:
    """ "1 output", "2 outputs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def some(names: Sequence[str], most: int | None = None) -> str:
    """Names with commas; of more than `most` the first, and how many more."""
    shown = names[:most]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters; of a longer one the beginning."""
    return text if len(text) <= most else text[: most - 3] + "..."


def duration(seconds: float) -> str:
    """Seconds for reading: "0.42 s", "12.3 s", "3 min 05 s"."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def at_line(where: str) -> str:
    """A source line behind a text, if there is one."""
    return f"  at {where}" if where else ""
