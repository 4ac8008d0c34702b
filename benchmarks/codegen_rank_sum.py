"""Machine code of the ordered sum over ranks for every target, without a GPU.

    python benchmarks/codegen_rank_sum.py                          a covering set of launches, seconds
    python benchmarks/codegen_rank_sum.py --targets sm_90 --show

The library's own launcher runs on CPU tensors and nothing is executed. Exit code 1 if a kernel spills, loads less than
16 bytes a thread where rows are aligned, computes in float64, uses atomics, contracts, flushes subnormal numbers or
divides otherwise than IEEE: then a GPU would not have the bits of the loop.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import codegen_gates
import torch

from retrograd import codegen
from retrograd.core.schema import plain
from retrograd.runtime.triton import planned_gpu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One launch: ranks, elements a rank, dtypes, what is done to the sum, whether rows are watched for NaN."""

    ranks: int
    count: int
    given: torch.dtype
    out: torch.dtype
    mode: str
    flags: bool

    @property
    def label(self) -> str:
        watched = "-watched" if self.flags else ""
        return f"W{self.ranks}-N{self.count}-{self.given}-{self.out}-{self.mode}{watched}".replace("torch.", "")

    @property
    def aligned(self) -> bool:
        """Whether every row starts at a multiple of 16 bytes."""
        return self.count * self.given.itemsize % 16 == 0


CASES = [
    Case(2, 1 << 20, F32, F32, "divide", False),
    Case(4, 1 << 20, F32, F32, "none", True),
    Case(8, 1 << 20, BF16, F32, "divide", True),
    Case(8, 1 << 20, BF16, BF16, "multiply", False),
    Case(6, 1 << 20, F32, F32, "divide", True),
    Case(6, 1 << 20, BF16, F32, "divide", False),
    Case(64, 1 << 20, BF16, F32, "divide", True),
    Case(4, 1 << 20, F16, F16, "none", True),
    Case(8, 8 * 1001, BF16, F32, "divide", False),
    Case(3, 1001, F32, F32, "divide", True),
    Case(3, 1001, BF16, BF16, "divide", False),
]


def launch(case: Case) -> None:
    """Call the launcher of the library."""
    from retrograd.fsdp.rank_sum.kernel import rank_sum_triton

    received = torch.empty(case.ranks, case.count, dtype=case.given)
    flags = torch.empty(case.ranks, dtype=torch.int32) if case.flags else None
    rank_sum_triton(received, torch.empty(case.count, dtype=case.out), case.mode, 3.0, flags)


def record(targets: list[str]) -> Iterator[tuple[codegen.Launch, Case]]:
    """The launch of every case on every target."""
    for name in targets:
        target = codegen.target_named(name)
        for case in CASES:
            with planned_gpu.planning(target), codegen.recording(name) as launches:
                launch(case)
            yield launches[0], case


def faults(found: codegen.Launch, facts: codegen.Facts, case: Case) -> list[str]:
    """What is wrong with one kernel of a case."""
    where = f"{facts.kernel} for {facts.target}"
    wrong = codegen_gates.faults(facts, wide=case.aligned)
    if facts.atomics:
        wrong.append(f"{where} has atomics {facts.atomics}")
    if not found.target.nvidia:
        return wrong
    ptx = found.compile().asm["ptx"]
    # Packed additions (add.f32x2) and those that widen an operand (add.rn.f32.bf16) round as IEEE's do.
    if bad := sorted(set(re.findall(r"\b(?:fma\.[\w.]*f32\w*|\w+[\w.]*\.(?:ftz|approx|full)\b[\w.]*)", ptx))):
        wrong.append(f"{where} computes with {bad}, expected additions, IEEE division and products alone")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(codegen.targets()), choices=list(codegen.targets()))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the facts and faults here")
    parser.add_argument("--show", action="store_true", help="print every access to memory with its source line")
    args = parser.parse_args()
    planned = list(record(args.targets))
    facts = codegen_gates.facts_of_all([found for found, _ in planned], args.workers)
    rows = [
        {"case": case.label, "aligned": case.aligned, "facts": plain(f), "faults": faults(found, f, case)}
        for f, (found, case) in zip(facts, planned, strict=True)
    ]
    if args.json:
        args.json.write_text(json.dumps({"cases": len(CASES), "kernels": rows}, indent=1))
    print("| target | case | registers | programs/SM | loads | stores |\n| --- | --- | --- | --- | --- | --- |")
    for row, f in zip(rows, facts, strict=True):
        widths = [" ".join(f"{n}x{width}B" for width, n in w.items()) for w in (f.load_bytes, f.store_bytes)]
        cells = (f.target, row["case"], f.registers, f.programs_per_sm, *widths)
        print("|", " | ".join(map(str, cells)), "|")
        for access in row["facts"]["accesses"] if args.show else ():
            print("  ", *(f"{key}={value}" for key, value in access.items()))
    wrong = [f"{row['case']}: {fault}" for row in rows for fault in row["faults"]]
    print(f"\n{len(CASES)} cases, {len(rows)} kernels for {len(args.targets)} targets: {len(wrong)} faults")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
