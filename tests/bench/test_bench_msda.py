"""The benchmark of deformable attention on the CPU with a timer that does not measure: checks, bytes, tables."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from fake_timer import FakeTimer

from retrograd.bench import registry, runner
from retrograd.bench.accuracy import judge
from retrograd.bench.benchmark import Implementation, Provider, UnavailableError
from retrograd.bench.ops import msda
from retrograd.bench.ops.msda import MORE_SHAPES, SHAPES, Shape, shape_of
from retrograd.bench.ops.msda_providers import by_grid_sample, grid_sample
from retrograd.bench.rows import Row, load, to_line
from retrograd.bench.selection import Selection
from retrograd.bench.table import best_peer, markdown
from retrograd.errors import UsageError

TINY = "B2-Q20-H2-C8-P2-6x5+3x4"
BASE = Row(
    msda.OP, "dec300", "float32", "grid_sample",
    beside="float32", copy_gb_per_s=4000.0, machine={"gpu": "G", "torch": "2.11"},
)  # fmt: skip


@pytest.fixture
def offered(monkeypatch):
    """A function that puts a provider in place of its namesake, for one test."""
    monkeypatch.setattr(registry, "PROVIDERS", list(registry.PROVIDERS))
    return lambda name, make: registry.add(Provider(name, (msda.OP,), make))


def run(**what):
    told = []
    rows = runner.run(Selection((msda.OP,), **{"shapes": (TINY,), **what}), FakeTimer(), told.append)
    return rows, told


@pytest.mark.parametrize("provider", ["retrograd", "retrograd-deterministic", "retrograd-torch", "grid_sample"])
@pytest.mark.parametrize("dtype", msda.DeformableAttention.dtypes)
@pytest.mark.parametrize("locations", ["float32", "same"])
def test_right_providers_are_timed(provider, dtype, locations):
    (row,), _ = run(providers=(provider,), dtypes=(dtype,), locations=locations)
    assert (row.skipped, row.note, row.fwd_ms, row.bwd_ms) == ("", "", 1.0, 1.0)
    assert row.beside == (dtype if locations == "same" else "float32")


def test_compile_is_timed_too_and_comes_last(monkeypatch):
    # Without Inductor, whose C++ compiler takes half a minute for this graph.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    rows, told = run(providers=("grid_sample-compile", "grid_sample"), dtypes=("float32",))
    assert [row.provider for row in rows] == ["grid_sample-compile", "grid_sample"]
    assert not any(row.skipped for row in rows)
    assert "grid_sample:" in told[0]


def data(shape, dtype="float32"):
    return next(msda.make_data(shape, dtype, "float32", "cpu"))


@pytest.mark.parametrize("shape", [shape_of(TINY), Shape(1, ((6, 5), (3, 4)), 42, 2, 8, 2, pixels=True)])
def test_points_keep_away_from_borders(shape):
    inputs, _ = data(shape)
    sizes = torch.tensor(shape.levels).flip(1)[:, None]
    x = inputs["locations"].detach().double() * sizes - 0.5
    assert float((x - x.round()).abs().min()) > 2.0**-11
    assert shape.pixels == bool((x < -1).any())  # normal offsets lead out of small levels, uniform points do not


def _transposed(shape):
    """A classic: height and width swapped."""
    levels = tuple((w, h) for h, w in shape.levels)
    return Implementation(lambda t: (by_grid_sample(t["value"], levels, t["locations"], t["weights"]),))


def test_a_wrong_provider_is_reported_and_not_timed(offered):
    offered("mmcv", _transposed)
    (row,), _ = run(providers=("mmcv",), dtypes=("float32",))
    assert row.skipped.startswith("wrong: out")
    assert "grad_locations" in row.skipped
    assert row.fwd_ms is None


class _HalfAtomics(torch.autograd.Function):
    """Adds noise as large as that of adding hundreds of terms in 16 bits."""

    @staticmethod
    def forward(_ctx, value):
        return value.clone()

    @staticmethod
    def backward(_ctx, grad):
        return grad * (1 + 0.03 * torch.randn(grad.shape, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(("dtype", "verdict"), [("bfloat16", "coarse"), ("float32", "wrong")])
def test_sums_in_16_bits_are_timed_and_noted(offered, dtype, verdict):
    def noisy(shape):
        inner = grid_sample(shape)
        return Implementation(lambda t: inner.call({**t, "value": _HalfAtomics.apply(t["value"])}))

    offered("mmcv", noisy)
    (row,), _ = run(providers=("mmcv",), dtypes=(dtype,))
    assert (row.skipped or row.note).startswith(f"{verdict}: grad_value")
    assert (row.bwd_ms is not None) == (verdict == "coarse")


def test_the_truth_does_not_depend_on_its_pieces(monkeypatch):
    shape = shape_of(TINY)
    inputs, grads = data(shape)
    at_once = msda.truth(shape, inputs, grads)
    monkeypatch.setattr(msda, "_CHUNK_ELEMENTS", 1)
    for name, tensor in msda.truth(shape, inputs, grads).items():
        torch.testing.assert_close(tensor, at_once[name], rtol=1e-14, atol=1e-14)
    problem = registry.BENCHMARKS[msda.OP].problem(TINY, "float32", "float32", "cpu")
    assert judge(grid_sample(shape), problem, inputs, grads) == ("", "")


class _Im2col(torch.autograd.Function):
    """What mmcv and the Hub's kernel offer, by grid_sample."""

    @staticmethod
    def forward(ctx, value, sizes, starts, locations, weights, step):
        assert value.shape[0] % step == 0
        assert starts.tolist() == [0, 30]
        with torch.enable_grad():
            ctx.leaves = [t.detach().requires_grad_() for t in (value, locations, weights)]
            levels = tuple(map(tuple, sizes.tolist()))
            ctx.out = by_grid_sample(ctx.leaves[0], levels, *ctx.leaves[1:])
        return ctx.out.detach().flatten(2)

    @staticmethod
    def backward(ctx, grad):
        grads = torch.autograd.grad(ctx.out, ctx.leaves, grad.view_as(ctx.out), retain_graph=True)
        return grads[0], None, None, *grads[1:], None


