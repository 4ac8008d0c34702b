"""The ordered reduce-scatter by itself: operators, dtypes, handles, who sent a NaN, what is refused, setting and undoing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

from ordered_steps import among, four_ranks, in_rank_order, loss_of, make_batch, make_net, wrap
from torch.distributed.fsdp import fully_shard

from retrograd import fsdp
from retrograd.errors import NonFiniteGradientError, RetrogradError, UsageError
from retrograd.fsdp.ordered_reduce import _param_groups

OPS = {"SUM": None, "AVG": None, "PREMUL": 0.3}


def sent_by(rank, ranks, count, dtype):
    """[ranks * count]"""
    generator = torch.Generator().manual_seed(rank)
    return (10 * torch.randn(ranks * count, generator=generator)).to(dtype)


def operator(name):
    if name != "PREMUL":
        return getattr(dist.ReduceOp, name)
    # As FSDP makes it: before torch 2.13 PREMUL_SUM cannot be called.
    make = getattr(dist, "_make_nccl_premul_sum", None) or dist.ReduceOp.PREMUL_SUM
    return make(OPS[name])


def reduce_once(mesh, name, count, dtype, out, options):
    ranks, rank = mesh.size(), mesh.get_local_rank()
    given = sent_by(rank, ranks, count, dtype)
    before = given.clone()
    output = torch.full((count,), 7.0, dtype=out)
    work = fsdp.ordered_reduce_scatter(output, given, mesh.get_group(), operator(name), **options)
    states = None
    if work is not None:
        states = work.is_completed(), work.wait(), work.is_completed(), work.wait()
    assert torch.equal(given, before)
    return output, states


def reduced(*args):
    return among(3, reduce_once, *args)


def expected(rank, name, count, dtype, out, wire=None):
    pieces = [sent_by(r, 3, count, dtype).to(wire or dtype).view(3, count)[rank] for r in range(3)]
    scales = {"SUM": lambda t: t, "AVG": lambda t: t / 3, "PREMUL": lambda t: t * torch.tensor(OPS["PREMUL"])}
    return in_rank_order(pieces, scales[name]).to(out)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_is_the_sum_in_rank_order(name, dtype):
    for out in {dtype, torch.float32}:
        for rank, (got, _) in enumerate(four_ranks().run(reduced, name, 101, dtype, out, {})[:3]):
            assert torch.equal(got, expected(rank, name, 101, dtype, out))


def test_bf16_on_the_wire_rounds_every_summand():
    options = {"wire_dtype": torch.bfloat16}
    for rank, (got, _) in enumerate(four_ranks().run(reduced, "AVG", 64, torch.float32, torch.float32, options)[:3]):
        want = expected(rank, "AVG", 64, torch.float32, torch.float32, torch.bfloat16)
        assert torch.equal(got, want)
        assert not torch.equal(got, expected(rank, "AVG", 64, torch.float32, torch.float32))


@pytest.mark.parametrize("count", [0, 33])
def test_handle(count):
    """Complete once waited for; a second wait does nothing."""
    answers = four_ranks().run(reduced, "SUM", count, torch.bfloat16, torch.float32, {"async_op": True})
    for rank, (got, states) in enumerate(answers[:3]):
        assert states == (count == 0, True, True, True)
        assert torch.equal(got, expected(rank, "SUM", count, torch.bfloat16, torch.float32))


def poisoned(mesh, how):
    """The message of a backward whose batch is NaN on rank 1, and of one where a gradient is Inf on rank 2."""
    messages = []
    for bad, value in ((1, "nan"), (2, "inf")):
        model = make_net()
        wrap(model, how, mesh=mesh)
        fsdp.fixed_order(model, check_finite=True)
        batch = make_batch(0, 0, dist.get_rank())
        loss = loss_of(model, batch)
        if dist.get_rank() == bad:
            loss = loss * float(value)
        with pytest.raises(NonFiniteGradientError) as caught:
            loss.backward()
        messages.append(str(caught.value))
    return messages


def poisoned_among(*args):
    return among(3, poisoned, *args)


@pytest.mark.parametrize(
    ("how", "module"), [("block", "layers.3"), ("pairs", "layers.2, layers.3"), ("whole", "(root)")]
)
def test_who_sent_a_nan_is_named(how, module):
    for rank, (nan, inf) in enumerate(four_ranks().run(poisoned_among, how)[:3]):
        assert nan.startswith("rank 1 sent ")
        assert f" to rank {rank} in the gradient of {module}, expected finite" in nan
        assert inf.startswith("rank 2 sent ")
        assert "rank 1" not in nan.partition(" to rank ")[0].replace("rank 1 sent", "")


def one_inf(mesh):
    """Only the rank that has the bad piece raises."""
    rank = mesh.get_local_rank()
    given = torch.ones(3 * 50, dtype=torch.bfloat16)
    if rank == 1:
        given[2 * 50 + 17] = float("-inf")
    try:
        fsdp.ordered_reduce_scatter(torch.empty(50), given, mesh.get_group(), check_finite=True, name="decoder")
    except NonFiniteGradientError as error:
        return str(error)
    return None


def one_inf_among():
    return among(3, one_inf)


def test_place_of_an_inf():
    assert four_ranks().run(one_inf_among)[:3] == [
        None,
        None,
        "rank 1 sent 0 NaN and 1 Inf (the first is element 17 of 50) to rank 2 in the gradient of decoder, expected "
        "finite numbers; look at the loss and the data of this step on the rank that sent them",
    ]


@pytest.mark.parametrize("name", OPS)
def test_one_rank_copies(alone, name):
    x = torch.randn(9)
    output = torch.empty(9)
    fsdp.ordered_reduce_scatter(output, x, op=operator(name))
    assert torch.equal(output, x * 0.3 if name == "PREMUL" else x)


@pytest.mark.parametrize(
    ("output", "given", "options", "message"),
    [
        (torch.empty(3), torch.empty(4), {}, r"input has 4 elements and output 3, expected 1 \(ranks\) x output; pad"),
        (torch.empty(4), torch.empty(4, dtype=torch.int32), {}, r"input is torch.int32, expected float32"),
        (torch.empty(4, dtype=torch.float16), torch.empty(4), {}, r"output is torch.float16 for torch.float32"),
        (torch.empty(4), torch.empty(4, dtype=torch.float64), {}, r"output is torch.float32 for torch.float64"),
        (torch.empty(4), torch.empty(8)[::2], {}, r"input has strides \(2,\), expected contiguous"),
        (torch.empty(4), torch.empty(4, device="meta"), {}, r"output is on cpu and input on meta"),
        (torch.empty(4), torch.empty(4), {"op": dist.ReduceOp.MAX}, r"op=.*MAX, expected ReduceOp.SUM, AVG or PREMUL"),
        (torch.empty(4), torch.empty(4), {"op": dist.ReduceOp.PREMUL_SUM}, r"expected .*PREMUL_SUM with its factor"),
        (torch.empty(4), torch.empty(4), {"wire_dtype": torch.float16}, r"wire_dtype=torch.float16, expected None"),
        (
            torch.empty(4, dtype=torch.float16),
            torch.empty(4, dtype=torch.float16),
            {"wire_dtype": torch.bfloat16},
            r"wire_dtype=torch.bfloat16 with torch.float16, expected float32",
        ),
    ],
)
def test_refusals(alone, output, given, options, message):
    with pytest.raises(UsageError, match=message):
        fsdp.ordered_reduce_scatter(output, given, **options)


def comms(model):
    groups = {id(g): g for m in model.modules() if fully_shard.state(m) for g in _param_groups(m)}
    return [group._reduce_scatter_comm for group in groups.values()]


def test_is_set_on_every_group_and_removed(alone):
    model = make_net()
    wrap(model, "pairs")
    mine = fsdp.FixedOrderReduceScatter(name="mine")
    model.layers[0].set_custom_reduce_scatter(mine)
    before = comms(model)
    with fsdp.fixed_order(model) as handle:
        assert sorted(handle.names) == ["(root)", "layers.0, layers.1", "layers.2, layers.3"]
        assert [comm.name for comm in comms(model)] == list(handle.names)
    assert comms(model) == before
    assert mine in before
    handle.remove()


def test_is_not_removed_over_someone_elses(alone):
    model = make_net()
    wrap(model, "block")
    handle = fsdp.fixed_order(model)
    model.layers[1].set_custom_reduce_scatter(fsdp.FixedOrderReduceScatter())
    with pytest.raises(RetrogradError, match=r"reduce-scatter of layers.1 is FixedOrderReduceScatter by now"):
        handle.remove()


def test_model_must_be_sharded():
    with pytest.raises(UsageError, match=r"`model` \(Net\) has no FSDPModule.*shard it first"):
        fsdp.fixed_order(make_net())
    with pytest.raises(UsageError, match=r"wire_dtype=torch.int8"):
        fsdp.FixedOrderReduceScatter(wire_dtype=torch.int8)


def test_importing_the_room_loads_no_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
        "import retrograd\nprint(retrograd.fsdp.__all__, 'fixed_order' in dir(retrograd.fsdp))\n"
        "try: retrograd.fsdp.no_such\nexcept AttributeError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "True" in done.stdout, done.stderr
    assert "has no attribute 'no_such'; it has " in done.stdout
