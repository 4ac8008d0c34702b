"""What bucket_gradients refuses, and what it leaves behind: one process is enough."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from retrograd.compat import registry
from retrograd.errors import UsageError

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")


@pytest.fixture(autouse=True)
def untested_parts(monkeypatch):
    """A self-test otherwise runs once a process."""
    monkeypatch.setattr(registry, "_statuses", {})


@pytest.fixture
def net(mesh):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for module in model:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def bucket(*args, **kwargs):
    from retrograd.fsdp import bucket_gradients

    return bucket_gradients(*args, **kwargs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bucket_mb": 0}, "`bucket_mb` is 0"),
        ({"bucket_mb": "25"}, "`bucket_mb` is '25'"),
        ({"bucket_mb": float("inf")}, "`bucket_mb` is inf"),
        ({"max_pending_mb": -1}, "`max_pending_mb` is -1"),
        ({"reduce": "fast"}, "`reduce` is 'fast', expected one of native, ordered"),
        ({"missing": "ignore"}, "`missing` is 'ignore', expected one of error, zeros, skip"),
        ({"verify_every": -1}, "`verify_every` is -1"),
        ({"plan": "/nowhere/plan.json"}, "cannot be read"),
    ],
)
def test_arguments_that_are_wrong(net, options, said):
    with pytest.raises(UsageError, match=said):
        bucket(net, **options)


def test_models_that_cannot_have_buckets(net):
    with pytest.raises(UsageError, match="`model` is Linear, which fully_shard was not called on"):
        bucket(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="DDP has buckets of its own"):
        bucket(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="FSDP1 is not supported"):
        bucket(type("FullyShardedDataParallel", (nn.Linear,), {})(2, 2))
    net(torch.ones(2, 4)).sum().backward()
    with pytest.raises(UsageError, match="part of a larger sharded model"):
        bucket(net[0])
    handle = bucket(net)
    with pytest.raises(UsageError, match=r"has buckets already; remove\(\)"):
        bucket(net)
    handle.remove()
    bucket(net).remove()


def test_another_reduce_scatter_is_not_replaced(net):
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class Mine(DefaultReduceScatter):
        pass

    net[1].set_custom_reduce_scatter(Mine())
    with pytest.raises(UsageError, match="would replace Mine"):
        bucket(net, reduce="ordered")
    bucket(net).remove()


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0a0+git", "3.0.0"])
def test_unknown_versions_are_refused(net, monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(UsageError, match=r"knows those of 2\.11, 2\.12, 2\.13, 2\.14, 2\.15") as caught:
        bucket(net)
    assert version in str(caught.value)
    assert "shard_by_size" in str(caught.value)


def _other_signature(monkeypatch, home, collectives, states):
    monkeypatch.setattr(collectives, "foreach_reduce", lambda params, grads: None)
    monkeypatch.setattr(home, "foreach_reduce", collectives.foreach_reduce)
    return r"foreach_reduce takes \(params, grads\)"


def _replaced_by_another(monkeypatch, home, collectives, states):
    monkeypatch.setattr(home, "foreach_reduce", lambda *args: None)
    return "was replaced by"


def _no_longer_called(monkeypatch, home, collectives, states):
    monkeypatch.setattr(home.FSDPParamGroup, "post_backward", lambda self: None)
    return "post_backward does not call foreach_reduce"


def _another_callback(monkeypatch, home, collectives, states):
    monkeypatch.setattr(states, "_register_root_post_backward_final_callback", lambda self: None)
    return "does not use _root_post_backward_final_callback"


def _keeps_gradients(monkeypatch, home, collectives, states):
    real = collectives.foreach_reduce

    @functools.wraps(real)
    def keeping(fsdp_params, unsharded_grads, *args, **kwargs):
        return real(fsdp_params, list(unsharded_grads), *args, **kwargs)

    monkeypatch.setattr(collectives, "foreach_reduce", keeping)
    monkeypatch.setattr(home, "foreach_reduce", keeping)
    return "or keeps the gradients"


def _hands_out_nothing(monkeypatch, home, collectives, states):
    real = collectives.foreach_reduce

    @functools.wraps(real)
    def forgetting(fsdp_params, unsharded_grads, *args, **kwargs):
        answer = real(fsdp_params, unsharded_grads, *args, **kwargs)
        fsdp_params[1].sharded_param.grad = fsdp_params[0].sharded_param.grad
        return answer

    monkeypatch.setattr(collectives, "foreach_reduce", forgetting)
    monkeypatch.setattr(home, "foreach_reduce", forgetting)
    return "does not hand each parameter its gradient"


@pytest.mark.parametrize(
    "change",
    [
        _other_signature,
        _replaced_by_another,
        _no_longer_called,
        _another_callback,
        _keeps_gradients,
        _hands_out_nothing,
    ],
)
def test_the_self_test_notices_another_fsdp2(net, monkeypatch, change):
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group, _fsdp_state

    said = change(monkeypatch, _fsdp_param_group, _fsdp_collectives, _fsdp_state.FSDPState)
    with pytest.raises(UsageError, match=said):
        bucket(net)


def test_the_table_of_versions():
    from retrograd.compat.fsdp2.names import VERSIONS, version

    assert list(VERSIONS) == ["2.11", "2.12", "2.13", "2.14", "2.15"]
    assert len(version().returns) in (6, 7)


def test_removed_without_a_trace(net):
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

    def state():
        groups = [group for s in states for group in getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group]]
        groups = [group for group in groups if group]
        return (
            _fsdp_param_group.foreach_reduce is _fsdp_collectives.foreach_reduce,
            [sorted(k for k, v in vars(s).items() if callable(v) and k.startswith("_re")) for s in states],
            [sorted(k for k in vars(g) if k.startswith("_register")) for g in groups],
            len(net._forward_pre_hooks),
            [hasattr(p, "_retrograd_reduce") for g in groups for p in g.fsdp_params],
        )

    states = [module._get_fsdp_state() for module in net.modules() if hasattr(module, "_get_fsdp_state")]
    before = state()
    handle = bucket(net)
    assert state() != before
    with pytest.raises(UsageError, match="no backward has ended yet"):
        handle.hash()
    assert "no plan yet" in handle.report()
    net(torch.ones(2, 4)).sum().backward()
    assert [len(one) for one in handle.log] == [len(handle.plan.buckets)]
    handle.remove()
    handle.remove()
    assert state() == before


def test_paused_fsdp2_reduces_alone_and_another_handle_may_take_its_place(net):
    def backward():
        net(torch.ones(2, 4)).sum().backward()

    handle = bucket(net)
    backward()
    handle.pause()
    handle.pause()
    backward()
    assert handle.backwards == 1
    other = bucket(net)
    backward()
    with pytest.raises(UsageError, match=r"has buckets already; remove\(\)"):
        handle.resume()
    other.remove()
    handle.resume()
    handle.resume()
    backward()
    assert (handle.backwards, other.backwards) == (2, 1)
    assert len(handle.sequences) == 1
    handle.remove()
    with pytest.raises(UsageError, match=r"resume\(\) was called after remove\(\)"):
        handle.resume()


@pytest.mark.parametrize("what", ["remove", "pause", "resume"])
def test_a_handle_stays_as_it_is_in_backward(net, what):
    handle = bucket(net)
    out = net(torch.ones(2, 4)).sum()
    out.register_hook(lambda _: getattr(handle, what)())
    with pytest.raises(UsageError, match=rf"{what}\(\) was called inside backward"):
        out.backward()


@pytest.mark.parametrize(("mb", "straight"), [(1e-6, 3), (25.0, 1)], ids=["alone", "together"])
def test_a_group_alone_is_reduced_by_the_call_that_fsdp2_makes(net, monkeypatch, mb, straight):
    """The first layer's input needs no gradient, so it goes last and alone, whatever the bucket."""
    from retrograd.compat.fsdp2.foreach_reduce import ReduceCall

    handle, make, held = bucket(net, bucket_mb=mb), ReduceCall.make, []
    monkeypatch.setattr(ReduceCall, "make", lambda call, *given: held.append(call) or make(call, *given))
    net(torch.ones(2, 4)).sum().backward()
    assert len(held) == len(handle.log[-1]) - straight
    assert [len(one.groups) for one in handle.log[-1]] == ([1, 1, 1] if straight == 3 else [2, 1])
    assert all(param.grad is not None for param in net.parameters())


