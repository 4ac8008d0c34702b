"""TTIR executed on a CPU beside a GPU: the results of the same kernels, tensor by tensor.

    python benchmarks/ttir_gpu.py run --on cpu --out cpu.pt                      # anywhere
    python benchmarks/ttir_gpu.py run --on cuda --part 0/4 --out cuda-0.pt       # on the GPU, perhaps elsewhere
    python benchmarks/ttir_gpu.py compare --cpu cpu.pt --cuda cuda-*.pt --out benchmarks/results/ttir-NAME

Run are the healthy programs of tests/ttir, the norms and deformable attention of this package, forward and backward,
and the ops of benchmarks/outside_triton whose library can be imported (PYTHONPATH). A tensor is "equal" if all bits
are, NaN where NaN is; else its largest difference counts in unit roundoffs of its dtype, relative to its largest
element.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

import retrograd as rg
from retrograd.check.inputs import base_case, differentiable, draw

ROOT = Path(__file__).resolve().parent.parent
Results = list[torch.Tensor]
UNITS = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# Differences in unit roundoffs up to which a result counts as summed or contracted otherwise, and as a tf32 product.
STEPS = (
    (4, "up to 4 units"),
    (64, "up to 64 units"),
    (2.0**13, "up to 2^13 units (tf32 keeps 2^-11)"),
    (math.inf, "more"),
)


def on_device(function: Callable[[str], Results], where: str) -> tuple[Results, str]:
    """Results on the CPU of one program, and what was noticed of its memory."""
    if where == "cuda":
        return [t.detach().cpu() for t in function("cuda")], ""
    with rg.cpu_triton() as run:
        results = [t.detach().clone() for t in function("cuda")]
    return results, "; ".join(sorted({fault.kind for fault in run.faults}))


def programs() -> Iterator[tuple[str, Callable[[str], Results]]]:
    """The healthy programs that judge the checker of races."""
    sys.path.insert(0, str(ROOT / "tests" / "ttir"))
    import programs as registry

    registry.load()
    for name, program in registry.HEALTHY.items():

        def run(device: str, program: Any = program) -> Results:
            checks = program.run(device)
            if wrong := [text for check in checks if (text := check.difference())]:
                raise AssertionError(f"not what is expected: {wrong[0]}")
            return [check.actual for check in checks]

        yield f"program {name}", run


def shipped() -> Iterator[tuple[str, Callable[[str], Results]]]:
    """The norms, and deformable attention, in Triton."""
    for name in ("rms_norm", "layer_norm"):
        for shape in ((16, 64), (37, 1000), (64, 1024), (8, 4096)):
            for dtype in (torch.float32, torch.bfloat16):

                def norm(device: str, name: str = name, shape: Any = shape, dtype: Any = dtype) -> Results:
                    made = torch.Generator().manual_seed(0)
                    x, g = (torch.randn(shape, generator=made).to(device, dtype) for _ in range(2))
                    w, b = (torch.randn(shape[-1:], generator=made).to(device, dtype) for _ in range(2))
                    leaves = [t.requires_grad_() for t in ((x, w, b) if name == "layer_norm" else (x, w))]
                    out = getattr(rg.ops, name)(*leaves, impl="triton")
                    return [out, *torch.autograd.grad(out, leaves, g)]

                yield f"{name} {shape[0]}x{shape[1]} {str(dtype)[6:]}", norm
    for dtype in (torch.float32, torch.bfloat16):

        def attention(device: str, dtype: Any = dtype) -> Results:
            made = torch.Generator().manual_seed(0)
            shapes = [(8, 8), (4, 4)]
            value = torch.randn(2, 80, 4, 16, generator=made).to(device, dtype).requires_grad_()
            places = torch.rand(2, 30, 4, 2, 3, 2, generator=made).to(device, dtype).requires_grad_()
            weights = torch.rand(2, 30, 4, 2, 3, generator=made).to(device, dtype).requires_grad_()
            out = rg.ops.ms_deform_attn(value, shapes, places, weights, impl="triton")
            g = torch.randn(out.shape, generator=made).to(device, dtype)
            return [out, *torch.autograd.grad(out, [value, places, weights], g)]

        yield f"ms_deform_attn {str(dtype)[6:]}", attention


def libraries() -> Iterator[tuple[str, Callable[[str], Results]]]:
    """Ops of Liger and fla, in the dtypes of their specs."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "outside_triton"))
    from fla_modules import FLA
    from liger_attention import LIGER

    for name, spec in {**LIGER.specs, **FLA.specs}.items():
        for dtype in spec.dtypes:

            def run(device: str, spec: Any = spec, dtype: str = dtype) -> Results:
                inputs: dict[str, Any] = draw(spec, base_case(spec, dtype), 0)
                inputs = {k: v.clone().to(device) if torch.is_tensor(v) else v for k, v in inputs.items()}
                asked = [inputs[key].requires_grad_() for key in differentiable(spec, inputs)]
                result = spec.fn(*inputs.values(), **{key: values[0] for key, values in spec.params.items()})
                outs = [t for t in (result if isinstance(result, (tuple, list)) else (result,)) if torch.is_tensor(t)]
                roots, made = [t for t in outs if t.requires_grad], torch.Generator().manual_seed(0)
                gs = [torch.randn(t.shape, generator=made).to(t.device, t.dtype) for t in roots]
                grads = torch.autograd.grad(roots, asked, gs, allow_unused=True)
                return [*outs, *(t for t in grads if t is not None)]

            yield f"{name} {dtype}", run


