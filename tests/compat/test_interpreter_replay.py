"""Replayed programs: the same bits as interpreted ones, another recording where another way is taken."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from retrograd import config
from retrograd.check import memory_accesses
from retrograd.compat.registry import works
from retrograd.compat.triton_interpreter import launch_cache, program_recorder
from retrograd.compat.triton_interpreter.launch_cache import caching_launches
from retrograd.compat.triton_interpreter.preparation import prepare

pytestmark = pytest.mark.skipif(not config.interpreting(), reason="kernels are compiled in this process")


@triton.jit
def square_root(x):
    return tl.sqrt(x + 1.0)


@triton.jit
def rows_kernel(x_ptr, out_ptr, M, N, stride, scale, BLOCK: tl.constexpr):
    """A loop over rows, functions, reductions along the row, 16 bits, a division of whole numbers."""
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        cols = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
        e = tl.where(cols < N, tl.exp(x - tl.max(x, axis=0)) * scale, 0.0)
        half = (N // 2 + row % 3).to(tl.float32)
        y = square_root(e) / tl.sum(e, axis=0) + half
        tl.store(out_ptr + row * N + cols, y.to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, M, N, K, A, B, BLOCK: tl.constexpr):
    """Two dimensions, a dot of a transpose, a cumulative sum, an atomic sum."""
    m, n, k = tl.arange(0, BLOCK), tl.arange(0, BLOCK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + k[:, None] * A + m[None, :], mask=(k[:, None] < K) & (m[None, :] < M), other=0.0)
    b = tl.load(b_ptr + k[:, None] * B + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
    c = tl.dot(a.T, tl.cumsum(b, axis=1))
    tl.atomic_add(c_ptr + m[:, None] * N + n[None, :], c, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def branch_kernel(x_ptr, out_ptr):
    """Writes, and goes on by what it has read."""
    at = tl.program_id(0)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.load(out_ptr + at) + 1.0)
    if x > 0:
        tl.store(out_ptr + at, tl.load(out_ptr + at) * 10.0)


@triton.jit
def later(a, b):
    return a * 0.5 + b


@triton.jit
def own_reduction_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.reduce(tl.load(x_ptr + tl.arange(0, BLOCK)), 0, later))


@pytest.fixture(autouse=True)
def prepared() -> None:
    prepare()
    assert works(launch_cache.LAUNCH_CACHE)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels of programs that were interpreted."""
    ran: list[str] = []
    stock = program_recorder._interpret

    def interpret(module, fn, arguments, known):
        ran.append(fn.__name__)
        stock(module, fn, arguments, known)

    monkeypatch.setattr(program_recorder, "_interpret", interpret)
    return ran


def rows(m: int, n: int, stride: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(m, stride, generator=torch.Generator().manual_seed(m), dtype=torch.float64).to(dtype)
    out = torch.zeros(m, n, dtype=dtype)
    rows_kernel[(2,)](x, out, m, n, stride, 1.5, BLOCK=16)
    return out


def products(m: int, n: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(k)
    a, b = torch.randn(k, m + 1, generator=generator), torch.randn(k, n, generator=generator)
    c = torch.zeros(m, n)
    product_kernel[(triton.cdiv(k, 16),)](a, b, c, m, n, k, m + 1, n, BLOCK=16)
    return c


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"])
def test_replayed_programs_give_the_bits_of_interpreted_ones(interpreted, dtype):
    sizes = [(5, 7, 9), (4, 7, 9), (5, 16, 16), (4, 3, 3), (5, 1, 2)]
    want = [rows(*size, dtype) for size in sizes]
    assert interpreted == []
    with caching_launches({}):
        got = [rows(*size, dtype) for size in sizes]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len(interpreted) == 4  # two programs, for five rows and for four; none for other columns and strides


def test_a_program_for_each_tile_is_interpreted_once(interpreted):
    sizes = [(5, 6, 40), (6, 5, 33), (16, 16, 16)]
    want = [products(*size) for size in sizes]
    with caching_launches({}):
        got = [products(*size) for size in sizes]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len(interpreted) == 1


def test_another_way_after_something_was_written_is_made_from_the_start(interpreted):
    x = torch.tensor([1.0, -1.0, 1.0, -1.0])
    with caching_launches({}):
        for _ in range(3):
            x = -x
            out = torch.ones(4)
            branch_kernel[(4,)](x, out)
            assert torch.equal(out, torch.where(x > 0, 20.0, 2.0))
    assert len(interpreted) < 12


def test_a_reduction_with_a_function_of_its_own_is_not_recorded(interpreted):
    with caching_launches({}):
        for factor in (1.0, 2.0):
            out = torch.zeros(1)
            own_reduction_kernel[(1,)](factor * torch.arange(4.0), out, BLOCK=4)
            assert float(out) == factor * 4.25  # ((0 / 2 + 1) / 2 + 2) / 2 + 3
    assert len(interpreted) == 2


def test_an_error_is_the_interpreters_own():
    @triton.jit
    def wrong_kernel(x_ptr, BLOCK: tl.constexpr):
        tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)
        tl.static_assert(BLOCK > 4, "too small")

    x = torch.zeros(4)
    with pytest.raises(InterpreterError, match="too small") as plain:
        wrong_kernel[(1,)](x, BLOCK=4)
    with caching_launches({}), pytest.raises(InterpreterError, match="too small") as recorded:
        wrong_kernel[(1,)](x, BLOCK=4)
    assert str(recorded.value) == str(plain.value)


def test_values_that_are_shown_are_shown_each_time(interpreted, capsys):
    @triton.jit
    def show_kernel(x_ptr):
        tl.static_print(tl.load(x_ptr))

    with caching_launches({}):
        for value in (1.0, 2.0):
            show_kernel[(1,)](torch.tensor([value]))
    assert capsys.readouterr().out.split() == ["[1.]", "[2.]"]
    assert len(interpreted) == 2


@pytest.mark.parametrize("known", [False, True], ids=["interpreted", "replayed"])
def test_accesses_are_watched_in_programs_of_either_kind(known):
    """One element behind the tensor is read; the first program of all has told the recorder what a load is."""

    @triton.jit
    def beyond_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at <= n, other=0.0), mask=at < n)

    whole = torch.zeros(16)
    with caching_launches({}):
        rows(3, 7, 7, torch.float32)
        if known:
            beyond_kernel[(1,)](whole, torch.zeros(8), 8, BLOCK=16)
        with memory_accesses.watch([]) as seen:
            beyond_kernel[(1,)](torch.zeros(8), torch.zeros(8), 8, BLOCK=16)
    (access,) = seen.accesses.values()
    assert (access.argument, access.count, access.write) == ("`x_ptr`", 1, False)
    assert "tl.store(out_ptr" in access.text()


