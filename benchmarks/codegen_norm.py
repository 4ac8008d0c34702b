"""Machine code of the norm kernels for every target, without a GPU: registers, spills, shared memory, load widths.

    python benchmarks/codegen_norm.py                                  a covering set of launches, about 3 minutes cold
    python benchmarks/codegen_norm.py --full                           every width with every profile, an hour cold
    python benchmarks/codegen_norm.py --targets sm_90 --cases 16384 --show

The library's own launchers run on CPU tensors and nothing is executed, so what is compiled is what the launch plan
chooses. Exit code 1 if a kernel spills, loads less than 16 bytes a thread where memory is aligned, needs more shared
memory than there is, computes in float64 or loops over compare-and-swap.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import codegen_gates
import torch
import triton

from retrograd import codegen
from retrograd.core.schema import decode, plain
from retrograd.ops.norm.spec import NormSpec
from retrograd.runtime.triton import planned_gpu
from retrograd.runtime.triton.gpu import Backend

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Profile:
    """What is asked of the launchers besides the width."""

    x: torch.dtype = BF16
    weight: torch.dtype | None = BF16
    bias: bool = False
    residual: torch.dtype | None = None
    s: torch.dtype | None = None  # dtype of the residual stream; None: that of x
    grad_s: bool = False
    centered: bool = False
    deterministic: bool = True
    backward: bool = True
    need_x: bool = True
    need_vectors: bool = True
    into: bool = False
    heads: int = 1
    parts: int | None = None
    offset: int = 0  # elements by which x and grad_out start after an aligned address
    bytes: int = 1 << 27  # about how large x is; nothing is touched
    float8: bool = False  # y, with a scale a row; on GPUs that have it


PROFILES = {
    "rms-bf16": Profile(),
    "rms-f16-no-weight": Profile(x=F16, weight=None, need_vectors=False),
    "rms-f32": Profile(x=F32, weight=F32),
    "rms-bf16-frozen": Profile(need_vectors=False),
    "rms-bf16-vectors-only": Profile(bias=True, need_x=False),
    "rms-bf16-atomic": Profile(bias=True, deterministic=False),
    "rms-f16-w32-main-grad": Profile(x=F16, weight=F32, into=True),
    "rms-bf16-heads": Profile(heads=8),
    "rms-bf16-inference": Profile(backward=False),
    "rms-bf16-unaligned": Profile(offset=1),
    "rms-bf16-3gib": Profile(bytes=3 << 30),
    "rms-bf16-small": Profile(bytes=4 << 20),
    "ln-bf16-small": Profile(bias=True, centered=True, bytes=4 << 20),
    "ln-add-bf16-small": Profile(bias=True, residual=BF16, grad_s=True, centered=True, bytes=4 << 20),
    "add-bf16": Profile(residual=BF16, grad_s=True),
    "add-bf16-stream32": Profile(weight=F32, residual=F32, s=F32, grad_s=True),
    "ln-bf16": Profile(bias=True, centered=True),
    "ln-f32": Profile(x=F32, weight=F32, bias=True, centered=True),
    "ln-add-bf16": Profile(bias=True, residual=BF16, grad_s=True, centered=True),
    "ln-add-f32": Profile(x=F32, weight=F32, bias=True, residual=F32, grad_s=True, centered=True),
    "ln-add-bf16-parts": Profile(bias=True, residual=BF16, grad_s=True, centered=True, parts=64),
    "ln-bf16-heads": Profile(bias=True, centered=True, heads=16),
    "rms-bf16-float8": Profile(float8=True),
    "ln-add-bf16-float8": Profile(bias=True, residual=BF16, centered=True, float8=True),
}

# Powers of two; multiples of 16 that are not; multiples of 8 (100: of 4) alone; odd.
WIDTHS = [2**k for k in range(19)]
WIDTHS += [80, 768, 1536, 2880, 5120, 12288, 20480, 28672, 50000, 100000, 200000, 261120]
WIDTHS += [100, 200, 1000, 4104, 18440, 50008]
WIDTHS += [3, 77, 127, 1001, 4097, 9999, 33333, 70001, 262143]

# Every profile, every kernel and both sides of every width at which the plan changes its kind; heavy profiles where
# registers are scarce.
COVERING = """
1 ln-f32 | 77 ln-bf16 | 64 ln-add-f32 | 100 rms-f32 | 128 ln-bf16-heads | 256 ln-add-bf16
512 rms-f16-w32-main-grad | 1000 ln-bf16 | 1024 add-bf16-stream32 | 2880 rms-bf16-frozen
2048 add-bf16 | 4096 rms-bf16 | 4096 rms-bf16-3gib | 4096 rms-bf16-unaligned | 4104 rms-bf16 | 5120 rms-bf16-atomic
8192 ln-add-f32 | 12288 rms-f16-no-weight | 16384 ln-add-bf16 | 16384 rms-f32
20480 ln-add-bf16-parts | 28672 rms-bf16-inference | 32768 ln-add-bf16 | 33333 rms-bf16 | 50008 rms-bf16
65536 ln-add-f32 | 65536 rms-bf16-heads | 100000 add-bf16-stream32 | 131072 rms-bf16-vectors-only | 262144 ln-add-bf16
256 ln-bf16-small | 512 ln-add-bf16 | 1024 ln-add-bf16-small | 2048 ln-bf16 | 4096 ln-add-bf16 | 4096 rms-bf16-small
256 rms-f32 | 512 ln-bf16 | 1024 ln-f32 | 2048 ln-add-f32 | 4096 ln-f32 | 8192 rms-bf16 | 8192 ln-add-bf16
16384 ln-bf16 | 16384 add-bf16 | 16384 ln-add-f32 | 65536 rms-bf16 | 65536 add-bf16 | 65536 ln-bf16 | 131072 rms-f32
1024 rms-bf16-float8 | 5120 rms-bf16-float8 | 8192 rms-bf16-float8 | 16384 ln-add-bf16-float8
"""

# Loads of one value a row, of the words that programs exchange, of one value a column of a 64-column block.
NARROW = frozenset({"rstd_ptr", "mean_ptr", "word_ptrs", "out_ptrs"})
# Bytes a thread that a release of Triton spills where the one that plans are tuned with does not: release, case, GPU.
KNOWN_SPILLS = {
    ("3.9", "N100000-add-bf16-stream32", "sm_80"): 8,
    ("3.9", "N77-ln-bf16", "sm_90"): 24,
    ("3.9", "N77-ln-bf16", "sm_100"): 24,
}
VECTORS = ("weight_ptr", "bias_ptr")


@dataclass(frozen=True)
class Case:
    """One call of norm_fwd and norm_bwd."""

    n: int
    name: str

    @property
    def profile(self) -> Profile:
        return PROFILES[self.name]

    @property
    def label(self) -> str:
        return f"N{self.n}-{self.name}"

    @property
    def aligned(self) -> bool:
        """Whether every row of every tensor starts at a multiple of 16 bytes."""
        dtypes = (self.profile.x, self.profile.weight, self.profile.residual, self.profile.s)
        return not self.profile.offset and all(self.n * d.itemsize % 16 == 0 for d in dtypes if d is not None)


def covering() -> list[Case]:
    """The cases of continuous integration."""
    words = [entry.split() for line in COVERING.strip().splitlines() for entry in line.split("|")]
    return [Case(int(n), name) for n, name in words]


def sweep() -> list[Case]:
    """Every width with every profile."""
    return [Case(n, name) for n in WIDTHS for name in PROFILES]


def launch(case: Case) -> None:
    """Call the launchers of the library as their autograd function does."""
    from retrograd.ops.norm.arguments import BackwardTensors, NormTensors, WantedGrads, WantedOutput
    from retrograd.ops.norm.triton import norm_bwd, norm_fwd
    from retrograd.ops.norm.triton.float8 import norm_fwd_float8

    p, n = case.profile, case.n
    rows = p.heads * max(1, min(4096, p.bytes // (n * p.x.itemsize * p.heads)))
    if p.bytes > 1 << 31:
        rows = p.bytes // (n * p.x.itemsize)

    def matrix(dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        return torch.empty(rows * n + offset, dtype=dtype)[offset:].view(rows, n)

    def vector(dtype: torch.dtype | None) -> torch.Tensor | None:
        return None if dtype is None else torch.empty((p.heads, n) if p.heads > 1 else n, dtype=dtype)

    spec = NormSpec(p.centered, 1e-5, 0.0, p.deterministic, p.parts)
    s_dtype = p.s or p.x
    weight, bias = vector(p.weight), vector(p.weight if p.bias else None)
    residual = None if p.residual is None else matrix(p.residual)
    tensors = NormTensors(x=matrix(p.x, p.offset), weight=weight, bias=bias, residual=residual)
    if p.float8:
        gpu = planned_gpu.planned()
        if gpu is None or gpu.backend is not Backend.CUDA or gpu.arch >= 89:
            norm_fwd_float8(tensors, None, spec, WantedOutput(torch.float8_e4m3fn, s_dtype))
        return
    norm_fwd(tensors, spec, WantedOutput(out_dtype=p.x, s_dtype=s_dtype, store_stats=p.backward, store_s=p.backward))
    if not p.backward:
        return
    rstd = torch.empty(rows, dtype=F32)
    vector_dtype = p.weight if p.need_vectors else None
    saved = BackwardTensors(
        grad_out=matrix(p.x, p.offset),
        s=matrix(s_dtype, p.offset),
        weight=weight,
        mean=torch.empty_like(rstd) if p.centered else None,
        rstd=rstd,
        grad_s=matrix(s_dtype) if p.grad_s else None,
    )
    wanted = WantedGrads(
        x=p.x if p.need_x else None,
        weight=vector_dtype,
        bias=vector_dtype if p.bias else None,
        residual=p.residual if p.need_x else None,
        heads=p.heads,
        into_weight=vector(F32) if p.into else None,
    )
    norm_bwd(saved, spec, wanted)


def record(cases: list[Case], targets: list[str]) -> Iterator[tuple[codegen.Launch, Case]]:
    """Each distinct launch with the first case that makes it; one that must load wide goes before one that need not."""
    seen = set()
    for name in targets:
        target = codegen.target_named(name)
        for case in sorted(cases, key=lambda case: not case.aligned):
            with planned_gpu.planning(target), codegen.recording(name) as launches:
                launch(case)
            for found in launches:
                if found.identity not in seen:
                    seen.add(found.identity)
                    yield found, case


def faults(facts: codegen.Facts, case: Case) -> list[str]:
    """What is wrong with one kernel of a case."""
    threads = facts.num_warps * codegen.target_named(facts.target).warp_size
    per_thread = facts.constants["BLOCK_N"] // threads
    # A vector that has less than 16 bytes for each thread of a program; tiles of whole rows always have more.
    thin = {v for v in VECTORS if per_thread * int(facts.arguments.get(v, "*fp32")[-2:]) // 8 < codegen_gates.WIDE}
    known = KNOWN_SPILLS.get((triton.__version__.rpartition(".")[0], case.label, facts.target), 0)
    wrong = codegen_gates.faults(facts, narrow=NARROW | thin, wide=case.aligned)
    return [fault for fault in wrong if not 0 < facts.spill_bytes <= known or " spills " not in fault]


def table(rows: list[dict]) -> str:
    """A markdown table, one line a kernel."""
    head = "kernel | target | case | warps | registers | spills B | smem B | programs/SM | loads | stores | atomics"
    lines = [head, " | ".join("---" for _ in head.split("|"))]
    for row in rows:
        f = decode(codegen.Facts, row["facts"])
        widths = [" ".join(f"{n}x{width}B" for width, n in w.items()) for w in (f.load_bytes, f.store_bytes)]
        cells = (f.kernel, f.target, row["case"], f.num_warps, f.registers, f.spill_bytes or "", f.shared_bytes)
        atomics = " ".join(f"{count}x{kind}" for kind, count in f.atomics.items())
        lines.append(" | ".join(map(str, (*cells, f.programs_per_sm, *widths, atomics))))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every width with every profile, not the covering set")
    parser.add_argument("--targets", nargs="+", default=list(codegen.targets()), choices=list(codegen.targets()))
    parser.add_argument("--cases", nargs="+", help="only cases with one of these words in N<width>-<profile>")
    parser.add_argument("--kernels", nargs="+", help="only kernels with one of these words in their name")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the facts and faults here")
    parser.add_argument("--show", action="store_true", help="print every access to memory with its source line")
    args = parser.parse_args()
    start = time.perf_counter()
    cases = sweep() if args.full or args.cases else covering()
    cases = [c for c in cases if not args.cases or any(word in f"{c.label}-" for word in args.cases)]
    planned = list(record(cases, args.targets))
    planned = [p for p in planned if not args.kernels or any(word in p[0].kernel for word in args.kernels)]
    print(f"{len(cases)} cases, {len(planned)} kernels for {', '.join(args.targets)}", file=sys.stderr)
    facts = codegen_gates.facts_of_all([found for found, _ in planned], args.workers)
    rows = [
        {"case": case.label, "aligned": case.aligned, "facts": plain(f), "faults": faults(f, case)}
        for f, (_, case) in zip(facts, planned, strict=True)
    ]
    if args.json:
        args.json.write_text(json.dumps({"cases": len(cases), "kernels": rows}, indent=1))
    print(table(rows))
    for row in rows:
        if args.show:
            print(f"\n{row['case']} {row['facts']['kernel']} {row['facts']['target']}")
            for access in row["facts"]["accesses"]:
                print("  ", *(f"{key}={value}" for key, value in access.items()))
    wrong = [f"{row['case']}: {fault}" for row in rows for fault in row["faults"]]
    seconds = time.perf_counter() - start
    counts = f"{len(cases)} cases, {len(rows)} kernels for {len(args.targets)} targets"
    print(f"\n{counts}: {len(wrong)} faults, {seconds:.0f} s")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
