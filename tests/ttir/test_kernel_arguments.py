"""What launches are given: wrappers with an address, compiled kernels with all or some of their arguments."""

from __future__ import annotations

import pytest
import torch

import retrograd as rg

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def double(x_ptr, n, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


class Window:
    """A tensor from an element on, as launchers of other people have it."""

    def __init__(self, tensor, first):
        self._whole, self.dtype, self._first = tensor, tensor.dtype, first

    def data_ptr(self):
        return self._whole.data_ptr() + 4 * self._first


def test_a_wrapper_points_into_the_tensor_that_it_keeps():
    x, out = torch.arange(8.0), torch.zeros(8)
    with rg.cpu_triton() as session:
        double[(1,)](Window(x, 3), 5, Window(out, 1), BLOCK=8)
    assert not session.faults
    assert out.tolist() == [0, 6, 8, 10, 12, 14, 0, 0]


def test_a_wrapper_that_points_past_its_tensor_is_told():
    x, out = torch.arange(8.0), torch.zeros(8)
    with rg.cpu_triton() as session:
        double[(1,)](Window(x, 3), 6, Window(out, 1), BLOCK=8)
    assert {fault.kind for fault in session.faults} == {"out of bounds"}


def test_a_compiled_kernel_takes_its_constexprs_too():
    x, out = torch.arange(8.0), torch.zeros(8)
    with rg.cpu_triton():
        compiled = double[(1,)](x, 8, out, BLOCK=8)
        compiled[1, 1, 1](out.clone(), 8, out, 8)
        with pytest.raises(TypeError, match="3 of its 4 arguments"):
            compiled[1, 1, 1](x, 8, out)
    assert torch.equal(out, 4 * x)


@triton.jit
def count(out_ptr):
    at = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
    tl.store(out_ptr + at, tl.num_programs(1))


def test_a_grid_may_be_of_tensors_and_of_whole_numbers_alone():
    out = torch.zeros(6, dtype=torch.int32)
    with rg.cpu_triton() as session:
        count[(torch.tensor(3), torch.tensor([2]).max())](out)
        with pytest.raises(TypeError):
            count[(3.0,)](out)
    assert out.tolist() == [2] * 6
    assert not session.faults
