"""The torch_xla backend, on a fake of torch_xla (`fake_torch_xla`): torch_xla itself cannot be installed beside this torch."""

from __future__ import annotations

import argparse
import gc
import os
import threading
import types
import weakref
from pathlib import Path

import pytest
from fake_torch_xla import hlo, installed

import retrograd.graph as graph
from retrograd.compat import registry
from retrograd.core.rank_store import FolderStore, RankStore
from retrograd.errors import GraphChangedError, GraphError, RanksDifferError, UsageError, VerificationError
from retrograd.graph.watching import live_tensors
from retrograd.graph.watching.rank_agreement import packed

STEADY = [("f32[8]{0}", 4, "train.py:30"), ("f32[]", 90, "train.py:33")]
STRAY = [*STEADY, ("f32[8]{0}", 5, "train.py:41")]


@pytest.fixture
def world(monkeypatch):
    monkeypatch.delenv("XLA_SAVE_TENSORS_FILE", raising=False)
    monkeypatch.delenv("XLA_SAVE_TENSORS_FMT", raising=False)
    with installed() as made:
        yield made


def train(world, w, stray_at=(), steps=5, cut=None):
    import torch_xla

    for step in range(steps):
        if step == 0:
            world.pend("d6e603", hlo(rate=0.25), STEADY[:1])
        else:
            stray = step in stray_at
            world.pend("6b6de8" if stray else "5e4854", hlo(stray=stray), STRAY if stray else STEADY)
        (cut or torch_xla.sync)()
        w.step()


def test_a_steady_run_has_two_graphs(world):
    with graph.watch("xla", expect=2) as w:
        train(world, w)
    report = w.report()
    assert report
    assert [(g.recorded, g.step, g.seconds, g.name) for g in report.graphs] == [
        ("d6e603", 0, 2.0, "train.py:50"),
        ("5e4854", 1, 2.0, "train.py:50"),
    ]
    assert [row.ran for row in report.rows] == [(0,), (1,)]


def test_a_stray_tensor_is_explained_by_the_graph_and_by_what_was_alive(world):
    with graph.watch("xla", expect=2, on_extra="raise") as w, pytest.raises(GraphChangedError) as error:
        train(world, w, stray_at=(3,))
    text = str(error.value)
    assert "step 3" in text
    assert "f32[8] of 5 nodes, made at train.py:41 is alive at this cut, not at that of step 2" in text
    assert w.report().unexpected[0].causes[0].kind == "output_added"
    assert world.cuts == 4


def test_the_graph_is_kept_only_where_it_was_compiled_and_the_file_does_not_grow(world, tmp_path):
    with graph.watch("xla", expect=3, save=tmp_path) as w:
        follower = w.backends[0]._follower()
        train(world, w, stray_at=(2, 4))
        assert follower.path.stat().st_size == 0
        assert "XLA_SAVE_TENSORS_FILE" not in os.environ  # nor for processes that the program starts meanwhile
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *(f"graph-00{i}-step.hlo.txt.gz" for i in range(3)), "report.json",
    ]  # fmt: skip
    assert "steps: 0 graph 0, 1 graph 1, 2 graph 2, 3 graph 1, 4 graph 2" in w.report().text()


def test_the_users_own_save_file_is_left_alone(world, monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(tmp_path / "mine"))
    with pytest.raises(UsageError, match="XLA_SAVE_TENSORS_FMT is 'text', expected 'hlo'"), graph.watch("xla"):
        pass
    monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "hlo")
    with graph.watch("xla", expect=2) as w:
        train(world, w)
    assert (tmp_path / "mine.0").read_text().count("## BEGIN_GRAPH") == 5
    assert [g.level for g in w.report().graphs] == ["strict", "strict"]
    assert os.environ["XLA_SAVE_TENSORS_FILE"]


def test_a_second_watch_reads_the_file_that_torch_xla_remembers(world):
    for _ in range(2):
        with graph.watch("xla", expect=2) as w:
            train(world, w)
        assert [g.level for g in w.report().graphs] == ["strict", "strict"]
        kept = w.backends[0]
        world.sync()  # goes on writing, to nowhere
        assert Path(world._file).resolve() == Path(os.devnull)
    assert kept._files == {}
    assert "compiled it before the watch began" in w.report().graphs[1].reason


def test_a_watch_that_begins_after_the_first_cut_says_why_it_has_no_graph(world):
    world.sync()
    world.cached.clear()
    with graph.watch("xla", expect=2) as w:
        train(world, w)
    assert [g.level for g in w.report().graphs] == ["live", "live"]
    assert "begin to watch before that" in w.report().graphs[0].notes[-1]


def test_without_texts_the_live_tensors_tell_graphs_apart(world):
    with graph.watch("xla", expect=2, texts=False) as w:
        train(world, w, stray_at=(3,))
    extra = w.report().unexpected[0]
    assert extra.level == "live"
    assert any("train.py:41" in note for note in extra.notes)


def test_mark_step_is_one_cut_and_both_are_put_back(world):
    import torch_xla
    import torch_xla.core.xla_model as xm

    before = torch_xla.sync, xm.mark_step, torch_xla.torch_xla.sync
    with graph.watch("xla", expect=2) as w:
        train(world, w, cut=lambda: xm.mark_step())
    assert w.report().steps == 5
    assert len(w.report().graphs) == 2
    assert (torch_xla.sync, xm.mark_step, torch_xla.torch_xla.sync) == before


