"""What a pipeline runs on whatever memory holds, to learn sizes, is no cause of a NaN."""

from __future__ import annotations

import pytest
import sharded_jobs
import torch
import torch.distributed as dist

from retrograd.trace.rank_provenance import rank_provenance

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")


def _where_memory_is_nan(layout, fault):
    torch.use_deterministic_algorithms(True)  # `torch.empty` gives NaN then
    try:
        return sharded_jobs.record(layout, fault)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", ["pipeline GPipe 2", "pipeline Interleaved1F1B 4"])
def test_a_pipeline_that_learns_sizes_has_made_no_nan(ranks, layout):
    traces = ranks.run(_where_memory_is_nan, layout, "")
    assert rank_provenance(traces).found == ""


def test_what_a_stage_makes_of_its_microbatches_is_found(ranks):
    found = rank_provenance(ranks.run(_where_memory_is_nan, "pipeline GPipe 2", "logarithm"))
    assert (found.found, found.origin, found.rank, found.op.name) == ("nan", "made", 1, "aten.log.default")
    assert "below 0" in found.reason
