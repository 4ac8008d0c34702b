"""A broken op that an ordinary test lets through: what `retrograd demo` verifies. PyTorch alone, no kernels."""

from __future__ import annotations

from typing import Any

import torch

from retrograd.check.spec import op, tensor


class RmsNorm(torch.autograd.Function):
    """An RMSNorm with a backward written by hand, and a mistake in it that was made in more than one library."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
        """x * rstd * w."""
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, w, rstd)
        return x * rstd * w

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        x, w, rstd = ctx.saved_tensors
        x_hat = x * rstd
        dx = rstd * (grad - x_hat * (grad * x_hat).mean(-1, keepdim=True))
        dw = (grad * x_hat).reshape(-1, w.shape[0]).sum(0)
        return dx, dw, None


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """The op."""
    return RmsNorm.apply(x, w, eps)


def reference(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """The formula, as a paper writes it."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


spec = op(rms_norm, reference, dict(x=tensor("M...", "N"), w=tensor("N")), params=dict(eps=[1e-6, 1e-2]))


def ordinary_test() -> None:
    """What many suites have: fresh weights, one shape, one tolerance. It passes, and the gradient of x is wrong."""
    torch.manual_seed(0)
    x, w = torch.randn(32, 64, requires_grad=True), torch.ones(64, requires_grad=True)
    grad = torch.randn(32, 64)
    ours = torch.autograd.grad(rms_norm(x, w), (x, w), grad)
    wanted = torch.autograd.grad(reference(x, w), (x, w), grad)
    for got, want in zip(ours, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
