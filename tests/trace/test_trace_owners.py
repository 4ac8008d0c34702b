"""Owners of operators: module, the model itself, optimizer, reduction of gradients or a line of the program."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from retrograd import trace
from retrograd.errors import TraceError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(self.first(x)) * self.scale)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def owners(engine: str, model: nn.Module) -> dict[str, set[tuple[str, str]]]:
    """Module and owner by operator, of a step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(2, 4)
    with trace.record(model, level="names", engine=engine) as recorder:
        x.clone()
        torch.sigmoid(model(x)).sum().backward()
        optimizer.step()
    found: dict[str, set[tuple[str, str]]] = {}
    for op in recorder.trace.ops:
        found.setdefault(op.name, set()).add((op.module, op.owner))
    return found


@pytest.mark.parametrize("engine", ["python", "tape"])
def test_the_root_is_told_from_what_is_outside_of_every_module(engine):
    found = owners(engine, Model())
    assert found["aten.tanh.default"] == found["aten.tanh_backward.default"] == {("", "module")}
    assert found["aten.addmm.default"] == {("first", "module"), ("last", "module")}
    assert found["aten.sigmoid.default"] == found["aten.sigmoid_backward.default"] == {("", "program")}
    assert found["aten.clone.default"] == {("", "program")}
    assert found["aten.add_.Tensor"] == {("", "optimizer")}


@pytest.mark.parametrize("engine", ["python", "tape"])
@pytest.mark.usefixtures("group")
def test_a_bucket_is_named_by_the_modules_whose_gradients_are_in_it(engine):
    found = owners(engine, nn.parallel.DistributedDataParallel(Model()))
    ((_, owner),) = found["c10d::allreduce_"]
    assert owner.startswith("gradient reduction of module")
    assert set(owner.removeprefix("gradient reduction of ").split(" to ")) <= {"module", "module.first", "module.last"}
    assert " to " in owner
    assert all(owner for pairs in found.values() for _, owner in pairs)


def test_a_file_of_schema_3_has_no_owners(tmp_path: Path) -> None:
    op = trace.Op(0, 0, "forward", "aten.exp.default", "", "", "x.py:1", "y", "", (), (), owner="module")
    path = tmp_path / "new.trace"
    trace.save(trace.Trace([op]), path)
    assert trace.load(path).ops == [op]
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    lines[0]["schema"] = 3
    for line in lines[1:]:
        if line[0] == "o":
            del line[11]  # after kind, index, step and eight texts
    old = tmp_path / "old.trace"
    old.write_bytes(gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in lines)))
    assert [op.owner for op in trace.load(old).ops] == [""]
    lines[0]["schema"] = 4
    old.write_bytes(gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in lines)))
    with pytest.raises(TraceError, match="damaged in line"):
        trace.load(old)
