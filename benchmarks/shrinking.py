"""Shrinking by `retrograd.check.shrink` beside `hypothesis.find`: the smallest case that each finds, and its runs.

    pip install hypothesis; python benchmarks/shrinking.py

A case is two sizes up to 512. Ours starts from a known failure, 301 x 300; hypothesis searches for its own. A failure
that comes only sometimes is asked for up to 30 times a case by hypothesis's predicate, as often as its measured rate
needs by ours; verdicts are remembered by both. Ten seeds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

import retrograd as rg
from retrograd.check import shrink
from retrograd.check.inputs import base_case
from retrograd.check.schema import Case

Rule = Callable[[int, int], bool]
Found = tuple[Any, int]  # what was found, and how many runs that took

SPEC = rg.op(torch.sin, torch.sin, dict(x=rg.tensor("M", "N")))
RULES: dict[str, tuple[Rule, float]] = {
    "M >= 17 and N >= 5": (lambda m, n: m >= 17 and n >= 5, 1.0),
    "N > 256": (lambda m, n: n > 256, 1.0),
    "M % 4 != 0": (lambda m, n: m % 4 != 0, 1.0),
    "M * N > 4096": (lambda m, n: m * n > 4096, 1.0),
    "M >= 17 and N >= 5, in half of the runs": (lambda m, n: m >= 17 and n >= 5, 0.5),
    "M >= 17 and N >= 5, in a fifth of the runs": (lambda m, n: m >= 17 and n >= 5, 0.2),
}


def ours(rule: Rule, rate: float, seed: int) -> Found:
    draw, runs = random.Random(seed), 0

    def fails(case: Case) -> bool:
        nonlocal runs
        runs += 1
        sizes: Any = dict(case.sizes)
        return rule(sizes["M"], sizes["N"]) and draw.random() < rate

    first = base_case(SPEC, "float32").but(sizes=dict(M=301, N=300))
    again = shrink.Again(fails, first)
    case = shrink.shrink(SPEC, first, again)[0] if again.failures else first
    return tuple(dict(case.sizes).values()), runs


def theirs(rule: Rule, rate: float, seed: int) -> Found:
    draw, runs = random.Random(seed), 0
    known: dict[tuple[int, int], bool] = {}

    def fails(case: tuple[int, int]) -> bool:
        nonlocal runs
        if case not in known:
            known[case] = False
            for _ in range(1 if rate == 1 else 30):
                runs += 1
                if rule(*case) and draw.random() < rate:
                    known[case] = True
                    break
        return known[case]

    sizes = st.tuples(st.integers(1, 512), st.integers(1, 512))
    options = hypothesis.settings(max_examples=400, database=None, deadline=None)
    return hypothesis.find(sizes, fails, settings=options, random=random.Random(seed)), runs


def cells(found: list[Found]) -> str:
    least = Counter(f"{' x '.join(map(str, case))}" for case, _ in found)
    runs = [n for _, n in found]
    said = ", ".join(f"{case} ({n})" for case, n in least.most_common(3)) + (", ..." if len(least) > 3 else "")
    return f"{said} | {min(runs)} to {max(runs)}"


if __name__ == "__main__":
    print(f"hypothesis {hypothesis.__version__}")
    print("| fails where | ours (of 10) | runs | hypothesis (of 10) | runs |", "|---" * 5 + "|", sep="\n")
    for text, (rule, rate) in RULES.items():
        print(f"| {text} | {cells([ours(rule, rate, s) for s in range(10)])} | "
              f"{cells([theirs(rule, rate, s) for s in range(10)])} |")  # fmt: skip
