"""Which graph is one too many, what is said about it, and the record: on graphs given as text, without a framework."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from fake_torch_xla import hlo

from retrograd.core import order_registry
from retrograd.core.order_registry import Order
from retrograd.errors import GraphChangedError, UndecidedError, UsageError
from retrograd.graph.watching import lock
from retrograd.graph.watching.events import Compiled, Executed
from retrograd.graph.watching.schema import WatchReport
from retrograd.graph.watching.session import GraphChangedWarning, WatchSession


def compiled(text: str, key: str, **more) -> Compiled:
    return Compiled("step", "hlo", text, recorded=key, **more)


def stray_run(**options) -> WatchSession:
    """Graphs a, b, b, a stray output at step 3, b."""
    session = WatchSession(**options)
    session.step([compiled(hlo(rate=0.25), "a", seconds=1.0), Executed("a")])
    session.step([compiled(hlo(), "b", seconds=2.0), Executed("b")])
    session.step([Executed("b")])
    session.step([compiled(hlo(stray=True), "c", seconds=4.0), Executed("c")])
    session.step([Executed("b")])
    return session


def test_a_stray_tensor_is_named_with_its_line_the_step_and_the_cost():
    said = []
    report = stray_run(expect=2, say=said.append).report()
    assert [g.expected for g in report.graphs] == [True, True, False]
    extra = report.unexpected[0]
    assert extra.causes[0].kind == "output_added"
    assert extra.causes[0].where == "train.py:41"
    assert (extra.step, extra.against, report.wasted, report.seconds) == (3, 1, 4.0, 7.0)
    (text,) = said
    for part in ("step 3", "expected at most 2, this makes 3", "4.00 s", "train.py:41", "first seen at step 1"):
        assert part in text
    assert report.exit_code == 1
    assert not report


def test_the_second_graph_too_many_is_told_in_a_line():
    said = []
    session = stray_run(expect=2, say=said.append)
    session.step([compiled(hlo(9), "d")])
    assert len(said) == 2
    assert len(said[1].splitlines()) == 1
    assert "f32[9]" in said[1]


def test_steps_say_which_graph_ran():
    report = stray_run(expect=3).report()
    assert report
    assert [(row.step, row.ran) for row in report.rows] == [(0, (0,)), (1, (1,)), (3, (2,)), (4, (1,))]
    assert "steps: 0 graph 0, 1-2 graph 1, 3 graph 2, 4 graph 1" in report.text()


def test_the_record_survives_json():
    report = stray_run(expect=2, say=lambda text: None).report()
    assert WatchReport.from_json(report.to_json()) == report
    assert len({line.count("step") > 5 for line in report.text().splitlines()}) == 1
    with pytest.raises(UsageError, match="schema"):
        WatchReport.from_json("{}")
    with pytest.raises(UsageError, match="damaged"):
        WatchReport.from_json('{"schema": "retrograd.graph.watch/1"}')


def test_after_the_warm_up_any_graph_is_one_too_many():
    assert stray_run(warmup=4).report()
    assert [g.number for g in stray_run(warmup=3, say=lambda text: None).report().unexpected] == [2]
    assert [g.number for g in stray_run(say=lambda text: None).report().unexpected] == [2]  # 2 steps by default


def test_raise_and_warn():
    with pytest.raises(GraphChangedError, match=r"train\.py:41"):
        stray_run(expect=2, on_extra="raise")
    with pytest.warns(GraphChangedWarning, match=r"train\.py:41"):
        stray_run(expect=2, on_extra="warn")


def test_the_same_computation_compiled_again_is_said_to_be_the_same():
    said = []
    session = WatchSession(expect=1, say=said.append)
    session.step([compiled(hlo(), "a")])
    session.step([compiled(hlo().replace("multiply.4", "mul.77"), "b", reason="aliasing")])
    graph = session.report().graphs[1]
    assert (graph.same_as, graph.causes) == (0, ())
    assert "computes the same as graph 0" in session.report().text()
    assert "it computes the same as graph 0; only the framework's key or guards differ" in said[0]
    assert session.report().computations == 1


def test_a_text_that_cannot_be_read_is_compared_as_text_and_says_so():
    session = WatchSession(expect=4)
    session.step([compiled("HloModule broken\n%x = f32[", "a"), compiled("HloModule broken\n%x = f32[", "b")])
    first, second = session.report().graphs
    assert first.level == "text"
    assert second.key == first.key
    assert second.same_as is None  # nobody knows what it leaves out
    assert session.report().computations == 2
    with pytest.raises(UndecidedError, match="cannot be locked or checked: compared by its text alone"):
        lock.of_session(session)
    assert "compared by its text alone" in first.notes[0]
    with pytest.raises(UsageError, match="compared by its text alone"):
        session.explain(0, 1)


def test_a_comparison_that_fails_does_not_end_the_run_and_is_told(monkeypatch):
    from retrograd.graph.watching import session as watching

    def fail(*args, **kwargs):
        raise KeyError("p3")

    monkeypatch.setattr(watching, "compare", fail)
    said = []
    report = stray_run(expect=2, say=said.append).report()
    assert report.unexpected[0].causes == ()
    assert "the comparison with graph 1 failed: KeyError 'p3'" in said[0]


def test_graphs_of_other_families_are_not_compared():
    session = WatchSession(expect=9)
    session.step(
        [Compiled("forward", "hlo", hlo(), family="forward 0"), Compiled("forward", "hlo", hlo(9), family="forward 1")]
    )
    assert [g.against for g in session.report().graphs] == [None, None]


def test_explain_compares_any_two():
    session = stray_run(expect=3)
    assert session.explain(1, 2).causes[0].kind == "output_added"
    assert session.explain(0, 1).causes[0].kind == "constant_changed"
    with pytest.raises(UsageError, match="`j` is 7, expected the number of a graph, 0 to 2"):
        session.explain(0, 7)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(expect=-1), "`expect` is -1"),
        (dict(expect=True), "`expect` is True"),
        (dict(warmup=1.5), "`warmup` is 1.5"),
        (dict(on_extra="stop"), "`on_extra` is 'stop', expected one of 'explain', 'raise', 'warn'"),
    ],
)
def test_bad_arguments(options, match):
    with pytest.raises(UsageError, match=match):
        WatchSession(**options)


@pytest.mark.parametrize(
    "module", ["watch", "run", "lock", "offline", "backends.compile", "backends.xla", "backends.jax"]
)
def test_import_brings_no_framework(module):
    code = f"import sys, retrograd.graph, retrograd.graph.watching.{module}; retrograd.graph.watch; print([m for m in ('torch', 'jax', 'numpy', 'torch_xla', 'click') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_nothing_imported_is_an_error_that_names_the_choices():
    code = "import retrograd.graph as g\ntry: g.watch()\nexcept Exception as e: print(type(e).__name__, e)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.startswith("UsageError `backend` is 'auto', but none of torch, torch_xla and jax is imported yet")


PLAN = Order("bucket plan", "aa", ("[c] of 4 bytes", "[b, a] of 8 bytes"), "bucket", "keep the plan")
OTHERS = {
    "moved": (
        ("[b, a] of 8 bytes", "[c] of 4 bytes"),
        "the same buckets in another order: bucket 0 was [c] of 4 bytes, and is [b, a] of 8 bytes",
    ),
    "other": (("[c] of 4 bytes", "[b] of 4 bytes"), "bucket 1 was [b, a] of 8 bytes, and is [b] of 4 bytes"),
    "longer": ((*PLAN.rows, "[z] of 1 bytes"), "2 buckets, then 3; [z] of 1 bytes is in one only"),
    "limits": (PLAN.rows, "the same buckets, with other sizes or limits"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_plan_of_buckets_that_changed_is_told_as_a_cause(other):
    rows, words = OTHERS[other]
    said = []
    session = WatchSession(say=said.append)
    for step in range(5):
        session.step([], {7: PLAN if step < 3 else replace(PLAN, key="bb", rows=rows)})
    report = session.report()
    assert [(o.key, o.step, o.expected) for o in report.orders] == [("aa", 0, True), ("bb", 3, False)]
    (cause,) = report.orders[1].causes
    assert (cause.kind, cause.what, cause.advice) == (
        "order_changed",
        f"bucket plan aa -> bb: {words}",
        "keep the plan",
    )
    assert len(said) == 1
    assert "step 3: an order beside the graphs changed\n  bucket plan aa -> bb: " in said[0]
    assert (bool(report), report.exit_code) == (False, 1)
    text = report.text()
    assert "1 order beside them changed" in text
    assert "bucket plan aa: 2 buckets, since step 0" in text
    assert words in text
    assert WatchReport.from_json(report.to_json()) == report
    raising = WatchSession(expect=0, on_extra="raise")
    raising.step([], {7: PLAN})
    with pytest.raises(GraphChangedError, match="bucket plan aa -> bb"):
        raising.step([], {7: replace(PLAN, key="bb", rows=rows)})


def test_a_plan_that_stays_and_the_plan_of_another_model_are_no_change():
    """A plan that comes later, one whose model is gone, and one that is made anew as it was."""
    session = WatchSession(expect=0, on_extra="raise")
    away = replace(PLAN, key="", rows=())
    for held in ({}, {1: PLAN}, {1: PLAN, 2: replace(PLAN, key="cc")}, {2: replace(PLAN, key="cc")}):
        session.step([], held)
    assert session.report()
    with pytest.raises(GraphChangedError, match="bucket plan cc was withdrawn"):
        session.step([], {2: away})
    session.step([], {2: replace(PLAN, key="cc")})
    assert [(o.place, o.key) for o in session.report().orders] == [(1, "aa"), (2, "cc"), (2, ""), (2, "cc")]


def test_reports_from_before_there_were_orders_are_read():
    report = json.loads(stray_run(expect=3).report().to_json())
    del report["orders"]
    assert WatchReport.from_json(json.dumps(report)).orders == ()


def test_orders_are_of_their_owner():
    class Model:
        pass

    one, other = Model(), Model()
    before = set(order_registry.current())
    order_registry.announce(one, PLAN)
    order_registry.announce(other, PLAN)
    order_registry.announce(one, replace(PLAN, key="bb"))
    mine = {place: order.key for place, order in order_registry.current().items() if place not in before}
    assert list(mine.values()) == ["bb", "aa"]
    order_registry.withdraw(one)
    order_registry.withdraw(Model())
    del other
    gc.collect()
    assert [order.key for place, order in order_registry.current().items() if place in mine] == [""]


def test_steps_that_the_program_marks_begin_anew():
    session = WatchSession(expect=2)
    session.step([compiled(hlo(), "a")])
    session.step([compiled(hlo(stray=True), "b")])
    session.restart()
    session.step([])
    report = session.report()
    assert report.steps == 1
    assert [graph.step for graph in report.graphs] == [0, 0]
    assert [(row.step, row.compiled) for row in report.rows] == [(0, (0, 1))]
