"""Clock of CUDA devices: time of a call whose inputs are not in the L2 cache, its memory, and host time."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.testing

# Beyond any L2 cache (50 MB on H100 and H200, 126 MB on B200).
COLD_BYTES = 512 * 1024**2
_LARGEST_L2_BYTES = 126 * 1024**2
# Inputs, results and what autograd keeps of them, of all sets together.
MOST_BYTES = 20 * 1024**3
COPY_BYTES = 1024**3
FEWEST_CALLS, MOST_CALLS = 10, 50
_REPLAYS = 20
_WARMUPS = 3
_REPLAY_ERROR = 0.02

Results = Sequence[torch.Tensor | None]
Call = Callable[[int], Results]  # works on input set i, returns what it wrote


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, `how` it was measured ("graph", "events", "do_bench", "wall"), why not by a graph."""

    ms: float
    how: str
    note: str = ""


def plan_calls(touched_bytes: int) -> tuple[int, int]:
    """(input sets, calls) so that a call finds nothing of the one before in the cache, where memory allows it."""
    sets = -(-COLD_BYTES // max(touched_bytes, 1))
    # Twice: autograd keeps the forward's result while the backward of a set is timed.
    sets = min(max(sets, 2), MOST_CALLS, max(MOST_BYTES // max(2 * touched_bytes, 1), 1))
    return sets, sets * -(-FEWEST_CALLS // sets)


class CudaTimer:
    """Replays of a CUDA graph on one side stream; CUDA events around each call where capture fails or is not wanted.

    A graph holds `calls` calls on alternating input sets, so host time does not count and inputs are cold. Results
    of the last round stay allocated: each call writes to memory of its own, as cold as its inputs.
    """

    device = "cuda"
    # Captures and inputs of several providers at once would not fit: each round measures each provider anew.
    rounds = 1  # how often providers take turns unless the user says otherwise
    discarded = 0  # rounds before these that do not count
    keeps_data = False  # whether inputs stay from round to round, and providers share them

    def __init__(self, timing: str = "graph") -> None:
        self._stream = torch.cuda.Stream()
        self._timing = timing

    def facts(self) -> dict[str, str]:
        return {"gpu": torch.cuda.get_device_name()}

    plan = staticmethod(plan_calls)

    def cold(self, touched_bytes: int) -> bool:
        """Whether all sets are larger than the largest L2 cache."""
        return plan_calls(touched_bytes)[0] * touched_bytes > _LARGEST_L2_BYTES

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """The side stream; a backward runs on the stream of its forward, and only one stream is captured."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def time(self, call: Call, sets: int, calls: int) -> Timing:
        """Median over replays of the time of a graph, by call; without graphs median over calls."""
        for i in range(_WARMUPS):
            call(i % sets)
        torch.cuda.synchronize()
        if self._timing == "do_bench":
            # Eager calls on one set of inputs, L2 overwritten before each.
            ms: Any = triton.testing.do_bench(lambda: call(0), return_mode="median")
            return Timing(ms, "do_bench")
        reason = ""
        if self._timing == "graph":
            try:
                return Timing(self._replayed(call, sets, calls), "graph")
            except Exception as error:
                reason = f"not captured: {first_line(_root(error))}"
            torch.cuda.synchronize()
        return Timing(self._evented(call, sets, max(calls, _REPLAYS)), "events", reason)

    def copy_gb_per_s(self) -> float:
        """Median of copies of 1 GiB."""
        source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        for _ in range(_WARMUPS):
            target.copy_(source)
        ms = self._evented(lambda _: (target.copy_(source),), 1, _REPLAYS)
        return 2 * COPY_BYTES / ms / 1e6

    def extra_bytes(self, call: Callable[[], Results]) -> int:
        """As counted by torch's allocator; for a forward with a gradient, what it saves for its backward as well."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = call()
        torch.cuda.synchronize()
        stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in results if t is not None}
        return max(torch.cuda.max_memory_allocated() - before - sum(stored.values()), 0)

    def _replayed(self, call: Call, sets: int, calls: int) -> float:
        graph = torch.cuda.CUDAGraph()
        want = [None if t is None else t.detach().clone() for t in call(0)]
        ring: list[Results] = [()] * sets
        # The other modes also forbid what autograd's own thread and unrelated threads do meanwhile.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            for i in range(calls):
                ring[i % sets] = call(i % sets)
        _prove_it_computes(graph, ring, want)
        for _ in range(_WARMUPS):
            graph.replay()
        return self._evented(lambda _: graph.replay() or (), 1, _REPLAYS) / calls

    @staticmethod
    def _evented(call: Call, sets: int, calls: int) -> float:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for i, (start, stop) in enumerate(pairs):
            start.record()
            call(i % sets)
            stop.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(stop) for start, stop in pairs)


def host_us(call: Callable[[], object], calls: int = 500, repeats: int = 5) -> float:
    """Microseconds of host time a call, the median of `repeats` loops; the device must be faster than the host."""
    loops = []
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else torch.cpu.synchronize
    for _ in range(repeats + 1):
        synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        taken = time.perf_counter() - began
        synchronize()
        loops.append(taken / calls * 1e6)
    return statistics.median(loops[1:])  # the first loop warms up


def first_line(error: BaseException) -> str:
    """Class and first line of an error, short enough for a table."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:160]


def _root(error: BaseException) -> BaseException:
    """What went wrong first: ending a broken capture raises an error of its own."""
    return error if error.__context__ is None else _root(error.__context__)


def _prove_it_computes(graph: torch.cuda.CUDAGraph, ring: Sequence[Results], want: Results) -> None:
    """Raise unless each replay fills every result anew, and those of set 0 with what the call gives outside.

    Work that escaped the capture would be timed as nothing, and a kernel that takes a fresh number from the host at
    each launch may skip its waiting when it meets the old one again.
    """
    results = [t.detach() for results in ring for t in results if t is not None]
    for _ in range(2):
        for tensor in results:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        if any(bool(tensor.isnan().any()) for tensor in results):
            raise RuntimeError("a replay left results unwritten, so part of the work is not in the graph")
    for got, expected in zip(ring[0], want, strict=True):
        if got is None or expected is None:
            continue
        # Atomic sums differ in their last bits.
        if not (got.detach().float() - expected.float()).norm() <= _REPLAY_ERROR * expected.float().norm():
            raise RuntimeError("a replay computes something else than the call it was captured from")
