"""A backward that leaves its result in grad_out's memory: one fault, which only the stage that is about it tells."""

from __future__ import annotations

import torch

import retrograd as rg


class InPlace(torch.autograd.Function):
    """x * w; grad x takes the place of grad_out."""

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, _output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dw = (dy * x).sum(0)
        return dy.mul_(w), dw


def verify(**more):
    spec = rg.op(InPlace.apply, lambda x, w: x * w, dict(x=rg.tensor("M", "N"), w=rg.tensor("N")), transforms=["vjp"])
    return rg.verify(spec, level="quick", **more)


def test_it_is_told_once():
    # One layout: an expanded grad_out cannot be written to, which is told apart.
    report = verify(skip=["layouts"])
    assert [(f.stage, f.kind) for f in report.findings] == [("mutation", "grad_out")]


def test_no_stage_takes_it_for_something_else():
    for stage in ("poison", "algebra", "adjoint", "state", "compiler"):
        assert verify(only=[stage]), stage
