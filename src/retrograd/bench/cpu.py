"""Clock of CPUs: time on the wall around single calls, on inputs that are not in the cache."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from retrograd.bench.timing import Call, Results, Timing
from retrograd.env.facts import cpu_model, last_level_cache_bytes, memory_bytes

# Where the system does not say how large its cache is; more than most have a core complex.
_CACHE_BYTES = 64 * 2**20
_FEWEST_SETS, _MOST_SETS = 2, 64
_FEWEST_CALLS = 4
_COPIES, _COPY_BYTES = 10, 2**28
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h


class CpuTimer:
    """Median of single calls that go round enough sets of inputs to find none of theirs in the cache.

    Results of the last round are kept, as on a GPU, so each call writes to memory as cold as its inputs. Freed memory
    stays in the process where the C library can be told so: mapping each large result afresh costs more than most
    kernels (0.4 GiB/s on a virtual machine).
    """

    device = "cpu"
    rounds = 9
    # The first round of every provider maps memory, starts threads and compiles.
    discarded = 1
    keeps_data = True

    def __init__(self) -> None:
        self.cache_bytes = last_level_cache_bytes() or _CACHE_BYTES
        self.keeps_memory = _keep_freed_memory()

    def facts(self) -> dict[str, str]:
        """The processor, how many threads torch takes, and what it was compiled for."""
        facts = {"cpu": f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()})"}
        facts["threads"] = str(torch.get_num_threads())
        facts["cache"] = f"{self.cache_bytes / 2**20:.0f} MiB"
        return facts if self.keeps_memory else {**facts, "page faults": "included"}

    scope = staticmethod(contextlib.nullcontext)

    def plan(self, touched_bytes: int) -> tuple[int, int]:
        """(input sets, calls): twice the cache where memory allows it."""
        touched = max(touched_bytes, 1)
        most = max((memory_bytes() or 2**33) // 8 // (2 * touched), 1)
        sets = min(max(-(-2 * self.cache_bytes // touched), _FEWEST_SETS), _MOST_SETS, most)
        return sets, sets * -(-_FEWEST_CALLS // sets)

    def cold(self, touched_bytes: int) -> bool:
        """Whether a call finds none of its inputs in the cache."""
        return self.plan(touched_bytes)[0] * touched_bytes > self.cache_bytes

    def time(self, call: Call, sets: int, calls: int) -> Timing:
        """Median over calls; one more goes before them."""
        ring: list[Results] = [()] * sets
        call(0)
        taken = []
        for i in range(calls):
            began = time.perf_counter()
            results = call(i % sets)
            taken.append(time.perf_counter() - began)
            ring[i % sets] = results  # frees the older result outside of the time
        return Timing(1e3 * statistics.median(taken), "wall")

    def copy_gb_per_s(self) -> float:
        """Median of copies of eight times the cache, at least 256 MiB."""
        size = max(8 * self.cache_bytes, _COPY_BYTES)
        source = torch.zeros(size, dtype=torch.uint8)
        target = torch.zeros_like(source)
        timing = self.time(lambda _: (target.copy_(source),), 1, _COPIES)
        return 2 * size / timing.ms / 1e6

    def extra_bytes(self, call: Callable[[], Results]) -> None:
        """Runs the call; torch does not count memory of the host."""
        call()


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """torch's number of threads; None leaves it as it is."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count:
            torch.set_num_threads(before)


def _keep_freed_memory() -> bool:
    """Tell glibc neither to map large blocks one by one nor to give the top of its heap back; whether it obeys."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # As an unsigned size -1 is the largest there is.
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