def test_garbage_is_collected_before_the_cut_if_asked_for(world):
    import torch_xla

    class Cycle:
        def __init__(self):
            self.me = self

    for collect in (True, False):
        gc.collect()
        gc.disable()
        try:
            with graph.watch("xla", expect=9, gc_before_cut=collect):
                dropped = weakref.ref(Cycle())
                torch_xla.sync()
                assert (dropped() is None) == collect
        finally:
            gc.enable()


def test_the_threshold_hides_small_tensors(world):
    with graph.watch("xla", expect=9, threshold=10) as w:
        train(world, w, stray_at=(3,))
    assert not any("train.py:41" in note for g in w.report().graphs for note in g.notes)


class Bucketed:
    """A part of a model with gradients in its bucket."""

    def __init__(self, bucket):
        self.reduce_scatter_op = types.SimpleNamespace(bucket=bucket, flush=lambda: bucket.clear())

    def named_modules(self):
        return [("", self), ("block", self)]


def test_a_gradient_in_a_bucket_at_the_cut_is_an_error(world):
    import torch_xla

    model = Bucketed([])
    with graph.watch("xla", expect=9, model=model):
        torch_xla.sync()
        model.reduce_scatter_op.bucket.append("gradient")
        with pytest.raises(VerificationError, match="1 gradients are left in reduce-scatter buckets"):
            torch_xla.sync()
    assert world.cuts == 1


def test_options_of_torch_xla_are_refused_elsewhere_and_a_model_needs_buckets(world):
    with pytest.raises(UsageError, match="`threshold` is for the backend 'xla', but 'compile' is watched"):
        graph.watch("compile", threshold=3)
    with pytest.raises(UsageError, match="`model` is Namespace and has no module with reduce_scatter_op"):
        graph.watch("xla", model=argparse.Namespace())


def test_each_device_of_a_process_has_its_file_and_its_cut(world):
    import torch_xla

    names = ["CPU:0", "CPU:1"]
    torch_xla._XLAC._xla_get_default_device = lambda: names[threading.current_thread().name == "second"]
    both = threading.Barrier(2, timeout=30)
    inner = world.sync

    def cut(*args):
        both.wait()  # both are inside of their cut at once
        if threading.current_thread().name == "second":
            inner_world.sync()
        else:
            inner()

    inner_world = type(world)()
    inner_world.ordinal = 1
    torch_xla.sync = torch_xla.torch_xla.sync = cut
    with graph.watch("xla", expect=9) as w:
        second = threading.Thread(target=torch_xla.sync, name="second")
        second.start()
        torch_xla.sync()
        second.join()
        w.step()
        assert sorted(w.backends[0]._files) == ["0", "1"]
    assert all(g.level == "strict" for g in w.report().graphs)


def test_ranks_with_other_live_tensors_stop_before_the_cut(world, tmp_path):
    import torch_xla

    other = RankStore(FolderStore(tmp_path), 1, 2)
    with graph.watch("xla", expect=9, ranks=RankStore(FolderStore(tmp_path), 0, 2), ranks_timeout=0.2) as w:
        world.pend("a", hlo(), STEADY)
        key = live_tensors.digest(live_tensors.read(world.report(0, "CPU:0")))
        other.post("step-0/graph-0/key", f"live {key}")
        other.post("step-0/graph-1/key", "nothing")
        torch_xla.sync()
        w.step()
        stray = live_tensors.read(world.report(0, "CPU:0"))[:1] * 2
        other.post("step-1/graph-0/text", packed("\n".join(map(str, stray))))
        other.post("step-1/graph-0/key", "live 0123456789")
        said = r"step 1: rank 0 .*rank 1 is about to run the live graph 01234567.*only rank 0 has f32\[\] of 90 nodes, made at train\.py:33; only rank 1 has f32\[8\] of 4 nodes"
        with pytest.raises(RanksDifferError, match=said):
            torch_xla.sync()
    assert world.cuts == 1


def test_a_torch_xla_without_the_report_is_refused(world, monkeypatch):
    import torch_xla

    monkeypatch.setattr(registry, "_statuses", {})
    del torch_xla._XLAC._xla_tensors_report
    with (
        pytest.raises(
            GraphError, match=r"torch_xla 2\.9\.0\+fake behaves differently .*lacks _XLAC\._xla_tensors_report"
        ),
        graph.watch("xla"),
    ):
        pass
    assert torch_xla.sync == world.sync


def test_the_report_is_read_whatever_stands_between():
    text = (
        "Tensor: id=1, shape=(f32[2]{0}, s64[]), device=TPU:0, ir_nodes=3\nIR {\n  %0 = f32[] x::y(), scope=a (b:1)\n}\n\n\n"
        "Tensor: id=2, shape=bf16[4,8]{1,0}, device=TPU:0, ir_nodes=17\nPython Frames:\n  f (/u/a b (c)/t.py:12)\n\nIR {\n}\n"
    )
    found = live_tensors.read(text)
    assert [str(t) for t in found] == ["(f32[2], s64[]) of 3 nodes", "bf16[4,8] of 17 nodes, made at t.py:12"]
    assert live_tensors.digest(found) == live_tensors.digest(reversed(found))
    assert live_tensors.digest(found) != live_tensors.digest(found[:1])
    assert live_tensors.read("") == ()
