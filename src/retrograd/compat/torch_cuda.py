"""CUDA by torch's private shortcuts: current device and stream in a fraction of a microsecond, a kernel that waits,
a pool of memory for all threads.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from retrograd.compat.registry import part, works

# A build without CUDA has neither name, and none is called there.
current_raw_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


_SHORTCUTS = ("_cuda_getCurrentRawStream", "_cuda_getDevice")
_ALLOCATION = "_empty_strided_cuda"  # of torch._C._dynamo.guards, by which what Inductor has written allocates


def _allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="cuda")


@contextlib.contextmanager
def pretended_shortcuts() -> Iterator[None]:
    """The first two answer 0, for libraries that look them up where they are told of a GPU that is not there."""
    answers: list[tuple[Any, str, Any]] = [(torch._C, name, lambda *_: 0) for name in _SHORTCUTS]
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if hasattr(guards, _ALLOCATION):
        answers.append((guards, _ALLOCATION, _allocate))
    stock = [(owner, name, getattr(owner, name)) for owner, name, _ in answers if hasattr(owner, name)]
    for owner, name, answer in answers:
        setattr(owner, name, answer)
    _forget_triton()
    try:
        yield
    finally:
        _forget_triton()
        for owner, name, _ in answers:
            delattr(owner, name)
        for owner, name, value in stock:
            setattr(owner, name, value)


def _forget_triton() -> None:
    """Torch asks once a process whether there is a GPU for Triton: what it has been told is kept no longer."""
    module = sys.modules.get("torch.utils._triton")
    for name in ("has_triton", "has_triton_tma", "has_triton_tma_device", "has_triton_stable_tma_api"):
        if (clear := getattr(getattr(module, name, None), "cache_clear", None)) is not None:
            clear()


def keep_busy(cycles: int) -> None:
    """Queue a kernel on the current stream that does nothing for so many cycles."""
    if works(SLEEP):
        torch.cuda._sleep(cycles)
        return
    # 4096^3 multiplications take about 10^6 cycles of an H100 in float32.
    square = torch.ones(4096, 4096, device="cuda")
    for _ in range(-(-cycles // 1_000_000)):
        square = square @ square


def allocate_from(pool: torch.cuda.MemPool) -> None:
    """Have all threads allocate from the pool on the current device until the process ends.

    `torch.cuda.use_mem_pool` is for one thread, and a backward allocates in another; torch aborts a process that ends
    while a pool is in use.
    """
    if not works(POOL):
        scope = contextlib.ExitStack()
        scope.enter_context(torch.cuda.use_mem_pool(pool))
        atexit.register(scope.close)
        return
    device = torch.cuda.current_device()
    torch._C._cuda_beginAllocateToPool(device, pool.id)

    def end() -> None:
        torch._C._cuda_endAllocateToPool(device, pool.id)
        torch._C._cuda_releasePool(device, pool.id)

    atexit.register(end)


@part(
    "torch.cuda.stream",
    "asks for the current GPU and stream at each launch",
    "the public functions are asked, which takes some microseconds more a launch",
    names=("torch._C._cuda_getCurrentRawStream", "torch._C._cuda_getDevice"),
    ran=("2.11",),
)
def STREAM() -> str:
    if not torch.cuda.is_available():
        return ""
    device = torch.cuda.current_device()
    if current_device() != device:
        return f"the current device is {current_device()} where torch.cuda.current_device() is {device}"
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        inside = current_raw_stream(device)
    if inside != side.cuda_stream or current_raw_stream(device) != torch.cuda.current_stream().cuda_stream:
        return "the current stream's address is another than torch.cuda.current_stream() has"
    return ""


@part(
    "torch.cuda.sleep",
    "keeps a stream busy, to show what does not wait for it",
    "large matrix products keep it busy",
    names=("torch.cuda._sleep",),
    ran=("2.11",),
)
def SLEEP() -> str:
    if not torch.cuda.is_available():
        return ""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(1_000_000)
    end.record()
    end.synchronize()
    spent = begin.elapsed_time(end)
    return "" if spent > 0.1 else f"a kernel of a million cycles takes {spent:.3f} ms"


@part(
    "torch.cuda.pool",
    "has all threads allocate from one pool of memory",
    "the pool is for the thread that begins, and a sanitizer does not see what backwards allocate",
    names=("torch._C._cuda_beginAllocateToPool", "torch._C._cuda_endAllocateToPool", "torch._C._cuda_releasePool"),
    ran=("2.11",),
)
def POOL() -> str:
    if not torch.cuda.is_available():
        return ""
    pool, device = torch.cuda.MemPool(), torch.cuda.current_device()
    torch._C._cuda_beginAllocateToPool(device, pool.id)
    try:
        with ThreadPoolExecutor(1) as other:
            held = other.submit(torch.empty, 1 << 20, device="cuda").result()
    finally:
        torch._C._cuda_endAllocateToPool(device, pool.id)
        torch._C._cuda_releasePool(device, pool.id)
    inside = any(
        segment["address"] <= held.data_ptr() < segment["address"] + segment["total_size"]
        for segment in pool.snapshot()
    )
    return "" if inside else "another thread's memory is not from the pool"
