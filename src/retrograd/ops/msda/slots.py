"""Slots: the numbers by which recipes know tensors; host.cpp has the same ones."""

from __future__ import annotations

from enum import IntEnum


class Slot(IntEnum):
    """A tensor of a call: the inputs, the results, and what the sort of samples works in."""

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
