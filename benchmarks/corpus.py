"""The checker on the corpus: broken ops must be found at every seed, healthy ones left alone at every seed.

    python benchmarks/corpus.py --seeds 10 --level full --out benchmarks/results/corpus.md

Beside it, on the same ops: torch.autograd.gradcheck (float64, contiguous, defaults) and
torch.library.opcheck, each in its documented use. Exit code 1 if a broken op is missed or a healthy one accused.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from retrograd.check import inputs as make
from retrograd.check.run import verify
from retrograd.check.spec import OpSpec

TESTS = Path(__file__).resolve().parent.parent / "tests"


def corpus(kind: str) -> dict[str, OpSpec]:
    """Specs of tests/mutants or tests/healthy by name, real Triton kernels apart (they need minutes here)."""
    found: dict[str, OpSpec] = {}
    for path in sorted((TESTS / kind).glob("*.py")):
        if path.stem.startswith(("_", "triton_", "test_")):
            continue
        spec = importlib.util.spec_from_file_location(f"corpus_{path.stem}", path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        found |= getattr(module, kind.upper())
    return found


def gradcheck(op: OpSpec, seed: int) -> bool:
    """Whether torch.autograd.gradcheck accepts the op at its ordinary case in float64."""
    case = make.base_case(op, "float64")
    inputs = make.materialise(op, case, seed, "cpu")
    for name in make.differentiable(op, inputs):
        inputs[name] = inputs[name].double().requires_grad_()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.autograd.gradcheck(lambda *a: op.fn(*a, **dict(case.params)), tuple(inputs.values()))
    except Exception:
        return False


def opcheck(op: OpSpec, seed: int, name: str) -> bool | None:
    """Whether torch.library.opcheck accepts the op, registered as a custom operator; None if it cannot be."""
    case = make.base_case(op, "float32")
    inputs = make.materialise(op, case, seed, "cpu")
    tensors = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    if len(tensors) != len(inputs):
        return None
    names = make.differentiable(op, inputs)
    with torch.no_grad():
        outs = op.fn(*inputs.values(), **dict(case.params))
    many = isinstance(outs, tuple)
    arguments = ", ".join(f"Tensor a{i}" for i in range(len(inputs)))
    returns = "(" + ", ".join(["Tensor"] * len(outs)) + ")" if many else "Tensor"

    def forward(*args: torch.Tensor) -> Any:
        with torch.no_grad():
            got = op.fn(*args, **dict(case.params))
        return tuple(t.clone() for t in got) if many else got.clone()

    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        leaves = [t.detach().requires_grad_(n in names) for n, t in zip(inputs, ctx.saved_tensors, strict=True)]
        with torch.enable_grad():
            got = op.fn(*leaves, **dict(case.params))
        wanted = [t for t in leaves if t.requires_grad]
        found = iter(torch.autograd.grad(got, wanted, grads if many else grads[0], allow_unused=True))
        return tuple(next(found) if t.requires_grad else None for t in leaves)

    try:
        custom = torch.library.custom_op(
            f"corpus::{name.lower()}_{seed}_{time.monotonic_ns()}", forward, mutates_args=(),
            schema=f"({arguments}) -> {returns}",
        )  # fmt: skip
        custom.register_fake(forward)
        custom.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
        for key in names:
            inputs[key].requires_grad_()
        result = torch.library.opcheck(custom, tuple(inputs.values()), raise_exception=False)
    except Exception:
        return None
    return all(v == "SUCCESS" for v in result.values())


def main() -> int:
    """Print the table; 1 if the checker was wrong anywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--level", default="full", choices=["quick", "full"])
    parser.add_argument("--kinds", default="mutants,healthy")
    parser.add_argument("--names", default="", help="only these, comma separated")
    parser.add_argument("--no-peers", action="store_true", help="leave gradcheck and opcheck out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {args.level}, {args.seeds} seeds, one thread"
    )
    lines = [
        head,
        "",
        "| op | kind | found | stages | s (median) | gradcheck | opcheck |",
        "|---|---|---|---|---|---|---|",
    ]
    wrong = []
    # The first verification of a process imports parts of torch (1.3 s), which is no op's cost.
    verify(next(iter(corpus("healthy").values())), level="quick", seed=0)
    for kind in args.kinds.split(","):
        for name, op in corpus(kind).items():
            if args.names and name not in args.names.split(","):
                continue
            found, stages, times = 0, set(), []
            for seed in range(args.seeds):
                start = time.perf_counter()
                report = verify(op, level=args.level, seed=seed)
                times.append(time.perf_counter() - start)
                found += report.verdict != "proved"
                stages |= {f.stage for f in report.findings}
                if kind == "healthy" and not report:
                    for f in report.findings[:2]:
                        print(f"  {name} seed {seed} [{f.stage}] {f.what} | {f.where}", file=sys.stderr)
            if found != (args.seeds if kind == "mutants" else 0):
                wrong.append(f"{name} {found}/{args.seeds}")
            peers = ["", ""]
            if not args.no_peers:
                checks = (gradcheck(op, 0), opcheck(op, 0, name))
                peers = ["-" if ok is None else "passes" if ok else "fails" for ok in checks]
            median = sorted(times)[len(times) // 2]
            cells = [name, kind, f"{found}/{args.seeds}", " ".join(sorted(stages)), f"{median:.2f}", *peers]
            row = f"| {' | '.join(cells)} |"
            print(row, flush=True)
            lines.append(row)
    lines += ["", f"wrong: {', '.join(wrong) or 'none'}"]
    print(lines[-1])
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
