"""What collectives write: tensors that are sent, gathered, scattered or reduced elsewhere are read, and stay theirs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from retrograd import trace
from retrograd.trace import Trace
from retrograd.trace.rank_provenance import rank_provenance

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")
ENGINES = pytest.mark.parametrize("engine", ["python", "tape"])


def _given(kind: str, x: torch.Tensor) -> None:
    """Give a tensor of two elements to the other of two ranks, by a collective that does not change it here."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    room = torch.zeros(4)
    if kind == "send":
        dist.send(x, other) if rank == 0 else dist.recv(room[:2], other)
    elif kind == "isend":
        (dist.isend(x, other) if rank == 0 else dist.irecv(room[:2], other)).wait()
    elif kind == "batch":
        operation = dist.P2POp(dist.isend, x, other) if rank == 0 else dist.P2POp(dist.irecv, room[:2], other)
        for work in dist.batch_isend_irecv([operation]):
            work.wait()
    elif kind == "all_gather":
        dist.all_gather(list(room.chunk(2)), x)
    elif kind == "all_gather_into_tensor":
        dist.all_gather_into_tensor(room, x)
    elif kind == "gather":
        dist.gather(x, list(room.chunk(2)) if rank == 1 else None, dst=1)
    elif kind == "scatter":
        dist.scatter(room[:1], list(x.chunk(2)) if rank == 0 else None, src=0)
    else:
        dist.all_to_all_single(room[:2], x)
    (room + 1).sum()


def _made(kind: str, engine: str) -> Trace:
    """A NaN that rank 0 makes, gives away and reads itself."""
    with trace.record(level="full", engine=engine) as recorder:
        x = torch.tensor([-1.0, -2.0])
        x = x.log() if dist.get_rank() == 0 else x.exp()
        _given(kind, x)
        x.cos().sum()
    return recorder.trace


@ENGINES
@pytest.mark.parametrize(
    "kind", ["send", "isend", "batch", "all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all_single"]
)
def test_what_is_given_to_other_ranks_is_still_what_made_it(ranks, kind, engine):
    traces = ranks.run(_made, kind, engine)
    (made,) = (op.outputs[0] for op in traces[0].ops if op.name == "aten.log.default")
    (read,) = (op.inputs[0] for op in traces[0].ops if op.name == "aten.cos.default")
    assert (read.tensor, read.nan) == (made.tensor, 2)  # nobody has written to it
    (given,) = (op for op in traces[0].ops if op.name.startswith("c10d::"))
    assert made.storage in {t.storage for t in given.inputs}
    assert made.storage not in {t.storage for t in given.outputs}
    alone, both = rank_provenance(traces[:1]), rank_provenance(traces)
    assert (alone.op.name, both.op.name) == ("aten.log.default", "aten.log.default")
    assert any("rank 1 received it in step 0 by c10d::" in note for note in both.notes), both.notes


def _overwritten(kind: str, engine: str) -> Trace:
    """A tensor that is finite before what another rank gives comes into it."""
    with trace.record(level="full", engine=engine) as recorder:
        x = torch.tensor([1.0, 2.0]).exp()
        other = torch.tensor([-1.0, 2.0]).log() if dist.get_rank() == 0 else torch.ones(2)
        if kind == "recv":
            dist.send(other, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
        elif kind == "broadcast":
            x = other if dist.get_rank() == 0 else x
            dist.broadcast(x, 0)
        elif kind == "reduce":
            x = other if dist.get_rank() == 0 else x
            dist.reduce(x, 1)
        else:
            x = other if dist.get_rank() == 0 else x
            dist.all_reduce(x)
        x.cos().sum()
    return recorder.trace


@ENGINES
@pytest.mark.parametrize("kind", ["recv", "broadcast", "reduce", "all_reduce"])
def test_what_comes_from_another_rank_is_another_value(ranks, kind, engine):
    traces = ranks.run(_overwritten, kind, engine)
    mine = traces[1].ops
    (made,) = (op.outputs[0] for op in mine if op.name == "aten.exp.default")
    (read,) = (op.inputs[0] for op in mine if op.name == "aten.cos.default")
    assert made.tensor != read.tensor
    assert (made.nan, read.nan) == (0, 1)
    alone = rank_provenance(traces[1:])
    assert alone.origin == "received"
    assert alone.op.name.startswith("c10d::")
    both = rank_provenance(traces)
    assert both.op.name == "aten.log.default"
    if kind == "broadcast":  # who is the source of it has what went in read
        (given,) = (op for op in traces[0].ops if op.name == "c10d::broadcast_")
        assert given.inputs[0].nan == 1
