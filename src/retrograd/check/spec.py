"""Description of an op to be checked, as a person writes it: `op` and `tensor`. No data is made and nothing runs here.

Torch-free: dtypes are names ("float32") or torch dtypes, whose name is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrograd.check.acceptance import acceptances
from retrograd.check.schema import Acceptance
from retrograd.errors import SpecError, UsageError

FLOATS = ("float64", "float32", "float16", "bfloat16")
COMPLEXES = ("complex128", "complex64")
COMPLEX = "complex"  # of a tensor: the complex dtype of the precision under test
DTYPES = (*FLOATS, *COMPLEXES, COMPLEX, "int64", "int32", "int16", "int8", "uint8", "bool")

TRANSFORMS = ("compile", "inductor", "vjp", "vmap")

_SHORT = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "half": "float16"}
_DIM = re.compile(r"[A-Za-z_]\w*(\.\.\.)?")


def dtype_name(dtype: Any, argument: str = "dtype") -> str:
    """ "bfloat16" for torch.bfloat16, "bf16" or "bfloat16"; UsageError otherwise."""
    text = str(dtype).removeprefix("torch.")
    text = _SHORT.get(text, text)
    if text not in DTYPES:
        raise UsageError(f"`{argument}` is {dtype!r}, expected one of {', '.join(DTYPES)}")
    return text


@dataclass(frozen=True)
class TensorSpec:
    """One input tensor, described; see `tensor`."""

    dims: tuple[str | int, ...]
    dtype: str | None = None
    low: float | None = None
    high: float | str | None = None
    scale: float | tuple[float, float] = 1.0
    grad: bool | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The named dimensions, in order."""
        return tuple(d.removesuffix("...") for d in self.dims if isinstance(d, str))

    @property
    def differentiable(self) -> bool:
        """Whether a gradient is asked for: floating and not declared `grad=False`."""
        floating = self.dtype is None or self.dtype in (*FLOATS, *COMPLEXES, COMPLEX)
        return floating if self.grad is None else self.grad


def tensor(
    *dims: str | int,
    dtype: Any = None,
    low: float | None = None,
    high: float | str | None = None,
    scale: float | tuple[float, float] = 1.0,
    grad: bool | None = None,
) -> TensorSpec:
    """Describe an input tensor with named sizes, which `verify` sweeps and shrinks.

    Args:
        *dims: names ("M"), integers, or a name with dots ("M...", first place only) for any number of
            leading dimensions. One name means one size in all tensors of the op. "M N" is "M", "N".
        dtype: None for the dtype under test; a name or torch dtype for a fixed one; "complex" for complex numbers
            in the precision under test. Integer and bool tensors get no gradient.
        low, high: values are uniform in [low, high), for integers low <= v < high; `high` may name a
            dimension (an index tensor). None: standard normal (integers need `high`).
        scale: a factor, or (smallest, largest): then each row gets a factor drawn log-uniformly.
        grad: False for a floating input that has no gradient by design.

    Raises:
        SpecError: a dimension is not a name or a size, `low` without `high`, an integer tensor without `high`.
    """
    words = tuple(w for d in dims for w in (d.split() if isinstance(d, str) else (d,)))
    for place, dim in enumerate(words):
        ok = dim >= 0 if isinstance(dim, int) else bool(_DIM.fullmatch(dim))
        if not ok or (isinstance(dim, str) and dim.endswith("...") and place):
            raise SpecError(
                f"`dims` has {dim!r} at place {place}; expected a size >= 0, a name such as 'N', "
                "or in the first place a name with dots such as 'M...'"
            )
    kind = None if dtype is None else dtype_name(dtype)
    integer = kind is not None and kind not in (*FLOATS, *COMPLEXES, COMPLEX, "bool")
    if (low is None) != (high is None) and not integer:
        raise SpecError(f"`low` is {low!r} and `high` is {high!r}; give both for a uniform range, or neither")
    if integer and high is None:
        raise SpecError(f"a tensor of dtype {kind} needs `high` (a number, or a dimension's name for an index)")
    return TensorSpec(words, kind, low, high, scale, grad)


# A size may be fixed (int), a range (lowest, highest) or a list of the sizes that are allowed.
SizeRule = int | tuple[int, int] | list[int]

Inputs = Mapping[str, Any] | Sequence[Any] | Callable[..., Any]


