"""What Triton 3.9 has that the releases before have not, run without a GPU: a line of JSON a program, [name, result].

A program that this Triton cannot say is left out.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

import retrograd as rg


@triton.jit
def waiting_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    gdc_wait()
    gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i) + 1)


@triton.jit
def polling_kernel(flag_ptr, y_ptr, WANTED: tl.constexpr, TIMEOUT: tl.constexpr):
    if TIMEOUT == 0:
        there = tl.atomic_poll(flag_ptr, WANTED)
    else:
        there = tl.atomic_poll(flag_ptr, WANTED, timeout_ns=TIMEOUT)
    tl.store(y_ptr + tl.program_id(0), there.to(tl.int32))


@triton.jit
def quotient_kernel(x_ptr, d_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.fdiv(tl.load(x_ptr + i), tl.load(d_ptr + i), approx=True))


def waits() -> object:
    x, y = torch.arange(8.0), torch.zeros(8)
    waiting_kernel[(1,)](x, y, BLOCK=8)
    return torch.equal(y, x + 1)


def polls(wanted: int, timeout: int = 0, programs: int = 1) -> object:
    y = torch.full((programs,), -1, dtype=torch.int32)
    polling_kernel[(programs,)](torch.zeros(1, dtype=torch.int32), y, WANTED=wanted, TIMEOUT=timeout)
    return y.tolist()


def divides() -> object:
    huge = 2.0**127
    x = torch.tensor([1.0, 3.0, huge, -huge, float("inf"), 1.0, 0.0, 1.0])
    d = torch.tensor([3.0, 2.0, 2.0**126, huge, huge, float("inf"), 0.0, -0.0])
    y = torch.zeros(8)
    quotient_kernel[(1,)](x, d, y, BLOCK=8)
    return [str(value) for value in y.tolist()]


PROGRAMS = {
    "waits": waits,
    "found at once": lambda: polls(0),
    "in time": lambda: polls(1, 5000),
    "nobody writes": lambda: polls(1),
    "nobody writes, two programs": lambda: polls(1, programs=2),
    "in time, two programs": lambda: polls(1, 5000, programs=2),
    "divides": divides,
}


def main() -> None:
    for name, program in PROGRAMS.items():
        needed = "fdiv" if name == "divides" else "atomic_poll" if name != "waits" else "load"
        if not hasattr(tl, needed) or (needed == "fdiv" and not hasattr(tl, "atomic_poll")):
            continue
        result: object
        try:
            with rg.cpu_triton():
                result = program()
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps([name, result]) + "\n")


if __name__ == "__main__":
    main()
