"""Threads that a program starts where a GPU is pretended."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import retrograd as rg
from retrograd.compat.registry import in_fresh_thread

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def _summed(x, y, n, out, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)


def _sums(k: int, written: bool = True) -> float:
    x = torch.full((100,), float(k), device="cuda")
    y = torch.empty(100, device="cuda")
    if written:
        y.copy_(x)
    out = torch.empty_like(x)
    assert torch.cuda.is_available()
    assert all(t.is_cuda for t in (x, y, out))
    _summed[(4,)](x, y, 100, out, 32)
    return float(out.sum())


@pytest.fixture
def run():
    with rg.cpu_triton() as session:
        yield session


def test_threads_of_a_pool_hear_of_the_gpu_and_launch_at_the_same_time(run):
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(_sums, range(24)))
    assert sums == [200.0 * k for k in range(24)]
    assert len(run.launches) == 24
    assert not run.faults


def test_a_thread_with_a_run_of_its_own_hears_of_the_gpu(run):
    class Worker(threading.Thread):
        total = 0.0

        def run(self):
            self.total = _sums(3)

    worker = Worker()
    worker.start()
    worker.join()
    assert worker.total == 600.0


def test_memory_that_a_thread_does_not_write_is_told(run):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_sums, 1, False).result()
    (fault,) = run.faults
    assert fault.kind == "uninitialised"


def test_threads_that_are_started_later_hear_of_none():
    with rg.cpu_triton():
        pass
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(torch.cuda.is_available).result()
        with pytest.raises((AssertionError, RuntimeError)):
            pool.submit(torch.ones, 1, device="cuda").result()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU tensors may be made on it anywhere")
def test_self_tests_of_this_library_hear_of_none(run):
    @in_fresh_thread
    def made() -> str:
        return str(torch.ones(1).device)

    assert made() == "cpu"