@dataclass(frozen=True)
class OpSpec:
    """An op and all that is needed to check it; see `op`."""

    fn: Callable[..., Any]
    reference: Callable[..., Any] | None
    inputs: Inputs
    name: str
    params: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    sizes: Mapping[str, SizeRule] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float32",)
    compute: str | None = None
    deterministic: bool | None = None
    surrogate: bool = False
    extremes: tuple[str, ...] | None = None
    double_backward: str | None = None
    kinks: Callable[..., Mapping[str, Any]] | None = None
    transforms: tuple[str, ...] = ()
    algorithm_error: float | None = None
    accept: tuple[Acceptance, ...] = ()

    @property
    def tensor_specs(self) -> Mapping[str, Any] | None:
        """The inputs if they are described (a dict with at least one TensorSpec), else None."""
        described = isinstance(self.inputs, Mapping) and any(isinstance(v, TensorSpec) for v in self.inputs.values())
        return self.inputs if described else None  # type: ignore[return-value]

    @property
    def size_names(self) -> tuple[str, ...]:
        """Every named dimension, in order of first use."""
        used: dict[str, None] = {}
        for spec in (self.tensor_specs or {}).values():
            if isinstance(spec, TensorSpec):
                used |= dict.fromkeys(spec.names)
        return tuple(used | dict.fromkeys(self.sizes))


