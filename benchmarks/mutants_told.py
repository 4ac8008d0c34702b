"""Mutants that are told to differ at every input, beside tests that are perfect by construction.

    python benchmarks/mutants_told.py --ops 30 --count 6 -j 2

Ops are the healthy ones of `tests/healthy/torch_ops.py`, in float64; mutated is one operation of a recorded backward.
A test is perfect by construction here: it knows neither the search nor verify, draws inputs of its own, and compares
results and gradients with those of the reference in float64 to 1e-9 of the largest. A mutant that the search puts into
the class "every input" and this test lets pass would be an equivalent one that is told as a survivor. Exit code 1 if
there is one.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]

import torch  # noqa: E402
from healthy.torch_ops import HEALTHY  # noqa: E402

import retrograd as rg  # noqa: E402
from retrograd.check.op_runner import OpRunner  # noqa: E402
from retrograd.check.spec import OpSpec  # noqa: E402
from retrograd.errors import RetrogradError  # noqa: E402

_DRAWS, _SEED, _SHARE = 8, 1_000_003, 1e-9


def perfect(spec: OpSpec, seed: int) -> bool:
    """Whether a result or gradient differs from the reference's at any of the test's own inputs."""
    runner = OpRunner(spec, "float64", seed + _SEED, "cpu")
    for draw in range(_DRAWS):
        case = runner.base.but(draw=draw)
        got = runner.forward(case).backward().tensors
        for name, want in runner.reference(case).run(torch.float64).items():
            if want is None or got.get(name) is None:
                if want is not got.get(name):
                    return True
            elif want.numel() and (got[name] - want).abs().max() > _SHARE * want.abs().max():
                return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=30)
    parser.add_argument("--count", type=int, default=6, help="mutants of an op")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-j", "--jobs", type=int, default=1)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    ops = total = top = 0
    told = []
    for name, spec in HEALTHY.items():
        if ops == args.ops:
            break
        spec = replace(spec, dtypes=("float64",))
        try:
            if perfect(spec, args.seed):
                print(f"{name}: its reference is another algorithm")
                continue
            report = rg.mutate(
                spec, levels=["operation"], count=args.count, seed=args.seed, jobs=args.jobs, beside={"test": perfect}
            )
        except (RetrogradError, RuntimeError) as error:
            print(f"{name}: {error}")
            continue
        ops, total = ops + 1, total + len(report.results)
        first = [r for r in report.differing if r.rarity == "every input"]
        top += len(first)
        told += [f"{name}: {r.mutant.id} {r.difference}\n{r.mutant.diff}" for r in first if not r.killed("test")]
        print(f"{name}: {len(first)} of {len(report.results)} differ at every input", flush=True)
    print(
        f"{ops} ops, {total} mutants, {top} told to differ at every input, {len(told)} of them equivalent",
        *told,
        sep="\n",
    )
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
