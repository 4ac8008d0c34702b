"""What scripts ask of a GPU beside its kernels: devices in every spelling, generators, streams, events, benchmarks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()


@triton.jit
def twice_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def twice(x: torch.Tensor) -> None:
    assert x.is_cuda
    with torch.cuda.device(x.device):
        twice_kernel[(1,)](x, len(x), BLOCK=16)


if __name__ == "__main__":
    generator = torch.Generator(device="cuda").manual_seed(0)
    host = torch.empty(10, pin_memory=True).uniform_()
    with torch.device("cuda"):
        made = torch.ones(10)
    tensors = [
        torch.rand(10, generator=generator, device="cuda"), host.pin_memory().to("cuda", non_blocking=True), made,
        torch.arange(10).to("cuda").float(), torch.nn.Linear(10, 10).cuda().weight.detach()[0].clone(),
    ]  # fmt: skip
    for t in tensors:
        before = t.clone()
        twice(t)
        assert torch.equal(t, 2 * before)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
        twice(made)
        end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) == 1000.0  # what is fastest on a GPU nobody knows here, nor differs between runs
    median, *_ = triton.testing.do_bench(lambda: twice(made), warmup=1, rep=1, quantiles=[0.5, 0.2, 0.8])
    assert median > 0
    torch.cuda.nvtx.range_push("range")
    torch.cuda.nvtx.range_pop()
    assert torch.cuda.mem_get_info()[0] <= torch.cuda.get_device_properties(0).total_memory