def op(
    fn: Callable[..., Any],
    reference: Callable[..., Any] | None = None,
    inputs: Inputs | None = None,
    *,
    params: Mapping[str, Any] | None = None,
    sizes: Mapping[str, SizeRule] | None = None,
    dtypes: Sequence[Any] = ("float32",),
    compute: Any = None,
    deterministic: bool | None = None,
    surrogate: bool = False,
    extremes: Sequence[str] | None = None,
    double_backward: bool | str | None = None,
    kinks: Callable[..., Mapping[str, Any]] | None = None,
    transforms: Sequence[str] = (),
    algorithm_error: float | None = None,
    accept: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> OpSpec:
    """Describe a differentiable op, so that `verify` can prove its backward pass.

    Args:
        fn: the op: called `fn(*inputs, **params)`, returns a tensor, or tensors in tuples, lists, dicts or dataclasses.
        reference: the same function in plain PyTorch, as slow and readable as you like; run in float64 by
            the tool, whatever casts it makes. Without one, the stages that need none still run.
        inputs: what to call it with, in the order of `fn`'s arguments. A dict of `tensor(...)` specs
            (other values are passed as they are); or a callable `(seed, dtype, sizes)` that makes the
            inputs (`sizes` is a dict); or the concrete tensors, as a dict or a sequence.
        params: keyword arguments for `fn` and `reference`; a list gives values to sweep: `eps=[1e-6, 1e-2]`.
        sizes: per named dimension a fixed size, a range `(lowest, highest)` or a list of allowed sizes.
            Dimensions not named here are free: 0 and 1 included.
        dtypes: floating or complex dtypes to check, the first being the one for stages that need only one.
        compute: "float32" promises that 16-bit inputs are computed in float32 and rounded once at the end,
            which makes the 16-bit checks sharper. None promises nothing.
        deterministic: True: any bit that differs between two runs is a finding. False: differences within
            the attainable error are expected (float atomics). None: they are noted.
        surrogate: True if the gradient is not meant to be the derivative of the forward (straight-through).
        extremes: names of the inputs that may hold anything: huge and tiny numbers, NaN, Inf. None: the
            described floating ones without a range (`low`, `high`).
        double_backward: True or "right": gradients of gradients must be right; False or "raises": asking for them must
            raise. None: either will do; what is silently wrong is a finding, and none at all a note.
        kinks: called like `fn`, returns by input name how far each element is from the next point without a
            derivative, in the input's own units. Kinks of the reference are found without it; this is for those that
            it hides, such as a coordinate computed otherwise than in `fn`.
        transforms: what the op promises to work under: "compile" (torch.compile with one graph, checked with the
            backend aot_eager), "inductor" (the same with code generation, slow), "vjp", "vmap" (torch.func).
        algorithm_error: how many times the attainable error of the reference's formula the op's own algorithm may be
            off, where it is another one: sums by blocks, a transform, a function by another. None: it is the same;
            up to 4 times are undecided then, and more a finding.
        accept: findings that may stand, with the reason: `accept={"higher_order": "once_differentiable by design"}`.
            A class is a stage, "stage/kind" or "stage/kind/tensor", as findings print them. They are shown and fail
            nothing; one that does not occur any more fails. What only level full sees has `dict(reason=...,
            level="full")` instead of the reason.
        name: how reports call the op; `fn.__name__` unless given.

    Raises:
        SpecError: `fn` or `reference` cannot be called, `inputs` is missing, a size rule is malformed, `accept` has a
            class that no stage tells.
        UsageError: an unknown dtype.
    """
    if not callable(fn):
        raise SpecError(f"`fn` is {type(fn).__name__}, expected a callable op(*inputs, **params)")
    if reference is not None and not callable(reference):
        raise SpecError(f"`reference` is {type(reference).__name__}, expected a callable or None")
    if inputs is None or isinstance(inputs, (str, bytes)) or not (callable(inputs) or len(inputs)):
        raise SpecError(
            "`inputs` is missing; expected a dict of retrograd.tensor(...), concrete tensors, or a callable"
        )
    swept = {k: tuple(v) if isinstance(v, list) else (v,) for k, v in (params or {}).items()}
    if empty := [k for k, v in swept.items() if not v]:
        raise SpecError(f"`params` has no value for {empty}; give at least one")
    names = _dtypes(dtypes)
    _check_promises(transforms, kinks, double_backward, algorithm_error)
    for key, rule in (sizes or {}).items():
        _check_size_rule(key, rule)
    spec_name = name or getattr(fn, "__name__", None) or type(fn).__name__
    width = None if compute is None else dtype_name(compute, "compute")
    any_value = None if extremes is None else _names(extremes, inputs)
    spec = OpSpec(fn, reference, inputs, spec_name, swept, dict(sizes or {}), names, width, deterministic,
                  surrogate, any_value, _order_two(double_backward), kinks, tuple(transforms), algorithm_error,
                  acceptances(accept))  # fmt: skip
    if callable(inputs) or spec.tensor_specs:
        return spec
    if sizes:
        raise SpecError("`sizes` is given, but `inputs` are concrete tensors; describe them with retrograd.tensor(...)")
    return spec


def _dtypes(dtypes: Sequence[Any]) -> tuple[str, ...]:
    names = tuple(dtype_name(d, "dtypes") for d in dtypes)
    unknown = [d for d in names if d not in (*FLOATS, *COMPLEXES)]
    if unknown or not names:
        expected = ", ".join((*FLOATS, *COMPLEXES))
        raise UsageError(f"`dtypes` has {unknown or 'nothing'}; expected floating or complex dtypes: {expected}")
    return names


def _check_promises(transforms: Any, kinks: Any, double_backward: Any, algorithm_error: Any) -> None:
    if algorithm_error is not None and not algorithm_error >= 1:
        raise SpecError(f"`algorithm_error` is {algorithm_error!r}, expected a factor of at least 1 or None")
    unknown = [transforms] if isinstance(transforms, str) else sorted(set(transforms) - set(TRANSFORMS))
    if unknown:
        raise SpecError(f"`transforms` has {unknown}, expected a sequence of some of {', '.join(TRANSFORMS)}")
    if kinks is not None and not callable(kinks):
        raise SpecError(f"`kinks` is {type(kinks).__name__}, expected a callable kinks(*inputs, **params) or None")
    if not (isinstance(double_backward, bool) or double_backward in (None, "right", "raises")):
        raise SpecError(f"`double_backward` is {double_backward!r}, expected True ('right'), False ('raises') or None")


def _order_two(double_backward: bool | str | None) -> str | None:
    return ("right" if double_backward else "raises") if isinstance(double_backward, bool) else double_backward


def _names(extremes: Sequence[str], inputs: Inputs) -> tuple[str, ...]:
    named = list(inputs) if isinstance(inputs, Mapping) else None
    if isinstance(extremes, str) or (named is not None and (set(extremes) - set(named))):
        raise SpecError(f"`extremes` is {extremes!r}; expected names of inputs: {named}")
    return tuple(extremes)


def _check_size_rule(name: str, rule: Any) -> None:
    values = rule if isinstance(rule, (tuple, list)) else [rule]
    valid = bool(values) and all(isinstance(v, int) and v >= 0 for v in values)
    if not valid or (isinstance(rule, tuple) and (len(rule) != 2 or rule[0] > rule[1])):
        raise SpecError(f"`sizes[{name!r}]` is {rule!r}; expected a size, a range (lowest, highest) or a list of sizes")
