"""What a pipeline runs on whatever memory holds, to learn sizes, is no cause of a NaN."""

from __future__ import annotations

import pytest
import sharded_jobs
import torch
import torch.distributed as dist

from retrograd.trace.rank_provenance import rank_provenance
from retrograd.trace.schema import Op, Stats
from retrograd.trace.trial_runs import trial_runs

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


def test_a_validation_whose_loss_is_read_is_no_trial():
    def op(index, name, reads, gives, owner="module", phase="forward"):
        inputs, outputs = ([Stats(n, (2,), "float32", "cpu")] for n in (reads, gives))
        outputs = outputs if gives else []
        return Op(index, 0, phase, name, "head", "", "", "", "", tuple(inputs), tuple(outputs), owner=owner)

    send, train = op(0, "c10d::send", 1, 0), op(1, "aten.log.default", 1, 2)
    update, again = op(2, "aten.add_.Tensor", 2, 3, "optimizer", "other"), op(3, "aten.log.default", 4, 5)
    read = op(4, "aten._local_scalar_dense.default", 5, 0, "program", "other")
    assert trial_runs([send, train, update, again]) == {3}
    assert trial_runs([send, train, update, again, read]) == set()
    assert trial_runs([train, update, again]) == set()


def test_what_a_stage_makes_of_its_microbatches_is_found(ranks):
    found = rank_provenance(ranks.run(_where_memory_is_nan, "pipeline GPipe 2", "logarithm"))
    assert (found.found, found.origin, found.rank, found.op.name) == ("nan", "made", 1, "aten.log.default")
    assert "below 0" in found.reason
