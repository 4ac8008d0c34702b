"""What a plain copy of few bytes reaches of a copy of many: the ceiling of a norm's forward at that size, on one GPU.

A Triton kernel copies bfloat16 elements, timed as the norms are in `retrograd bench norm`: replayed from a CUDA graph,
round tensors that are larger together than the L2 cache. The best of twelve tiles is printed. Needs Hopper or later.

    python benchmarks/norm_copy.py
"""

from __future__ import annotations

import itertools
from functools import partial

import torch
import triton
import triton.language as tl
from norm_tune import COLD_BYTES, DTYPE, events_ms, graph_ms
from triton.language.extra.cuda import gdc_wait

ELEMENTS = [2**21, 2**23, 2**25, 2**26, 2**28]
TILES = list(itertools.product((1024, 2048, 4096, 8192), (2, 4, 8)))
LARGE_BYTES = 1024**3


@triton.jit
def copy_kernel(from_ptr, to_ptr, BLOCK: tl.constexpr):
    """Program i copies elements [i * BLOCK, + BLOCK); launched while what runs ahead of it ends, as the norms are."""
    gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(to_ptr + at, tl.load(from_ptr + at))


def copy(block: int, warps: int, pair: dict[str, torch.Tensor]) -> None:
    """One copy, whole blocks."""
    copy_kernel[(pair["x"].numel() // block,)](pair["x"], pair["y"], block, num_warps=warps, launch_pdl=True)


def main() -> None:
    """Print the large copy and the share of it at each size."""
    a, b = (torch.empty(LARGE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    large = 2 * LARGE_BYTES / events_ms(lambda: b.copy_(a)) / 1e6
    print(f"copy of {LARGE_BYTES // 2**20} MiB: {large:.0f} GB/s")
    for n in ELEMENTS:
        moved = 2 * DTYPE.itemsize * n
        sets = [
            {"x": torch.randn(n, device="cuda", dtype=DTYPE), "y": torch.empty(n, device="cuda", dtype=DTYPE)}
            for _ in range(max(2, min(16, COLD_BYTES // moved)))
        ]
        ms, tile = min((graph_ms(partial(copy, *tile), sets), tile) for tile in TILES)
        share = moved / ms / 1e6 / large
        print(f"{n // 2**20:4d} Mi elements: {1e3 * ms:7.2f} us, {share:.1%}, tile of {tile[0]} in {tile[1]} warps")
        del sets
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
