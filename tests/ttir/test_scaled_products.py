"""Products of scaled floats of 4 bits beside the same in float64: exponents for 32 elements, or nvfp4's for 16."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

import retrograd as rg

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


@triton.JITFunction  # triton.jit interprets where TRITON_INTERPRET is set
def product_kernel(a, a_scale, b, b_scale, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 2)
    groups = tl.arange(0, K // GROUP)
    left = tl.load(a + m[:, None] * (K // 2) + k)
    right = tl.load(b + n[None, :] * (K // 2) + k[:, None])
    left_scale = tl.load(a_scale + m[:, None] * (K // GROUP) + groups)
    right_scale = tl.load(b_scale + n[:, None] * (K // GROUP) + groups)
    total = tl.dot_scaled(left, left_scale, "e2m1", right, right_scale, "e2m1")
    tl.store(c + m[:, None] * N + n, total)


def unpacked(codes: torch.Tensor, factors: torch.Tensor, group: int) -> torch.Tensor:
    """Numbers of codes, two a byte, the lower first."""
    both = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()
    return torch.where(both > 7, -1.0, 1.0) * FP4[both & 7] * factors.double().repeat_interleave(group, dim=-1)


@pytest.mark.parametrize("group", [16, 32])
def test_scaled_products_are_those_of_float64(group):
    torch.manual_seed(0)
    m, n, k = 16, 32, 64
    a, b = (torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8) for rows in (m, n))
    scales = [torch.randint(120, 130, (rows, k // group), dtype=torch.uint8) for rows in (m, n)]
    factors = [torch.exp2(scale.double() - 127) for scale in scales]
    if group == 16:  # floats of 8 bits
        scales = [(torch.rand(rows, k // group) * 3).to(torch.float8_e4m3fn) for rows in (m, n)]
        factors = [scale.double() for scale in scales]
    c = torch.empty(m, n)
    with rg.cpu_triton(gpu="sm_100") as session:
        product_kernel[(1,)](a, scales[0], b, scales[1], c, M=m, N=n, K=k, GROUP=group)
    expected = unpacked(a, factors[0], group) @ unpacked(b, factors[1], group).T
    assert torch.equal(c.double(), expected.float().double())
    assert list(session.faults) == []
