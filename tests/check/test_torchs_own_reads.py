"""Reads between rows: an op's own are found, and those of an operator that its reference has too are a note."""

from __future__ import annotations

import pytest
import torch

import retrograd as rg


def _with_gaps(x: torch.Tensor) -> torch.Tensor:
    """As oneDNN's products in bfloat16 on CPUs with AMX: rows are read up to the next one, times zero."""
    if x.ndim == 2 and x.stride(0) > x.shape[1] and x.stride(1) == 1 and len(x) > 1:
        rows = x.detach().as_strided((len(x) - 1, x.stride(0)), x.stride(), x.storage_offset())
        return 2 * x + 0 * rows.sum()
    return 2 * x


@pytest.mark.parametrize("stage", ["layouts", "bounds"])
@pytest.mark.parametrize(("reference", "verdict"), [(_with_gaps, "proved"), (lambda x: 2 * x, "finding")])
def test_what_a_reference_reads_as_well_is_a_note(stage, reference, verdict):
    report = rg.verify(_with_gaps, reference=reference, inputs=dict(x=rg.tensor("M", "N")), level="quick",
                       dtypes=["float32"], only=[stage])  # fmt: skip
    assert report.verdict == verdict, report.findings
    notes = [note for result in report.stages for note in result.notes if "read between rows" in note]
    assert bool(notes) == (verdict == "proved")
