"""Product of two matrices in tiles, autotuned: `retrograd run-kernel examples/triton_matmul.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()
CONFIGS = [
    triton.Config({"TM": 64, "TN": 64, "TK": 32, "GROUP": 8}, num_stages=3, num_warps=4),
    triton.Config({"TM": 128, "TN": 128, "TK": 64, "GROUP": 8}, num_stages=4, num_warps=8),
]


@triton.autotune(configs=CONFIGS, key=["M", "N", "K"])
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, a_row, a_col, b_row, b_col, c_row, c_col,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Programs that follow each other share columns of b: groups of GROUP rows of tiles.
    program, across = tl.program_id(0), tl.cdiv(N, TN)
    first = program // (GROUP * across) * GROUP
    height = min(tl.cdiv(M, TM) - first, GROUP)
    row = first + program % (GROUP * across) % height
    col = program % (GROUP * across) // height

    i = (row * TM + tl.arange(0, TM)) % M
    j = (col * TN + tl.arange(0, TN)) % N
    k = tl.arange(0, TK)
    a, b = a_ptr + i[:, None] * a_row + k * a_col, b_ptr + k[:, None] * b_row + j * b_col
    total = tl.zeros((TM, TN), tl.float32)
    for step in range(tl.cdiv(K, TK)):
        left = K - step * TK
        total = tl.dot(tl.load(a, mask=k < left, other=0.0), tl.load(b, mask=k[:, None] < left, other=0.0), total)
        a += TK * a_col
        b += TK * b_row

    i, j = row * TM + tl.arange(0, TM), col * TN + tl.arange(0, TN)
    tl.store(c_ptr + i[:, None] * c_row + j * c_col, total.to(c_ptr.dtype.element_ty), (i < M)[:, None] & (j < N))


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, device=a.device, dtype=torch.float16)

    def grid(meta):
        return (triton.cdiv(m, meta["TM"]) * triton.cdiv(n, meta["TN"]),)

    matmul_kernel[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride())
    return c


if __name__ == "__main__":
    torch.manual_seed(0)
    x, y = (torch.rand(300, 300, device=DEVICE, dtype=torch.float16) - 0.5 for _ in range(2))
    print("float16 right:", torch.allclose(matmul(x, y), x @ y, atol=1e-2, rtol=0))
    x, y = x.to(torch.float8_e5m2), y.T.contiguous().to(torch.float8_e5m2).T
    print("float8 right:", torch.allclose(matmul(x, y), x.half() @ y.half(), atol=1e-2, rtol=0))
