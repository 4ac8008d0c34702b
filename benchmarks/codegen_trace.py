"""Machine code of the kernel that measures tensors, for every dtype and target, without a GPU.

    python benchmarks/codegen_trace.py [sm_90 gfx942]

Exit code 1 if a kernel does not compile, spills, uses atomics, or loads floats of 16 and 32 bits in less than 16 bytes
a thread. It adds in float64, which is meant.
"""

from __future__ import annotations

import sys

import torch

from retrograd import codegen
from retrograd.ops._triton import launch as device
from retrograd.trace.statistics.digest import BLOCK
from retrograd.trace.statistics.triton import kernel


def record(target: str, dtype: torch.dtype) -> codegen.Launch:
    """The launch for a tensor of this dtype."""
    chosen = codegen.target_named(target)
    ints = torch.empty(1, kernel.PROGRAMS, kernel.INTS, dtype=torch.int64)
    floats = torch.empty(1, kernel.PROGRAMS, kernel.FLOATS, dtype=torch.float64)
    keys = torch.empty(BLOCK, dtype=torch.int64)
    arch = chosen.arch if isinstance(chosen.arch, int) else 0
    x = torch.empty(1 << 20, dtype=dtype)
    with device.dry(chosen.num_sms, hip=not chosen.nvidia, arch=arch), codegen.recording(target) as launches:
        kernel.measure(x, ints, floats, keys, 0)
    return launches[0]


def main() -> int:
    names = sys.argv[1:] or list(codegen.targets())
    cases = [(target, dtype) for target in names for dtype in kernel.DTYPES]
    planned = [record(*case) for case in cases]
    wrong = []
    for (target, dtype), facts in zip(cases, codegen.facts_of_all(planned, 2), strict=True):
        found = codegen.faults(facts, wide=dtype.is_floating_point and dtype.itemsize < 8) + [
            f"atomics {a}" for a in facts.atomics
        ]
        wrong += [f"{target} {dtype}: {fault}" for fault in found if "float64" not in fault]
        print(
            target, dtype, f"{facts.registers} registers, {facts.programs_per_sm} programs/SM, loads {facts.load_bytes}"
        )
    print(f"\n{len(cases)} kernels for {len(names)} targets: {len(wrong)} faults")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
