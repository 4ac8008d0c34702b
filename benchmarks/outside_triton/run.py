"""What `verify` says of each op of liger-kernel 0.8.5 and fla-core 0.6.0, a process and a line of JSON each.

    python benchmarks/outside_triton/run.py --list
    pip install --target libs --no-deps liger-kernel==0.8.5 fla-core==0.6.0 einops
    PYTHONPATH=libs python benchmarks/outside_triton/run.py --out rows.jsonl [--library liger] [--only NAME ...]

Seconds are those after torch's imports, by the clock and of the processor, first launches included. Rows that are in
the file already are not made again. `--references` needs neither library: it runs our formulas in float64, forward and
backward, on ordinary inputs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fla_modules import FLA
from liger_attention import LIGER

import retrograd as rg
from retrograd.check.inputs import base_case, differentiable, draw
from retrograd.check.spec import OpSpec

LIBRARIES = {"liger": LIGER, "fla": FLA}
SPECS: dict[str, OpSpec] = {name: spec for library in LIBRARIES.values() for name, spec in library.specs.items()}


def chosen(args: argparse.Namespace) -> Iterator[tuple[str, OpSpec, str]]:
    """Name, spec and dtype of what is asked for."""
    for short in args.library:
        for name, spec in LIBRARIES[short].specs.items():
            if not args.only or name in args.only:
                yield from ((name, spec, dtype) for dtype in spec.dtypes if not args.dtype or dtype in args.dtype)


def verified(name: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row of an op, made in this process."""
    row: dict[str, Any] = dict(name=name, dtype=dtype, level=args.level, device=args.device, seed=args.seed)
    # Torch loads Dynamo with the first operator that a mode sees, which takes as long as an op.
    rg.verify(rg.op(torch.sin, torch.sin, dict(x=rg.tensor("N"))), level="quick")
    start, began = time.perf_counter(), time.process_time()
    try:
        report = rg.verify(SPECS[name], level=args.level, dtypes=[dtype], device=args.device, seed=args.seed)
    except Exception as error:
        return row | dict(verdict="error", error=f"{type(error).__name__}: {error}", wall_s=time.perf_counter() - start)
    findings = [dict(stage=f.stage, kind=f.kind, what=" ".join(f.what.split()), where=f.where) for f in report.findings]
    undecided = {s.id: s.reason for s in report.stages if s.status == "undecided"}
    cpu = time.process_time() - began
    return row | dict(verdict=report.verdict, seconds=report.seconds, wall_s=time.perf_counter() - start, cpu_s=cpu,
                      findings=findings, undecided=undecided, notes=report.notes)  # fmt: skip


def in_a_process(name: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row of an op, made in a process of its own that is ended at the limit."""
    words = [sys.executable, __file__, "--one", "--only", name, "--dtype", dtype, "--level", args.level]
    words += ["--device", args.device, "--seed", str(args.seed)]
    row = dict(name=name, dtype=dtype, level=args.level, device=args.device, seed=args.seed)
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return row | dict(verdict="error", error=f"not done after {args.timeout} s")
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return row | dict(verdict="error", error=f"exit code {done.returncode}: {done.stderr[-1000:]}")
    return json.loads(lines[-1])


def reference_errors(name: str) -> str:
    """What is wrong with a reference in float64: an error, or an input without a gradient. Empty if nothing is."""
    spec = SPECS[name]
    try:
        case = base_case(spec, "float64")
        inputs = draw(spec, case, 0)
        asked = [inputs[key].requires_grad_() for key in differentiable(spec, inputs)]
        params = {key: values[0] for key, values in spec.params.items()}
        assert spec.reference
        result = spec.reference(*inputs.values(), **params)
        outputs = [y for y in (result if isinstance(result, tuple) else (result,)) if y.requires_grad]
        grads = torch.autograd.grad(outputs, asked, [torch.ones_like(y) for y in outputs], allow_unused=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no gradient for an input" if any(g is None for g in grads) else ""


def summary(rows: list[dict[str, Any]]) -> str:
    """Verdicts counted, and the seconds of the median and the slowest: by the clock, and of the processor."""
    counts = {v: sum(r["verdict"] == v for r in rows) for v in ("proved", "finding", "undecided", "error")}
    seconds, cpu = (sorted(r[key] for r in rows if key in r) or [0.0] for key in ("seconds", "cpu_s"))
    words = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    times = "; ".join(f"median {s[len(s) // 2]:.2f} s, slowest {s[-1]:.2f} s" for s in (seconds, cpu))
    return f"{len(rows)} rows: {words}; {times} of the processor"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="names and dtypes")
    parser.add_argument("--references", action="store_true", help="only our formulas, in float64")
    parser.add_argument("--library", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--dtype", nargs="+", default=[])
    parser.add_argument("--level", default="quick", choices=["quick", "full"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120, help="seconds a process may take")
    parser.add_argument("--out", type=Path, default=Path("outside_triton.jsonl"))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.only) - SPECS.keys():
        parser.error(f"--only names no op: {sorted(unknown)}")
    targets = list(chosen(args))
    if args.list:
        for name, spec in SPECS.items():
            print(f"{name:45} {', '.join(spec.dtypes)}")
        return 0
    if args.references:
        errors = {name: text for name in dict.fromkeys(t[0] for t in targets) if (text := reference_errors(name))}
        print(*(f"{name}: {text}" for name, text in errors.items()), sep="\n", end="\n" * bool(errors))
        return int(bool(errors))
    if args.one:
        print(json.dumps(verified(targets[0][0], targets[0][2], args), default=str))
        return 0
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    key = ("name", "dtype", "level", "device", "seed")
    present = {tuple(row[k] for k in key) for row in rows}
    for name, _, dtype in targets:
        if (name, dtype, args.level, args.device, args.seed) in present:
            continue
        rows.append(in_a_process(name, dtype, args))
        with args.out.open("a") as file:
            file.write(json.dumps(rows[-1], default=str) + "\n")
        row = rows[-1]
        times = f"{row.get('seconds', 0):6.2f} s {row.get('cpu_s', 0):6.2f} s"
        print(f"{name:45} {dtype:9} {row['verdict']:9} {times}", flush=True)
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
