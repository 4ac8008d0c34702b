"""How often a fixed tolerance fails for the gradient of deformable attention: exactly, drawn, and in full.

    python benchmarks/flake_msda.py                                   the table of all modes (a minute)
    python benchmarks/flake_msda.py --compare 13 --padding border     one full comparison, element by element
    python benchmarks/flake_msda.py --points 1/128 1/128+ 17/128-     single points beside a kink

The test that is repeated: levels of 64, 32, 16 and 8 pixels a side, B=4 N=1000 H=8 C=32 P=3, hence 768000 uniform
coordinates; gradients held against grid_sample with grids 2 p - 1 by atol 1e-3, rtol 1e-2. The gradient of a
coordinate is constant within a cell of the image and jumps between cells, so it differs where two computations put
one point into different cells. That depends on the coordinate alone and needs no gradient to be computed.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from retrograd.bench.ops.msda_providers import by_grid_sample
from retrograd.ops import ms_deform_attn
from retrograd.ops.msda import ms_deform_attn_reference

BATCH, QUERIES, HEADS, CHANNELS, POINTS = 4, 1000, 8, 32, 3
SIDES = (64, 32, 16, 8)
UNEVEN_SIDES = (100, 50, 25, 13)
SHAPE = (BATCH, QUERIES, HEADS, len(SIDES), POINTS, 2)
COORDINATES = math.prod(SHAPE)  # 768000, a quarter in each level
ATOL, RTOL = 1e-3, 1e-2
SAFE_MARGIN = 0.05
# In units of 2^-32. A computation that puts a point into a wrong cell does so within 2^-22 of the border, in units of
# the image: at most four roundings of 2^-24. Random bits are rounded by 2^-25 to the point.
_WINDOW = 2**11

Array = np.ndarray[Any, Any]
Position = Callable[[Array, int, bool], Array]


def cuda_uniform(bits: Array) -> Array:
    """What torch.rand gives on CUDA for 32 random bits: float32(bits) * 2^-32 + 2^-33, and 0 for 1."""
    p = bits.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    p[p == 1] = 0
    return p


def cpu_uniform(bits: Array) -> Array:
    """What torch.rand gives on the CPU for 32 random bits: a multiple of 2^-24."""
    return (bits & np.uint32(2**24 - 1)).astype(np.float32) * np.float32(2.0**-24)


def direct(p: Array, side: int, aligned: bool) -> Array:
    """x in pixels as retrograd, msda-triton and the CUDA kernels round it, in the dtype of p."""
    scale = p.dtype.type(side - 1 if aligned else side)
    return p * scale if aligned else p * scale - p.dtype.type(0.5)


def by_grid(p: Array, side: int, aligned: bool) -> Array:
    """x in pixels of grid_sample at 2 p - 1, in the dtype of p."""
    one, two = p.dtype.type(1), p.dtype.type(2)
    grid = two * p - one
    return (grid + one) / two * p.dtype.type(side - 1) if aligned else ((grid + one) * p.dtype.type(side) - one) / two


def in_double(p: Array, side: int, aligned: bool) -> Array:
    """x in pixels in float64, of the same float32 points."""
    return direct(p.astype(np.float64), side, aligned)


@dataclass(frozen=True)
class Case:
    """Two computations that are held against each other, and how points are drawn.

    Attributes:
        border: padding_mode "border"; else "zeros".
        aligned: align_corners.
        reference: how the reference rounds a position.
        inner_edge: the kernel takes the derivative towards the inside at exactly the outermost pixel centres of a
            border, as msda-triton does; else that of the outside, 0, as grid_sample and retrograd do.
        sides: of the square levels.
        draw: the random number generator.
    """

    border: bool = False
    aligned: bool = False
    reference: Position = by_grid
    inner_edge: bool = False
    sides: tuple[int, ...] = SIDES
    draw: Callable[[Array], Array] = cuda_uniform

    def disagree(self, p: Array, side: int) -> Array:
        """Where kernel and reference take derivatives of different cells."""
        ours = _cell(direct(p, side, self.aligned), side, self.border, self.inner_edge)
        return ours != _cell(self.reference(p, side, self.aligned), side, self.border, False)


def _cell(x: Array, side: int, border: bool, inner_edge: bool) -> Array:
    """A number for each piece of the image with a derivative of its own; all that is outside is one or two pieces."""
    cell = np.floor(x)
    if not border:
        return np.clip(cell, -2, side)
    if not inner_edge:
        cell = np.where(x <= 0, -1, cell)
    return np.clip(cell, -1, side - 1)


@functools.cache
def odds(case: Case) -> list[float]:
    """For each level the exact probability that one random coordinate disagrees, over all outputs of the generator."""
    total = 2**24 if case.draw is cpu_uniform else 2**32
    found = []
    for side in case.sides:
        points = case.draw(_beside_kinks(side, case.aligned, total))
        found.append(int(case.disagree(points, side).sum()) / total)
    return found


def expected(case: Case) -> float:
    """Expected disagreements in one run of the test."""
    return sum(q * COORDINATES / len(case.sides) for q in odds(case))


def chance(case: Case) -> float:
    """Exact probability that at least one of the 768000 coordinates of a run disagrees."""
    return 1 - math.exp(sum(COORDINATES / len(case.sides) * math.log1p(-q) for q in odds(case)))


@functools.cache
def _beside_kinks(side: int, aligned: bool, total: int) -> Array:
    """Random bits whose points lie near a place where the derivative jumps."""
    kinks = np.arange(side) / (side - 1) if aligned else (np.arange(side) + 0.5) / side
    near = np.round(kinks * total).astype(np.int64)[:, None] + np.arange(-_WINDOW, _WINDOW)
    return np.unique(near[(near >= 0) & (near < total)]).astype(np.uint32)


def drawn(seed: int) -> Array:
    """The random bits of one run, in the order of the sampling points [B, N, H, L, P, 2]."""
    return np.random.default_rng(seed).integers(0, 2**32, COORDINATES, dtype=np.uint32)


def disagreements(case: Case, bits: Array) -> list[tuple[int, ...]]:
    """Places in [B, N, H, L, P, 2] where a run disagrees."""
    return next(_each_disagreement((case,), bits))


def _each_disagreement(cases: tuple[Case, ...], bits: Array) -> Iterator[list[tuple[int, ...]]]:
    """`disagreements` of several cases with the same draw and sides: what is near a kink is looked at in all."""
    p = cases[0].draw(bits)
    sides = np.repeat(np.array(cases[0].sides, dtype=np.float32), 2 * POINTS)  # of the last three dimensions
    near = np.zeros(COORDINATES, dtype=bool)
    for aligned in {case.aligned for case in cases}:
        scaled = p.reshape(-1, len(sides)) * (sides - np.float32(aligned)) - np.float32(0.0 if aligned else 0.5)
        scaled -= np.rint(scaled)
        near |= (np.abs(scaled, out=scaled) < sides * np.float32(2.0**-20)).reshape(-1)
    places = np.flatnonzero(near)
    found, level = p[places], places // (2 * POINTS) % len(cases[0].sides)
    for case in cases:
        wrong = np.zeros(len(found), dtype=bool)
        for i, side in enumerate(case.sides):
            wrong[level == i] = case.disagree(found[level == i], side)
        yield [tuple(map(int, np.unravel_index(place, SHAPE))) for place in places[wrong]]


def failures(cases: tuple[Case, ...], runs: int) -> list[int]:
    """How many of the runs with seeds 0, 1, ... hold a disagreement, for each case."""
    counts = [0] * len(cases)
    for seed in range(runs):
        for i, places in enumerate(_each_disagreement(cases, drawn(seed))):
            counts[i] += bool(places)
    return counts


def interval(successes: int, runs: int, confidence: float = 0.99) -> tuple[float, float]:
    """The Clopper-Pearson interval: exact, holds the true probability with at least this confidence."""
    # Written out because SciPy, whose binomtest does this, would be a dependency for this line alone.
    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else _root(lambda p: 1 - _at_most(successes - 1, runs, p) - tail)
    high = 1.0 if successes == runs else _root(lambda p: tail - _at_most(successes, runs, p))
    return low, high


def _at_most(successes: int, runs: int, p: float) -> float:
    """Probability of at most so many successes."""
    log_p, log_q = math.log(p), math.log1p(-p)

    def log_term(k: int) -> float:
        ways = math.lgamma(runs + 1) - math.lgamma(k + 1) - math.lgamma(runs - k + 1)
        return ways + k * log_p + (runs - k) * log_q

    return min(math.fsum(math.exp(log_term(k)) for k in range(successes + 1)), 1.0)


def _root(rising: Callable[[float], float]) -> float:
    low, high = 1e-12, 1 - 1e-12
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return high


@dataclass(frozen=True)
class Run:
    """Gradients of one run of the test in full, float32 unless said.

    Attributes:
        got: of retrograd: value, locations and weights.
        usual: of grid_sample with grids 2 p - 1.
        aware: of the float64 reference that rounds positions as the kernel does.
    """

    got: list[torch.Tensor]
    usual: list[torch.Tensor]
    aware: list[torch.Tensor]


def in_full(case: Case, bits: Array) -> Run:
    """All gradients of a run; the reference in float64 one image at a time, for its memory."""
    generator = torch.Generator().manual_seed(int(bits[0]))
    levels = [(side, side) for side in case.sides]
    value = torch.randn((BATCH, sum(h * w for h, w in levels), HEADS, CHANNELS), generator=generator)
    weights = torch.randn(SHAPE[:-1], generator=generator).flatten(3).softmax(-1).view(SHAPE[:-1])
    grad_out = torch.randn((BATCH, QUERIES, HEADS, CHANNELS), generator=generator)
    locations = torch.from_numpy(case.draw(bits).reshape(SHAPE))
    mode = dict(padding_mode="border" if case.border else "zeros", align_corners=case.aligned)

    def gradients(
        function: Callable[..., torch.Tensor], images: slice, dtype: torch.dtype, **more: Any
    ) -> list[torch.Tensor]:
        leaves = [t[images].to(dtype).requires_grad_() for t in (value, locations, weights)]
        out = function(leaves[0], levels, leaves[1], leaves[2], **mode, **more)
        return list(torch.autograd.grad(out, leaves, grad_out[images].to(dtype)))

    single, double = torch.float32, torch.float64
    aware = [gradients(ms_deform_attn_reference, slice(i, i + 1), double, coordinates_in=single) for i in range(BATCH)]
    return Run(
        gradients(ms_deform_attn, slice(None), single),
        gradients(by_grid_sample, slice(None), single),
        [torch.cat(parts).float() for parts in zip(*aware, strict=True)],
    )


def beyond(got: torch.Tensor, want: torch.Tensor) -> list[tuple[int, ...]]:
    """Places where the test's tolerance, |got - want| <= 1e-3 + 1e-2 |want|, does not hold."""
    return [tuple(place) for place in (~torch.isclose(got, want, RTOL, ATOL)).nonzero().tolist()]


