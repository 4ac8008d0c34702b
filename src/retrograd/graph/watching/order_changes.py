"""Changes of the orders that hold beside graphs, as a plan of gradient buckets, in words. Pure."""

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
    recorded: list[Planned] = []
    for place, order in now.items():
        earlier = [earlier_order for earlier_order in seen if earlier_order.place == place]
        if order.key == (earlier[-1].key if earlier else ""):
            continue
        before = next((earlier_order for earlier_order in reversed(earlier) if earlier_order.key), None)
        causes = () if before is None or before.key == order.key else (_cause(before, order),)
        number = len(seen) + len(recorded)
        planned = Planned(number, order.kind, order.key, step, place, order.unit, order.rows, causes)
        recorded.append(replace(planned, expected=expected or not causes))
    return recorded


def _cause(before: Planned, order: Order) -> Cause:
    if not order.key:
        return Cause("order_changed", f"{before.kind} {before.key} was withdrawn, and nothing holds in its place")
    text = difference(before.rows, order.rows, order.unit, ("was", "is"))
    return Cause("order_changed", f"{before.kind} {before.key} -> {order.key}: {text}", advice=order.advice)


def difference(first: Sequence[str], second: Sequence[str], unit: str, verbs: tuple[str, str]) -> str:
    """Where the rows of two orders part; `verbs` say of which side a row is."""
    shorter = min(len(first), len(second))
    at = next((i for i in range(shorter) if first[i] != second[i]), shorter)
    if at < shorter:
        same = f"the same {unit}s in another order: " if Counter(first) == Counter(second) else ""
        return f"{same}{unit} {at} {verbs[0]} {first[at]}, and {verbs[1]} {second[at]}"
    if len(first) == len(second):
        return f"the same {unit}s, with other sizes or limits"
    return f"{len(first)} {unit}s, then {len(second)}; {max(first, second, key=len)[at]} is in one only"


def packed(orders: Iterable[Order]) -> str:
    """Orders as text for other ranks."""
    return json.dumps([[order.title, order.unit, order.rows] for order in orders])


def between_ranks(first: int, first_orders: str, second: int, second_orders: str) -> str:
    """Where the packed orders of two ranks part."""
    mine, theirs = json.loads(first_orders), json.loads(second_orders)
    for (title, unit, rows), (their_title, _, their_rows) in zip(mine, theirs, strict=False):
        if title != their_title:
            text = difference(rows, their_rows, unit, (f"on rank {first} is", f"on rank {second} is"))
            return f"rank {first} keeps to {title}, rank {second} to {their_title}; {text}"
    more, who = (mine, first) if len(mine) > len(theirs) else (theirs, second)
    return f"only rank {who} keeps to {more[min(len(mine), len(theirs))][0]}"
