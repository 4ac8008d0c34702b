"""Sessions inside of others: `verify`, or `cpu_triton` again, in a program whose kernels are executed already."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import retrograd as rg
from retrograd.ttir.run_records import record_of

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def _double_kernel(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, 2 * tl.load(x + i, i < n), i < n)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return _doubled(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.factor * _doubled(grad), None


def _doubled(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _double_kernel[(triton.cdiv(x.numel(), 32),)](x, out, x.numel(), 32)
    return out


def _spec(factor):
    return rg.op(lambda x: _Double.apply(x, factor), lambda x: 2 * x, dict(x=rg.tensor("M", "N")), name="double")


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "proved"), (1.5, "finding")])
def test_an_op_is_verified_inside_as_outside(factor, verdict):
    outside = rg.verify(_spec(factor), level="quick")
    with rg.cpu_triton() as run:
        inside = rg.verify(_spec(factor), level="quick")
    assert (inside.verdict, outside.verdict) == (verdict, verdict)
    assert [f.what for f in inside.findings] == [f.what for f in outside.findings]
    assert not run.faults


def test_the_outer_session_accuses_nobody_of_what_an_inner_one_has_written():
    before = torch.ones(100)
    with rg.cpu_triton() as outer:
        early = torch.empty(100)
        with rg.cpu_triton() as inner:
            _double_kernel[(4,)](before, early, 100, 32)
            late = _doubled(early)
            assert float(late.sum()) == 400
        assert float((early + late).sum()) == 600
    assert not outer.faults
    assert len(inner.launches) == 2
    assert not inner.faults
    said = record_of(outer, "program", 132).undecided
    assert said == ("no Triton kernel was launched but inside of cpu_triton or verify, which the program calls itself",)


def test_each_session_tells_what_its_own_launches_read():
    with rg.cpu_triton() as outer:
        with rg.cpu_triton() as inner:
            assert float(_doubled(torch.empty(8)).sum()) is not None
        assert float(_doubled(torch.empty(8)).sum()) is not None
    assert [fault.kind for fault in inner.faults] == ["uninitialised"]
    assert [fault.kind for fault in outer.faults] == ["uninitialised"]


def test_a_context_that_nobody_leaves_is_left_at_exit(tmp_path):
    """As at the top of a conftest.py: Python has taken its own modules away by the time that the generator ends."""
    code = "import retrograd as rg; kernels = rg.cpu_triton(); kernels.__enter__(); import torch; torch.ones(2).cuda()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
