"""An op with autotuned Triton kernels: x / |x| of each row, sixteen configurations each of forward and backward.

retrograd verify benchmarks/tuned_l2norm.py:spec --level quick --device cuda [--configs all]
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl

import retrograd as rg

CONFIGS = [
    triton.Config({"ROWS": rows}, num_warps=warps) for rows, warps in itertools.product((8, 16, 32, 64), (1, 2, 4, 8))
]


@triton.jit
def _rows(x_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A tile of x in float32 with its places and what of it there is."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    mask = (row < M) & (col < N)
    at = row * N + col
    return tl.load(x_ptr + at, mask, other=0.0).to(tl.float32), at, mask


@triton.autotune(CONFIGS, key=["N"])
@triton.jit
def l2norm_forward(x_ptr, y_ptr, r_ptr, M, N, eps, ROWS: tl.constexpr, COLS: tl.constexpr):
    x, at, mask = _rows(x_ptr, M, N, ROWS, COLS)
    r = 1 / tl.sqrt(tl.sum(x * x, 1) + eps)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(r_ptr + row, r, row < M)
    tl.store(y_ptr + at, x * r[:, None], mask)


@triton.autotune(CONFIGS, key=["N"])
@triton.jit
def l2norm_backward(x_ptr, r_ptr, dy_ptr, dx_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    x, at, mask = _rows(x_ptr, M, N, ROWS, COLS)
    dy, _, _ = _rows(dy_ptr, M, N, ROWS, COLS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r = tl.load(r_ptr + row, row < M, other=0.0)[:, None]
    y = x * r
    dx = r * (dy - y * tl.sum(dy * y, 1)[:, None])
    tl.store(dx_ptr + at, dx, mask)


def _grid(rows: int) -> Any:
    return lambda meta: (triton.cdiv(rows, meta["ROWS"]),)


class L2Norm(torch.autograd.Function):
    """Rows of [M, N] divided by their length."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.contiguous()
        y, r = torch.empty_like(x), torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        if x.numel():
            l2norm_forward[_grid(x.shape[0])](x, y, r, *x.shape, eps, COLS=triton.next_power_of_2(x.shape[1]))
        ctx.save_for_backward(x, r)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, r = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(x)
        if x.numel():
            l2norm_backward[_grid(x.shape[0])](x, r, dy, dx, *x.shape, COLS=triton.next_power_of_2(x.shape[1]))
        return dx, None


def _reference(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(1, keepdim=True) + eps)


spec = rg.op(
    lambda x, eps: L2Norm.apply(x, eps), _reference, dict(x=rg.tensor("M", "N")), params=dict(eps=[1e-6, 1e-2]),
    sizes=dict(N=(0, 512)),  # 64 rows of 512 take 9 s to compile for one warp, wider ones longer
    dtypes=["float32", "float16", "bfloat16"], compute="float32", name="l2norm",
)  # fmt: skip
