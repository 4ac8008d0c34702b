"""Tests dealt over days: of what is marked `dealt(parts)`, `pytest --rotate DAY` runs one part, and another the next day.

For long sets that were frozen when they were measured, variants of one claim that take a minute together, and whole
programs of a quarter of a minute and more: others of the same features run every day. Without --rotate everything runs.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Iterable
from typing import Any


def left_out(items: Iterable[Any], day: int) -> list[Any]:
    """The tests that another day runs.

    Args:
        items: of pytest, in the order of collection. The marked ones of a function are one set, dealt in their order: a
            parameter that is marked alone leaves the others of its function where they are. With `whole_file=True`, for
            files whose time goes into one fixture, everything of a file runs on the same day.
        day: any whole number; as many in a row as there are parts run everything.
    """
    seen: collections.Counter[str] = collections.Counter()
    others = []
    for item in items:
        mark = item.get_closest_marker("dealt")
        if mark is None:
            continue
        (parts,) = mark.args
        whole_file = mark.kwargs.get("whole_file", False)
        of = item.nodeid.split("::" if whole_file else "[")[0]
        at = seen[of]
        seen[of] += not whole_file
        # Files begin on different days: sets of one test would else all run on the same.
        first = zlib.crc32(item.nodeid.split("::")[0].encode())
        # One of each `parts` in a row, and of the next row another: a grid whose last axis is as long as there are parts
        # would be dealt by that axis.
        if (first + at + at // parts) % parts != day % parts:
            others.append(item)
    return others
