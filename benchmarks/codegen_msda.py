"""Machine code of the kernels of deformable attention for every target, without a GPU.

    python benchmarks/codegen_msda.py                                  a covering set of launches, a minute cold
    python benchmarks/codegen_msda.py --full                           every mode, dtype and number of channels
    python benchmarks/codegen_msda.py --targets sm_90 --cases C32-f32 --show

The library's own launchers run on CPU tensors and nothing is executed, so what is compiled is what the launch plan
chooses. Exit code 1 if a kernel spills, loads less than 16 bytes a thread where rows are aligned, needs more shared
memory than there is, computes in float64, loops over compare-and-swap, fences its additions, adds fewer than four
numbers at once where the GPU can, or does not round a position in pixels before and after 0.5 is taken off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import codegen_gates
import torch

from retrograd import codegen
from retrograd.codegen import kernel_facts as machine
from retrograd.core.schema import decode, plain
from retrograd.ops.msda.arguments import Levels, MsdaGrads, MsdaInputs, MsdaSpec, NeededGrads
from retrograd.runtime.triton import planned_gpu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# dtypes of value and of locations and weights
DTYPES = {"f32": (F32, F32), "bf16-f32": (BF16, F32), "bf16": (BF16, BF16), "f16-f32": (F16, F32), "f16": (F16, F16)}
MODES = {"zeros": (False, False), "aligned": (False, True), "border": (True, False), "border-aligned": (True, True)}
CHANNELS = (16, 32, 64, 128)
# One value a point, or a list.
NARROW = frozenset(
    {"locations_ptr", "weights_ptr", "logits_ptr", "shapes_ptr", "order_ptr", "begins_ptr", "references_ptr"}
)
COVERING = """
C32-f32-zeros | C64-bf16-border | C16-f16-f32-aligned | C128-f32-border-aligned | C32-f32-zeros-large
"""


@dataclass(frozen=True)
class Case:
    """One call of msda_fwd, two of its fused form with what its backward adds, and several of msda_bwd."""

    channels: int
    dtypes: str
    mode: str
    large: bool = False  # more than 2^31 elements an image: offsets of 64 bits; sizes of levels in a tensor

    @property
    def label(self) -> str:
        return f"C{self.channels}-{self.dtypes}-{self.mode}{'-large' if self.large else ''}"

    @property
    def aligned(self) -> bool:
        """Whether every row starts at a multiple of 16 bytes."""
        return self.channels * DTYPES[self.dtypes][0].itemsize % 16 == 0


def parse(label: str) -> Case:
    """The case of a label."""
    found = re.fullmatch(rf"C(\d+)-({'|'.join(DTYPES)})-({'|'.join(MODES)})(-large)?", label)
    assert found is not None, label
    return Case(int(found[1]), found[2], found[3], bool(found[4]))


def covering() -> list[Case]:
    """The cases of continuous integration."""
    return [parse(word) for word in COVERING.split() if word != "|"]


def sweep() -> list[Case]:
    """Everything."""
    return [Case(*each) for each in itertools.product(CHANNELS, DTYPES, MODES)]


def launch(case: Case) -> None:
    """Call the launchers of the library as the autograd function does."""
    from retrograd.ops.msda.triton import msda_bwd, msda_fwd, sampled, sampled_bwd

    dtype, beside = DTYPES[case.dtypes]
    border, aligned = MODES[case.mode]
    sizes = ((3000, 4000), (200, 300)) if case.large else ((100, 160), (50, 80))
    levels = Levels(None, torch.tensor(sizes)) if case.large else Levels(sizes)
    heads, queries, pixels = 8, 3000, sum(h * w for h, w in sizes)

    def empty(*size: int, kind: torch.dtype = dtype) -> torch.Tensor:
        # Nothing is touched.
        return torch.empty(size, dtype=kind)

    value, out = empty(1, pixels, heads, case.channels), empty(1, queries, heads, case.channels)
    p, a = empty(1, queries, heads, 8, 2, kind=beside), empty(1, queries, heads, 8, kind=beside)
    spec = MsdaSpec((4, 4), border, aligned)
    inputs = MsdaInputs(value, levels, locations=p, weights=a)
    msda_fwd(inputs, spec)
    for last in (2, 4):
        whole = inputs._replace(references=empty(1, queries, len(sizes), last, kind=beside))
        msda_fwd(whole, spec)
        plain = sampled(whole, spec)
        grads = MsdaGrads(None, plain.locations, plain.weights)
        sampled_bwd(grads, plain.weights, whole, spec, NeededGrads(True, True, True, True))
    msda_bwd(out, inputs, spec, NeededGrads(value=False, locations=True, weights=True))
    few = MsdaInputs(value, levels, locations=p[:, :300], weights=a[:, :300])
    msda_fwd(few, spec)
    if case.large:
        return  # zeros for grad_value would be gigabytes
    msda_bwd(out, inputs, spec, NeededGrads(value=True, locations=True, weights=True))
    msda_bwd(out[:, :300], few, spec, NeededGrads(value=True, locations=True, weights=True))
    # Sorts on the host, where nothing has been computed: small.
    small = MsdaInputs(value, levels, locations=p[:, :4], weights=a[:, :4])
    spec = MsdaSpec((4, 4), border, aligned, deterministic=True)
    msda_bwd(out[:, :4], small, spec, NeededGrads(value=True, locations=False, weights=False))


def record(cases: list[Case], targets: list[str]) -> Iterator[tuple[codegen.Launch, Case]]:
    """Each distinct launch with the first case that makes it."""
    seen = set()
    for name in targets:
        target = codegen.target_named(name)
        for case in cases:
            with planned_gpu.planning(target), codegen.recording(name) as launches:
                launch(case)
            for found in launches:
                if found.identity not in seen:
                    seen.add(found.identity)
                    yield found, case


def faults(found: codegen.Launch, facts: codegen.Facts, case: Case) -> list[str]:
    """What is wrong with one kernel of a case."""
    where = f"{facts.kernel} for {facts.target}"
    adds = facts.constants.get("grad_value_ptr", "given") is not None and facts.kernel == "msda_bwd_kernel"
    # Columns of a row are read once, in the layout of the additions.
    once = {"pointers"} if adds and DTYPES[case.dtypes][0] != F32 else frozenset()
    wide = case.aligned and facts.kernel != "msda_bwd_kernel_cells"
    wrong = codegen_gates.faults(facts, narrow=NARROW | once, wide=wide)
    compiled = found.compile()
    vectors = facts.target in ("sm_90", "sm_100") and case.channels % 4 == 0
    expected = {"add.f32x4" if vectors else "add.f32"}
    if adds and case.aligned and set(facts.atomics) != expected:
        wrong.append(f"{where} has atomics {facts.atomics}, expected {expected} alone")
    if not adds and facts.atomics:
        wrong.append(f"{where} has atomics {facts.atomics}, expected none")
    if fences := re.findall(r"membar|fence|acq_rel", compiled.asm.get("ptx", "")):
        wrong.append(f"{where} orders memory: {sorted(set(fences))}")
    return wrong if case.large else wrong + [f"{where} {what}" for what in unrounded(found, compiled)]


def unrounded(found: codegen.Launch, compiled: object) -> list[str]:
    """What contracts the product and the sum of a position: x = fl(fl(p * w) - 0.5)."""
    if "points" in found.kernel:  # those of the fused form make locations, not positions
        return []
    if found.signature.constants.get("ALIGNED"):
        return []
    if found.target.nvidia:
        _, code = machine.disassembled(compiled.asm["cubin"])
        fused, apart = r"FFMA[^;]*-0\.5\b", r"FADD[^;]*-0\.5\b"
    else:
        code = compiled.asm["amdgcn"]
        fused, apart = r"v_(?:pk_)?(?:fma|fmac|mad|mac)\w*f32[^\n]*-0\.5\b", r"v_(?:pk_)?add_f32\w*[^\n]*-0\.5\b"
    if re.search(fused, code):
        return ["computes p * w - 0.5 with one rounding"]
    return [] if re.search(apart, code) else ["has no subtraction of 0.5 that was recognised"]


def table(rows: list[dict]) -> str:
    """A markdown table, one line a kernel."""
    head = "kernel | target | case | warps | registers | smem B | programs/SM | loads | stores | atomics"
    lines = [head, " | ".join("---" for _ in head.split("|"))]
    for row in rows:
        f = decode(codegen.Facts, row["facts"])
        widths = [" ".join(f"{n}x{width}B" for width, n in w.items()) for w in (f.load_bytes, f.store_bytes)]
        atomics = " ".join(f"{count}x{kind}" for kind, count in f.atomics.items())
        cells = (f.kernel, f.target, row["case"], f.num_warps, f.registers, f.shared_bytes, f.programs_per_sm)
        lines.append(" | ".join(map(str, (*cells, *widths, atomics))))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="everything, not the covering set")
    parser.add_argument("--targets", nargs="+", default=list(codegen.targets()), choices=list(codegen.targets()))
    parser.add_argument("--cases", nargs="+", help="only cases with one of these words in their label")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the facts and faults here")
    parser.add_argument("--show", action="store_true", help="print every access to memory with its source line")
    args = parser.parse_args()
    start = time.perf_counter()
    cases = sweep() if args.full else covering()
    cases = [c for c in cases if not args.cases or any(word in f"{c.label}-" for word in args.cases)]
    planned = list(record(cases, args.targets))
    facts = codegen_gates.facts_of_all([found for found, _ in planned], args.workers)
    rows = [
        {"case": case.label, "facts": plain(f), "faults": faults(found, f, case)}
        for f, (found, case) in zip(facts, planned, strict=True)
    ]
    if args.json:
        args.json.write_text(json.dumps({"cases": len(cases), "kernels": rows}, indent=1))
    print(table(rows))
    for row in rows if args.show else ():
        print(f"\n{row['case']} {row['facts']['kernel']} {row['facts']['target']}")
        for access in row["facts"]["accesses"]:
            print("  ", *(f"{key}={value}" for key, value in access.items()))
    wrong = [f"{row['case']}: {fault}" for row in rows for fault in row["faults"]]
    counts = f"{len(cases)} cases, {len(rows)} kernels for {len(args.targets)} targets"
    print(f"\n{counts}: {len(wrong)} faults, {time.perf_counter() - start:.0f} s")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
