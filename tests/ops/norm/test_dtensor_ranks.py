"""DTensors over two processes with real collectives: which are needed, where results lie, equality with one process.

The whole batch is computed in one process as well. Rows are independent, so y and the gradients of rows must be its
bits. A sum over rows must be the bits of the sum of both halves, and be within budget of the whole batch's truth.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from norm_cases import Case, assert_within_budget, make_inputs, run, truth
from ranks import Ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import retrograd.nn
from retrograd import ops

ROWS, VECTORS = ("x", "residual", "grad_y", "grad_s"), ("weight", "bias")
WHOLE = Replicate()
STORES_UNEVEN_IN_PLACE = torch.__version__ >= torch.torch_version.TorchVersion("2.12")
GATHERS = "torch 2.11 itself gathers a gradient that is split unevenly along a middle dimension when it stores it"


def place(case: Case, mesh: DeviceMesh, rows: Placement, vectors: Placement = WHOLE) -> dict[str, DTensor]:
    """Each tensor of a case as a leaf DTensor that requires a gradient."""
    return {
        name: distribute_tensor(tensor, mesh, [rows if name in ROWS else vectors]).requires_grad_()
        for name, tensor in case.items()
    }


def collectives(mode: CommDebugMode) -> dict[str, int]:
    """How often each collective ran, by name."""
    return {str(op).rpartition(".")[2]: count for op, count in mode.get_comm_counts().items() if count}


def call(norm: str, tensors: dict[str, Any], **options: Any) -> Any:
    """The norm of what a case holds besides the gradients."""
    return getattr(ops, norm)(**{k: v for k, v in tensors.items() if not k.startswith("grad")}, eps=1e-6, **options)


def sharded_step(norm: str, case: Case, rows: Placement, vectors: Placement) -> dict[str, Any]:
    """Forward and backward on one rank: local and whole results, placements and collectives."""
    mesh = init_device_mesh("cpu", (2,))
    # A mode that watches makes the norms take their operators, so results come from a second step without it.
    for forward, backward in ((CommDebugMode(), CommDebugMode()), (nullcontext(), nullcontext())):
        tensors = place(case, mesh, rows, vectors)
        with forward:
            y, s = call(norm, tensors, prenorm=True)
        with backward:
            torch.autograd.backward([y, s], [tensors["grad_y"].detach(), tensors["grad_s"].detach()])
        if isinstance(forward, CommDebugMode):
            counts = {"forward": collectives(forward), "backward": collectives(backward)}
    results = {"y": y.detach(), "s": s.detach()}
    results |= {name: t.grad for name, t in tensors.items() if not name.startswith("grad")}
    return {
        "local": {name: t.to_local() for name, t in results.items()},
        "whole": {name: t.full_tensor() for name, t in results.items()},
        "placements": {name: t.placements for name, t in results.items()},
    } | counts


def halves(case: Case, dim: int) -> list[Case]:
    """The case of each of two ranks, split as DTensor splits."""
    parts = {k: torch.chunk(v, 2, dim) if k in ROWS else (v, v) for k, v in case.items()}
    empty = {k: v.narrow(dim, 0, 0) if k in ROWS else v for k, v in case.items()}
    return [{k: v[rank] if rank < len(v) else empty[k] for k, v in parts.items()} for rank in (0, 1)]


def assert_sums(name: str, got: torch.Tensor, parts: list[torch.Tensor], case: Case, norm: str) -> None:
    """Hold a gradient of a vector to the sum of the halves, bit for bit, and to the truth of the whole batch."""
    assert torch.equal(got, parts[0] + parts[1]), name
    shape = case["x"].shape
    assert_within_budget(name, got, truth(case, norm, prenorm=True)[name], math.prod(shape[:-1]), shape[-1])


# Even; uneven, the second rank having fewer rows; a second rank without any.
@pytest.mark.parametrize("shape", [(4, 6, 16), (3, 5, 16), (1, 1, 16)], ids=str)
@pytest.mark.parametrize("dim", [0, 1], ids=lambda dim: f"dim{dim}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_are_normalised_where_they_lie(
    dtype: torch.dtype, dim: int, shape: tuple[int, ...], norm: str, ranks: Ranks
) -> None:
    if dim and shape[dim] % 2 and shape[dim] > 1 and not STORES_UNEVEN_IN_PLACE:
        pytest.skip(GATHERS)
    case = make_inputs(shape, dtype)
    want = run(case, norm, prenorm=True)
    parts = [run(half, norm, prenorm=True) for half in halves(case, dim)]
    for rank, got in enumerate(ranks.run(sharded_step, norm, case, Shard(dim), Replicate())):
        assert (got["forward"], got["backward"]) == ({}, {})
        for name, local in got["local"].items():
            assert torch.equal(local, parts[rank][name]), name
            if name in VECTORS:
                assert got["placements"][name] == (Partial(),)
                assert_sums(name, got["whole"][name], [part[name] for part in parts], case, norm)
            else:
                assert got["placements"][name] == (Shard(dim),)
                assert torch.equal(got["whole"][name], want[name]), name


def test_replicated_rows_need_no_collective(norm: str, ranks: Ranks) -> None:
    case = make_inputs((3, 5, 16))
    want = run(case, norm, prenorm=True)
    for got in ranks.run(sharded_step, norm, case, Replicate(), Replicate()):
        assert (got["forward"], got["backward"]) == ({}, {})
        assert set(got["placements"].values()) == {(Replicate(),)}
        assert all(torch.equal(tensor, want[name]) for name, tensor in got["whole"].items())


def test_sharded_vectors_are_gathered_and_their_gradients_scattered(norm: str, ranks: Ranks) -> None:
    case = make_inputs((4, 6, 16))
    parts = [run(half, norm, prenorm=True) for half in halves(case, 0)]
    for got in ranks.run(sharded_step, norm, case, Shard(0), Shard(0)):
        assert got["forward"] == {"all_gather_into_tensor": 2}
        assert got["backward"] == {"reduce_scatter_tensor": 2}
        for name in VECTORS:
            assert got["placements"][name] == (Shard(0),)
            assert_sums(name, got["whole"][name], [part[name] for part in parts], case, norm)


def heads_step(norm: str, case: Case, vectors: Placement) -> dict[str, Any]:
    """Rows of [B, H, N] split by heads, with weights that are split by heads or whole."""
    mesh = init_device_mesh("cpu", (2,))
    tensors = place(case, mesh, Shard(1), vectors)
    with CommDebugMode() as mode:
        call(norm, tensors).backward(tensors["grad_y"].detach())
    grads = {name: tensors[name].grad for name in ("x", *VECTORS)}
    return {"collectives": collectives(mode)} | {k: (g.full_tensor(), g.placements) for k, g in grads.items()}


@pytest.mark.parametrize("heads", [4, 3])
def test_heads_of_weights_follow_the_heads_of_x(heads: int, norm: str, ranks: Ranks) -> None:
    if heads % 2 and not STORES_UNEVEN_IN_PLACE:
        pytest.skip(GATHERS)
    case = make_inputs((3, heads, 16), given="weight bias", heads=True)
    want = run(case, norm)
    for got in ranks.run(heads_step, norm, case, Shard(0)):
        assert got.pop("collectives") == {}
        for name, (whole, placements) in got.items():
            assert placements == (Shard(1) if name == "x" else Shard(0),)
            assert torch.equal(whole, want[name]), name


def test_whole_weights_of_split_heads_get_whole_gradients(norm: str, ranks: Ranks) -> None:
    case = make_inputs((3, 4, 16), given="weight bias", heads=True)
    want = run(case, norm)
    for got in ranks.run(heads_step, norm, case, Replicate()):
        assert got.pop("collectives") == {"all_gather_into_tensor": 2}
        for name, (whole, _) in got.items():
            assert torch.equal(whole, want[name]), name


def through_a_loss(norm: str, case: Case) -> dict[str, torch.Tensor]:
    """Gradients where y goes on through DTensor operations: elsewhere placed, multiplied, summed."""
    mesh = init_device_mesh("cpu", (2,))
    tensors = place(case, mesh, Shard(1))
    y, s = call(norm, tensors, prenorm=True)
    assert isinstance(y, DTensor)
    elsewhere = y.redistribute(mesh, [Shard(0)]) * tensors["grad_y"].detach().redistribute(mesh, [Shard(0)])
    everywhere = s.redistribute(mesh, [Replicate()]) * tensors["grad_s"].detach().redistribute(mesh, [Replicate()])
    (elsewhere.sum() + everywhere.sum()).full_tensor().backward()
    return {name: t.grad.full_tensor() for name, t in tensors.items() if not name.startswith("grad")}


def test_gradients_arrive_from_other_placements(norm: str, ranks: Ranks) -> None:
    case = make_inputs((4, 6, 16))
    want = run(case, norm, prenorm=True)
    parts = [run(half, norm, prenorm=True) for half in halves(case, 1)]
    for got in ranks.run(through_a_loss, norm, case):
        for name, grad in got.items():
            if name in VECTORS:
                assert_sums(name, grad, [part[name] for part in parts], case, norm)
            else:
                assert torch.equal(grad, want[name]), name


def under_way(norm: str, case: Case, requires_grad: bool) -> dict[str, torch.Tensor]:
    """Rows and gradients that arrive by a collective that nobody has waited for, as in tensor parallelism.

    One at a time: with two functional collectives under way torch 2.13 itself corrupts the heap of a gloo process, in
    plain torch within 25 s of pairs of all_gather; with one not in 20,000.
    """
    mesh = init_device_mesh("cpu", (2,))
    tensors = {k: v.requires_grad_(requires_grad) for k, v in place(case, mesh, Shard(0)).items()}
    vectors = {name: tensors[name] for name in VECTORS}
    split = {name: tensors[name].redistribute(mesh, [Shard(1)], async_op=name == "x") for name in ("x", "residual")}
    y, s = call(norm, split | vectors, prenorm=True)
    results = {"y": y.detach().full_tensor(), "s": s.detach().full_tensor()}
    inputs = {k: t.detach() for k, t in tensors.items() if not k.startswith("grad")}
    arriving = {k: t.redistribute(mesh, [Replicate()], async_op=k == "residual") for k, t in inputs.items()}
    plain = {k: t.to_local() for k, t in arriving.items()}
    results["plain y"] = call(norm, {k: t.requires_grad_(requires_grad) for k, t in plain.items()}).detach()
    if requires_grad:
        # Each rank's loss is a part of the whole, so that gradients are summed on their way back.
        parts = [
            t.redistribute(mesh, [Replicate()], async_op=t is s).to_local(grad_placements=[Partial()]) for t in (y, s)
        ]
        rank = mesh.get_local_rank()
        grads = [case[name] * torch.tensor([0.25, 0.75])[rank] for name in ("grad_y", "grad_s")]
        torch.autograd.backward(parts, grads)
        results |= {name: t.grad.full_tensor() for name, t in tensors.items() if not name.startswith("grad")}
    return results


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no-gradient", "gradients"])
def test_collectives_under_way_are_waited_for(requires_grad: bool, norm: str, ranks: Ranks) -> None:
    case = make_inputs((4, 6, 16))
    # A quarter and three quarters of such a gradient add up to it exactly.
    case |= {name: (case[name] * 256).round() / 256 for name in ("grad_y", "grad_s")}
    want = run(case, norm, prenorm=True)
    want["plain y"] = want["y"]
    parts = [run(half, norm, prenorm=True) for half in halves(case, 1)]
    for got in ranks.run(under_way, norm, case, requires_grad):
        for name, tensor in got.items():
            if name in VECTORS:
                assert_sums(name, tensor, [part[name] for part in parts], case, norm)
            else:
                assert torch.equal(tensor, want[name]), name


def columns_step(norm: str, case: Case) -> tuple[list[str], dict[str, torch.Tensor]]:
    """What is said of x split by columns, and results after the redistribution that is asked for."""
    mesh = init_device_mesh("cpu", (2,))
    tensors = place(case, mesh, Shard(2))
    said = []
    with CommDebugMode() as mode:
        for dim in (2, -1):
            with pytest.raises(ValueError, match="`x` has placement") as caught:
                call(norm, tensors | {"x": distribute_tensor(case["x"], mesh, [Shard(dim)], src_data_rank=None)})
            said.append(str(caught.value))
    assert collectives(mode) == {}
    mended = {name: t.redistribute(mesh, [Shard(0)]) if name in ROWS else t for name, t in tensors.items()}
    y = call(norm, mended)
    y.backward(mended["grad_y"].detach())
    assert tensors["x"].grad.placements == (Shard(2),)
    return said, {"y": y.detach().full_tensor()} | {k: tensors[k].grad.full_tensor() for k in ("x", "residual")}


def test_split_columns_are_refused_on_every_rank_and_mended_by_redistribution(norm: str, ranks: Ranks) -> None:
    case = make_inputs((4, 6, 16))
    want = run(case, norm)
    for said, got in ranks.run(columns_step, norm, case):
        assert all("splits the rows" in text and "use x.redistribute(...)" in text for text in said)
        assert all(torch.equal(tensor, want[name]) for name, tensor in got.items())


def mesh_of_two_dimensions(norm: str, case: Case) -> dict[str, Any]:
    """Rows split by batch over one dimension of the mesh and by sequence over the other."""
    mesh = init_device_mesh("cpu", (1, 2))
    rows, vectors = [Shard(0), Shard(1)], [Replicate(), Replicate()]
    tensors = {k: distribute_tensor(v, mesh, rows if k in ROWS else vectors).requires_grad_() for k, v in case.items()}
    y, s = call(norm, tensors, prenorm=True)
    torch.autograd.backward([y, s], [tensors["grad_y"].detach(), tensors["grad_s"].detach()])
    return {k: (t.grad.full_tensor(), t.grad.placements) for k, t in tensors.items() if not k.startswith("grad")}


def test_mesh_of_two_dimensions(norm: str, ranks: Ranks) -> None:
    case = make_inputs((4, 6, 16))
    want = run(case, norm, prenorm=True)
    parts = [run(half, norm, prenorm=True) for half in halves(case, 1)]
    for got in ranks.run(mesh_of_two_dimensions, norm, case):
        for name, (grad, placements) in got.items():
            if name in VECTORS:
                assert placements == (Partial(), Partial())
                assert_sums(name, grad, [part[name] for part in parts], case, norm)
            else:
                assert placements == (Shard(0), Shard(1))
                assert torch.equal(grad, want[name]), name


MODULES = {"rms_norm": retrograd.nn.RMSNorm, "layer_norm": retrograd.nn.LayerNorm}


def module_step(norm: str, case: Case) -> dict[str, torch.Tensor]:
    """A step of SGD of a module under sequence parallelism: x [B, S, N] split along S."""
    mesh = init_device_mesh("cpu", (2,))
    module = MODULES[norm](16, eps=1e-6)
    module = parallelize_module(module, mesh, SequenceParallel(use_local_output=False))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(distribute_tensor(case[name], mesh, [Replicate()]))
    tensors = place({k: case[k] for k in ("x", "grad_y")}, mesh, Shard(1))
    y = module(tensors["x"])
    y.backward(tensors["grad_y"].detach())
    grads = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    stepped = {f"new {name}": p.detach().full_tensor() for name, p in module.named_parameters()}
    return grads | stepped | {"y": y.detach().full_tensor(), "x": tensors["x"].grad.full_tensor()}


def test_module_under_sequence_parallelism(norm: str, ranks: Ranks) -> None:
    case = make_inputs((2, 6, 16), given="weight" if norm == "rms_norm" else "weight bias")
    want = run(case, norm)
    parts = [run(half, norm) for half in halves(case, 1)]
    for got in ranks.run(module_step, norm, case):
        for name in ("y", "x"):
            assert torch.equal(got[name], want[name]), name
        for name in VECTORS:
            if name in case:
                assert torch.equal(got[name], parts[0][name] + parts[1][name]), name
                assert torch.equal(got[f"new {name}"], case[name] - 0.5 * got[name]), name


def two_dimensions_step(norm: str, case: Case) -> dict[str, torch.Tensor]:
    """A module that normalises two dimensions, x split over the batch."""
    mesh = init_device_mesh("cpu", (2,))
    module = distribute_module(MODULES[norm]((4, 16), eps=1e-6), mesh)
    tensors = place(case, mesh, Shard(0))
    module(tensors["x"]).backward(tensors["grad_y"].detach())
    return {"x": tensors["x"].grad.full_tensor(), "weight": module.weight.grad.full_tensor()}


def test_module_over_two_dimensions(norm: str, ranks: Ranks) -> None:
    case = make_inputs((4, 4, 16), given="")
    module = MODULES[norm]((4, 16), eps=1e-6)
    want = []
    for half in [case, *halves(case, 0)]:
        x = half["x"].clone().requires_grad_()
        want.append(torch.autograd.grad(module(x), [x, module.weight], half["grad_y"]))
    for got in ranks.run(two_dimensions_step, norm, case):
        assert torch.equal(got["x"], want[0][0])
        assert torch.equal(got["weight"], want[1][1] + want[2][1])
