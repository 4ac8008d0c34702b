"""Ops whose kernels are interpreted are known by their launches, whatever arguments these have."""

from __future__ import annotations

import pytest
import torch
from specimens import with_backward

import retrograd as rg
from retrograd import config

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
NOTE = "kernels were interpreted, one program after another: no race between programs can show"


@triton.jit
def scale_kernel(x_ptr, out_ptr, factors, N, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < N)
    tl.store(out_ptr + places, x * factors[0], mask=places < N)


@triton.jit
def scale_by_number_kernel(x_ptr, out_ptr, factor, N, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < N)
    tl.store(out_ptr + places, x * factor, mask=places < N)


def doubled(kernel, factor):
    def launch(x):
        out = torch.empty_like(x)
        kernel[(triton.cdiv(x.numel(), 64),)](x, out, factor, x.numel(), BLOCK=64)
        return out

    op = with_backward(launch, lambda dy, x: launch(dy.contiguous()))
    return rg.op(op, lambda x: 2 * x, dict(x=rg.tensor("N")), name="doubled")


@pytest.mark.skipif(not config.interpreting(), reason="on a GPU kernels are compiled, not interpreted")
@pytest.mark.parametrize(
    ("kernel", "factor"), [(scale_kernel, (2.0, 1.0)), (scale_by_number_kernel, 2.0)], ids=["tuple", "number"]
)
def test_no_race_can_show_in_a_kernel_that_is_interpreted(kernel, factor):
    report = rg.verify(doubled(kernel, factor), level="quick", only=["determinism"])
    assert report
    assert NOTE in report.stage("determinism").notes


def test_nothing_is_said_of_races_where_no_kernel_is_launched():
    spec = rg.op(lambda x: 2 * x, lambda x: 2 * x, dict(x=rg.tensor("N")), name="doubled")
    assert rg.verify(spec, level="quick", only=["determinism"]).stage("determinism").notes == ()
