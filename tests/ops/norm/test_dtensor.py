"""DTensors over a mesh of two whose peer is imagined: what is local is right, what is partial is called so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from norm_cases import Case, make_inputs, run
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from retrograd import ops


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def place(tensor: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """The local part of a DTensor, which requires a gradient."""
    return DTensor.from_local(tensor, mesh, [placement], run_check=False).requires_grad_()


def placed(case: Case, mesh: DeviceMesh, placement: Placement) -> dict[str, DTensor]:
    """x and residual placed as said, the vectors replicated."""
    where = {"x": placement, "residual": placement}
    return {k: place(v, mesh, where.get(k, Replicate())) for k, v in case.items() if not k.startswith("grad")}


@pytest.mark.parametrize(
    ("placement", "vectors"),
    [(Shard(0), Partial()), (Shard(1), Partial()), (Shard(-2), Partial()), (Replicate(), Replicate())],
    ids=str,
)
def test_rows_stay_where_they_are(placement: Placement, vectors: Placement, mesh: DeviceMesh, norm: str) -> None:
    case = make_inputs((3, 5, 16))
    want = run(case, norm, prenorm=True)
    inputs = placed(case, mesh, placement)
    y, s = getattr(ops, norm)(**inputs, prenorm=True, eps=1e-6)
    expected = inputs["x"]
    for out, name in ((y, "y"), (s, "s")):
        assert (out.shape, out.placements) == (expected.shape, expected.placements)
        assert torch.equal(out.to_local(), want[name])
    torch.autograd.backward([y.to_local(), s.to_local()], [case["grad_y"], case["grad_s"]])
    for name, tensor in inputs.items():
        assert torch.equal(tensor.grad.to_local(), want[name]), name
        assert tensor.grad.shape == tensor.shape
        assert tensor.grad.placements == ((vectors,) if name in ("weight", "bias") else expected.placements)


def test_heads_of_weights_follow_the_heads_of_x(mesh: DeviceMesh, norm: str) -> None:
    case = make_inputs((3, 2, 16), given="weight", heads=True)
    want = run(case, norm)
    x, weight = (place(case[name], mesh, Shard(d)) for name, d in (("x", 1), ("weight", 0)))
    y = getattr(ops, norm)(x, weight, eps=1e-6)
    assert y.shape == (3, 4, 16)
    y.to_local().backward(case["grad_y"])
    assert weight.grad.placements == (Shard(0),)
    assert torch.equal(weight.grad.to_local(), want["weight"])


def test_x_is_s_without_residual(mesh: DeviceMesh, norm: str) -> None:
    x = place(torch.randn(3, 16), mesh, Shard(0))
    y, s = getattr(ops, norm)(x, prenorm=True)
    assert s is x
    assert isinstance(y, DTensor)


def test_placements_without_whole_rows_are_refused(mesh: DeviceMesh, norm: str) -> None:
    function, local = getattr(ops, norm), torch.randn(3, 16)
    rows, vector = place(local, mesh, Shard(0)), place(local[0], mesh, Replicate())
    for split in (Shard(1), Shard(-1)):
        with pytest.raises(ValueError, match=r"`x` has placement .* splits the rows .*redistribute"):
            function(place(local, mesh, split))
    with pytest.raises(ValueError, match=r"`x` has placement .*expected whole values"):
        function(place(local, mesh, Partial()))
    with pytest.raises(ValueError, match=r"`residual` has placements .*redistribute"):
        function(rows, residual=place(torch.randn(6, 16), mesh, Replicate()))
    with pytest.raises(TypeError, match=r"`weight` is a plain Tensor among DTensors.*distribute_tensor"):
        function(rows, local[0])
    with pytest.raises(TypeError, match=r"`x` is a plain Tensor among DTensors"):
        function(local, vector)
    with pytest.raises(ValueError, match=r"accumulate_main_grad=True is for plain tensors"):
        function(rows, vector, accumulate_main_grad=True)
