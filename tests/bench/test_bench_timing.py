"""The order of events in the CUDA timer, with a pretended CUDA: capture, proof, replays, and what happens if it fails."""

from __future__ import annotations

import contextlib

import pytest
import torch

from retrograd.bench.accuracy import computed
from retrograd.bench.benchmark import Implementation, Problem
from retrograd.bench.timing import CudaTimer, host_us


class _Stream:
    def wait_stream(self, other):
        pass


class _Event:
    clock = 0.0

    def __init__(self, enable_timing=False):
        self.at = 0.0

    def record(self):
        self.at = _Event.clock

    def elapsed_time(self, stop):
        return stop.at - self.at


class _Graph:
    """Replays what was called while it was captured; `broken` captures nothing."""

    broken = False

    def __init__(self):
        self.calls = []

    def replay(self):
        for again in self.calls:
            again()


@pytest.fixture
def cuda(monkeypatch):
    captured = []

    @contextlib.contextmanager
    def graph(cuda_graph, stream, capture_error_mode):
        assert isinstance(stream, _Stream)
        captured.append(cuda_graph)
        try:
            yield
        finally:
            captured.pop()

    fakes = dict(
        Stream=_Stream, Event=_Event, CUDAGraph=_Graph, graph=graph, synchronize=lambda: None,
        current_stream=_Stream, stream=lambda stream: contextlib.nullcontext(),
    )  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return captured


def _call_on(sets, captured, works_in_capture=True):
    """A call that takes 2 ms by the pretended clock and fills one tensor a set."""
    results = [torch.zeros(4) for _ in range(sets)]

    def call(i):
        def work():
            _Event.clock += 2.0
            results[i].fill_(i)

        if captured and not works_in_capture:
            return (results[i],)
        if captured:
            captured[-1].calls.append(work)
        else:
            work()
        return (results[i],)

    return call


def test_time_is_that_of_a_replay_by_its_calls(cuda):
    timer = CudaTimer()
    with timer.scope():
        timing = timer.time(_call_on(3, cuda), sets=3, calls=12)
    assert (timing.ms, timing.how, timing.note) == (2.0, "graph", "")


def test_work_that_escapes_the_capture_is_timed_by_events(cuda):
    timing = CudaTimer().time(_call_on(2, cuda, works_in_capture=False), sets=2, calls=10)
    assert (timing.ms, timing.how) == (2.0, "events")
    assert "unwritten" in timing.note


def test_replays_that_compute_something_else_are_not_timed(cuda):
    def call(i):
        result = torch.full((4,), float(i + 1))
        if cuda:  # as a kernel whose host side hands it a new number each time
            cuda[-1].calls.append(lambda: result.fill_(-1.0))
        return (result,)

    timing = CudaTimer().time(call, sets=2, calls=10)
    assert timing.how == "events"
    assert "something else" in timing.note


def test_a_capture_that_fails_names_its_first_cause(cuda):
    plain = _call_on(2, cuda)

    def call(i):
        if not cuda:
            return plain(i)
        try:
            raise ValueError("operation not permitted")
        finally:
            raise RuntimeError("capture was invalidated")

    timing = CudaTimer().time(call, sets=2, calls=10)
    assert timing.how == "events"
    assert timing.note == "not captured: ValueError: operation not permitted"


def test_triton_times_calls_where_it_is_asked_to(cuda, monkeypatch):
    def do_bench(call, return_mode):
        call()
        return {"median": 3.0}[return_mode]

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    timing = CudaTimer("do_bench").time(_call_on(2, cuda), sets=2, calls=10)
    assert (timing.ms, timing.how, timing.note) == (3.0, "do_bench", "")


def test_without_graphs_calls_are_timed_by_events(cuda):
    timing = CudaTimer("eager").time(_call_on(2, cuda), sets=2, calls=10)
    assert (timing.ms, timing.how, timing.note) == (2.0, "events", "")


def test_extra_memory_is_what_was_held_beyond_the_results(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1500)
    result = torch.zeros(25)  # 100 bytes, once although returned twice
    assert CudaTimer().extra_bytes(lambda: (result, result[:3], None)) == 400


def test_host_time_counts_calls():
    counted = []
    assert host_us(lambda: counted.append(0), calls=7, repeats=3) > 0
    assert len(counted) == 28  # one loop warms up


@pytest.mark.parametrize("checked", [True, False])
def test_a_compiled_backward_runs_again_where_its_first_run_was_that_of_the_check(checked):
    import torch._functorch.config as functorch

    # exp(x) is saved and nobody outside of the graph holds it: such memory a backward may overwrite.
    op = Implementation(torch.compile(lambda t: (t["x"].exp().exp(),), backend="aot_eager", dynamic=False))
    problem = Problem(leaves=("x",), results=("y",), data=lambda: iter(()), truth=lambda *_: (), bytes_moved=(1, 1))
    inputs, grads = {"x": torch.zeros(4, requires_grad=True)}, {"y": torch.ones(4)}
    torch.compiler.reset()
    with functorch.patch(donated_buffer=True):
        if checked:
            computed(op, op.call(inputs), problem, inputs, grads)
        else:
            torch.autograd.grad(op.call(inputs)[0], inputs["x"], grads["y"])
        (y,) = op.call(inputs)
        with contextlib.nullcontext() if checked else pytest.raises(RuntimeError, match="donated"):
            runs = [torch.autograd.grad(y, inputs["x"], grads["y"], retain_graph=True)[0] for _ in range(2)]
            assert torch.equal(*runs)
