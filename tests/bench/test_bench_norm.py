"""The harness itself on the CPU with a timer that does not measure: checks, order, what is left out and why."""

from __future__ import annotations

import pytest
import torch
from fake_timer import FakeTimer

from retrograd.bench import registry, runner, timing
from retrograd.bench.accuracy import judge
from retrograd.bench.benchmark import Implementation, Provider, UnavailableError
from retrograd.bench.ops.norm import HOST_SHAPE
from retrograd.bench.selection import Selection
from retrograd.errors import UsageError

OPS = registry.GROUPS["norm"]
TINY = ("24x64",)


@pytest.fixture
def offered(monkeypatch):
    """A function that puts a provider of the norms in place of its namesake, for one test."""
    monkeypatch.setattr(registry, "PROVIDERS", list(registry.PROVIDERS))
    return lambda name, make: registry.add(Provider(name, OPS, make))


def run(**what):
    told = []
    rows = runner.run(Selection(**{"ops": OPS, "shapes": TINY, **what}), FakeTimer(), told.append)
    return rows, told


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("provider", ["retrograd", "retrograd-atomic", "torch"])
def test_right_providers_are_timed(op, provider):
    (row,), _ = run(ops=(op,), providers=(provider,), dtypes=("float32",))
    assert (row.skipped, row.fwd_ms, row.bwd_ms) == ("", 1.0, 1.0)


@pytest.mark.dealt(3)
def test_compile_is_timed_too_and_comes_last():
    rows, told = run(ops=("add_layer_norm",), providers=("compile", "torch"), dtypes=("float32",))
    assert [(row.provider, row.skipped, row.bwd_ms) for row in rows] == [("compile", "", 1.0), ("torch", "", 1.0)]
    assert "torch:" in told[0]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_definition_passes_its_own_check(op, dtype):
    problem = registry.BENCHMARKS[op].problem("40x96", dtype, "", "cpu")
    implementation = registry.make(op, registry.find(op, "written-out"), "40x96", dtype)
    assert judge(implementation, problem, *next(problem.data())) == ("", "")


def _no_projection(t):
    # A classic: the mean square is treated as a constant.
    x = t["x"]
    y = x * torch.rsqrt(x.detach().float().square().mean(-1, keepdim=True) + 1e-6) * t["weight"]
    return (y.to(x.dtype),)


def test_a_wrong_provider_is_reported_and_not_timed(offered):
    offered("torch", lambda op: Implementation(_no_projection))
    (row,), _ = run(ops=("rms_norm",), providers=("torch",))
    assert "grad_x" in row.skipped
    assert "grad_weight" not in row.skipped
    assert row.fwd_ms is None


def test_a_provider_that_raises_does_not_end_the_run(offered):
    offered("liger", lambda op: Implementation(lambda t: 1 / 0))
    rows, _ = run(ops=("rms_norm",), providers=("liger", "torch"))
    assert rows[0].skipped.startswith("ZeroDivisionError")
    assert rows[1].fwd_ms == 1.0


def test_a_missing_provider_is_said_once(offered):
    def gone(op):
        raise UnavailableError("quack is gone")

    offered("quack", gone)
    rows, told = run(ops=("rms_norm",), shapes=("8x64", "16x64"), providers=("quack",))
    assert rows == []
    assert told == ["left out: quack is gone"]


def test_forward_only_providers_have_no_backward(offered):
    offered("quack", lambda norm: Implementation(norm.written_out, backward=False))
    (row,), _ = run(ops=("layer_norm",), providers=("quack",))
    assert (row.fwd_ms, row.bwd_ms, row.note) == (1.0, None, "no backward")


def test_nothing_starts_after_max_seconds():
    rows, _ = run(ops=("rms_norm",), providers=("torch",), max_seconds=-1.0)
    assert rows[0].skipped == "over --max-seconds"


def test_host_time():
    selection = Selection(OPS, host=True)
    assert {job.shape for job in selection.jobs(selection.groups()["norm"])} == {HOST_SHAPE}
    (row,), _ = run(ops=("rms_norm",), providers=("torch",), host=True)
    assert row.host_us > 0
    assert row.fwd_ms is None


@pytest.mark.parametrize("bad", [{"ops": ("rmsnorm",)}, {"providers": ("apex",)}])
def test_unknown_names_are_usage_errors(bad):
    with pytest.raises(UsageError, match="expected some of"):
        Selection(**{"ops": OPS, **bad})


@pytest.mark.parametrize("touched", [1, 4 * 2**20, 100 * 2**20, 2**31, 2**36])
def test_calls_go_round_enough_sets(touched):
    sets, calls = timing.plan_calls(touched)
    assert calls % sets == 0
    assert timing.FEWEST_CALLS <= calls <= timing.MOST_CALLS
    assert sets == timing.MOST_CALLS or sets * touched >= timing.COLD_BYTES
    assert sets == 1 or 2 * sets * touched <= timing.MOST_BYTES
