"""Random backward comparisons of deformable attention, as many as asked for: python tests/ops/msda/soak.py --runs 10000.

Every run draws a mode, dtypes, sizes and a kind of points from its number alone, so that `--first N --runs 1` repeats
run N. Points lie anywhere, on borders of cells and one ulp beside them, far outside, or at NaN and infinity. Output and
gradients are held against float64 values whose cells float32 found, to the error that float32 arithmetic may have.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))

from msda_cases import DEVICE, Case, assert_within_budget, make_inputs, run, truth

# Few enough for kernels that are compiled for one shape; no two sizes equal, powers of two and others.
SHAPES = (
    dict(levels=[(16, 8), (7, 9)], heads=2, points=4, channels=32),
    dict(levels=[(25, 13), (12, 7), (6, 4), (3, 2)], heads=4, points=2, channels=16),
    dict(levels=[(9, 1), (1, 11), (5, 6)], heads=3, points=3, channels=8),
    dict(levels=[(33, 20)], heads=1, points=5, channels=64),
)
DTYPES = (
    (torch.float32, None),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, None),
    (torch.float16, torch.float32),
)
KINDS = ("apart", "anywhere", "borders", "outside", "one pixel", "not finite")


class Draw(NamedTuple):
    """What run number `number` computes."""

    number: int
    shape: int
    dtype: int
    kind: str
    batch: int
    queries: int
    options: dict[str, Any]


def draw(number: int) -> Draw:
    """The run with this number."""
    chosen = random.Random(number)
    options = dict(
        padding_mode=chosen.choice(("zeros", "border")),
        align_corners=chosen.random() < 0.5,
        deterministic=chosen.random() < 0.5,
    )
    # The last shape's queries are its pixels now and then.
    queries = chosen.choice((1, 3, 17, 60, 150, 660))
    return Draw(
        number,
        chosen.randrange(len(SHAPES)),
        chosen.randrange(len(DTYPES)),
        chosen.choice(KINDS),
        chosen.choice((1, 2)),
        queries,
        options,
    )


def inputs(drawn: Draw, device: str = DEVICE) -> Case:
    """Its inputs."""
    dtype, beside = DTYPES[drawn.dtype]
    shape: dict[str, Any] = SHAPES[drawn.shape]
    aligned = drawn.options["align_corners"]
    sizes = dict(batch=drawn.batch, queries=drawn.queries, align_corners=aligned)
    case = make_inputs(dtype=dtype, beside=beside, seed=drawn.number, device=device, **sizes, **shape)
    if drawn.kind == "apart":
        return case
    generator = torch.Generator().manual_seed(drawn.number)
    locations = case["sampling_locations"]
    size = torch.tensor(shape["levels"]).flip(1)[:, None]  # [L, 1, 2] (width, height)
    p = torch.rand(locations.shape, generator=generator)
    if drawn.kind in ("borders", "not finite"):
        cell = (p * (size + 3)).floor() - 1
        p = cell / (size - 1).clamp_min(1) if aligned else (cell + 0.5) / size
        beside_it = torch.randint(-1, 2, p.shape, generator=generator)
        p = torch.where(beside_it == 0, p, torch.nextafter(p, beside_it * torch.inf))
    elif drawn.kind == "outside":
        p = (p - 0.5) * torch.tensor([2.0, 20.0, 1e6, 1e30])[torch.randint(4, p.shape, generator=generator)]
    elif drawn.kind == "one pixel":
        p = 0.37 + 0 * p
    if drawn.kind == "not finite":
        bad = torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.randint(3, p.shape, generator=generator)]
        p = torch.where(torch.rand(p.shape, generator=generator) < 0.1, bad, p)
    return case | {"sampling_locations": p.to(device, locations.dtype)}


def check(number: int, impl: str | None) -> str | None:
    """What is wrong with a run, or None."""
    drawn = draw(number)
    case = inputs(drawn)
    options = dict(drawn.options)
    try:
        got = run(case, impl=impl, **options)
        del options["deterministic"]
        assert_within_budget(got, truth(case, **options), case)
    except (AssertionError, RuntimeError, ValueError) as error:
        return f"{drawn}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None


def _checked(numbers: range, impl: str | None) -> list[str]:
    torch.set_num_threads(1)
    return [wrong for number in numbers if (wrong := check(number, impl)) is not None]


def main() -> int:
    """Run, print what was wrong and how many were right; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--impl", help="as of ms_deform_attn; left out: the default")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    given = parser.parse_args()
    began = time.monotonic()
    numbers = [range(given.first + job, given.first + given.runs, given.jobs) for job in range(given.jobs)]
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        wrong = [line for lines in pool.map(_checked, numbers, [given.impl] * given.jobs) for line in lines]
    seconds = time.monotonic() - began
    sys.stdout.writelines(f"{line}\n" for line in wrong)
    sys.stdout.write(f"{given.runs} runs on {DEVICE}, impl {given.impl}: {len(wrong)} wrong, {seconds:.0f} s\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
