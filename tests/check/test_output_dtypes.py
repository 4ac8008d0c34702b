"""Outputs wider than the inputs, as losses are: their grad_out comes to the backward in their own dtype."""

from __future__ import annotations

import pytest
import torch

import retrograd as rg


def _loss(overwrites: bool = False, expanded: bool = True):
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.float().square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            if 0 in g.stride() and not expanded:  # as a kernel reads it that knows of no strides
                g = torch.cat([g.as_strided((1,), (1,)), g.new_zeros(g.numel() - 1)]).view(g.shape)
            dx = (2 * x.float() * g).to(x.dtype)
            if overwrites:
                g.zero_()
            return dx

    inputs = dict(x=rg.tensor("M", "N"))
    return rg.op(Loss.apply, lambda x: x.square().float(), inputs, dtypes=["bfloat16"], name="loss")


def _found(spec, *only):
    return {(f.stage, f.kind) for f in rg.verify(spec, level="quick", only=only).findings}


def test_a_healthy_one_is_left_alone():
    assert not _found(_loss())


@pytest.mark.parametrize("only", [(), ("mutation",)])
def test_a_grad_out_that_is_overwritten_is_told(only):
    assert ("mutation", "grad_out") in _found(_loss(overwrites=True), *only)


def test_an_expanded_grad_out_that_is_read_as_if_it_were_not_is_told():
    assert ("layouts", "wrong-value") in _found(_loss(expanded=False), "layouts")
