"""A gradient test that many have written, and what it lets pass: the weight is all ones.

retrograd mutate examples/weak_norm_test.py:spec --tests "pytest examples/weak_norm_test.py"
"""

from __future__ import annotations

import torch

import retrograd as rg


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        xhat = x * rstd
        dweight = (dy * xhat).sum(0)
        g = dy * weight
        dx = (g - xhat * (g * xhat).mean(-1, keepdim=True)) * rstd
        return dx, dweight, None


def rms_norm(x, weight, eps):
    return RmsNorm.apply(x, weight, eps)


def reference(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def test_backward():
    torch.manual_seed(0)
    x, weight, dy = torch.randn(8, 64, requires_grad=True), torch.ones(64, requires_grad=True), torch.randn(8, 64)
    grads, expected = (
        torch.autograd.grad(norm(x, weight, 1e-6), [x, weight], dy) for norm in (rms_norm, reference)
    )  # fmt: skip
    torch.testing.assert_close(grads, expected, rtol=1e-3, atol=1e-3)


spec = rg.op(
    rms_norm, reference, inputs={"x": rg.tensor("M", "N"), "weight": rg.tensor("N")}, params={"eps": [1e-6, 1e-2]}
)
