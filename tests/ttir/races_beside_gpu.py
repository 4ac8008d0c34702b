"""Stage races where the op's device is a GPU, which is not there: what it decides, a line of JSON an op.

The first run, on the GPU, is left out; all that follows is as with one.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl

import retrograd as rg
from retrograd.check.op_runner import OpRunner
from retrograd.check.stages import StageContext, races

STOCK = OpRunner.run


@triton.jit
def column_sums_kernel(x_ptr, sum_ptr, cols, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    j = tl.arange(0, BLOCK)
    row = tl.load(x_ptr + tl.program_id(0) * cols + j, mask=j < cols)
    if ATOMIC:
        tl.atomic_add(sum_ptr + j, row, mask=j < cols)
    else:
        tl.store(sum_ptr + j, tl.load(sum_ptr + j, mask=j < cols) + row, mask=j < cols)


class ColumnSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, atomic):
        assert x.is_cuda
        ctx.rows, total = len(x), x.new_zeros(x.shape[1])
        column_sums_kernel[(len(x),)](x, total, x.shape[1], BLOCK=64, ATOMIC=atomic)
        return total

    @staticmethod
    def backward(ctx, dy):
        return dy.expand(ctx.rows, -1).clone(), None


def needs_gpu(x):
    raise RuntimeError("no CUDA-capable device is detected")


OPS = {
    "racy": lambda x: ColumnSums.apply(x, False),
    "atomic": lambda x: ColumnSums.apply(x, True),
    "no kernel": lambda x: x.sum(0),
    "needs a GPU": needs_gpu,
}


def run(self: OpRunner, case, **more):
    return None if self.device == "cuda" else STOCK(self, case, **more)


if __name__ == "__main__":
    OpRunner.run = run
    for name, fn in OPS.items():
        spec = rg.op(fn, lambda x: x.sum(0), dict(x=rg.tensor("M", "N")), name=name)
        context = StageContext.of(spec, "float32", device="cuda")
        outcome = races.check(context, context.base)
        kinds = sorted({finding.kind for finding in outcome.findings})
        row = [name, kinds, outcome.power_text, outcome.notes, outcome.undecided]
        sys.stdout.write(json.dumps(row) + "\n")
