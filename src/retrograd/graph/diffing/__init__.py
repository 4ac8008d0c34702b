"""Comparing two graphs: `ids` (what is equal), `matching` (what corresponds), `changes` (what differs), `causes` (why)."""

from __future__ import annotations
