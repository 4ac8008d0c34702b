"""Kernels over 2^22 elements without a GPU: how much memory executing them takes.

python tests/ttir/memory_use.py    # a line of JSON a kernel: bytes at the largest moment, those of the tensors included
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from typing import Any

import torch
import triton
import triton.language as tl

from retrograd import cpu_triton

ELEMENTS = 1 << 22


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask) + tl.load(y_ptr + i, mask), mask)


@triton.jit
def in_place_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, i < n) * 2.0, i < n)


@triton.jit
def atomic_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + i, tl.load(x_ptr + i, i < n), i < n)


@triton.jit
def last_adds_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i) + 1.0)
    if tl.atomic_add(out_ptr, 1.0) == tl.num_programs(0):
        tl.store(out_ptr + 1, tl.sum(tl.load(y_ptr + tl.arange(0, BLOCK))))


# With the number of orders in which each is run. The last is run in turns, and its tensors are one storage.
KERNELS = (
    (add_kernel, 1024, 1), (add_kernel, 1 << 20, 2), (in_place_kernel, 1024, 1), (atomic_kernel, 1024, 2),
    (last_adds_kernel, 1 << 14, 1),
)  # fmt: skip


def main() -> None:
    for kernel, block, orders in KERNELS:
        tensors = torch.ones(3, ELEMENTS)
        with cpu_triton(orders=orders) as session:
            tracemalloc.start()
            launch: Any = kernel[(triton.cdiv(ELEMENTS, block),)]
            launch(*tensors, ELEMENTS, BLOCK=block)
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        total = tensors[2, 1].item() if kernel is last_adds_kernel else 0.0
        faults = [fault.text() for fault in session.faults if fault.kind != "order"]
        row = {"kernel": kernel.__name__, "block": block, "most": most + tensors.nbytes, "faults": faults}
        sys.stdout.write(json.dumps(row | {"total": total, "in_turns": session.launches[-1].in_turns}) + "\n")


if __name__ == "__main__":
    main()
