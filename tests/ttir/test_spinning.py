"""Loops that wait for others are run in turns; those that load and count to their end are run at once."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

import retrograd as rg


@triton.JITFunction  # triton.jit interprets where TRITON_INTERPRET is set
def tiles_kernel(x_ptr, y_ptr, ends_ptr):
    """Programs walk over the tiles of groups whose ends are in memory; a tile is loaded, and written, in place."""
    at = tl.program_id(0)
    last = 0
    for group in range(2):
        end = tl.load(ends_ptr + group)
        while at >= last and at < end:
            total = 0.0
            step = 0
            while step < 3:
                total += tl.load(x_ptr + at)
                step += 1
            tl.store(y_ptr + at, total + tl.load(y_ptr + at))
            at += tl.num_programs(0)
        last = end


@triton.JITFunction
def waiting_kernel(x_ptr, flag_ptr):
    if tl.program_id(0) == 0:
        tl.store(x_ptr, 5.0)
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    else:
        while tl.load(flag_ptr, volatile=True) == 0:
            pass


@triton.JITFunction
def waiting_by_turns_kernel(x_ptr, flag_ptr):
    """The flag reaches the condition by way of a branch and of a value that is carried from round to round."""
    if tl.program_id(0) == 0:
        tl.store(x_ptr, 5.0)
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    else:
        ready, known = 0, 0
        while ready == 0:
            ready = known
            if tl.load(flag_ptr, volatile=True) > 0:
                known = 1


@triton.jit(noinline=True)
def look(flag_ptr):
    return tl.load(flag_ptr, volatile=True)


@triton.JITFunction
def waiting_by_call_kernel(x_ptr, flag_ptr):
    if tl.program_id(0) == 0:
        tl.store(x_ptr, 5.0)
        tl.atomic_xchg(flag_ptr, 1, sem="release")
    else:
        while look(flag_ptr) == 0:
            pass


def test_a_loop_that_counts_is_run_at_once():
    x, y, ends = torch.arange(10.0), torch.ones(10), torch.tensor([4, 10], dtype=torch.int32)
    with rg.cpu_triton() as session:
        tiles_kernel[(3,)](x, y, ends)
    assert not session.launches[-1].in_turns
    assert list(session.faults) == []
    assert torch.equal(y, 3 * x + 1)


@pytest.mark.parametrize("kernel", [waiting_kernel, waiting_by_turns_kernel, waiting_by_call_kernel])
def test_a_loop_that_waits_is_run_in_turns(kernel):
    with rg.cpu_triton(seed=1) as session:
        kernel[(4,)](x := torch.zeros(1), torch.zeros(1, dtype=torch.int32))
    assert session.launches[-1].in_turns
    assert not [fault for fault in session.faults if not fault.is_mild]
    assert x == 5


def test_programs_that_count_and_share_an_element_still_race():
    x, y, ends = torch.arange(10.0), torch.ones(10), torch.tensor([4, 10], dtype=torch.int32)
    with rg.cpu_triton() as session:
        tiles_kernel[(3,)](x, y.as_strided((10,), (1,)), ends)
        tiles_kernel[(3, 2)](x, y, ends)
    assert any(fault.kind == "race" and fault.argument == "y_ptr" for fault in session.faults)
