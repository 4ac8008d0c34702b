"""Comparing two graphs: `ids` says which values are equal, `matching` what corresponds, `compare` why they differ.

What differs is found by kind: `labels` (constants, shapes, attributes), `regions` (inserted, removed), `orders`
(parameters, outputs, operands), `collectives`, `carried` (gradients of another step); `picture` is for people.
"""

from __future__ import annotations
