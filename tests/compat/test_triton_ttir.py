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
from retrograd.errors import UnsupportedOperationError


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


FACTOR = tl.constexpr(2)


@triton.JITFunction
def scaling_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) * FACTOR)


def test_a_global_that_has_changed_since_stops_the_launch(texts, monkeypatch):
    """As on a GPU, where the kernel would go on with what it has read before."""
    x = torch.ones(1)
    with rg.cpu_triton():
        for _ in range(2):
            scaling_kernel[(1,)](x)
        assert x == 4
        monkeypatch.setitem(globals(), "FACTOR", tl.constexpr(3))
        with pytest.raises(RuntimeError, match="FACTOR has changed"):
            scaling_kernel[(1,)](x)
    assert x == 4


def test_more_threads_than_a_block_may_have_are_out_of_resources(texts):
    """So that autotuners pass over such a configuration."""
    x, y = torch.arange(16.0), torch.zeros(16)
    configurations = [triton.Config({}, num_warps=warps) for warps in (64, 32)]
    tuned = triton.autotune(configurations, key=[])(doubling_kernel)
    with rg.cpu_triton():
        with pytest.raises(triton.OutOfResources, match="threads"):
            doubling_kernel[(1,)](x, y, 16, N=16, num_warps=64)
        assert not y.any()
        tuned[(1,)](x, y, 16, N=16)
    assert torch.equal(y, 2 * x)
    assert tuned.best_config.num_warps == 32


def test_hooks_on_launches_hear_of_them(texts, monkeypatch):
    heard: list[object] = []
    hooks = triton.knobs.runtime
    monkeypatch.setattr(hooks.launch_enter_hook, "calls", [lambda launch: heard.append(launch.get()["name"])])
    monkeypatch.setattr(hooks.launch_exit_hook, "calls", [lambda launch: heard.append(y.any().item())])
    x, y = torch.arange(16.0), torch.zeros(16)
    with rg.cpu_triton():
        doubling_kernel[(1,)](x, y, 16, N=16)
    assert heard == ["doubling_kernel", True]


def test_code_that_a_configuration_brings_along_is_executed_or_refused(texts, tmp_path):
    x, y = torch.arange(16.0), torch.zeros(16)
    with rg.cpu_triton():
        doubling_kernel[(1,)](x, y, 16, N=16)
        path = tmp_path / "kernel.ttir"
        for factor in (3, 5):
            path.write_text(texts[0].replace("dense<2.000000e+00>", f"dense<{factor}.0>"))
            doubling_kernel.device_caches.clear()
            doubling_kernel[(1,)](x, y, 16, N=16, ir_override=str(path))
            assert torch.equal(y, factor * x)
        with pytest.raises(UnsupportedOperationError, match=r"runs kernel\.ptx in place of its own code"):
            doubling_kernel[(1,)](x, y, 16, N=16, ir_override="kernel.ptx")
