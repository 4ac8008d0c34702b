"""A Triton RMSNorm with a real bug that an ordinary test does not see.

The backward kernel forgets the weight in dx (as in karpathy/llm.c#763). Layers start with a weight of ones,
tests do too, and there the bug is invisible: `fixed_tolerance_test()` passes. A checker has to find it:

    retrograd verify examples/broken_rms_norm.py:spec

Runs on a GPU, or without one: `verify` then executes the kernels on CPU tensors.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

import retrograd as rg


@triton.jit
def rms_norm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    block = tl.program_id(0)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    places = rows.to(tl.int64)[:, None] * N + cols[None, :]

    dy = tl.load(dy_ptr + places, mask=inside, other=0.0)
    x = tl.load(x_ptr + places, mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
    xhat = x * rstd

    g = dy  # the bug: this has to be dy * weight
    c = tl.sum(g * xhat, axis=1)[:, None] / N
    tl.store(dx_ptr + places, rstd * (g - xhat * c), mask=inside)

    # One row of partial sums per program, added up outside: no atomics, so the result is reproducible.
    tl.store(dw_ptr + block * N + cols, tl.sum(dy * xhat, axis=0), mask=cols < N)


def run_backward(kernel, dy, x, weight, rstd, block_m=16):
    """Launch a backward kernel with the signature above; returns (dx, dw)."""
    n = x.shape[-1]
    m = x.numel() // n if n else 0
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    blocks = triton.cdiv(m, block_m)
    partial = torch.empty(blocks, n, dtype=x.dtype, device=x.device)
    if blocks:
        block_n = triton.next_power_of_2(n)
        operands = (dy.contiguous(), x.contiguous(), weight.contiguous(), rstd, dx, partial)
        kernel[(blocks,)](*operands, m, n, BLOCK_M=block_m, BLOCK_N=block_n)
    return dx, partial.sum(0)


def make_rms_norm(kernel):
    """An RMSNorm with a plain PyTorch forward and the given Triton kernel as its backward."""

    class RMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, eps):
            rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
            ctx.save_for_backward(x, weight, rstd)
            return x * rstd * weight

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            x, weight, rstd = ctx.saved_tensors
            dx, dw = run_backward(kernel, dy, x, weight, rstd.contiguous())
            return dx if ctx.needs_input_grad[0] else None, dw if ctx.needs_input_grad[1] else None, None

    def rms_norm(x, weight, eps=1e-6):
        return RMSNorm.apply(x, weight, eps)

    return rms_norm


def reference(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


rms_norm = make_rms_norm(rms_norm_backward_kernel)

spec = rg.op(
    rms_norm,
    reference,
    dict(x=rg.tensor("M...", "N"), weight=rg.tensor("N")),
    params=dict(eps=[1e-6, 1e-2]),
    name="broken_rms_norm",
)


def fixed_tolerance_test(device="cpu"):
    """The test that many suites have: fresh weights, one shape, 1e-2. It passes, and the kernel is wrong."""
    torch.manual_seed(0)
    x = torch.randn(32, 64, device=device, requires_grad=True)
    weight = torch.ones(64, device=device, requires_grad=True)
    grad_out = torch.randn(32, 64, device=device)
    with rg.cpu_triton() if device == "cpu" else nullcontext():
        got_y, want_y = rms_norm(x, weight), reference(x, weight)
        got = torch.autograd.grad(got_y, (x, weight), grad_out)
        want = torch.autograd.grad(want_y, (x, weight), grad_out)
    for a, b in zip((got_y, *got), (want_y, *want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


if __name__ == "__main__":
    fixed_tolerance_test("cuda" if torch.cuda.is_available() else "cpu")
    print("the fixed tolerance test passed")