@triton.jit
def places_kernel(x_ptr, at_ptr, out_ptr, n, first, BLOCK: tl.constexpr):
    """Addresses of all kinds: in a run, apart, backwards, found in memory, of either of two tensors, of one number."""
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    at = tl.load(at_ptr + cols, mask=mask, other=0)
    total = tl.load(x_ptr + first + cols, mask=mask, other=0.0) + tl.load(x_ptr + 2 * cols, mask=mask, other=0.0)
    total += tl.load(x_ptr + at, mask=mask, other=0.0) + tl.load(x_ptr + (n - 1 - cols), mask=mask, other=0.0)
    total += tl.load(tl.where(at > 1, x_ptr, out_ptr) + cols, mask=mask & (at > 0), other=-1.0) + tl.load(x_ptr)
    pairs = (out_ptr + cols[:, None]) + n * tl.arange(0, 2)[None, :]
    tl.store(pairs, tl.broadcast_to(total[:, None], (BLOCK, 2)), mask=mask[:, None] & (at > 0)[:, None])
    tl.store(out_ptr + 2 * n + cols, tl.load(out_ptr + cols, mask=mask, other=0.0) + 1.0, mask=mask)


def places(n: int, first: int, seed: int) -> torch.Tensor:
    """The kernel on tensors that lie elsewhere each time, and within others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64 + seed, generator=generator)[seed:]
    at = torch.randint(0, n, (n,), generator=generator, dtype=torch.int32)
    out = torch.randn(80, generator=generator)[3:]
    places_kernel[(1,)](x, at, out, n, first, BLOCK=8)
    return out


def test_addresses_follow_their_tensors(interpreted):
    calls = [(5, 2, seed) for seed in range(6)] + [(7, 0, 3), (7, 0, 4), (5, 2, 7)]
    want = [places(*call) for call in calls]
    with caching_launches({}):
        got = [places(*call) for call in calls]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert interpreted == ["places_kernel"]


def test_a_launch_that_was_replayed_is_made_again_where_what_it_read_has_changed(monkeypatch):
    replayed = []
    stock = program_recorder.RecordedProgram.replay
    monkeypatch.setattr(program_recorder.RecordedProgram, "replay", lambda *given: replayed.append(1) or stock(*given))
    x, at = torch.randn(64), torch.tensor([1, 3, 2, 0, 2], dtype=torch.int32)

    def call() -> torch.Tensor:
        out = torch.zeros(80)
        places_kernel[(1,)](x, at, out, 5, 2, BLOCK=8)
        return out

    store: dict = {}
    for place, read in ((6, True), (8, True), (40, False)):  # as 2 + cols, as 2 * cols, by nobody
        with caching_launches(store):
            call()
        x[place] += 1.0
        want = call()
        replayed.clear()
        with caching_launches(store):
            assert torch.equal(call(), want)
        assert bool(replayed) == read