class _Flash:
    """What DCNv4 offers: locations and logits in one tensor."""

    @staticmethod
    def apply(value, sizes, starts, both, step, points):
        b, q, h = both.shape[:3]
        locations, logits = both.split([2 * len(sizes) * points, len(sizes) * points], dim=-1)
        weights = logits.softmax(-1).view(b, q, h, len(sizes), points)
        locations = locations.reshape(b, q, h, len(sizes), points, 2)
        return _Im2col.apply(value, sizes, starts, locations, weights, step)


@pytest.fixture
def peers(monkeypatch):
    """Modules that have the signatures of other libraries."""
    layers = SimpleNamespace(MultiScaleDeformableAttentionFunction=_Im2col)
    modules = {
        "mmcv": {},
        "mmcv.ops": {"MultiScaleDeformableAttnFunction": _Im2col},
        "kernels": {"get_kernel": lambda name: SimpleNamespace(layers=layers)},
        "DCNv4": {},
        "DCNv4.functions": {"FlashDeformAttnFunction": _Flash},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("op", "provider"),
    [(op, name) for op in (msda.OP, msda.FUSED) for name in ("mmcv", "deformable-detr")] + [(msda.FUSED, "dcnv4")],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_libraries_are_called_as_they_want(peers, op, provider, dtype):
    problem = registry.BENCHMARKS[op].problem(TINY, dtype, "float32", "cpu")
    implementation = registry.make(op, registry.find(op, provider), TINY, dtype)
    assert judge(implementation, problem, *next(problem.data())) == ("", "")


@pytest.mark.parametrize("provider", ["retrograd", "grid_sample"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_fused_form_is_held_against_float64(provider, dtype):
    problem = registry.BENCHMARKS[msda.FUSED].problem(TINY, dtype, "float32", "cpu")
    inputs, grads = next(problem.data())
    right = registry.make(msda.FUSED, registry.find(msda.FUSED, provider), TINY, dtype)
    assert judge(right, problem, inputs, grads) == ("", "")
    halved = replace(right, call=lambda t: right.call({**t, "offsets": 0.5 * t["offsets"]}))
    assert "out" in judge(halved, problem, inputs, grads)[0]


def test_a_kernel_that_the_hub_does_not_give_is_said(monkeypatch):
    def get_kernel(name):
        raise FileNotFoundError(f"{name}: no network")

    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))
    with pytest.raises(UnavailableError, match="no network"):
        registry.make(msda.OP, registry.find(msda.OP, "deformable-detr"), TINY, "float32")


def test_missing_libraries_are_said_once(offered):
    def gone(shape):
        raise UnavailableError("mmcv is gone")

    offered("mmcv", gone)
    rows, told = run(providers=("mmcv",))
    assert rows == []
    assert told == ["left out: mmcv is gone"]


def test_the_usual_shapes():
    assert [shape.queries for shape in SHAPES.values()] == [22223, 22223, 10000, 300, 900]
    assert {shape.size for shape in SHAPES.values()} == {22223, 5440}
    assert shape_of("B4-Q300-H8-C32-P4-100x167+50x84+25x42+13x21") == SHAPES["dec300"]
    assert (MORE_SHAPES["rfdetr"].heads, MORE_SHAPES["mask2former"].queries) == (16, 21504)
    assert {job.provider for job in Selection((msda.OP,)).jobs([registry.BENCHMARKS[msda.OP]])} == {
        *[
            "retrograd",
            "retrograd-deterministic",
            "retrograd-triton",
            "grid_sample",
            "msda-triton",
            "mmcv",
            "deformable-detr",
            "grid_sample-compile",
        ]
    }


def test_useful_bytes():
    """By hand for a DETR encoder of one image: 22.8 MB of value, 22.8 of locations, 11.4 of weights, 22.8 of out."""
    shape = SHAPES["enc800b1"]
    assert shape.bytes_moved("fwd", "float32", "float32") == 22223 * 4 * (256 + 256 + 128 + 256)
    assert shape.bytes_moved("bwd", "float32", "float32") == 22223 * 4 * (2 * (256 + 256 + 128) + 256)
    assert shape.bytes_moved("fwd", "bfloat16", "float32") == 22223 * (2 * 256 + 4 * 384 + 2 * 256)
    # Of a level with 50 pixels and one with 6 one query with 2 points reads at most 8 and 6.
    few = Shape(1, ((5, 10), (2, 3)), 1, heads=1, channels=1, points=2)
    assert few.bytes_moved("fwd", "float32", "float32") == 4 * (8 + 6 + 3 * 4 + 1)


def rows_of(**ms):
    return [replace(BASE, provider=name.replace("_", "-"), fwd_ms=t, bwd_ms=2 * t) for name, t in ms.items()]


def test_table_has_ratios_of_this_run_and_marks_those_of_another():
    rows = rows_of(retrograd=0.02, msda_triton=0.03)
    rows += [replace(BASE, fwd_ms=0.1, bwd_ms=0.1, fwd_how="events", fwd_extra_bytes=3 * 2**20)]
    rows += [replace(BASE, provider="mmcv", skipped="a|b")]
    text = markdown(rows)
    assert "G, torch 2.11; copy 4000 GB/s" in text
    lines = {line.split(" | ")[1]: line.split(" | ") for line in text.splitlines() if line.startswith("| dec300")}
    assert lines["retrograd"][2] == "20.0"
    assert lines["retrograd"][5:7] == ["5.00", "**1.50** msda-triton"]
    assert lines["grid_sample"][2] == "100.0 (events)"
    assert lines["grid_sample"][7] == "3.0"
    assert lines["mmcv"][2] == "a/b"
    earlier = lines["† msda-triton / Deformable-DETR CUDA"]
    assert [cell for cell in earlier if cell.startswith("†")][1:] == ["†25.5", "†119"]
    assert "† are an earlier run on one NVIDIA H200" in text
    assert "not measured here" in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {15}


def test_the_best_peer_is_never_this_project():
    rows = rows_of(retrograd=0.1, retrograd_torch=0.01, grid_sample=1.0, mmcv=0.5)
    assert best_peer(rows, "fwd").provider == "mmcv"
    assert best_peer(rows[:2], "bwd") is None


def test_lines_come_back(tmp_path):
    rows = [replace(BASE, fwd_ms=1.0), replace(BASE, provider="mmcv", fwd_extra_bytes=7)]
    (tmp_path / "r.jsonl").write_text("\n".join(map(to_line, rows)) + "\n")
    assert load([tmp_path / "r.jsonl"]) == rows


@pytest.mark.parametrize(
    "bad",
    [{"shapes": ("enc900",)}, {"shapes": ("B0-Q1-H1-C1-P1-1x1",)}, {"providers": ("torch",)}, {"dtypes": ("int8",)}],
)
def test_unknown_names_are_usage_errors(bad):
    with pytest.raises(UsageError, match="expected s"):
        Selection((msda.OP,), **bad)
