"""Ops whose kernels race, and their healthy neighbours, verified without a GPU in a process of their own.

python tests/ttir/verified_ops.py    # a line of JSON an op
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl

import retrograd as rg


@triton.jit
def scale_backward_kernel(x_ptr, w_ptr, dy_ptr, dx_ptr, dw_ptr, N, HOW: tl.constexpr, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < N
    dy = tl.load(dy_ptr + row * N + cols, mask, other=0.0)
    tl.store(dx_ptr + row * N + cols, dy * tl.load(w_ptr + cols, mask, other=0.0), mask)
    dw = dy * tl.load(x_ptr + row * N + cols, mask, other=0.0)
    if HOW == "atomic":
        tl.atomic_add(dw_ptr + cols, dw, mask)
    elif HOW == "store":
        tl.store(dw_ptr + cols, tl.load(dw_ptr + cols, mask, other=0.0) + dw, mask)
    else:
        tl.store(dw_ptr + row * N + cols, dw, mask)


def scale(how: str) -> Any:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            x, w = (t.contiguous() for t in ctx.saved_tensors)
            rows = len(x) if how == "partial" else 1
            dx, dw = torch.empty_like(x), torch.zeros(rows, len(w), dtype=w.dtype, device=w.device)
            if x.numel():
                block = triton.next_power_of_2(len(w))
                scale_backward_kernel[(len(x),)](x, w, dy.contiguous(), dx, dw, len(w), HOW=how, BLOCK=block)
            return dx, dw.sum(0)

    return Scale.apply


INPUTS = dict(x=rg.tensor("M", "N"), w=rg.tensor("N"))
OPS = {how: rg.op(scale(how), lambda x, w: x * w, INPUTS, name=how) for how in ("store", "atomic", "partial")}


def main() -> None:
    for name, spec in OPS.items():
        report = rg.verify(spec, level="quick", dtypes=["float32"])
        findings = [[finding.stage, finding.kind, finding.what] for finding in report.findings]
        races = next(stage for stage in report.stages if stage.id == "races")
        row = {"name": name, "verdict": report.verdict, "findings": findings, "power": races.power_text}
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
