"""torch.compile, really compiled: forward and backward graphs, guard reasons, seconds; the user's code is unchanged."""

from __future__ import annotations

import logging

import pytest
import torch

import retrograd.graph as graph
from retrograd.compat import registry
from retrograd.errors import GraphChangedError, GraphError, UsageError
from retrograd.graph.watching.backends.compile import Compile

pytestmark = pytest.mark.skipif(not torch._dynamo.is_dynamo_supported(), reason="torch.compile does not work here")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    assert not [h for h in logging.getLogger("torch.__trace").handlers if type(h).__module__.startswith("retrograd")]


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))


def train(w, batches, backend="aot_eager", before=lambda step, m: None):
    m = model()
    compiled = torch.compile(m, backend=backend)
    for step, batch in enumerate(batches):
        before(step, m)
        compiled(torch.randn(batch, 4)).sum().backward()
        w.step()
    return m


def test_forward_and_backward_are_two_graphs():
    with graph.watch("compile", expect=2, on_extra="raise") as w:
        train(w, (8, 8, 8))
    report = w.report()
    assert report
    assert [(g.role, g.step, g.level, g.format) for g in report.graphs] == [
        ("forward", 0, "strict", "fx"),
        ("backward", 0, "strict", "fx"),
    ]
    assert all(g.instructions > 10 for g in report.graphs)
    assert report.graphs[0].seconds > 0
    assert "test_watch_compile.py" in report.graphs[0].name
    assert report.steps == 3


def test_the_same_program_has_the_same_keys():
    keys = []
    for _ in range(2):
        torch._dynamo.reset()
        with graph.watch("compile", expect=2) as w:
            train(w, (8,))
        keys.append([g.key for g in w.report().graphs])
    assert keys[0] == keys[1]


def test_another_batch_is_one_too_many_with_the_guard_the_step_and_the_shape():
    with graph.watch("compile", expect=2, on_extra="raise") as w, pytest.raises(GraphChangedError) as error:
        train(w, (8, 8, 5))
    text = str(error.value)
    assert "step 2: a new forward graph was compiled (expected at most 2, this makes 3)" in text
    assert "size mismatch at index 0. expected 8, actual 5" in text
    extra = w.report().unexpected
    assert [g.role for g in extra] == ["forward", "backward"]
    assert [g.against for g in extra] == [0, 1]
    assert any(c.kind == "shape_changed" for c in extra[1].causes)


@torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=False)  # without it torch 2.11 does not compile
def test_a_frozen_weight_changes_the_backward_graph():
    def freeze(step, m):
        m[0].weight.requires_grad_(step < 2)

    with graph.watch("compile", warmup=2) as w:
        train(w, (8, 8, 8), before=freeze)
    forward, backward = w.report().unexpected
    assert "requires_grad mismatch" in forward.reason
    # What made the gradient of this weight is gone, and with it what was saved for it.
    assert {"output_removed", "parameter_removed", "instruction_removed"} & {c.kind for c in backward.causes}
    assert backward.instructions < w.report().graphs[1].instructions


@pytest.mark.parametrize("thaws", [False, True], ids=["freezes", "thaws"])
def test_of_a_weight_that_freezes_or_thaws_as_many_graphs_are_told_as_torch_compiled(thaws):
    """As torch is set: 2.11 does not look at a parameter again while the module's dicts are the same."""
    counted = torch._dynamo.utils.counters["stats"]
    counted.clear()

    def turn(step, m):
        m[0].weight.requires_grad_((step < 2) != thaws)

    with graph.watch("compile", warmup=2) as w:
        trained = train(w, (8, 8, 8), before=turn)
    again = counted["unique_graphs"] == 2
    assert [g.role for g in w.report().unexpected] == (["forward", "backward"] if again else [])
    assert again or torch.__version__ < "2.13"  # of which 2.11 was seen
    if thaws:
        assert (trained[0].weight.grad is not None) == again


@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.dealt(3)), "eager"])
def test_other_backends(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with graph.watch("compile") as w:
        train(w, (8,), backend=backend)
    roles = [g.role for g in w.report().graphs]
    assert roles == (["forward", "backward"] if backend == "inductor" else ["traced"])
    assert all(g.seconds is not None for g in w.report().graphs)


def test_inference_has_one_graph():
    compiled = torch.compile(model(), backend="aot_eager")
    with graph.watch("compile", expect=1) as w, torch.no_grad():
        compiled(torch.randn(3, 4))
        w.step()
    assert [g.role for g in w.report().graphs] == ["inference"]


def test_auto_finds_torch_and_step_reaches_every_watch():
    with graph.watch(expect=9) as w:
        assert "compile" in w.report().backends
        graph.step()
    assert w.report().steps == 1
    graph.step()
    assert w.report().steps == 1


def test_graphs_of_the_last_step_without_step_are_counted():
    with graph.watch("compile") as w:
        torch.compile(model(), backend="aot_eager")(torch.randn(3, 4)).sum().backward()
    assert len(w.report().graphs) == 2


def test_an_exception_of_the_program_is_not_hidden_by_a_graph_too_many():
    def fail():
        with graph.watch("compile", expect=0, on_extra="raise"):
            torch.compile(model(), backend="aot_eager")(torch.randn(3, 4))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_a_torch_without_the_trace_is_refused(monkeypatch):
    monkeypatch.setattr(registry, "_statuses", {})
    monkeypatch.setattr(torch._logging, "trace_structured", lambda *args, **kwargs: None)
    with pytest.raises(GraphError, match="has no structured trace that can be listened to"):
        Compile().start(lambda made: None)


def test_steps_outside_and_a_second_entry_are_refused():
    w = graph.watch("compile")
    with pytest.raises(UsageError, match="outside of `with"):
        w.step()
    with w:
        w.step()
    with pytest.raises(UsageError, match="entered before"), w:
        pass


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(backend="tpu"), "`backend` is 'tpu', expected one of 'auto', 'compile', 'xla', 'jax'"),
        (dict(backend=["auto", "xla"]), "a list of these without 'auto'"),
        (dict(backend="compile", ranks_timeout=0), "`ranks_timeout` is 0"),
        (dict(backend="compile", threshold=-1), "`threshold` is -1"),
        (dict(backend="compile", ranks="compare"), "torch.distributed has no process group"),
        (dict(backend="compile", ranks="folder"), "RANK and WORLD_SIZE are not set"),
    ],
)
def test_bad_arguments(options, match, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match=match):
        graph.watch(**options)


@pytest.mark.parametrize("name", ["xla", "jax"])
def test_a_framework_that_is_not_imported_is_refused(name, monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, {"xla": "torch_xla", "jax": "jax"}[name], raising=False)
    with pytest.raises(UsageError, match="is not imported; import it before"), graph.watch(name):
        pass
