"""Texts of TTIR: one for all launches that Triton's frontend makes the same of, however they are aligned and scheduled."""

from __future__ import annotations

import gc

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

import retrograd as rg
from retrograd import ops
from retrograd.compat import triton_ttir
from retrograd.compat.registry import status


@triton.JITFunction  # triton.jit interprets where TRITON_INTERPRET is set
def doubling_kernel(x_ptr, y_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_ptr + at, tl.load(x_ptr + at, at < n) * 2, at < n)


@triton.JITFunction
def warps_kernel(y_ptr):
    tl.store(y_ptr, tl.extra.cuda.num_warps())


def _forget_kernels():
    """Have this process compile all kernels anew."""
    for kernel in (thing for thing in gc.get_objects() if type(thing) is triton.JITFunction):
        kernel.device_caches.clear()


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """The texts that are made, from an empty cache."""
    _forget_kernels()
    made: list[str] = []
    stock = triton_ttir._ttir

    def noted(*args):
        made.append(stock(*args))
        return made[-1]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(triton_ttir, "_ttir", noted)
    return made


def test_this_triton_gives_ttir():
    assert status(triton_ttir.TTIR).state == "works"


def test_alignment_and_options_of_later_passes_give_no_further_text(texts):
    x, y = torch.arange(40.0), torch.zeros(40)
    with rg.cpu_triton():
        for start, n, options in ((0, 16, {}), (1, 7, {}), (3, 16, dict(num_warps=8)), (0, 5, dict(num_stages=5))):
            y.zero_()
            doubling_kernel[(1,)](x[start:], y[start:], n, N=16, **options)
            assert torch.equal(y.nonzero().flatten(), x[max(start, 1) : start + n].long())
            assert torch.equal(y[start : start + n], 2 * x[start : start + n])
    assert len(texts) == 1


def test_what_the_frontend_sees_gives_another_text(texts):
    x, y = torch.arange(40.0), torch.zeros(40)
    with rg.cpu_triton():
        for n, size in ((16, 16), (1, 16), (16, 32)):  # a size of 1 is a constant
            doubling_kernel[(1,)](x, y, n, N=size)
    assert len(texts) == 3


def test_a_kernel_that_asks_for_its_warps_has_a_text_for_each_number(texts):
    y, seen = torch.zeros(1, dtype=torch.int32), list[int]()
    with rg.cpu_triton():
        for warps in (4, 8, 4, 2):
            warps_kernel[(1,)](y, num_warps=warps)
            seen.append(int(y))
    assert seen == [4, 8, 4, 2]
    assert len(texts) == 1 + 3  # the first was made to see what is asked for


def _run_ops(folder, monkeypatch):
    """Shipped kernels, at an even and an odd size, with texts of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    levels = [(4, 5), (2, 3)]
    with rg.cpu_triton():
        for n in (64, 33):
            x, w, b = (torch.randn(3, n), torch.ones(n), torch.zeros(n))
            for y in (ops.rms_norm(x.requires_grad_(), w), ops.layer_norm(x, w, b)):
                y.sum().backward()
        value = torch.randn(1, 26, 2, 8, requires_grad=True)
        locations, weights = torch.rand(1, 5, 2, 2, 3, 2), torch.rand(1, 5, 2, 2, 3)
        ops.ms_deform_attn(value, levels, locations, weights, impl="triton").sum().backward()


def test_texts_with_and_without_alignment_differ_in_that_alone(texts, tmp_path, monkeypatch):
    torch.manual_seed(0)
    _run_ops(tmp_path / "without", monkeypatch)
    without = set(texts)
    texts.clear()
    _forget_kernels()
    monkeypatch.setattr(triton_ttir, "_unaligned", lambda attrs: attrs)
    _run_ops(tmp_path / "with", monkeypatch)
    assert any("tt.divisibility" in text for text in texts)
    assert {text.replace(" {tt.divisibility = 16 : i32}", "") for text in texts} == without
