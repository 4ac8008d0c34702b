"""Parts of FSDP2's state, c10d's store, torch.compile's trace, JAX and torch_xla: what differs is named."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from retrograd.compat import fsdp2, registry, torch_trace, torch_xla
from retrograd.compat import jax as compilations
from retrograd.errors import UnsupportedVersionError

pytestmark = pytest.mark.usefixtures("untested_parts")
needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch is built without distributed"
)


@needs_distributed
def test_fsdp2_keeps_what_it_kept():
    assert registry.status(fsdp2.STATE).difference == ""


@needs_distributed
@pytest.mark.parametrize(
    ("broken", "difference"),
    [
        ({"_fsdp_param.FSDPParam.unsharded_param": property(lambda self: None)}, "another name than _unsharded_param"),
        ({"_fsdp_param_group.FSDPParamGroup._with_fqn": lambda self, label: label}, "otherwise than by _module_fqn"),
        ({"_fsdp_param_group.FSDPParamGroup.__init__": lambda self: None}, "has no _partial_reduce_output"),
    ],
    ids=["renamed", "another meaning", "gone"],
)
def test_another_fsdp2_is_noticed(monkeypatch, broken, difference):
    import torch.distributed.fsdp  # noqa: F401

    for name, stand_in in broken.items():
        monkeypatch.setattr(f"torch.distributed.fsdp._fully_shard.{name}", stand_in)
    assert difference in registry.status(fsdp2.STATE).note
    assert "bucket_gradients refuses" in registry.status(fsdp2.STATE).note


@needs_distributed
def test_a_store_that_moved_leaves_folders(alone, monkeypatch):
    from retrograd.compat import c10d_collectives as c10d

    assert registry.status(c10d.STORE).difference == ""
    registry._statuses.clear()
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_get_default_store")
    with pytest.raises(UnsupportedVersionError, match=r"ranks=FOLDER"):
        registry.require(c10d.STORE)


def test_a_trace_whose_messages_have_another_form_is_refused(monkeypatch):
    assert registry.status(torch_trace.PART).difference == ""
    registry._statuses.clear()
    monkeypatch.setattr(torch._logging, "trace_structured", lambda kind, **rest: None)
    with pytest.raises(UnsupportedVersionError, match="graph diff"):
        registry.require(torch_trace.PART)


@needs_jax
def test_jax_without_the_option_is_refused(monkeypatch):
    import jax

    assert registry.status(compilations.PART).difference == ""
    registry._statuses.clear()
    values = {name: value for name, value in jax.config.values.items() if name != compilations.DUMP}
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(config=SimpleNamespace(values=values), __version__="0.99"))
    with pytest.raises(UnsupportedVersionError, match=f"has no option {compilations.DUMP}"):
        registry.require(compilations.PART)


@needs_jax
def test_dialects_are_those_of_jax():
    assert registry.status(compilations.DIALECTS).difference == ""


def test_counters_of_torch_xla_of_another_kind_are_refused(monkeypatch):
    core = SimpleNamespace(
        _xla_tensors_report=lambda threshold, device: None,
        _xla_counter_value=lambda name: 0,
        _xla_metric_data=lambda name: None,
        _xla_get_default_device=lambda: "CPU:0",
    )
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace(_XLAC=core, __version__="2.9.0"))
    with pytest.raises(UnsupportedVersionError, match="of another kind"):
        registry.require(torch_xla.PART)
