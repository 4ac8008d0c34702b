"""Descriptions of inputs, as a person writes them: `tensor` and `size`. No data is made here.

Torch-free: dtypes are names ("float32") or torch dtypes, whose name is taken.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from retrograd.check import sizes
from retrograd.check.schema import Case, Size
from retrograd.errors import SpecError, UsageError

FLOATS = ("float64", "float32", "float16", "bfloat16")
COMPLEXES = ("complex128", "complex64")
COMPLEX = "complex"  # of a tensor: the complex dtype of the precision under test
FLOAT8S = ("float8_e4m3fn", "float8_e5m2")  # of inputs without a gradient: no arithmetic is done in them
DTYPES = (*FLOATS, *FLOAT8S, *COMPLEXES, COMPLEX, "int64", "int32", "int16", "int8", "uint8", "bool")

_SHORT = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "half": "float16"}

# Constraints on values by name; those of matrices need two dimensions.
MATRICES = ("symmetric", "positive_definite", "triangular", "lower_triangular", "upper_triangular", "orthogonal")
ROWS = ("sorted", "unique", "permutation", "simplex", "unit_norm")
CONSTRAINTS = (*MATRICES, *ROWS)


def dtype_name(dtype: Any, argument: str = "dtype") -> str:
    """ "bfloat16" for torch.bfloat16, "bf16" or "bfloat16"; UsageError otherwise."""
    text = str(dtype).removeprefix("torch.")
    text = _SHORT.get(text, text)
    if text not in DTYPES:
        raise UsageError(f"`{argument}` is {dtype!r}, expected one of {', '.join(DTYPES)}")
    return text


@dataclass(frozen=True)
class TensorSpec:
    """One input tensor, described; see `tensor`. A concrete one has no dimensions of its own."""

    dims: tuple[str | int, ...]
    dtype: str | None = None
    low: float | None = None
    high: float | str | None = None
    scale: float | tuple[float, float] = 1.0
    grad: bool | None = None
    values: str | Callable[..., Any] | None = None
    concrete: Any = field(default=None, compare=False)
    varied: bool = False  # a concrete one that is drawn around what it is

    @property
    def names(self) -> tuple[str, ...]:
        """The names in its dimensions, in order."""
        bound = (self.high,) if isinstance(self.high, str) else ()
        return tuple(dict.fromkeys(name for dim in (*self.dims, *bound) for name in sizes.names_of(dim)))

    @property
    def floating(self) -> bool:
        """Whether it holds floating or complex numbers."""
        if self.concrete is not None:
            floating = self.concrete.is_floating_point() or self.concrete.is_complex()
            return floating and self.concrete.dtype.itemsize > 1
        return self.dtype is None or self.dtype in (*FLOATS, *COMPLEXES, COMPLEX)

    @property
    def differentiable(self) -> bool:
        """Whether a gradient is asked for: floating and not declared `grad=False`."""
        return self.floating if self.grad is None else self.grad

    @property
    def range(self) -> tuple[float, float] | None:
        """The lowest and highest value, where both are numbers."""
        return (self.low, self.high) if self.low is not None and isinstance(self.high, (int, float)) else None


@dataclass(frozen=True)
class SizeSpec:
    """A size as an argument of the op; see `size`."""

    dim: str

    @property
    def dims(self) -> tuple[str]:
        """The dimension, as of a tensor."""
        return (self.dim,)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in it."""
        return sizes.names_of(self.dim)

    def at(self, case: Case) -> Size:
        """Its value in a case."""
        return sizes.size_of(self.dim, case)


def size(dim: str) -> SizeSpec:
    """Describe an argument of the op that is a size, a plain int that follows the tensors.

    Args:
        dim: a name or an expression as in `tensor`: "N", "2*N". "M..." is the tuple of all sizes it stands for.

    Raises:
        SpecError: it is neither.
    """
    sizes.check_dim(dim, 0)
    return SizeSpec(str(dim))


