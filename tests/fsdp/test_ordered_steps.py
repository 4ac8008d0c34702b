"""Fixed order through FSDP2 on gloo: gradients and parameters are the bits of one process that adds in rank order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

from ordered_steps import among, differing, four_ranks, reference, train
from torch.distributed.device_mesh import init_device_mesh

BF16, F32 = torch.bfloat16, torch.float32


SIZES = pytest.mark.parametrize("size", [2, 3, 4], ids=lambda n: f"{n}ranks")


def trained(size: int, how: str, options: dict) -> list | None:
    return among(size, train, how, **options)


def trained_under_hsdp(how: str) -> list:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return train(mesh, how, ordered={})


def check(size: int, options: dict, wraps: tuple[str, ...] = ("block", "pairs", "whole"), **of_reference) -> None:
    """Every rank, wrap and step has the reference's bits."""
    shared = {k: v for k, v in options.items() if k in ("accumulate", "every_sync", "param", "reduce", "factor")}
    want = reference(size, **shared, **of_reference)
    for how in wraps:
        for rank, got in enumerate(four_ranks().run(trained, size, how, {"ordered": {}} | options)[:size]):
            assert differing(got, want) == {}, f"{how}, rank {rank}"


@pytest.mark.dealt(3)
@pytest.mark.parametrize(("accumulate", "every_sync"), [(1, False), (2, False), (2, True)])
@SIZES
def test_wraps_and_accumulation_have_the_bits_of_rank_order(size, accumulate, every_sync):
    wraps = ("pairs",) if every_sync else ("block", "pairs", "whole")
    check(size, {"accumulate": accumulate, "every_sync": every_sync}, wraps)


@SIZES
def test_native_reduction_does_not(size):
    """Without this the test above could not fail; two numbers commute."""
    got = four_ranks().run(trained, size, "block", {})
    count = sum(differing(got[0], reference(size)).values())
    assert (count > 0) is (size > 2), count


@pytest.mark.parametrize("factor", [2.0, 3.0, 0.7])
def test_divide_factor(factor):
    """FSDP asks for PREMUL_SUM(1 / factor), and for AVG where the factor is the number of ranks."""
    check(3, {"factor": factor}, ("pairs",))


def test_forced_sum_is_divided_by_fsdp():
    check(3, {"force_sum": True}, ("pairs",))


def test_bf16_parameters_summed_in_float32():
    options = {"param": BF16, "reduce": F32}
    check(3, options)
    # Gradients that came from bfloat16 lose nothing on a bfloat16 wire.
    check(3, options | {"ordered": {"wire_dtype": BF16}}, ("pairs",))


def test_bf16_reduction_rounds_once():
    """The buffer is bfloat16, the sum is not."""
    check(3, {"param": BF16, "reduce": BF16}, ("block", "whole"))


def test_float32_gradients_on_a_bf16_wire():
    check(4, {"reduce": F32, "ordered": {"wire_dtype": BF16}, "accumulate": 2}, wire=BF16)


def test_hsdp_of_two_replicas():
    """The all-reduce between two replicas commutes, so wraps agree there too."""
    made = [four_ranks().run(trained_under_hsdp, how) for how in ("block", "pairs", "whole")]
    for of_wrap in made:
        for of_rank in of_wrap:
            assert differing(of_rank, made[0][0]) == {}
