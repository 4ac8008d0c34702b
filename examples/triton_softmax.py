"""Softmax of rows, with as many programs as fit on the GPU: `retrograd run-kernel examples/triton_softmax.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

driver = triton.runtime.driver.active
DEVICE = driver.get_active_torch_device()


@triton.jit
def softmax_kernel(x_ptr, out_ptr, x_stride, out_stride, rows, cols, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    j = tl.arange(0, BLOCK)
    inside = j < cols
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(x_ptr + row * x_stride + j, mask=inside, other=float("-inf"))
        power = tl.exp(x - tl.max(x, axis=0))
        tl.store(out_ptr + row * out_stride + j, power / tl.sum(power, axis=0), mask=inside)


def softmax(x: torch.Tensor, warps: int = 8) -> torch.Tensor:
    out = torch.empty_like(x)
    arguments = (x, out, x.stride(0), out.stride(0), *x.shape, triton.next_power_of_2(x.shape[1]), 4)
    # The compiler says what a program needs, the driver what a multiprocessor has.
    gpu = driver.utils.get_device_properties(DEVICE.index or 0)
    kernel = softmax_kernel.warmup(*arguments, num_warps=warps, grid=(1,))
    kernel._init_handles()
    programs = gpu["max_num_regs"] // (kernel.n_regs * gpu["warpSize"] * warps)
    programs = min(programs, gpu["max_shared_mem"] // kernel.metadata.shared)
    kernel[(min(gpu["multiprocessor_count"] * programs, len(x)), 1, 1)](*arguments)
    return out


if __name__ == "__main__":
    torch.manual_seed(0)
    matrix = torch.randn(1823, 781, device=DEVICE)
    print("right:", torch.allclose(softmax(matrix), torch.softmax(matrix, 1)))
