"""RMSNorm on a GPU with real kernels: sizes that take too long on a CPU, two devices, one truth (assert_backward)."""

from __future__ import annotations

import pytest
import torch

import retrograd as rg
from retrograd.ops.norm.reference import rms_norm_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: real kernels at real sizes"),
]


def _reference(x, weight, eps):
    return rms_norm_reference(x, weight, eps=eps)[0]


# Small and unaligned; square; wide and tall (fused kernel, many programs); wider than a tile (column loop).
@pytest.mark.parametrize(("m", "n"), [(64, 2000), (4096, 4096), (32768, 8192), (256, 65536)], ids=lambda v: str(v))
@pytest.mark.parametrize("deterministic", [True, False], ids=["fixed-order", "atomics"])
def test_gradients_bf16(m, n, deterministic):
    gen = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(m, n, device="cuda", generator=gen).bfloat16()
    weight = (1 + 0.2 * torch.randn(n, device="cuda", generator=gen)).bfloat16()
    grad_out = (x.float() + 0.5 * torch.randn(m, n, device="cuda", generator=gen)).bfloat16()
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = rg.ops.rms_norm(*leaves, eps=1e-6, impl="triton", deterministic=deterministic)
    dx, dw = torch.autograd.grad(y, leaves, grad_out)
    rg.assert_backward(
        _reference, dict(x=x, weight=weight), grad_out, grads=dict(x=dx, weight=dw), out=y.detach(), compute="float32",
        eps=1e-6,
    )  # fmt: skip


def test_weight_gradient_is_the_same_bits_every_time():
    x = torch.randn(8192, 1024, device="cuda").bfloat16()
    weight = torch.randn(1024, device="cuda").bfloat16().requires_grad_()
    g = torch.randn_like(x)
    first = torch.autograd.grad(rg.ops.rms_norm(x, weight, impl="triton"), weight, g)[0]
    for _ in range(50):
        again = torch.autograd.grad(rg.ops.rms_norm(x, weight, impl="triton"), weight, g)[0]
        assert torch.equal(again, first)


# 2048 rows of 1024 columns are written past the caches, all 65536 are not; 8192 and more are walked, sliced, clustered;
# rows of 768 to 5120 columns do not fill their tile.
@pytest.mark.parametrize("n", [256, 768, 1000, 1024, 3000, 3584, 4096, 5120, 8192, 12288, 16384, 32768, 65536])
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("added", [False, True], ids=["plain", "residual"])
def test_a_row_has_the_same_bits_in_every_batch(norm, n, added):
    gen = torch.Generator("cuda").manual_seed(0)
    x, residual = (torch.randn(2**26 // n, n, device="cuda", generator=gen).bfloat16() for _ in range(2))
    weight = torch.randn(n, device="cuda", generator=gen).bfloat16()
    op = getattr(rg.ops, norm)
    whole = op(x, weight, residual=residual if added else None, impl="triton")
    for rows in (slice(0, 1), slice(5, 2**21 // n + 5), slice(-3, None)):
        alone = op(x[rows], weight, residual=residual[rows] if added else None, impl="triton")
        assert torch.equal(alone, whole[rows])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices in one process")
def test_two_devices_in_one_process():
    outs = []
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        gen = torch.Generator().manual_seed(3)
        x = torch.randn(64, 2000, generator=gen).to(device).requires_grad_()
        weight = torch.randn(2000, generator=gen).to(device).requires_grad_()
        y = rg.ops.rms_norm(x, weight, impl="triton")
        grads = torch.autograd.grad(y, (x, weight), y.detach())
        assert all(t.device == x.device for t in (y, *grads))
        outs.append([t.detach().cpu() for t in (y, *grads)])
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


# On Hopper and later they are launched before what runs ahead of them has ended. Tiles, a walk, slices, clusters.
@pytest.mark.parametrize(
    ("m", "n"), [(512, 4096), (3, 256), (4096, 1024), (4096, 2000), (256, 8192), (64, 20040), (64, 65536)]
)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_kernels_wait_for_what_runs_ahead_of_them(norm, m, n):
    gen = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(m, n, device="cuda", generator=gen).bfloat16()
    weight = torch.randn(n, device="cuda", generator=gen).bfloat16().requires_grad_()
    op = getattr(rg.ops, norm)

    def chain(wait):
        # Behind kernels of its own and of torch's, in memory that was freed while kernels still used it.
        y, seen = x, torch.zeros(3, device="cuda", dtype=torch.float64)
        for step in range(50):
            y = y.detach().requires_grad_()
            out = op(op(y, weight, impl="triton"), weight, impl="triton")
            if wait:
                torch.cuda.synchronize()
            grads = torch.autograd.grad(out, (y, weight), out)
            if wait:
                torch.cuda.synchronize()
            seen += torch.stack([t.detach().double().sum() for t in (out, *grads)])
            y = grads[0] + x if step % 3 else grads[0].mul_(1.25)
        return y, seen

    alone, together = chain(True), chain(False)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain(False)
        with torch.cuda.graph(graph, stream=stream):
            captured = chain(False)
    graph.replay()
    torch.cuda.synchronize()
    for other in (together, captured):
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))