def slopes(p: float, border: bool, side: int = 64) -> dict[str, float]:
    """d out / d p_x at one point of one random image, y = 0.3, by each way to compute it."""
    image = torch.randn((side, side), generator=torch.Generator().manual_seed(0))
    ways: dict[str, tuple[Callable[..., torch.Tensor], torch.dtype, dict[str, Any]]] = {
        "grid_sample": (by_grid_sample, torch.float32, {}),
        "retrograd": (ms_deform_attn, torch.float32, {}),
        "float64": (ms_deform_attn_reference, torch.float64, {}),
        "float64, float32's cell": (ms_deform_attn_reference, torch.float64, {"coordinates_in": torch.float32}),
    }
    found = {}
    for name, (function, dtype, more) in ways.items():
        location = torch.tensor([p, 0.3]).to(dtype).requires_grad_()
        value, ones = image.to(dtype).view(1, -1, 1, 1), torch.ones((1,) * 5, dtype=dtype)
        padding = "border" if border else "zeros"
        out = function(value, ((side, side),), location.view(1, 1, 1, 1, 1, 2), ones, padding_mode=padding, **more)
        found[name] = float(torch.autograd.grad(out.sum(), location)[0][0])
    return found


MODES = {
    f"{'border' if border else 'zeros'}, align_corners={aligned}": Case(border, aligned)
    for border in (True, False)
    for aligned in (False, True)
}


