"""Tiny kernels of which it is known what their machine code must say; run as a script, prints their facts as JSON."""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl

from retrograd import codegen
from retrograd.core.schema import decode, plain


@triton.jit
def copy_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols, mask=cols < N), mask=cols < N)


@triton.jit
def spill_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < N, other=0.0)
    tl.store(y_ptr + cols, x * tl.sum(x, axis=0), mask=cols < N)


@triton.jit
def f64_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float64)
    tl.store(y_ptr + cols, (x * x + 1.0).to(tl.float32), mask=cols < N)


@triton.jit
def atomic_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + cols, tl.load(x_ptr + cols, mask=cols < N), mask=cols < N, sem="relaxed")


@triton.jit
def cas_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    tl.store(x_ptr, tl.atomic_cas(y_ptr, 0, 1))


@triton.jit
def pipelined_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in tl.range(0, N, BLOCK, num_stages=3):
        total += load_block(x_ptr + start, BLOCK)
    tl.store(y_ptr + tl.arange(0, BLOCK), total)


@triton.jit
def load_block(block_ptr, BLOCK: tl.constexpr):
    return tl.load(block_ptr + tl.arange(0, BLOCK))


def probes() -> dict[str, tuple]:
    """Name -> (kernel, arguments, options)."""
    f32, bf16, i32, n = torch.float32, torch.bfloat16, torch.int32, 4096
    shifted = torch.empty(n + 1, dtype=bf16)[1:]
    return {
        "copy": (copy_kernel, (bf16, bf16, n), {"BLOCK": 2048}),
        "copy-f32": (copy_kernel, (f32, f32, n), {"BLOCK": 2048}),
        "copy-thin": (copy_kernel, (bf16, bf16, n), {"BLOCK": 512, "num_warps": 4}),
        "unaligned-pointer": (copy_kernel, (shifted, bf16, n), {"BLOCK": 2048}),
        "unaligned-size": (copy_kernel, (bf16, bf16, n + 1), {"BLOCK": 2048}),
        "spill": (spill_kernel, (f32, f32, 32768), {"BLOCK": 32768, "num_warps": 1}),
        "f64": (f64_kernel, (f32, f32, n), {"BLOCK": 1024}),
        "atomic": (atomic_kernel, (f32, f32, n), {"BLOCK": 1024}),
        "cas": (cas_kernel, (i32, i32, n), {"BLOCK": 1024}),
        "pipelined": (pipelined_kernel, (f32, f32, n), {"BLOCK": 1024}),
    }


def main() -> None:
    found = {}
    for target in codegen.targets():
        for name, (kernel, args, options) in probes().items():
            facts = codegen.cross_compile(kernel, *args, target=target, **options)
            assert decode(codegen.Facts, json.loads(json.dumps(plain(facts)))) == facts
            found[f"{target} {name}"] = plain(facts)
    with codegen.recording("sm_90") as launches:
        for _ in range(2):
            copy_kernel[(3, 2)](torch.empty(64), torch.empty(64), 64, BLOCK=64, num_warps=1)
        copy_kernel[(3, 2)](torch.empty(64), torch.empty(64), 63, BLOCK=64, num_warps=1)
    found["recorded"] = [
        {"kernel": launch.kernel, "grid": launch.grid, **plain(launch.signature)} for launch in launches
    ]
    found["distinct"] = len(codegen.distinct(launches))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
