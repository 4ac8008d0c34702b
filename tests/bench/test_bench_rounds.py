"""Providers that take turns, the timer of CPUs, ratios with their spread, and the table of who offers what."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch
from fake_timer import FakeTimer

from retrograd.bench import cpu, ratios, registry, runner
from retrograd.bench.benchmark import Implementation, Provider, own
from retrograd.bench.cpu import CpuTimer, threads
from retrograd.bench.rows import Row, load, to_line
from retrograd.bench.selection import Selection
from retrograd.bench.table import markdown
from retrograd.bench.timing import Timing
from retrograd.errors import UsageError

MiB = 2**20


class Scripted(FakeTimer):
    """Says 1 ms in round 0, 2 ms in round 1, ... to everybody, and remembers the order of calls."""

    rounds = 4
    discarded = 1
    keeps_data = True

    def __init__(self):
        self.order = []

    def time(self, call, sets, calls):
        self.order.append(call(0))
        return Timing(float(1 + (len(self.order) - 1) // 4), "wall")  # two providers, two directions


@pytest.fixture
def two(monkeypatch):
    """Two providers of rms_norm, and what each was given and when."""
    monkeypatch.setattr(registry, "PROVIDERS", list(registry.PROVIDERS))
    seen = []

    def provider(name):
        def call(t):
            seen.append((name, id(t["x"])))
            return registry.BENCHMARKS["rms_norm"].written_out(t)

        return lambda op: Implementation(call)

    for name in ("a", "b"):
        registry.add(Provider(name, ("rms_norm",), provider(name)))
    return seen


def rows_of(timer, **what):
    selection = Selection(("rms_norm",), ("8x64",), ("a", "b"), ("float32",), device="cpu", **what)
    return runner.run(selection, timer, lambda line: None)


def test_providers_take_turns_on_the_same_data(two):
    timer = Scripted()
    a, b = rows_of(timer)
    # The first round does not count.
    assert (a.fwd_rounds, b.bwd_rounds) == ((2.0, 3.0, 4.0, 5.0), (2.0, 3.0, 4.0, 5.0))
    assert (a.fwd_ms, b.bwd_ms) == (3.5, 3.5)
    order = [name for name, _ in itertools.groupby(name for name, _ in two[2:])]  # both are checked first
    assert order == ["a", "b", "a", "b", "a", "b"]  # whoever ends a round begins the next
    assert {place for name, place in two[2:] if name == "a"} == {place for name, place in two[2:] if name == "b"}


def test_on_a_gpu_each_round_measures_each_provider_anew(two):
    timer = Scripted()
    timer.keeps_data, timer.discarded = False, 0
    a, b = rows_of(timer, rounds=3)
    assert (a.fwd_rounds, b.fwd_rounds) == ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0))
    order = [name for name, _ in itertools.groupby(name for name, _ in two[2:])]
    assert order == ["a", "b", "a", "b"]


def test_who_takes_too_long_has_fewer_rounds(two, monkeypatch):
    monkeypatch.setattr("retrograd.bench.runner._ROUNDS_SECONDS", -1.0)
    a, _ = rows_of(Scripted())
    assert (a.fwd_rounds, a.fwd_ms) == ((1.0,), 1.0)


def test_one_round_has_no_spread(two):
    a, _ = rows_of(Scripted(), rounds=1)
    assert (a.fwd_rounds, a.fwd_ms) == ((), 2.0)


def test_a_provider_that_fails_in_a_round_leaves_the_others_alone(two, monkeypatch):
    calls = itertools.count()

    def failing(t):
        if next(calls) >= 3:
            raise RuntimeError("out of luck")
        return registry.BENCHMARKS["rms_norm"].written_out(t)

    registry.add(Provider("a", ("rms_norm",), lambda op: Implementation(failing)))
    a, b = rows_of(Scripted())
    assert a.skipped == "RuntimeError: out of luck"
    assert len(b.fwd_rounds) == 4


def test_the_cpu_is_measured_with_its_threads_and_versions(monkeypatch):
    monkeypatch.setattr(cpu, "_CACHE_BYTES", MiB)
    monkeypatch.setattr(cpu, "_COPY_BYTES", MiB)
    monkeypatch.setattr(cpu, "last_level_cache_bytes", lambda: None)
    selection = Selection(("rms_norm",), ("64x64",), ("torch",), ("float32",), device="cpu", rounds=4)
    (row,) = runner.run(selection, CpuTimer(), lambda line: None)
    assert row.fwd_ms > 0
    assert (row.fwd_how, len(row.bwd_rounds)) == ("wall", 4)
    assert row.copy_gb_per_s > 0
    assert row.machine["threads"] == str(torch.get_num_threads())
    assert row.machine["cache"] == "1 MiB"
    assert row.device_name == row.machine["cpu"]


def test_inputs_are_twice_the_cache_where_memory_allows(monkeypatch):
    timer = CpuTimer()
    timer.cache_bytes = 32 * MiB
    monkeypatch.setattr(cpu, "memory_bytes", lambda: 16 * 2**30)
    assert timer.plan(4 * MiB) == (16, 16)
    assert timer.plan(2**30) == (1, 4)  # two of these do not fit
    assert (timer.cold(4 * MiB), timer.cold(MiB), timer.cold(2**18)) == (True, True, False)


def test_a_call_that_finds_its_inputs_in_the_cache_is_noted(two):
    class Warm(Scripted):
        def cold(self, touched_bytes):
            return False

    a, _ = rows_of(Warm())
    assert a.note == "inputs fit in the cache"


def test_results_stay_for_a_round_and_the_median_counts(monkeypatch):
    clock = iter([0, 5, 10, 11, 20, 22, 30, 33])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timer, sets = CpuTimer(), []
    timing = timer.time(lambda i: sets.append(i) or (torch.zeros(1),), 2, 4)
    assert sets == [0, 0, 1, 0, 1]  # one goes before
    assert (timing.ms, timing.how) == (2500.0, "wall")


def test_threads_come_back():
    before = torch.get_num_threads()
    with contextlib.suppress(ZeroDivisionError), threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_spread_of_pairs_and_of_runs():
    # A machine that is twice as slow in rounds 2 and 3 changes no pair.
    assert str(ratios.paired([2, 4, 4, 2, 2], [1, 2, 2, 1, 1])) == "2.00 (2.00-2.00)"
    assert str(ratios.paired([2, 4], [1, 2])) == "2.00"
    assert ratios.paired([], [1.0]) is None
    assert ratios.crossed([1, 1, 2, 2], [1, 1, 1, 1]).high == 2.0
    assert ratios.paired([1, 2, 3, 4, 5, 6, 7, 8, 9], [1] * 9) == ratios.Ratio(5, 3, 7)


@pytest.mark.parametrize(
    ("now", "verdict"), [((11, 12, 13, 14), 1), ((1, 1, 2, 2), -1), ((8, 10, 11, 12), 0), ((50, 60, 70), 0)]
)
def test_apart_means_every_round(now, verdict):
    assert ratios.apart(now, (4, 5, 8, 9)) == verdict


def test_ratios_of_rounds_have_their_quartiles_in_the_table():
    base = Row("rms_norm", "8x64", "float32", "torch", machine={"cpu": "C", "threads": "2"})
    base = replace(base, fwd_ms=2.5, fwd_rounds=(2.0, 2.0, 3.0, 3.0))
    ours = replace(base, provider="retrograd", fwd_ms=1.0, fwd_rounds=(1.0, 1.0, 1.0, 1.0))
    text = markdown([ours, base])
    assert "C, threads 2" in text
    assert "**2.50** (2.00-3.00) torch" in text
    assert "up to 4 rounds" in text


def test_rounds_come_back_from_a_file(tmp_path):
    row = Row("rms_norm", "8x64", "float32", "torch", fwd_ms=2.0, fwd_rounds=(2.0, 3.0), machine={"cpu": "C"})
    (tmp_path / "r.jsonl").write_text(to_line(row) + "\n")
    assert load([tmp_path / "r.jsonl"]) == [row]


def test_every_op_has_a_usual_provider_on_both_devices():
    for op in registry.ops():
        assert registry.BENCHMARKS[op].signature
        for device in ("cuda", "cpu"):
            usual = registry.names((op,), device)
            assert any(own(name) for name in usual)
            assert any(not own(name) for name in usual)
            assert all(device in registry.find(op, name).devices for name in usual)


def test_the_list_says_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(
        registry, "PROVIDERS", [replace(registry.PROVIDERS[0], name="x", package="no-such-package-of-ours")]
    )
    text = registry.listing()
    assert "not installed: pip install no-such-package-of-ours" in text
    assert "f(x, weight, eps=) -> y" in text


def test_a_provider_of_ones_own_is_checked_and_timed(monkeypatch):
    monkeypatch.setattr(registry, "PROVIDERS", list(registry.PROVIDERS))
    registry.register("mine", "rms_norm", lambda x, w, eps: torch.nn.functional.rms_norm(x, w.shape, w, eps))
    registry.register("off", "rms_norm", lambda x, w, eps: 1.01 * torch.nn.functional.rms_norm(x, w.shape, w, eps))
    selection = Selection(("rms_norm",), ("8x64",), ("mine", "off"), ("float32",))
    mine, off = runner.run(selection, FakeTimer(), lambda line: None)
    assert (mine.skipped, mine.fwd_ms) == ("", 1.0)
    assert off.skipped.startswith("wrong: y")
    assert "mine" in registry.names(("rms_norm",), "cpu")
    assert "mine" not in registry.names(("layer_norm",))


@pytest.mark.parametrize(
    ("name", "op", "function", "devices"),
    [
        ("mine", "softmax", abs, ("cpu",)),
        ("retrograd-mine", "rms_norm", abs, ("cpu",)),
        ("a,b", "rms_norm", abs, ("cpu",)),
        ("mine", "rms_norm", 3, ("cpu",)),
        ("mine", "rms_norm", abs, ("tpu",)),
    ],
    ids=["op", "own-name", "comma", "no-function", "device"],
)
def test_what_cannot_be_registered_is_a_usage_error(name, op, function, devices):
    with pytest.raises(UsageError, match="expected"):
        registry.register(name, op, function, devices=devices)


@pytest.mark.parametrize("bad", [{"host": True, "device": "cpu"}, {"threads": 2}, {"shapes": ("enc800",)}])
def test_options_that_do_not_fit_are_usage_errors(bad):
    with pytest.raises(UsageError):
        Selection(("rms_norm",), **bad)


def test_files_are_called_after_what_was_measured():
    selection = Selection(("rms_norm", "ms_deform_attn", "rank_sum"), device="cpu")
    name = runner.results_name(selection, CpuTimer())
    assert name.startswith("norm-msda-ops-")
    assert " " not in name
