"""Kernels of torch.library.wrap_triton: higher-order operators, which modes are asked about only where they know them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import retrograd as rg

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU kernels run there")
BLOCK = 16


@triton.jit
def sine_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr, COSINE: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n) if MASKED else tl.load(x_ptr + i)
    tl.store(y_ptr + i, tl.cos(x) if COSINE else tl.sin(x), i < n)


def _wrapped(x: torch.Tensor, masked: bool, cosine: bool) -> torch.Tensor:
    y = torch.empty(x.shape)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    if x.numel():
        torch.library.wrap_triton(sine_kernel)[grid](x.contiguous(), y, x.numel(), BLOCK, masked, cosine)
    return y


def _sine(masked: bool = True, cosine: bool = True) -> rg.OpSpec:
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return _wrapped(x, masked, False)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            return dy * _wrapped(*ctx.saved_tensors, masked, cosine)

    return rg.op(Sine.apply, torch.sin, dict(x=rg.tensor("M", "N")), dtypes=["float32"], name="sine")


def test_a_right_one_is_proved():
    report = rg.verify(_sine(), level="quick")
    assert report.verdict == "proved", report.findings


@pytest.mark.parametrize(
    ("spec", "stage", "kind"),
    [(_sine(masked=False), "shapes", "address-read"), (_sine(cosine=False), "oracle", "wrong-value")],
)
def test_a_wrong_one_is_found(spec, stage, kind):
    assert (stage, kind) in {(f.stage, f.kind) for f in rg.verify(spec, level="quick").findings}


def _operator(name, mutates):
    @torch.library.custom_op(f"test_wrapped_kernels::{name}", mutates_args=())
    def sine(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        with torch.cuda.device(x.device.index):  # as launchers do, for a GPU that is another than the current one
            sine_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK, True, False)
        if mutates:
            x.zero_()
        return y

    sine.register_fake(torch.empty_like)
    sine.register_autograd(lambda ctx, dy: dy * ctx.saved_tensors[0].cos(), setup_context=_kept)
    return lambda x: sine(x.contiguous())


def _kept(ctx, inputs, output):
    ctx.save_for_backward(inputs[0].clone())


@pytest.mark.parametrize("mutates", [False, True])
def test_an_operator_that_asks_for_a_gpu_is_checked_as_if_there_were_one(mutates):
    fn = _operator(f"sine_{'and_zero' if mutates else 'alone'}", mutates)
    report = rg.verify(
        fn, reference=torch.sin, inputs=dict(x=rg.tensor("M", "N")), dtypes=["float32"], only=["compiler"]
    )
    assert [f.kind for f in report.findings] == (["schema"] if mutates else []), report.findings


@pytest.mark.parametrize("cosine", [True, False])
def test_operators_with_a_kernel_for_cuda_alone_are_verified(cosine):
    name = f"test_wrapped_kernels::cuda_{'cosine' if cosine else 'sine'}"

    @torch.library.custom_op(f"{name}_inner", mutates_args=(), device_types="cuda")
    def inner(x: torch.Tensor, cosine: bool) -> torch.Tensor:
        assert x.is_cuda
        y = torch.empty_like(x)
        if x.numel():
            sine_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), BLOCK, True, cosine)
        return y

    @torch.library.custom_op(name, mutates_args=(), device_types="cuda")
    def sine(x: torch.Tensor) -> torch.Tensor:
        return inner(x, False)

    def backward(ctx, dy):
        return dy * inner(ctx.saved_tensors[0], cosine)

    sine.register_fake(torch.empty_like)
    sine.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    report = rg.verify(
        lambda x: sine(x.contiguous()), reference=torch.sin, inputs=dict(x=rg.tensor("M", "N")), dtypes=["float32"],
        level="quick", skip=["higher_order"],
    )  # fmt: skip
    assert [f.stage for f in report.findings] == ([] if cosine else ["oracle"]), report.findings