def tensor(
    *dims: Any,
    dtype: Any = None,
    low: float | None = None,
    high: float | str | None = None,
    scale: float | tuple[float, float] = 1.0,
    values: str | Callable[..., Any] | None = None,
    grad: bool | None = None,
) -> TensorSpec:
    """Describe an input tensor with named sizes, which `verify` sweeps and shrinks; or a concrete one.

    Args:
        *dims: names ("M"), integers, expressions of names ("2*N", "L+1", "N//2"), or a name with dots ("M...", first
            place only) for any number of leading dimensions. One name means one size in all tensors of the op. "M N"
            is "M", "N". Instead of dimensions a torch.Tensor: its values are taken, in the dtype under test if it is
            floating.
        dtype: None for the dtype under test; a name or torch dtype for a fixed one; "complex" for complex numbers
            in the precision under test. Integer, bool and float8 tensors get no gradient.
        low, high: values are uniform between them, either included; for integers low <= v < high, and `high` may name
            a dimension (an index tensor). None: standard normal (integers need `high`).
        scale: a factor, or (smallest, largest): then each row gets a factor drawn log-uniformly.
        values: what the values keep to. Of matrices (the last two dimensions) "symmetric", "positive_definite",
            "lower_triangular" ("triangular"), "upper_triangular", "orthogonal" (columns, or rows if there are fewer);
            of rows (the last dimension) "sorted", "unique", "permutation" (of 0, 1, ...), "simplex" (positive, of sum
            1), "unit_norm". Or a callable `(generator, shape, dtype)` that returns such a tensor. Gradients are judged
            along them: what no allowed change of the values can show does not count.
        grad: False for a floating input that has no gradient by design.

    Raises:
        SpecError: a dimension is not a name or a size, `low` without `high` or above it, an integer tensor without
            `high`, `scale` is no factor, `values` is no constraint or does not fit the dimensions or the dtype.
    """
    if len(dims) == 1 and hasattr(dims[0], "is_floating_point"):
        return _concrete(dims[0], dtype, low, high, scale, values, grad)
    words = tuple(w for d in dims for w in (sizes.words(d) if isinstance(d, str) else (d,)))
    for place, dim in enumerate(words):
        sizes.check_dim(dim, place)
    kind = None if dtype is None else dtype_name(dtype)
    integer = kind is not None and kind not in (*FLOATS, *FLOAT8S, *COMPLEXES, COMPLEX, "bool")
    if kind in FLOAT8S and (grad or values is not None):
        raise SpecError(f"`dtype` is {kind}, whose numbers have no gradient and keep to nothing; leave out the rest")
    _check_numbers(low, high, scale, grad)
    if (low is None) != (high is None) and not integer:
        raise SpecError(f"`low` is {low!r} and `high` is {high!r}; give both for a uniform range, or neither")
    if integer and high is None and values != "permutation" and not callable(values):
        raise SpecError(f"a tensor of dtype {kind} needs `high` (a number, or a dimension's name for an index)")
    if isinstance(high, str):
        sizes.check_dim(high, 0)
    _check_values(values, words, integer)
    if isinstance(values, str) and values not in ("sorted", "unique"):
        ranged = [n for n, v in (("low", low), ("high", high)) if v is not None and not integer]
        if ranged or scale != 1.0:
            labels = " and ".join(f"`{n}`" for n in (*ranged, *["scale"] * (scale != 1.0)))
            raise SpecError(f"{labels} of `values` {values!r}, which has a range of its own; leave it out")
    if isinstance(values, str) and kind in (*COMPLEXES, COMPLEX):
        raise SpecError(f"`values` is {values!r}, which is of real numbers; draw complex ones by a callable")
    return TensorSpec(words, kind, low, high, scale, grad, values)


def _check_numbers(low: Any, high: Any, scale: Any, grad: Any) -> None:
    for argument, value in (("low", low), ("high", high)):
        if not (value is None or _is_number(value) or (argument == "high" and isinstance(value, str))):
            dimension = ", or a dimension's name for an index" if argument == "high" else ""
            raise SpecError(f"`{argument}` is {value!r}, expected a number or None{dimension}")
    if _is_number(low) and _is_number(high) and low > high:
        raise SpecError(f"`low` is {low!r} and `high` is {high!r}; expected the smaller one as `low`")
    pair = isinstance(scale, tuple) and len(scale) == 2 and all(map(_is_number, scale)) and 0 < scale[0] <= scale[1]
    if not pair and not _is_number(scale):
        raise SpecError(f"`scale` is {scale!r}, expected a factor, or (smallest, largest) of positive ones")
    if grad not in (None, True, False):
        raise SpecError(f"`grad` is {grad!r}, expected False for an input without a gradient, True or None")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check_values(values: Any, dims: tuple[Any, ...], integer: bool) -> None:
    if values is None or callable(values):
        return
    if values not in CONSTRAINTS:
        raise SpecError(f"`values` is {values!r}, expected one of {', '.join(CONSTRAINTS)}, or a callable")
    needed = 2 if values in MATRICES else 1
    if len(dims) < needed or (needed == 2 and str(dims[-2]).endswith("...")):
        raise SpecError(f"`values` is {values!r} of dimensions {dims}, expected at least {needed}")
    if values in MATRICES and values != "orthogonal" and dims[-1] != dims[-2]:
        raise SpecError(f"`values` is {values!r} of dimensions {dims}, expected the last two to be the same: 'N', 'N'")
    if integer and values not in ("sorted", "unique", "permutation"):
        raise SpecError(f"`values` is {values!r} of whole numbers, expected sorted, unique or permutation")


def _concrete(value: Any, dtype: Any, low: Any, high: Any, scale: Any, values: Any, grad: bool | None) -> TensorSpec:
    drawn = [n for n, v in (("low", low), ("high", high), ("values", values)) if v is not None]
    drawn += ["scale"] * (scale != 1.0)
    if drawn:
        raise SpecError(f"{drawn} of a concrete tensor, whose values are known; expected `grad` and `dtype` alone")
    kind = None if dtype is None else dtype_name(dtype)
    if grad and not (value.is_floating_point() or value.is_complex()):
        raise SpecError(f"`grad` is True of a concrete tensor of {value.dtype}, which has no gradient")
    return TensorSpec((), kind, grad=grad, concrete=value.detach())
