"""The machine code of the ordered sum over ranks, for five GPUs, without any of them: seconds on two cores."""

from __future__ import annotations

import json

import pytest
from gate_process import SUMMARY, run

from retrograd.codegen import targets

pytestmark = pytest.mark.dealt(3, whole_file=True)

TARGETS = list(targets())


@pytest.fixture(scope="module")
def rank_sum_gate(tmp_path_factory) -> dict:
    """Facts and faults of every case for every target."""
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("gate") / "rank_sum.json"
    text = run("benchmarks/codegen_rank_sum.py", "--json", str(out), codes=(0, 1))
    SUMMARY.append("rank sum, " + next(line for line in text.splitlines() if " kernels for " in line))
    return json.loads(out.read_text())


@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_has_a_fault(rank_sum_gate, target):
    rows = [row for row in rank_sum_gate["kernels"] if row["facts"]["target"] == target]
    assert len(rows) == rank_sum_gate["cases"]
    assert sum(row["aligned"] for row in rows) >= 7
    faults = [f"{row['case']}: {fault}" for row in rows for fault in row["faults"]]
    assert not faults, "\n".join(faults)


def test_four_rows_are_loaded_ahead(rank_sum_gate):
    """Eight bfloat16 a thread are one load a row: the first row, four of the loop, three behind it (63 = 15 * 4 + 3)."""
    for target in ("sm_90", "gfx942"):
        row = next(
            row
            for row in rank_sum_gate["kernels"]
            if row["facts"]["target"] == target and row["case"].startswith("W64-")
        )
        assert sum(access["count"] for access in row["facts"]["accesses"] if access["op"] == "load") >= 5
