"""Tolerance: how far a correct op may be from the truth, element by element. The only home of such numbers.

tol_i = SIGMAS * sigma_i + u * |want_i| + 3 * E_i + smallest: sigma_i is the spread of random rounding (rounding.py),
u the unit roundoff of the storage dtype, E_i the error of the reference run in the op's own precision near
element i, `smallest` four steps of the subnormal grid.
"""

from __future__ import annotations

import math

import torch

# sigma is estimated from a few runs: 12 = sqrt(2 ln(1e6 / 1e-3)) = 6.4 for a million elements, times about 2
# for the luck of eight draws.
SIGMAS = 12.0
# Errors of the reference in the op's own precision: another order of the same operations is off by a few of them.
OWN_ERRORS = 3.0
# Times the attainable error up to which it may be another algorithm's constant (sums by blocks, transforms, a function
# by another): nobody can tell such from a mistake, unless the op states it (`algorithm_error=`).
ALGORITHM = 4.0
# Randomly rounded runs with which an alarm is confirmed before it is believed.
CONFIRM_RUNS = 48
# And before it: of a dozen no luck makes sigma a quarter of what it is (odds 1e-6 an element), which of six it does;
# what two dozen allow, four hardly refuse.
CONFIRMING = (12, 24, CONFIRM_RUNS)
# Times the attainable error from which on an alarm needs no more runs: no luck of the draws makes sigma so small.
BEYOND_NOISE = 1e4

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Of what tensor cores keep of float32. They cut where others round: as much from the middle, so as wide, and on the
# average half a unit of the last of 11 bits towards zero, which each product takes from all of its elements.
TF32 = 2.0**-11
# Of what tf32 may leave, at most so much is left with products of float32, 2^13 times as exact, if it was tf32.
WITHOUT_TF32 = 1 / 16
_SMALLEST = {"float64": 2.0**-1074, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
# Of a complex number either part is as exact as the product of two whole ones leaves it: sqrt(5) units (Brent 2007).
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
UNIT |= {name: 2.25 * UNIT[part] for name, part in _PARTS.items()}
_SMALLEST |= {name: _SMALLEST[part] for name, part in _PARTS.items()}


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff of a dtype that results are stored in."""
    return torch.finfo(dtype).eps / 2


def units(dtype: str, compute: str | None) -> tuple[float, float]:
    """Unit roundoff of each operator and of accumulators: 16-bit ops add in float32 as PyTorch does."""
    accumulate = min(UNIT[dtype], UNIT["float32"])
    return (min(UNIT[dtype], UNIT[compute]) if compute else UNIT[dtype]), accumulate


def sum_error(terms: int, dtype: str = "float32") -> float:
    """The largest error of a sum of so many products in any order, relative to the sum of their sizes (Higham 3.1)."""
    return terms * UNIT[dtype] / (1 - terms * UNIT[dtype])


# Units of rounding around a kink within which correct formulas may be on either side: a coordinate that is shifted,
# scaled and shifted back has three roundings of up to one unit each, twice that for two formulas, and eight to be safe.
KINK = 8.0
# The change of a gradient, of its size, that counts as a kink: above float32's own rounding by far, and as far below
# what any switch of a formula is for.
JUMP = 2.0**-7
# How many times as far away a second look is taken. A smooth change grows with the distance, a jump does not: what has
# grown less than eightfold of the 64 is one.
KINK_WIDER = 64.0
# How many times as large results beside a pole may be as KINK_WIDER times as far away: at a jump they are no larger, at
# a pole of first order 64 times, at a logarithm's more than by any number a few times over.
POLE = 4.0
# Units of the larger one-sided derivative that are allowed at a kink beyond what a place without one has: those
# derivatives are taken KINK units away and change on the way by a few times their size per size of the input.
BESIDE = 8 * KINK


def jumps(low: torch.Tensor, high: torch.Tensor, wider: torch.Tensor) -> torch.Tensor:
    """Where results between `low` and `high` show a jump: `wider` is how far apart they are KINK_WIDER times as far."""
    apart = high - low
    return (apart > wider / 8) & (apart > JUMP * torch.maximum(high.abs(), low.abs()))


def drifts(moved: torch.Tensor) -> torch.Tensor:
    """What one side of a kink changes over 8 times the distance to it, where over KINK_WIDER times it is `moved`."""
    return moved / (KINK_WIDER / 8)


# What the oracle must be able to refuse: the same formula in the next lower precision (for bfloat16 the three digits of
# float8 e4m3).
_LOWER = {"float64": "float32", "float32": "float16", "float16": "bfloat16", "bfloat16": "float8"}
_LOWER |= {"complex128": "float32", "complex64": "float16"}
_FLOAT8 = 2.0**-4


def lower(dtype: str, compute: str | None) -> tuple[str, float]:
    """The next lower precision and its unit roundoff: the storage dtype itself where `compute` promises more inside."""
    name = dtype if compute and UNIT[compute] < UNIT[dtype] else _LOWER[dtype]
    return name, UNIT.get(name, _FLOAT8)


def largest_safe(dtype: str, compute: str | None) -> float:
    """The largest number that may occur on the way without any partial sum, in any order, coming near overflow."""
    return torch.finfo(getattr(torch, compute or dtype)).max / 2


def _local(t: torch.Tensor, pool: str) -> torch.Tensor:
    """Largest value (or median) of the slice through each element, the smaller of the slices along each dimension."""
    if t.ndim == 0 or not t.numel():
        return t
    best: torch.Tensor | None = None
    for dim in range(t.ndim):
        if t.shape[dim] < 4 and t.ndim > 1:  # too few neighbours to speak for the element
            continue
        pooled = t.amax(dim, keepdim=True) if pool == "max" else t.median(dim, keepdim=True).values
        pooled = pooled.expand_as(t)
        best = pooled if best is None else torch.minimum(best, pooled)
    if best is None:
        best = (t.max() if pool == "max" else t.flatten().median()).expand_as(t)
    return best


# Of the terms' size: what float64 itself leaves of them, after some 50 operations, is no digit of the truth.
ZERO = 50 * UNIT["float64"]
# Units of rounding that terms may leave where they cancel exactly in float64: a product and a sum of each of two.
_CANCELLED = 4.0


def cancelled(
    want: torch.Tensor, eager_error: torch.Tensor | None, unit: float, terms: torch.Tensor | None
) -> torch.Tensor:
    """What is allowed where the truth is 0, as far as float64 knows: the terms that cancel there leave no trace in it.

    Their size is that of the row, or `terms` where that is larger; what the reference in the op's own precision leaves
    of them anywhere in the tensor counts too.
    """
    if not want.numel():
        return torch.zeros_like(want)
    size = want.abs().nan_to_num_(0.0, 0.0, 0.0)
    scale = size.amax(-1, keepdim=True) if want.ndim else size
    scale = scale if terms is None else torch.maximum(scale, terms)
    zero = size <= ZERO * scale
    if not bool(zero.any()):
        return torch.zeros_like(want)
    scale = scale.expand_as(size)
    left = 0.0 if eager_error is None else OWN_ERRORS * float(eager_error[zero].nan_to_num(0.0, 0.0, 0.0).max())
    return torch.where(zero, (_CANCELLED * unit * scale).clamp_min(left), 0.0)


def as_stored(tol: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, wanted: str) -> torch.Tensor:
    """What is allowed where a result is stored in a dtype, which may be less than the wanted one."""
    return torch.maximum(tol, 1.01 * unit(dtype) * want.abs()) if unit(dtype) > UNIT[wanted] else tol


def floor(want: torch.Tensor, eager_error: torch.Tensor | None, dtype: str) -> torch.Tensor:
    """What `tolerance` allows before any spread: storing the result, and the formula's error in the op's own precision.

    float64, the shape of `want`; `eager_error` is |eager - want|, `dtype` the one that the result is stored in.
    """
    tol = 1.01 * UNIT[dtype] * want.abs() + 4 * _SMALLEST[dtype]
    return tol if eager_error is None else tol + OWN_ERRORS * _local(eager_error.nan_to_num(0.0, 0.0, 0.0), "max")


def tolerance(least: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Attainable error per element, float64: `least` is what `floor` gives, `spread` sigma."""
    return least + SIGMAS * torch.maximum(spread, 0.5 * _local(spread, "median"))


def of_a_sum(
    unit: float,
    accumulate: float,
    want: torch.Tensor,
    squares: torch.Tensor,
    inherited: torch.Tensor,
    dim: int,
    count: int,
) -> torch.Tensor:
    """How far a cumulative sum over a dimension may be off, however it is added up, from either end or of a total.

    Args:
        unit: unit roundoff of the operators that make the terms.
        accumulate: that of the sums.
        want: the sum.
        squares: those of what each place adds; there are `count` terms along the dimension.
        inherited: squares of the attainable errors of those terms.
        dim: see above.
        count: see above.
    """
    all_of, off, largest = squares.sum(dim, True), inherited.sum(dim, True), want.abs().amax(dim, True)
    adding = count * (all_of / 6 + largest.square() / 3)  # as in rounding.py
    return (SIGMAS * (unit**2 * all_of + accumulate**2 * adding).sqrt() + off.sqrt()).expand_as(want)


def terms(want: float, least: float, tol: float, dtype: str) -> tuple[tuple[str, float], ...]:
    """What one element's tolerance is made of, by name; `least` and `tol` are what `floor` and `tolerance` gave it."""
    stored, smallest = 1.01 * UNIT[dtype] * abs(want), 4 * _SMALLEST[dtype]
    return (
        (f"{SIGMAS:g} sigma: random rounding of the formula", tol - least),
        ("u |want|: storing the result", stored),
        (f"{OWN_ERRORS:g} E: the formula in {dtype}", max(least - stored - smallest, 0.0)),
        ("4 steps of the smallest numbers", smallest),
    )


def no_digit_left(tol: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether most elements of a tensor, those that are 0 apart, may be off by more than their own size."""
    counted = want != 0
    return 2 * int(((tol > want.abs()) & counted).sum()) > int(counted.sum())


# Elements from which on a tensor has a scale of its own beside its rounding errors.
_SCALED = 32
# Units of rounding that the scale of a whole tensor may be off: as many of its factors may be one rounded number.
_FACTORS = 4.0


def scale(t: torch.Tensor, want: torch.Tensor) -> float:
    """The factor between two tensors that fits best; NaN where there is none to speak of."""
    if want.numel() < _SCALED:
        return math.nan
    size, product = float(want.square().sum()), float((t.detach() * want).sum())
    factor = product / size if size and math.isfinite(size) else math.nan
    return factor if math.isfinite(factor) else math.nan  # what is not finite in either tensor leaves no finite sum


def scales(runs: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """The factors between each of several tensors and another that fit best, likewise."""
    if want.numel() < _SCALED:
        return torch.full(runs.shape[:1], math.nan, dtype=want.dtype)
    size = want.square().sum()
    factors = (runs * want).flatten(1).sum(1) / size
    return torch.where(factors.isfinite() & size.isfinite(), factors, math.nan)


def scale_tolerance(spread: float, eager: float, want: torch.Tensor, dtype: torch.dtype, unit_inside: float) -> float:
    """How far from 1 a scale may be.

    Args:
        spread: of the scales of randomly rounded runs.
        eager: the scale of the reference in the op's own precision; NaN if unknown.
        want: the tensor in float64; storing it in `dtype` rounds its elements, equal digits alike.
        dtype: see there.
        unit_inside: unit roundoff of the operators.
    """
    own = OWN_ERRORS * abs(eager - 1) if eager == eager else 0.0
    squares = want.square().flatten()
    # Equal digits are rounded alike, whatever their number: 9,408 elements of 1/34 were all 0.9982 of it in bfloat16.
    _, digits = torch.frexp(want.abs().float()).mantissa.flatten().unique(return_inverse=True)
    alike = squares.new_zeros(int(digits.max()) + 1).index_add_(0, digits, squares)
    storing = unit(dtype) * float(torch.linalg.vector_norm(alike) / squares.sum())
    return SIGMAS * (spread + storing) + own + _FACTORS * unit_inside


# Finite differences: standard deviations of noise that an error estimate holds. 4 leaves 6e-5 to chance, and the noise
# is estimated from nine values only.
NOISE_SIGMAS = 4.0
# A tableau's error is the change of its last step, which covers the true error in two thirds of the cases; three such
# changes cover it wherever the tableau converges at all.
TABLEAU_ERRORS = 3.0


def storing_error(dtype: str, products: torch.Tensor) -> float:
    """What rounding a gradient to its dtype may change in the sum of `products`, its elements times a direction.

    Independent roundings of half a unit each: SIGMAS standard deviations of their sum.
    """
    return SIGMAS * UNIT[dtype] * float(products.square().sum().sqrt())


# A mistake is computed in float64 and compared with what the op gave: both sides of an ordinary comparison, and again
# as much for a factor that was fitted.
_ALIKE = 2.0
_AMPLIFIED = 2.0**7  # most that an element's error may have grown with it: quotients by what is nearly 0


def mistake_tolerance(tol: torch.Tensor, want: torch.Tensor, suspect: torch.Tensor, dtype: str) -> torch.Tensor:
    """How far a result may be from what a suspected mistake would give: `tol`, which is about `want`, in its scale."""
    size = suspect.nan_to_num(0.0, 0.0, 0.0).abs()
    overall = float(size.max() / want.abs().max().clamp_min(torch.finfo(want.dtype).tiny)) if want.numel() else 1.0
    each = (size / want.abs()).nan_to_num(1.0, 1.0).clamp(max(1.0, overall), max(_AMPLIFIED, overall))
    return _ALIKE * each * tol + _ALIKE * UNIT[dtype] * size


# Mean errors, in units of a lower precision, that show it: rounding once leaves a third of a unit in the mean, sums of
# rounded terms reach a few.
_COARSE = (0.1, 8.0)
# Standard deviations that a mean of independent errors keeps within; of fewer elements than its square times four a
# correlation of a half is still chance.
_CHANCE = 4.0
_SPREAD = 0.1  # of the mean error, that of the middle element: noise of rounding has 0.3 to 0.7, a few wrong ones none


def lower_precision_noise(got: torch.Tensor, want: torch.Tensor) -> str:
    """In words, that errors are those of a lower precision inside: small everywhere, and without a pattern; else ""."""
    size = float(want.square().mean().sqrt()) if want.numel() > 1 else 0.0
    if not size or not bool(got.isfinite().all()):
        return ""
    error = (got - want) / size
    mean, count = float(error.square().mean().sqrt()), error.numel()
    if count < 4 * _CHANCE**2 or float(error.abs().median()) < _SPREAD * mean:
        return ""
    along = float((error * want).mean()) / (mean * size) if mean else 1.0  # correlation with the right result
    means = [error.mean(axis) for axis in range(error.ndim)]
    ways = [float(m.square().mean().sqrt()) / mean * (count / m.numel()) ** 0.5 for m in means if mean and m.numel()]
    if abs(along) > _CHANCE / count**0.5 or any(way > _CHANCE for way in ways):
        return ""
    for name in ("bfloat16", "float16"):
        low, high = (factor * UNIT[name] for factor in _COARSE)
        if low <= mean <= high and float(error.abs().max()) <= SIGMAS * high:
            return f"noise of {mean:.1e} of the tensor's size, as if {name} were used on the way"
    return ""


def first_half(dtype: str) -> float:
    """Relative size of the first half of the digits, which the order of a sum does not reach."""
    return UNIT[dtype] ** 0.5


def half_the_digits(dtype: str, want: torch.Tensor, added: float = 0.0, left: float = 0.0) -> torch.Tensor:
    """Where no truth can be asked: `first_half` of the largest element, or of what was added up to it.

    Also what the step of as much in an input changes, which terms that cancel may leave.
    """
    return first_half(dtype) * want.abs().nan_to_num(0.0).max().clamp_min(added) + left


def another_path(want: torch.Tensor, *, tf32: bool) -> float:
    """How far the same gradient may be off by another path of the op, taken where fewer gradients are asked for.

    64 units of the largest element, of tf32 where that is multiplied in: another order of a sum over a row of a few
    thousand terms.
    """
    limits = torch.finfo(want.dtype)
    eps = max(limits.eps, 2 * TF32 if tf32 else 0.0)
    largest = float(want.abs().max().nan_to_num(0.0)) if want.numel() else 0.0
    return 64 * eps * max(largest, limits.tiny)  # below tiny digits get fewer


def scales_exactly(t: torch.Tensor, factor: float) -> torch.Tensor:
    """Where scaling by a power of two is exact: well above the subnormals (2^10 of room inside), no overflow."""
    info = torch.finfo(t.dtype)
    size = t.abs()
    return (size > info.tiny * 1024) & (size * abs(factor) < info.max / 2)


# A part of the largest element that an op which differs run to run may be from linear: its own noise is smaller by far,
# a forgotten factor larger.
NOISY_LINEAR = 1e-3

# Times the attainable error that a smaller case must reach to stand for the first: a tiny case that is out by a hair
# would explain nothing.
PLAINLY_WRONG = 100.0


def overflows(want: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where a result is so near the largest number of its dtype that rounding may make it infinite."""
    return want.abs() > torch.finfo(dtype).max / 2


def moderate(t: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all of a tensor are numbers, and none is that large: what `overflows` and isfinite say, in two steps."""
    return not t.numel() or float(torch.linalg.vector_norm(t, math.inf)) <= torch.finfo(dtype).max / 2
