"""RMS norm as an op to mutate, and its spec; the tests of it check less than they should."""

from __future__ import annotations

import torch

import retrograd as rg


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, w, rstd)
        return x * rstd * w

    @staticmethod
    def backward(ctx, dy):
        x, w, rstd = ctx.saved_tensors
        xhat = x * rstd
        return input_grad(dy, w, xhat, rstd), (dy * xhat).reshape(-1, len(w)).sum(0), None


def input_grad(dy, w, xhat, rstd):
    g = dy * w
    return (g - xhat * (g * xhat).mean(-1, keepdim=True)) * rstd


def norm(x, w, eps):
    return RmsNorm.apply(x, w, eps)


def reference(x, w, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w


spec = rg.op(
    norm, reference, inputs={"x": rg.tensor("M", "N"), "w": rg.tensor("N")}, params={"eps": [1e-5, 1e-2]}, name="norm"
)