def run(where: str, out: Path, only: str, part: str) -> None:
    """Run all of it, keeping what was done at each step."""
    device = torch.cuda.get_device_name() if where == "cuda" else platform.machine()
    records: dict[str, Any] = {"": dict(device=device, torch=torch.__version__, triton=triton.__version__)}
    first, parts = map(int, part.split("/"))
    # The CPU takes the first configuration of an autotuned kernel; a GPU would time all, minutes for each op of fla.
    tuner, pruned = triton.runtime.Autotuner, triton.runtime.Autotuner.prune_configs
    tuner.prune_configs = lambda self, kwargs: pruned(self, kwargs)[:1]
    # fla decides at import whether there is a GPU.
    with rg.cpu_triton() if where == "cpu" else contextlib.nullcontext():
        every = [*programs(), *shipped()]
        try:
            every += libraries()
        except ImportError as error:
            print(f"left out: {error}", file=sys.stderr)
    for name, function in every[first::parts]:
        if only not in name:
            continue
        try:
            records[name] = on_device(function, where)
        except Exception as error:
            records[name] = f"{type(error).__name__}: {error}"
            print(name, traceback.format_exc(limit=-2), file=sys.stderr)
        torch.save(records, out)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Unit roundoffs between two results, of the largest element; 0 where all bits are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    same = (a == b) | ((a != a) & (b != b))
    if bool(same.all()):
        return 0.0
    if not a.is_floating_point():
        return math.inf
    off = torch.where(same, 0.0, (a.double() - b.double()).abs())
    unit = UNITS.get(a.dtype, 2.0**-4)
    return float(off.max() / (unit * b.double().abs().nan_to_num(0.0, 0.0, 0.0).max().clamp_min(1e-300)))


def compare(cpu: list[Path], gpu: list[Path], out: Path) -> None:
    """A table of what differs."""
    left, right = ({k: v for f in each for k, v in torch.load(f, weights_only=False).items()} for each in (cpu, gpu))
    machines = left.pop(""), right.pop("")
    rows, failed = [], []
    for name in left.keys() & right.keys():
        if isinstance(left[name], str) or isinstance(right[name], str):
            failed.append((name, *(r if isinstance(r, str) else "runs" for r in (left[name], right[name]))))
            continue
        units = [difference(a, b) for a, b in zip(left[name][0], right[name][0], strict=True)]
        rows.append(dict(name=name, tensors=len(units), equal=units.count(0.0), units=max(units, default=0.0)))
    rows.sort(key=lambda row: -row["units"])
    classes = Counter(
        "all bits equal" if not r["units"] else next(t for n, t in STEPS if r["units"] <= n) for r in rows
    )
    lines = [
        "# TTIR on a CPU beside a GPU", "",
        f"CPU: {machines[0]['device']}, torch {machines[0]['torch']}, Triton {machines[0]['triton']}. "
        f"GPU: {machines[1]['device']}, torch {machines[1]['torch']}, Triton {machines[1]['triton']}.",
        "`python benchmarks/ttir_gpu.py` makes it. Units are roundoffs of a dtype, of a tensor's largest element.", "",
        f"{len(rows)} programs and ops, {sum(r['tensors'] for r in rows)} tensors, "
        f"{sum(r['equal'] for r in rows)} of them equal in all bits.", "",
        "| worst tensor of a program | programs |", "|---|---|",
        *(f"| {text} | {classes[text]} |" for text in ("all bits equal", *(t for _, t in STEPS))), "",
        "| not equal | tensors | equal | units |", "|---|---|---|---|",
        *(f"| {r['name']} | {r['tensors']} | {r['equal']} | {r['units']:.3g} |" for r in rows if r["units"]), "",
    ]  # fmt: skip
    if failed:
        lines += ["| not run on both | CPU | GPU |", "|---|---|---|"]
        lines += [f"| {n} | {a.splitlines()[0][:120]} | {b.splitlines()[0][:120]} |" for n, a, b in sorted(failed)]
    out.with_suffix(".md").write_text("\n".join(lines).rstrip() + "\n")
    out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(lines[:16]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--on", choices=("cpu", "cuda"), required=True)
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--part", default="0/1", help="I/N: every Nth program from the Ith on")
    runs.add_argument("--only", default="", help="names that contain this")
    both = commands.add_parser("compare")
    both.add_argument("--cpu", type=Path, nargs="+", required=True)
    both.add_argument("--cuda", type=Path, nargs="+", required=True)
    both.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "run":
        run(args.on, args.out, args.only, args.part)
    else:
        compare(args.cpu, args.cuda, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
