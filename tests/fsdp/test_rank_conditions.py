"""What differs between ranks before anything is wrong is told in one line; healthy ranks have nothing said of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import parallel_jobs
import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograd.fsdp as rf
from retrograd.env.run_conditions import differences
from retrograd.fsdp.rank_conditions import sentences

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")
HEAD = "ranks differ before the first update: "


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield


@contextmanager
def _tf32() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def _source(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        importlib.import_module("part_of_a_model")
        yield
    finally:
        sys.modules.pop("part_of_a_model", None)
        sys.path.remove(folder)


def _replicas(same: bool) -> nn.Module:
    torch.manual_seed(0 if same else dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch.manual_seed(0)
    return model


def train(case: str, model_of: str, folders: tuple[str, ...] = ()) -> dict[str, Any]:
    """Two steps in which rank 1 has a condition of its own."""
    odd = dist.get_rank() == 1
    conditions: dict[str, Callable[[], Any]] = {
        "tf32": _tf32,
        "nccl": lambda: _variable("NCCL_ALGO", "Ring"),
        "torch": lambda: _variable("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1"),
        "log": lambda: _variable("NCCL_DEBUG", "INFO"),
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }
    with (
        _source(folders[odd]) if folders else conditions[case]() if odd and case in conditions else _variable("A", "1")
    ):
        log = rf.record_collectives()
        with log:
            MODELS[model_of](case)
    return {"problems": log.problems, "notes": [note for note in log.notes if note.startswith("each rank has")]}


def _by_hand(case: str) -> None:
    model = _replicas(case != "not broadcast")
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def _local(case: str) -> None:
    """Layers of its own on each rank, as experts: nobody adds their gradients up, though others are."""
    del case
    model, shared = _replicas(same=False), _replicas(same=True)
    optimizer = torch.optim.SGD([*model.parameters(), *shared.parameters()], lr=0.1)
    for _ in range(2):
        dist.all_reduce(torch.ones(4, 4))
        shared(model(torch.ones(2, 4))).sum().backward()
        for parameter in shared.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def _ddp(case: str) -> None:
    model = nn.parallel.DistributedDataParallel(_replicas(case != "not broadcast"), init_sync=case != "not broadcast")
    step = parallel_jobs._step_of(model, lambda number: torch.ones(2, 4))
    step(), step()


def _fsdp(case: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(_replicas(same=True))
    if case == "seed":
        torch.manual_seed(100 + dist.get_rank())
    step = parallel_jobs._step_of(model, lambda number: torch.ones(2, 4))
    step(), step()


def _hybrid(case: str) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(_replicas(case != "not broadcast"), mesh=mesh)
    step = parallel_jobs._step_of(model, lambda number: torch.ones(2, 4))
    step(), step()


MODELS = {"by hand": _by_hand, "local": _local, "ddp": _ddp, "fsdp": _fsdp, "hybrid": _hybrid}


@pytest.mark.parametrize("model", MODELS)
def test_of_healthy_ranks_nothing_is_said(ranks, model):
    for answer in ranks.run(train, "healthy", model):
        assert (answer["problems"], answer["notes"]) == ([], [])


@pytest.mark.parametrize(
    ("case", "model", "sentence"),
    [
        ("tf32", "fsdp", "cuda.matmul.allow_tf32 is False on rank 0, True on rank 1"),
        ("autocast", "fsdp", "autocast.cpu is off on rank 0, bfloat16 on rank 1"),
        ("nccl", "fsdp", "NCCL_ALGO is unset on rank 0, Ring on rank 1"),
        ("torch", "ddp", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE is unset on rank 0, 1 on rank 1"),
        ("not broadcast", "by hand", "not equal on ranks 0 1: 0.weight, 0.bias, 1.weight and 1 more"),
        ("not broadcast", "ddp", "not equal on ranks 0 1: 0.weight, 0.bias, 1.weight and 1 more"),
        ("not broadcast", "hybrid", "parameters that ranks hold copies of are not equal on ranks 0 1: "),
    ],
)
def test_what_differs_is_told_once_for_all_ranks(ranks, case, model, sentence):
    first, second = ranks.run(train, case, model)
    assert len(first["problems"]) == 1
    assert first["problems"][0].startswith(HEAD)
    assert sentence in first["problems"][0]
    assert second["problems"] == []


@pytest.mark.parametrize(
    ("case", "note"),
    [
        ("seed", "each rank has its own: seed is 100 on rank 0, 101 on rank 1"),
        ("log", "each rank has its own: NCCL_DEBUG is unset on rank 0, INFO on rank 1"),
    ],
)
def test_what_may_differ_is_a_note(ranks, case, note):
    first, _ = ranks.run(train, case, "fsdp")
    assert (first["problems"], first["notes"]) == ([], [note])


def test_another_source_on_one_rank(ranks, tmp_path: Path):
    folders = [str(tmp_path / name) for name in ("first", "second")]
    for folder, text in zip(folders, ("SCALE = 1\n", "SCALE = 2\n"), strict=True):
        Path(folder).mkdir()
        Path(folder, "part_of_a_model.py").write_text(text)
    first, _ = ranks.run(train, "source", "fsdp", (folders[0], folders[1]))
    assert first["problems"] == [f"{HEAD}the source of part_of_a_model differs on rank 0, on rank 1"]
    first, _ = ranks.run(train, "source", "fsdp", (folders[0], folders[0]))
    assert first["problems"] == []


def test_a_module_that_one_rank_alone_has_loaded_is_no_difference():
    of = {0: {"versions": {"torch": "2", "wandb": "1"}, "sources": {"logs": "ab"}}, 1: {"versions": {"torch": "2"}}}
    assert differences(of) == []
    of[1]["versions"]["torch"] = "3"
    assert [row.text() for row in differences(of)] == ["torch is 2 on rank 0, 3 on rank 1"]


def test_the_ranks_that_stand_apart_come_first():
    of = {
        rank: {"flags": {"mkldnn.enabled": str(rank != 2)}, "parameters": {"w\x000,1,2,3": str(rank == 3)}}
        for rank in range(4)
    }
    (problem,), notes = sentences(of)
    assert problem == (
        f"{HEAD}mkldnn.enabled is False on rank 2, True on ranks 0 1 3; "
        "parameters that ranks hold copies of are not equal on rank 3: w"
    )
    assert notes == []


def _autocast_under_ddp(autocast: bool) -> list[str]:
    """Problems of three steps of DDP without buffers; odd ranks under autocast, or all."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rf.record_collectives() as log:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast or dist.get_rank() % 2 == 1):
                loss = model(torch.ones(2, 4)).float().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return log.problems


def test_autocast_of_a_rank_is_told_where_ddp_has_no_buffers(ranks):
    assert ranks.run(_autocast_under_ddp, True) == [[], []]
    first, second = ranks.run(_autocast_under_ddp, False)
    words = "dtype of matrix products, which autocast sets, is float32 on rank 0, bfloat16 on rank 1"
    assert first == [f"ranks differ before the first update: {words}"]
    assert second == []
