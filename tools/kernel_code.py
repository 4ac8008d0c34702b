"""Machine code of the shipped kernels before and after a change, without a GPU: one hash a kernel and architecture.

    python tools/kernel_code.py -o before.json           a covering set of launches, about 5 minutes on a cold core
    python tools/kernel_code.py --compare before.json    names the kernels that differ; exit code 1 if any does
    python tools/kernel_code.py --compare before.json --only norm --targets sm_90

The library's own launchers run on CPU tensors as in `benchmarks/codegen_*.py`, which hold the cases; nothing is
executed. What is hashed are the instructions alone (sections `.text` of the binary), in which neither paths nor line
numbers nor names of symbols occur, so that moving and renaming a kernel leaves its hash as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402

from retrograd import codegen  # noqa: E402
from retrograd.ops.msda.cuda import launch as msda_cuda  # noqa: E402
from retrograd.ops.msda.cuda import plan as msda_plan  # noqa: E402
from retrograd.ops.norm.cuda import backward, forward  # noqa: E402
from retrograd.ops.norm.cuda.inputs import HEADER  # noqa: E402
from retrograd.ops.norm.plan import plan_clusters  # noqa: E402
from retrograd.runtime.cuda import nvrtc  # noqa: E402

F32, BF16 = torch.float32, torch.bfloat16
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
CUDA_TARGETS = ("sm_90", "sm_100")  # what the CUDA C++ of the norms and of deformable attention is written for
# Tiles, walks over long rows, slices, sums of parts, few rows; weights, residual, atomics, heads, float32.
NORM_CASES = (
    *("77-ln-bf16", "128-ln-bf16-heads", "1024-add-bf16-stream32", "4096-rms-bf16", "4096-rms-bf16-unaligned"),
    *("5120-rms-bf16-atomic", "8192-ln-add-f32", "16384-ln-add-bf16", "33333-rms-bf16", "65536-rms-bf16"),
    "4096-ln-bf16-small",
    "4096-rms-bf16-float8",
)
MSDA_CASES = ("C32-f32-zeros", "C64-bf16-border", "C32-f32-zeros-large")
RANK_SUM_CASES = ("W8-N1048576-bfloat16-float32-divide-watched", "W3-N1001-float32-float32-divide-watched")
TRACE_CASES = ((F32, False), (BF16, True), (torch.int64, False))
# (x, residual, weight, bias, y, s), centered, columns
WIDE_FORWARD = {
    "rms": ((BF16, None, BF16, None, BF16, BF16), False, 32768),
    "ln": ((BF16, None, BF16, BF16, BF16, BF16), True, 65536),
    "ln-residual": ((BF16, BF16, BF16, BF16, BF16, BF16), True, 131072),
    "rms-f32": ((F32, None, F32, None, F32, F32), False, 50000),
}
# (s, grad_out, weight, grad), centered, columns
WIDE_BACKWARD = {
    "rms": ((BF16, BF16, BF16, BF16), False, 65536),
    "ln": ((BF16, BF16, BF16, BF16), True, 131072),
    "ln-f32": ((F32, F32, F32, F32), True, 16384),
}
MSDA_SIZES = msda_plan.Sizes(2, 17821, 17821, 8, 32, (4, 4, 4, 4), 4)


def triton_launches(targets: list[str]) -> Iterator[tuple[str, codegen.Launch]]:
    """(name, launch) of the Triton kernels."""
    import codegen_msda
    import codegen_norm
    import codegen_rank_sum
    import codegen_trace

    norm = [codegen_norm.Case(int(n), name) for n, _, name in (case.partition("-") for case in NORM_CASES)]
    for launch, case in codegen_norm.record(norm, targets):
        yield f"norm/{case.label}/{launch.target.name}/{launch.kernel}", launch
    msda = [codegen_msda.parse(case) for case in MSDA_CASES]
    for launch, case in codegen_msda.record(msda, targets):
        yield f"msda/{case.label}/{launch.target.name}/{launch.kernel}", launch
    for launch, case in codegen_rank_sum.record(targets):
        if case.label in RANK_SUM_CASES:
            yield f"rank_sum/{case.label}/{launch.target.name}/{launch.kernel}", launch
    for target in targets:
        for dtype, histogram in TRACE_CASES:
            launch = codegen_trace.record(target, dtype, histogram)
            yield f"trace/{dtype}{'-histogram' * histogram}/{target}/{launch.kernel}", launch


def cuda_sources(targets: list[str]) -> Iterator[tuple[str, Path, tuple[str, ...], tuple[Path, ...]]]:
    """(name, source, options, headers) of the CUDA C++ kernels."""
    for target in (target for target in targets if target in CUDA_TARGETS):
        arch = f"--gpu-architecture={target}"
        for name, (dtypes, centered, n) in WIDE_FORWARD.items():
            kind = forward.ForwardKind(*dtypes, centered=centered, own_s=dtypes[1] is not None)
            plan = forward.plan_wide(n, kind, int(target.removeprefix("sm_")))
            options = forward.options_of(n, kind, plan)
            yield f"norm/N{n}-{name}/{target}/wide_forward", forward.SOURCE, (arch, *options), (HEADER,)
        for name, (dtypes, centered, n) in WIDE_BACKWARD.items():
            kind = backward.BackwardKind(*dtypes, centered, True, centered, True)
            plan = plan_clusters(n, max(dtype.itemsize for dtype in dtypes))
            assert plan is not None, (name, n)
            options = backward.options_of(n, kind, plan)
            yield f"norm/N{n}-{name}/{target}/wide_backward", backward.SOURCE, (arch, *options), (HEADER,)
        for name, threads_blocks in (msda_cuda._THREADS | {"fill": (32 * len(MSDA_SIZES.points), 1)}).items():
            kernel, adds = ("backward", True) if name == "add" else (name, False)
            lanes = MSDA_SIZES.lanes(adds or name in msda_plan.SUMMING)
            macros = dict(
                VALUE_TYPE=0, POINT_TYPE=0, HEADS=MSDA_SIZES.heads, CHANNELS=MSDA_SIZES.channels,
                LEVELS=len(MSDA_SIZES.points), POINTS=",".join(map(str, MSDA_SIZES.points)), BORDER=0, ALIGNED=0,
                DOTS=1, ADD=int(adds), LANE_ELEMENTS=MSDA_SIZES.channels // lanes,
            )  # fmt: skip
            options = msda_cuda.options_of(target, tuple(macros.items()), *threads_blocks)
            source = msda_cuda.HEADERS[0].with_name(f"{kernel}.cu")
            yield f"msda/encoder-f32/{target}/cuda {name}", source, options, msda_cuda.HEADERS


def instructions(binary: bytes) -> str:
    """Hash of the sections of instructions of a 64-bit little-endian ELF file, as cubin and hsaco are."""
    assert binary[:6] == b"\x7fELF\x02\x01", "expected a 64-bit little-endian ELF file"
    (table,) = struct.unpack_from("<Q", binary, 40)
    size, count, names_index = struct.unpack_from("<HHH", binary, 58)
    # name, type, flags, address, offset, size
    sections = [struct.unpack_from("<IIQQQQ", binary, table + size * i) for i in range(count)]
    names = sections[names_index][4]
    texts = []
    for name, _, _, _, offset, length in sections:
        start = names + name
        if binary[start : binary.index(b"\0", start)].startswith(b".text"):
            texts.append(binary[offset : offset + length])
    assert any(texts), "a binary without instructions"
    return hashlib.sha256(b"\0".join(sorted(texts))).hexdigest()[:20]


def hashes(targets: list[str], only: str) -> dict[str, str]:
    """The hash of every kernel by its name; several launches of one name are numbered."""
    result: dict[str, str] = {}

    def add(name: str, binary: bytes) -> None:
        number = sum(key.rpartition("#")[0] == name for key in result)
        result[f"{name}#{number}"] = instructions(binary)

    for name, launch in triton_launches(targets):
        if only in name:
            compiled = launch.compile()
            add(name, compiled.asm["cubin" if launch.target.nvidia else "hsaco"])
    for name, source, options, headers in cuda_sources(targets) if nvrtc.is_there() else ():
        if only in name:
            add(name, nvrtc.compile_cubin(source, options, headers))
    return result


def versions() -> dict[str, str]:
    """Of the compilers: their machine code differs."""
    import triton

    cuda = ".".join(map(str, nvrtc.version())) if nvrtc.is_there() else "none"
    return {"triton": triton.__version__, "nvrtc": cuda}


def differences(before: dict[str, str], after: dict[str, str]) -> tuple[list[str], int]:
    """Names of launches whose instructions differ, with what became of them, and how many are only named otherwise."""
    gone = [name for name in before if after.get(name) != before[name]]
    new = {name for name in after if before.get(name) != after[name]}
    told, renamed = [], 0
    for name in gone:
        # One launch of the same case on the same architecture with the same instructions stands for one that is gone.
        case = name.rpartition("/")[0]
        same = min((n for n in new if n.rpartition("/")[0] == case and after[n] == before[name]), default=None)
        if same is None:
            told.append(f"{name}: {'not launched any more' if name not in after else 'other instructions'}")
        else:
            new.remove(same)
            renamed += 1
    return [*told, *(f"{name}: new" for name in sorted(new - before.keys()))], renamed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="write the hashes here")
    parser.add_argument("--compare", type=Path, metavar="BEFORE", help="hashes of the tree before the change")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--only", default="", help="kernels with this in their name, as 'norm/' or '/sm_90/'")
    args = parser.parse_args()
    after = hashes(args.targets, args.only)
    if args.output:
        args.output.write_text(json.dumps({"versions": versions(), "kernels": after}, indent=1) + "\n")
    if not args.compare:
        print(f"{len(after)} kernels")
        return 0
    before = json.loads(args.compare.read_text())
    if before["versions"] != versions():
        print(f"other compilers: {before['versions']} before, {versions()} now", file=sys.stderr)
        return 2
    wanted = {n: h for n, h in before["kernels"].items() if args.only in n and n.split("/")[2] in args.targets}
    told, renamed = differences(wanted, after)
    for line in told:
        print(line)
    changed = sum(not line.endswith(": new") for line in told)
    print(f"{len(wanted)} kernels compared, {changed} differ; {renamed} with the same instructions have another name")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
