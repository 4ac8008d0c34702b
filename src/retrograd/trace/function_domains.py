"""Domains and poles of functions: reasons of a NaN or Inf by the range of an input. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from retrograd.trace.diffing.identity import names
from retrograd.trace.schema import Op
from retrograd.trace.value_ranges import known_input, spread


@dataclass(frozen=True, slots=True)
class Domain:
    """Numbers outside of `low` to `high` give NaN, and those in `poles` an infinity; `at` is which input it is."""

    low: float = -math.inf
    high: float = math.inf
    poles: tuple[float, ...] = ()
    at: int = 0
    negative_integers: bool = False  # poles, too


_GAMMA = Domain(poles=(0,), negative_integers=True)
_PROBABILITY = Domain(0, 1, (0, 1))
_DOMAINS = {
    "acos": Domain(-1, 1),
    "asin": Domain(-1, 1),
    "atanh": Domain(-1, 1, (-1, 1)),
    "acosh": Domain(low=1),
    "erfinv": Domain(-1, 1, (-1, 1)),
    "logit": _PROBABILITY,
    "special_ndtri": _PROBABILITY,
    "lgamma": _GAMMA,
    "digamma": _GAMMA,
    "polygamma": _GAMMA,
    "xlogy": Domain(0, math.inf, (0,), at=1),
    "special_xlog1py": Domain(-1, math.inf, (-1,), at=1),
    "special_bessel_y0": Domain(0, math.inf, (0,)),
    "special_bessel_y1": Domain(0, math.inf, (0,)),
    "special_modified_bessel_k0": Domain(0, math.inf, (0,)),
    "special_modified_bessel_k1": Domain(0, math.inf, (0,)),
    "special_zeta": Domain(1, math.inf, (1,)),
}
_SOLVES = names("linalg_lu_solve lu_solve _linalg_solve_ex linalg_inv_ex linalg_solve_triangular triangular_solve")


def _outside_of_domain(op: Op, nan: bool, name: str) -> str:
    """The reason where an input is outside of the function's domain or at a pole; "" where it is not plain."""
    domain = _DOMAINS[name]
    stats = known_input(op, domain.at)
    if stats is None:
        return ""
    low, high = stats.low or 0.0, stats.high or 0.0
    reach = f"its input {domain.at + 1} has" if domain.at else "its input has"
    reach += f" {spread(stats)}"
    if nan and not domain.low <= low <= high <= domain.high:
        if math.isinf(domain.high):
            return f"{name} of numbers below {domain.low:g}: {reach}"
        return f"{name} outside of {domain.low:g} to {domain.high:g}: {reach}"
    poles = [f"{pole:g}" for pole in domain.poles if low <= pole <= high and (pole or stats.zero)]
    poles += ["negative integers"] * (domain.negative_integers and low <= -1)
    return f"{name} of {' or '.join(poles)} is infinite: {reach}" if poles and not nan else ""


def _entropy(op: Op, nan: bool, name: str) -> str:
    stats = known_input(op, 0)
    low = 0.0 if stats is None else stats.low or 0.0
    return f"{name} of numbers below 0 is -inf: its input goes down to {low:.4g}" if low < 0 and not nan else ""


def _singular(op: Op, nan: bool, name: str) -> str:
    return "the matrix is singular: a pivot, or a number on the diagonal of a triangular one, is 0"


def _determinant(op: Op, nan: bool, name: str) -> str:
    if any(s.bad for s in op.outputs):
        return "" if nan else "log(0) is -inf: the determinant is 0, of a matrix that is singular"
    return "log of a negative number, of which torch.logdet makes NaN: the determinant is negative"


def _connectionist(op: Op, nan: bool, name: str) -> str:
    return (
        "a target is longer than its input allows, of which the loss is infinite (labels that repeat need one more "
        "step each); zero_infinity=True leaves such out"
    )


def _weight_norm(op: Op, nan: bool, name: str) -> str:
    direction = known_input(op, 0)
    return (
        "0/0: the norm of a row of the weight's direction is zero" if direction is not None and direction.zero else ""
    )


def _running_variance(op: Op, nan: bool, name: str) -> str:
    """Of a batch norm in evaluation, whose last input is the variance."""
    variance = known_input(op, len(op.inputs) - 1)
    if variance is None or not nan or "train=True" in op.arguments or "training=True" in op.arguments:
        return ""
    low = variance.low or 0.0
    return f"root of a negative number: the running variance goes down to {low:.4g}" if low < 0 else ""


RULES: dict[str, Callable[[Op, bool, str], str]] = {
    **dict.fromkeys(_DOMAINS, _outside_of_domain),
    **dict.fromkeys(_SOLVES, _singular),
    "special_entr": _entropy,
    "_linalg_slogdet": _determinant,
    **dict.fromkeys(("_ctc_loss", "_cudnn_ctc_loss"), _connectionist),
    "_weight_norm_interface": _weight_norm,
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm"), _running_variance
    ),
}
