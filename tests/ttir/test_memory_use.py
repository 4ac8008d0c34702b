"""Memory that a kernel over 2^22 elements takes without a GPU, whether its programs run at once, in orders or in turns."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_races import in_a_process

MOST = 1 << 30  # bytes, as promised
LEAST = 3 * 4 << 22  # of the three tensors


def test_kernels_of_4_million_elements_take_less_than_a_gibibyte():
    pytest.importorskip("triton")
    rows = in_a_process(Path(__file__).with_name("memory_use.py"))
    assert [row["in_turns"] for row in rows] == [False] * 4 + [True]
    assert [row["faults"] for row in rows] == [[]] * 5
    assert rows[-1]["total"] == 2 << 14
    assert all(LEAST < row["most"] < MOST for row in rows), rows
