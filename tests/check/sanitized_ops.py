"""A sum over rows by plain additions of several programs, and by atomic ones."""

import torch
import triton
import triton.language as tl

import retrograd as rg


@triton.jit
def plain_kernel(x_ptr, out_ptr, m, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * n + cols, mask=mask)
    old = tl.load(out_ptr + cols, mask=mask)
    tl.store(out_ptr + cols, old + x, mask=mask)


@triton.jit
def atomic_kernel(x_ptr, out_ptr, m, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    tl.atomic_add(out_ptr + cols, tl.load(x_ptr + row * n + cols, mask=mask), mask=mask)


def make(kernel):
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.shape = x.shape
            out = torch.zeros(x.shape[1], device=x.device, dtype=x.dtype)
            x = x.contiguous()
            kernel[(x.shape[0],)](x, out, x.shape[0], x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
            return out

        @staticmethod
        def backward(ctx, g):
            return g.expand(ctx.shape)

    return Sum.apply


racy = rg.op(make(plain_kernel), lambda x: x.sum(0), dict(x=rg.tensor("M", "N")), name="racy")
atomic = rg.op(make(atomic_kernel), lambda x: x.sum(0), dict(x=rg.tensor("M", "N")), name="atomic")
