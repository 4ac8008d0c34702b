"""Sum of two vectors, a block of elements a program: `retrograd run-kernel examples/triton_vector_add.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    total = tl.load(x_ptr + i, mask=inside) + tl.load(y_ptr + i, mask=inside)
    tl.store(out_ptr + i, total, mask=inside)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    add_kernel[lambda meta: (triton.cdiv(len(x), meta["BLOCK"]),)](x, y, out, len(x), BLOCK=1024)
    return out


if __name__ == "__main__":
    a, b = torch.rand(98_432, device=DEVICE), torch.rand(98_432, device=DEVICE)
    print("largest error", (add(a, b) - (a + b)).abs().max().item())
