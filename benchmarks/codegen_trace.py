"""Machine code of the kernel that measures tensors, for every dtype and target, without a GPU.

    python benchmarks/codegen_trace.py [sm_90 gfx942]

Each floating dtype with the histogram of level full and without it. Exit code 1 if a kernel does not compile, spills,
uses atomics other than the histogram's sums of whole numbers, or loads floats of 16 and 32 bits in less than 16 bytes a
thread. It adds in float64, which is meant.
"""

from __future__ import annotations

import sys

import codegen_gates
import torch

from retrograd import codegen
from retrograd.runtime.triton import planned_gpu
from retrograd.trace.statistics.digest import BLOCK
from retrograd.trace.statistics.exponents import BUCKETS
from retrograd.trace.statistics.triton import kernel


def record(target: str, dtype: torch.dtype, histogram: bool) -> codegen.Launch:
    """The launch for a tensor of this dtype."""
    chosen = codegen.target_named(target)
    ints = torch.empty(1, kernel.PROGRAMS, kernel.INTS, dtype=torch.int64)
    floats = torch.empty(1, kernel.PROGRAMS, kernel.FLOATS, dtype=torch.float64)
    keys = torch.empty(BLOCK, dtype=torch.int64)
    counts = torch.empty(1, BUCKETS, dtype=torch.int64) if histogram else None
    x = torch.empty(1 << 20, dtype=dtype)
    with planned_gpu.planning(chosen), codegen.recording(target) as launches:
        kernel.measure(x, kernel.PartialResults(ints, floats, counts, keys), 0)
    return launches[0]


def main() -> int:
    names = sys.argv[1:] or list(codegen.targets())
    kinds = [
        (dtype, histogram) for dtype in kernel.DTYPES for histogram in (False, True)[: 1 + dtype.is_floating_point]
    ]
    cases = [(target, *kind) for target in names for kind in kinds]
    planned = [record(*case) for case in cases]
    wrong = []
    for (target, dtype, histogram), facts in zip(cases, codegen_gates.facts_of_all(planned, 2), strict=True):
        found = codegen_gates.faults(facts, wide=dtype.is_floating_point and dtype.itemsize < 8)
        found += [f"atomics {a}" for a in facts.atomics if not (histogram and a.startswith("add"))]
        wrong += [f"{target} {dtype}: {fault}" for fault in found if "float64" not in fault]
        print(
            target,
            dtype,
            "with histogram" * histogram,
            f"{facts.registers} registers, {facts.programs_per_sm} programs/SM, loads {facts.load_bytes}",
        )
    print(f"\n{len(cases)} kernels for {len(names)} targets: {len(wrong)} faults")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
