"""Small whole kernels, softmax, RMS norm and attention, within bounds that follow from their operations."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from programs import U32, Check, healthy, integers

APPROXIMATE = 2.0**-22  # PTX: relative error of ex2 and rsqrt


@triton.jit
def softmax_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, cols < N, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * N + cols, e / tl.sum(e, axis=0), cols < N)


@healthy("softmax of rows of whole numbers, within ex2's error, that of a sum of 50 and of a division")
def softmax_of_rows(device):
    x, out = integers(6, 50), torch.zeros(6, 50, device=device)
    softmax_kernel[(6,)](x.to(device), out, 50, BLOCK=64)
    expected = x.double().softmax(1)
    each = APPROXIMATE + 2 * U32 * 16  # whole numbers differ by 15 at most
    return [Check(out, expected, expected * (2 * each + (50 + 4) * U32) * 1.001)]


@triton.jit
def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, cols < N, other=0.0)
    weight = tl.load(weight_ptr + cols, cols < N, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x) / N + eps)
    tl.store(out_ptr + row * N + cols, x * scale * weight, cols < N)


@healthy("RMS norm of whole numbers: their squares add up exactly, so that only division, rsqrt and products round")
def rms_norm_of_rows(device):
    x, weight, out = integers(6, 50, seed=1), integers(50, seed=2), torch.zeros(6, 50, device=device)
    rms_norm_kernel[(6,)](x.to(device), weight.to(device), out, 50, 1e-6, BLOCK=64)
    wide = x.double()
    expected = wide * (wide.pow(2).mean(1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    # half of the division's 4 u, the addition's u and that of eps as float32; rsqrt; two products
    return [Check(out, expected, expected.abs() * (3 * U32 + APPROXIMATE + 2 * U32) * 1.001)]


@triton.jit
def attention_kernel(q_ptr, k_ptr, v_ptr, out_ptr, T: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    head, block = tl.program_id(0), tl.program_id(1)
    rows, dims = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    base = head * T * D
    q = tl.load(q_ptr + base + rows[:, None] * D + dims[None, :])
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    out = tl.zeros((BLOCK, D), tl.float32)
    for start in range(0, (block + 1) * BLOCK, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        k = tl.load(k_ptr + base + cols[None, :] * D + dims[:, None])
        v = tl.load(v_ptr + base + cols[:, None] * D + dims[None, :])
        scores = tl.where(rows[:, None] >= cols[None, :], tl.dot(q, k), -float("inf"))
        new = tl.maximum(largest, tl.max(scores, axis=1))
        p = tl.exp2(scores - new[:, None])
        rescale = tl.exp2(largest - new)
        total = total * rescale + tl.sum(p, axis=1)
        out = out * rescale[:, None] + tl.dot(p, v, input_precision="ieee")
        largest = new
    tl.store(out_ptr + base + rows[:, None] * D + dims[None, :], out / total[:, None])


@healthy("causal attention with a running maximum; scores are whole numbers")
def causal_attention(device):
    q, k = (integers(2, 32, 16, low=-1, high=2, seed=s) for s in (1, 2))
    v, out = integers(2, 32, 16, seed=3), torch.zeros(2, 32, 16, device=device)
    attention_kernel[(2, 2)](q.to(device), k.to(device), v.to(device), out, T=32, D=16, BLOCK=16)
    scores = (q.double() @ k.double().transpose(1, 2)).masked_fill(
        ~torch.ones(32, 32, dtype=torch.bool).tril(), -torch.inf
    )
    weights = (scores * np.log(2)).softmax(-1)
    # Above and below the line: ex2 twice (a block rescaled), sums of 32 fused or not; one division.
    relative = 2 * (2 * APPROXIMATE + 34 * U32) + 4 * U32
    return [Check(out, weights @ v.double(), relative * 1.001 * (weights @ v.double().abs()))]
