"""Orders that the program announced beside its graphs (a plan of gradient buckets): what changed, in words. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from retrograd.core.order_registry import Order
from retrograd.graph.schema import Cause
from retrograd.graph.watching.schema import Planned


def changes(seen: Sequence[Planned], now: Mapping[int, Order], step: int, expected: bool) -> list[Planned]:
    """What is to be recorded of the orders that hold at the end of a step.

    Args:
        seen: what is recorded so far.
        now: the orders that hold, by place.
        step: its number.
        expected: whether an order in the place of another is no surprise in this step.
    """
    found: list[Planned] = []
    for place, order in now.items():
        earlier = [one for one in seen if one.place == place]
        if order.key == (earlier[-1].key if earlier else ""):
            continue
        before = next((one for one in reversed(earlier) if one.key), None)
        causes = () if before is None or before.key == order.key else (_cause(before, order),)
        number = len(seen) + len(found)
        made = Planned(number, order.kind, order.key, step, place, order.unit, order.rows, causes)
        found.append(replace(made, expected=expected or not causes))
    return found


def _cause(before: Planned, order: Order) -> Cause:
    if not order.key:
        return Cause("order_changed", f"{before.kind} {before.key} was withdrawn, and nothing holds in its place")
    said = difference(before.rows, order.rows, order.unit, ("was", "is"))
    return Cause("order_changed", f"{before.kind} {before.key} -> {order.key}: {said}", advice=order.advice)


def difference(one: Sequence[str], other: Sequence[str], unit: str, verbs: tuple[str, str]) -> str:
    """Where the rows of two orders part; `verbs` say of which side a row is."""
    shorter = min(len(one), len(other))
    at = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    if at < shorter:
        same = f"the same {unit}s in another order: " if Counter(one) == Counter(other) else ""
        return f"{same}{unit} {at} {verbs[0]} {one[at]}, and {verbs[1]} {other[at]}"
    if len(one) == len(other):
        return f"the same {unit}s, with other sizes or limits"
    return f"{len(one)} {unit}s, then {len(other)}; {max(one, other, key=len)[at]} is in one only"


def packed(orders: Iterable[Order]) -> str:
    """Orders as text for other ranks."""
    return json.dumps([[order.title, order.unit, order.rows] for order in orders])


def between_ranks(first: int, one: str, second: int, other: str) -> str:
    """Where the packed orders of two ranks part."""
    mine, theirs = json.loads(one), json.loads(other)
    for (title, unit, rows), (their_title, _, their_rows) in zip(mine, theirs, strict=False):
        if title != their_title:
            said = difference(rows, their_rows, unit, (f"on rank {first} is", f"on rank {second} is"))
            return f"rank {first} keeps to {title}, rank {second} to {their_title}; {said}"
    more, who = (mine, first) if len(mine) > len(theirs) else (theirs, second)
    return f"only rank {who} keeps to {more[min(len(mine), len(theirs))][0]}"
