"""Slots: the numbers by which recipes know tensors; host.cpp has the same ones."""

from __future__ import annotations

from enum import IntEnum


class Slot(IntEnum):
    """A tensor of a call: inputs, results, what the sort of samples works in, what a fused backward has beside them."""

    VALUE = 0
    SHAPES = 1
    REFERENCES = 2
    LOCATIONS = 3
    WEIGHTS = 4
    GRAD_OUT = 5
    OUT = 6
    GRAD_VALUE = 7
    GRAD_LOCATIONS = 8
    GRAD_WEIGHTS = 9
    RECORDS = 10
    NUMBERS = 11
    COUNTS = 12
    STARTS = 13
    SUMS = 14
    TICKET = 15
    PARTIALS = 16
    # In the fused form's backward those above are of the points that are made of these. Its forward has one kernel, in
    # which offsets stand for locations and logits for weights.
    OFFSETS = 17
    LOGITS = 18
    GRAD_OFFSETS = 19
    GRAD_LOGITS = 20
    GRAD_REFERENCES = 21