# What the gradient is held against, and how that changes a mode.
CHANGES: dict[str, Callable[[Case], Case]] = {
    "grid_sample": lambda case: case,
    "grid_sample; a kernel with msda-triton's edges": lambda case: replace(case, inner_edge=True),
    "grid_sample; points from the CPU's torch.rand": lambda case: replace(case, draw=cpu_uniform),
    "the same; msda-triton's edges": lambda case: replace(case, draw=cpu_uniform, inner_edge=True),
    "float64": lambda case: replace(case, reference=in_double),
    "float64; levels of 100, 50, 25, 13": lambda case: replace(case, reference=in_double, sides=UNEVEN_SIDES),
    "the same; points from the CPU's torch.rand": lambda case: replace(
        case, reference=in_double, sides=UNEVEN_SIDES, draw=cpu_uniform
    ),
    "float64 in float32's cells; 64 .. 8": lambda case: replace(case, reference=direct),
    "float64 in float32's cells; 100 .. 13": lambda case: replace(case, reference=direct, sides=UNEVEN_SIDES),
}


def table(runs: int) -> Iterator[str]:
    """Predictions, and what drawing gives."""
    yield f"| against grid_sample | disagreements a run | P(fail) | {runs} runs drawn | 99 % interval |"
    yield "|---|---|---|---|---|"
    for (name, case), count in zip(MODES.items(), failures(tuple(MODES.values()), runs), strict=True):
        low, high = interval(count, runs)
        share = f"{count} = {count / runs:.2%} | {low:.2%} to {high:.2%}"
        yield f"| {name} | {expected(case):.4f} | {chance(case):.2%} | {share} |"
    yield ""
    yield ("| P(fail), held against | " + " | ".join(MODES) + " | any of the four |")
    yield "|---" * (len(MODES) + 2) + "|"
    for title, change in CHANGES.items():
        cells = [chance(change(case)) for case in MODES.values()]
        cells.append(1 - math.prod(1 - cell for cell in cells))
        yield f"| {title} | " + " | ".join(f"{cell:.2%}" for cell in cells) + " |"
    yield ""
    few = max(runs // 100, 1)
    yield f"{SAFE_MARGIN} pixels away from kinks: {safe_disagreements(few)} disagreements in {few} runs of each mode"


def safe_points(seed: int, side: int, aligned: bool, count: int) -> Array:
    """Uniform float32 points at least `SAFE_MARGIN` pixels from every kink."""
    random = np.random.default_rng(seed)
    cells = side - 1 if aligned else side
    x = random.integers(0, cells, count) + random.uniform(SAFE_MARGIN, 1 - SAFE_MARGIN, count)
    # Not aligned, the kinks lie at half pixels of the image: the first and the last cell reach half a pixel outside.
    return (x / cells if aligned else (x + 0.5) % side / side).astype(np.float32)


def safe_disagreements(runs: int) -> int:
    """Disagreements of all modes in runs with `safe_points`, with grid_sample and with float64."""
    found = 0
    for case in (*MODES.values(), *(replace(mode, reference=in_double, sides=UNEVEN_SIDES) for mode in MODES.values())):
        for seed in range(runs):
            for side in case.sides:
                points = safe_points(seed, side, case.aligned, COORDINATES // len(case.sides))
                found += int(case.disagree(points, side).sum())
    return found


def compared(case: Case, seed: int) -> Iterator[str]:
    """One full comparison in words."""
    bits = drawn(seed)
    run = in_full(case, bits)
    predicted = disagreements(case, bits)
    yield f"predicted to differ: {predicted or 'nothing'}"
    for name, got, usual, aware in zip(("value", "locations", "weights"), run.got, run.usual, run.aware, strict=True):
        bad = beyond(got, usual)
        yield f"grad_{name} beyond 1e-3 + 1 % of grid_sample's: {bad or 'nothing'}"
        for place in bad:
            p = case.draw(bits).reshape(SHAPE)[place] if name == "locations" else math.nan
            three = f"retrograd {got[place]:.4f}, grid_sample {usual[place]:.4f}"
            yield f"  {place}: p = {p!r}, {three}, float64 in float32's cell {aware[place]:.4f}"
        yield f"grad_{name} beyond 1e-3 + 1 % of float64's in float32's cells: {beyond(got, aware) or 'nothing'}"


def point(text: str) -> float:
    """A fraction as float32; with - or + behind it the next number below or above."""
    p = np.float32(Fraction(text.rstrip("+-")))
    return float(p if text[-1] not in "+-" else np.nextafter(p, np.float32(text[-1] == "+")))


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000, help="runs that are drawn for the table")
    parser.add_argument("--compare", type=int, metavar="SEED", help="compare all gradients of this run")
    parser.add_argument("--points", nargs="+", metavar="P", help="fractions, with - or + behind for the next number")
    parser.add_argument("--padding", choices=("border", "zeros"), default="border")
    parser.add_argument("--aligned", action="store_true", help="align_corners=True")
    args = parser.parse_args()
    case = Case(args.padding == "border", args.aligned)
    if args.points:
        names = list(slopes(0.5, case.border))
        print("| p | x | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 2))
        for text in args.points:
            p = point(text)
            found = " | ".join(f"{slope:.3f}" for slope in slopes(p, case.border).values())
            print(f"| {text} | {p * 64 - 0.5:.3g} | {found} |")
        return
    for line in compared(case, args.compare) if args.compare is not None else table(args.runs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
