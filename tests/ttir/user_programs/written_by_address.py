"""A tensor of torch.empty that a kernel writes by an address in memory: what it wrote is defined afterwards."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def fill_kernel(out_ptrs, n, BLOCK: tl.constexpr):
    out = tl.load(out_ptrs + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, BLOCK)
    tl.store(out + i, i.to(tl.float32), i < n)


if __name__ == "__main__":
    outs = [torch.empty(50, device="cuda") for _ in range(3)]
    fill_kernel[(3,)](torch.tensor([t.data_ptr() for t in outs], device="cuda"), 50, BLOCK=64)
    assert all(float(t[7]) == 7 for t in outs)
    assert len((outs[0] > 40).nonzero()) == 9
