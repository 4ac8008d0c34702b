"""Launches that are kept: the same bytes as an interpreted one, and never where what it read differs."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from retrograd import config
from retrograd.compat.registry import works
from retrograd.compat.triton_interpreter import launch_cache
from retrograd.compat.triton_interpreter.launch_cache import caching_launches, uncached
from retrograd.compat.triton_interpreter.preparation import prepare

pytestmark = pytest.mark.skipif(not config.interpreting(), reason="kernels are compiled in this process")


@triton.jit
def scale_kernel(x_ptr, out_ptr, n, factor, BLOCK: tl.constexpr, ADDS: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    value = tl.load(x_ptr + offsets, mask=mask, other=0.0) * factor
    if ADDS:
        value += tl.load(out_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, value, mask=mask)


@triton.jit
def count_kernel(total_ptr, x_ptr, BLOCK: tl.constexpr):
    tl.atomic_add(total_ptr, tl.sum(tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), axis=0))


@triton.jit
def print_kernel(x_ptr):
    tl.device_print("x", tl.load(x_ptr))


@pytest.fixture(autouse=True)
def prepared() -> None:
    prepare()
    assert works(launch_cache.LAUNCH_CACHE)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels whose programs have been run."""
    from triton.runtime.interpreter import GridExecutor

    ran: list[str] = []
    stock = GridExecutor.__call__

    def call(self, *args, **kwargs):
        ran.append(self.fn.__name__)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", call)
    return ran


def scale(x: torch.Tensor, out: torch.Tensor, factor: float = 2.0, *, adds: bool = False) -> torch.Tensor:
    scale_kernel[(2,)](x, out, x.numel(), factor, BLOCK=8, ADDS=adds)
    return out


def test_the_same_launch_is_interpreted_once(interpreted):
    x = torch.rand(13)
    with caching_launches({}):
        first = scale(x, torch.empty(16))
        # Other memory, in other places, whose bytes the kernel does not read.
        again = scale(x.clone(), torch.full((16,), 7.0))
    assert interpreted == ["scale_kernel"]
    assert torch.equal(again[:13], x * 2)
    assert torch.equal(again[:13], first[:13])
    assert again[13:].tolist() == [7.0] * 3  # and does not write


@pytest.mark.parametrize(
    ("x", "factor", "adds"),
    [(torch.ones(13), 2.0, False), (torch.zeros(12), 2.0, False), (torch.zeros(13), 3.0, False),
     (torch.zeros(13), 2.0, True), (torch.zeros(13, dtype=torch.float64), 2.0, False)],
    ids=["values", "size", "number", "constexpr", "dtype"],
)  # fmt: skip
def test_another_launch_is_another(interpreted, x, factor, adds):
    with caching_launches({}):
        scale(torch.zeros(13), torch.zeros(16))
        out = scale(x, torch.ones(16, dtype=x.dtype), factor, adds=adds)
    assert len(interpreted) == 2
    assert torch.equal(out[: x.numel()], x * factor + adds)


def test_what_is_read_before_it_is_written_counts():
    """A buffer that is added to, in place; and one that nobody has filled, which the poison stage must see."""
    x, total = torch.ones(13), torch.zeros(16)
    with caching_launches({}):
        for _ in range(3):
            scale(x, total, adds=True)
        lost = scale(x, torch.full((16,), float("nan")), adds=True)
    assert total[:13].tolist() == [6.0] * 13
    assert lost[:13].isnan().all()


def test_atomic_sums_are_read_too():
    total, x = torch.zeros(1), torch.ones(16)
    with caching_launches({}):
        for _ in range(3):
            count_kernel[(2,)](total, x, BLOCK=8)
    assert total.tolist() == [48.0]


def test_arguments_that_share_memory_are_no_others(interpreted):
    """Two views of one buffer, and two buffers, hold the same numbers before the launch; the first changes both."""
    flat = torch.ones(32)
    with caching_launches({}):
        scale(torch.ones(16), torch.ones(16), adds=True)
        scale(flat[:16], flat[8:24], adds=True)
    assert len(interpreted) == 2
    # The second program reads what the first one wrote there: 1 + 2, times 2, added to 1.
    assert flat[8:24].tolist() == [3.0] * 8 + [7.0] * 8


def test_what_prints_or_reaches_outside_is_made_each_time(interpreted, capsys):
    x = torch.ones(16)
    with caching_launches({}):
        for _ in range(2):
            print_kernel[(1,)](x)
    assert interpreted == ["print_kernel"] * 2
    assert capsys.readouterr().out.count("x") == 2


def test_uncached_and_outside_of_the_block_nothing_is_taken_from_there(interpreted):
    x, store = torch.ones(13), {}
    with caching_launches(store):
        scale(x, torch.empty(16))
        with uncached():
            scale(x, torch.empty(16))
    scale(x, torch.empty(16))
    assert len(interpreted) == 3
    with caching_launches(store):
        scale(x, torch.empty(16))
    assert len(interpreted) == 3


def test_a_grid_that_is_computed_from_outside_is_looked_at(interpreted):
    """The number of programs is no argument of the kernel."""
    x = torch.ones(16)
    with caching_launches({}):
        for programs in (1, 2, 2):
            out = torch.zeros(16)
            scale_kernel[lambda meta, n=programs: (n,)](x, out, 16, 2.0, BLOCK=8, ADDS=False)
            assert int(out.sum()) == 16 * programs
    assert len(interpreted) == 2
