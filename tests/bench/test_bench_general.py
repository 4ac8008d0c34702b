"""Ops that the benchmark knows by their tensors only: a person's own from its spec, and the sum over ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_timer import FakeTimer

import retrograd as rg
from retrograd.bench import registry, runner
from retrograd.bench.rows import Row, load, to_line
from retrograd.bench.selection import Selection
from retrograd.bench.table import markdown
from retrograd.catalog.timing import offer, usual_shape
from retrograd.errors import SpecError, UsageError


def _gate(x, y, scale):
    return torch.nn.functional.silu(x) * y * scale


def _reference(x, y, scale):
    return x * torch.sigmoid(x) * y * scale


def gate(fn=_gate, **changes):
    what = dict(inputs=dict(x=rg.tensor("M...", "N"), y=rg.tensor("M...", "N")), params=dict(scale=[2.0, 3.0]))
    return rg.op(fn, _reference, **{**what, "dtypes": ["float32", "bfloat16"], "name": "gate", **changes})


@pytest.fixture(autouse=True)
def _own_tables(monkeypatch):
    monkeypatch.setattr(registry, "PROVIDERS", list(registry.PROVIDERS))
    monkeypatch.setattr(registry, "BENCHMARKS", dict(registry.BENCHMARKS))


def run(name, **what):
    return runner.run(Selection((name,), **{"device": "cpu", **what}), FakeTimer(), lambda line: None)


def test_an_op_of_ones_own_is_timed_beside_its_reference():
    rows = run(offer(gate()), shapes=("M=3 N=8",))
    assert [(row.provider, row.dtype) for row in rows] == [
        *[("op", "float32"), ("reference", "float32")],
        *[("op", "bfloat16"), ("reference", "bfloat16")],
    ]
    assert all((row.skipped, row.fwd_ms, row.bwd_ms) == ("", 1.0, 1.0) for row in rows)
    # x, y and out; their gradients but that of out's twin, which is read.
    assert (rows[0].fwd_bytes, rows[0].bwd_bytes) == (3 * 96, 5 * 96)


@pytest.mark.parametrize(
    ("fn", "word"),
    [
        (lambda x, y, scale: 1.01 * _gate(x, y, scale), "wrong: out0"),
        (lambda x, y, scale: _gate(x.detach(), y, scale) + 0 * x, "wrong: grad_x"),
        (lambda x, y, scale: _gate(x, y, scale) * float("nan"), "wrong: out0"),
        (lambda x, y, scale: _gate(x, y, scale)[:1], "not in the shape"),
        (lambda x, y, scale: 1 / 0, "ZeroDivisionError"),
    ],
    ids=["factor", "gradient", "nan", "shape", "raises"],
)
def test_a_wrong_op_gets_no_time(fn, word):
    (op, reference) = run(offer(gate(fn)), shapes=("M=3 N=8",), dtypes=("float32",))
    assert word in op.skipped
    assert op.fwd_ms is None
    assert reference.fwd_ms == 1.0


def test_sums_in_another_order_are_not_wrong():
    spec = rg.op(lambda x: x.flip(-1).cumsum(-1)[..., -1], lambda x: x.sum(-1), dict(x=rg.tensor("M", "N")), name="sum")
    (row, *_) = run(offer(spec), shapes=("M=5 N=4000",))
    assert row.skipped == ""


def test_another_function_for_an_op_of_ones_own():
    name = offer(gate())
    registry.register("mine", name, lambda x, y, scale: _gate(x, y, scale))
    (row,) = run(name, shapes=("M=3 N=8 scale=3.0",), providers=("mine",), dtypes=("float32",))
    assert (row.provider, row.skipped) == ("mine", "")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (gate(), "M=2048 N=2048 scale=2.0"),
        (gate(sizes=dict(N=[8, 64])), "M=65536 N=64 scale=2.0"),
        (gate(sizes=dict(N=(1, 300))), "M=16384 N=256 scale=2.0"),
        (rg.op(abs, abs, dict(x=torch.ones(3))), ""),
    ],
    ids=["free", "listed", "range", "concrete"],
)
def test_without_shapes_the_largest_tensor_has_four_million_elements(spec, text):
    assert usual_shape(spec) == text


def test_what_cannot_be_timed_says_why():
    with pytest.raises(SpecError, match="no reference"):
        offer(rg.op(abs, inputs=dict(x=rg.tensor("N"))))
    with pytest.raises(UsageError, match="--shapes"):
        Selection((offer(gate()),), ("K=3",))


@pytest.mark.parametrize("provider", ["retrograd", "retrograd-loop", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sum_over_ranks(provider, dtype):
    (row,) = run("rank_sum", shapes=("4x100",), providers=(provider,), dtypes=(dtype,))
    assert (row.skipped, row.fwd_ms, row.bwd_ms, row.note) == ("", 1.0, None, "no backward")


def test_the_table_holds_everybody_against_the_first():
    first = Row(
        "gate",
        "M=3",
        "float32",
        "op",
        fwd_bytes=2000,
        bwd_bytes=3000,
        fwd_ms=0.001,
        copy_gb_per_s=10.0,
        machine={"cpu": "C"},
    )
    rows = [
        first,
        replace(first, provider="reference", fwd_ms=0.003, bwd_ms=1.0),
        replace(first, provider="x", skipped="a|b"),
    ]
    lines = markdown(rows).splitlines()
    assert "| M=3 | float32 | op | 1.0 | 2.0 | 20% |  | - |  |  |  |" in lines
    assert "| M=3 | float32 | reference | 3.0 | 0.7 | 7% | 3.00 | 1000.0 | 0.0 | 0% |  |" in lines
    assert {line.count("|") for line in lines if line.startswith("|")} == {12}
    assert "over that of op" in lines[-1]


def test_rows_of_all_kinds_come_back_from_one_file(tmp_path):
    rows = [
        Row("gate", "M=3", "float32", "op", fwd_ms=1.0),
        Row("rms_norm", "8x64", "float32", "torch", fwd_ms=1.0),
        Row("ms_deform_attn", "dec300", "float32", "retrograd", beside="float32", fwd_ms=1.0),
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(map(to_line, rows)) + "\n")
    assert load([tmp_path / "r.jsonl"]) == rows
    assert all(word in markdown(rows) for word in ("| 8x64 float32 |", "| dec300 |", "| M=3 |"))
