"""Ops that plan by the type of their tensors' device, and ops without a reference that run other kernels at times."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

import retrograd as rg

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU kernels run there")


@triton.jit
def column_sums_kernel(x_ptr, sums_ptr, m, n, rows: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr):
    j, first = tl.arange(0, BLOCK), tl.program_id(0) * rows
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(first, tl.minimum(first + rows, m) if CLAMPED else first + rows):
        total += tl.load(x_ptr + i * n + j, j < n, other=0.0)
    tl.store(sums_ptr + tl.program_id(0) * n + j, total, j < n)


def _scaled(clamped: bool) -> rg.OpSpec:
    """x times a row, whose gradient many programs add up on a GPU, and one elsewhere, as Liger's norms do."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            terms = (dy * x).contiguous()
            count = torch.cuda.get_device_properties(x.device).multi_processor_count if x.device.type == "cuda" else 1
            sums = torch.empty(count, len(w), device=w.device)
            args = (terms, sums, *terms.shape, math.ceil(len(terms) / count), clamped)
            column_sums_kernel[(count,)](*args, BLOCK=triton.next_power_of_2(max(len(w), 1)))
            return dy * w, sums.sum(0)

    return rg.op(Scaled.apply, torch.mul, dict(x=rg.tensor("M", "N"), w=rg.tensor("N")), name="scaled")


def test_they_plan_as_for_a_gpu():
    report = rg.verify(_scaled(clamped=True), level="quick")
    assert report.verdict == "proved", report.findings
    # One program alone never leaves its rows.
    found = rg.verify(_scaled(clamped=False), level="quick").findings
    assert ("bounds", "address-read") in {(f.stage, f.kind) for f in found}


def _layer(apart: float) -> rg.OpSpec:
    """A product that is added up in another order where nobody wants a gradient, or is another by so much."""

    def product(x, w):
        if torch.is_grad_enabled():
            return x @ w
        return (x[:, :4] @ w[:4] + x[:, 4:] @ w[4:]) * (1 + apart)

    return rg.op(product, None, dict(x=rg.tensor(3, 9), w=rg.tensor(9, 5)), name="layer")


@pytest.mark.parametrize(("apart", "verdict"), [(1e-6, "proved"), (1e-3, "finding")])
def test_without_a_reference_another_order_of_sums_is_a_note(apart, verdict):
    report = rg.verify(_layer(apart), level="quick", only=["calls"])
    assert report.verdict == verdict
    assert verdict == "finding" or any("another under torch.no_grad" in n for s in report.stages for n in s.notes)


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, BLOCK: tl.constexpr):
    i, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    c = tl.dot(tl.load(a_ptr + i * BLOCK + j), tl.load(b_ptr + i * BLOCK + j))
    tl.store(c_ptr + i * BLOCK + j, c)


def _product(a, b):
    c = torch.empty(16, 16, device=a.device)
    product_kernel[(1,)](a.contiguous(), b.contiguous(), c, BLOCK=16)
    return c


def _tf32_product(factor: float) -> rg.OpSpec:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return _product(a, b)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dc):
            a, b = ctx.saved_tensors
            return _product(dc, b.T), factor * _product(a.T, dc)

    return rg.op(Product.apply, None, dict(a=rg.tensor(16, 16), b=rg.tensor(16, 16)), name="tf32_product")


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "proved"), (1.02, "finding")])
def test_without_a_reference_products_in_tf32_are_differentiated_as_they_are(factor, verdict):
    assert rg.verify(_tf32_product(factor), level="quick", only=["adjoint"]).verdict == verdict