def test_a_plan_of_another_model(net):
    handle = bucket(net)
    net(torch.ones(2, 4)).sum().backward()
    plan = handle.plan
    handle.remove()
    other = type(plan).of([*plan.groups, type(plan.groups[0])("more", 4, "k")], plan.cap_bytes)
    bucket(net, plan=other)
    with pytest.raises(UsageError, match=r"lacks groups \[\] and has \[more\] too many"):
        net(torch.ones(2, 4)).sum().backward()


def test_a_cap_that_no_order_keeps(net):
    handle = bucket(net, max_pending_mb=1e-6)
    with pytest.raises(UsageError, match="wait even if gradients come in the planned order"):
        net(torch.ones(2, 4)).sum().backward()
    assert handle.plan is None


def test_gradients_of_inputs_alone_reduce_nothing(net):
    handle = bucket(net)
    x = torch.ones(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(net(x).sum(), x)
    assert gradient.abs().sum() > 0
    assert handle.log == [()]
    net(x).sum().backward()
    assert len(handle.log[-1]) == len(handle.plan.buckets)


def test_torch_comes_when_it_is_needed():
    import subprocess

    code = "import retrograd.fsdp, retrograd.fsdp.bucket_plan, sys; print('torch' in sys.modules, 'bucket_gradients' in dir(retrograd.fsdp))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert told == ["False", "True"]
