"""Description of an op to be checked, as a person writes it: `op`. No data is made and nothing runs here.

Torch-free, as are the descriptions of inputs (`check.input_specs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from retrograd.check import sizes as dimensions
from retrograd.check.acceptance import acceptances
from retrograd.check.calling import Call, arranged
from retrograd.check.input_specs import COMPLEXES, FLOATS, SizeSpec, TensorSpec, dtype_name
from retrograd.check.input_specs import size as size
from retrograd.check.input_specs import tensor as tensor
from retrograd.check.schema import Acceptance
from retrograd.core.loading import near
from retrograd.errors import SpecError, UsageError

LAYOUTS = ("transposed", "rows", "offset", "sliced", "expanded")
_ORDER_TWO = {True: "right", False: "raises", "right": "right", "raises": "raises", None: None}
TRANSFORMS = ("compile", "inductor", "vjp", "vmap", "jvp", "batched_grad")

# A size may be fixed (int), a range (lowest, highest[, ordinary]), a list of allowed sizes, or an expression.
SizeRule = int | tuple[int, int] | tuple[int, int, int] | list[int] | str

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
    finite: tuple[str, ...] = ()  # those of `extremes` that hold no NaN and no Inf
    double_backward: str | None = None
    kinks: Callable[..., Mapping[str, Any]] | None = None
    transforms: tuple[str, ...] = ()
    algorithm_error: float | None = None
    accept: tuple[Acceptance, ...] = ()
    where: tuple[str, ...] = ()
    layouts: str | Mapping[str, type[Exception]] | None = None
    random: bool | None = None
    batch_invariant: str | bool | None = None

    @property
    def leading(self) -> str:
        """The first named dimension that a tensor begins with and no index counts; "" without one."""
        counted = {str(t.high) for t in self.tensors.values()}
        firsts = (str(t.dims[0]).removesuffix("...") for t in self.tensors.values() if t.dims)
        return next((name for name in firsts if name in self.size_names and name not in counted), "")

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the inputs that are parameters and buffers of a module."""
        return self.fn.state if isinstance(self.fn, Call) else ()

    @cached_property
    def tensor_specs(self) -> Mapping[str, Any] | None:
        """The inputs if they are described (a dict with at least one TensorSpec), else None."""
        described = isinstance(self.inputs, Mapping) and any(
            isinstance(v, (TensorSpec, SizeSpec)) for v in self.inputs.values()
        )
        return self.inputs if described else None  # type: ignore[return-value]

    @cached_property
    def tensors(self) -> dict[str, TensorSpec]:
        """The inputs that are described tensors, by name."""
        return {name: value for name, value in (self.tensor_specs or {}).items() if isinstance(value, TensorSpec)}

    @cached_property
    def _described(self) -> list[TensorSpec | SizeSpec]:
        return [value for value in (self.tensor_specs or {}).values() if isinstance(value, (TensorSpec, SizeSpec))]

    @cached_property
    def size_names(self) -> tuple[str, ...]:
        """Every named dimension, in order of first use."""
        used = dict.fromkeys(name for each in self._described for name in each.names)
        return tuple(name for name in used | dict.fromkeys(self.sizes) if name not in self.params)

    @cached_property
    def expressions(self) -> tuple[str, ...]:
        """Every dimension that is an expression of names, which may be none where it is negative."""
        dims = (dim for each in self._described for dim in each.dims)
        return tuple(dict.fromkeys(d for d in dims if isinstance(d, str) and not d.rstrip(".").isidentifier()))

    @cached_property
    def free_rank(self) -> frozenset[str]:
        """Names of the dimensions written with dots ("M...")."""
        dims = (dim for each in self._described for dim in each.dims)
        return frozenset(d[:-3] for d in dims if isinstance(d, str) and d.endswith("..."))


def op(
    fn: Callable[..., Any],
    reference: Callable[..., Any] | None = None,
    inputs: Inputs | None = None,
    *,
    params: Mapping[str, Any] | None = None,
    sizes: Mapping[str, SizeRule] | None = None,
    where: str | Sequence[str] = (),
    dtypes: Sequence[Any] = ("float32",),
    compute: Any = None,
    deterministic: bool | None = None,
    surrogate: bool = False,
    extremes: Sequence[str] | Mapping[str, str] | None = None,
    double_backward: bool | str | None = None,
    kinks: Callable[..., Mapping[str, Any]] | None = None,
    transforms: Sequence[str] = (),
    algorithm_error: float | None = None,
    accept: Mapping[str, Any] | None = None,
    mutates: Sequence[str] = (),
    layouts: str | Mapping[str, type[Exception]] | None = None,
    random: bool | None = None,
    batch_invariant: str | bool | None = None,
    name: str | None = None,
) -> OpSpec:
    """Describe a differentiable op, so that `verify` can prove its backward pass.

    Args:
        fn: the op: called `fn(*inputs, **params)`, returns a tensor, or tensors in tuples, lists, dicts or dataclasses.
            Or a torch.nn.Module: its parameters and buffers are inputs then, under their names ("layers.0.bias"),
            parameters drawn around what they are, buffers as they are and compared after the call.
        reference: the same function in plain PyTorch, as slow and readable as you like; run in float64 by
            the tool, whatever casts it makes. Without one, the stages that need none still run. Of a module a module
            with the same names, or a function that takes parameters and buffers as keywords.
        inputs: what to call it with, in the order of `fn`'s arguments; by keyword where it takes one by keyword alone.
            A dict of `tensor(...)` specs (other values are passed as they are); or a callable `(seed, dtype, sizes)`
            that makes the inputs (`sizes` is a dict); or the concrete tensors, as a dict or a sequence. Specs and
            tensors in lists, tuples, dicts and dataclasses are inputs of their own, "x.0", "state.h".
        params: keyword arguments for `fn` and `reference`; a list gives values to sweep: `eps=[1e-6, 1e-2]`. A
            `tensor(...)` or `size(...)` is an input that is passed by keyword.
        sizes: per named dimension a fixed size, a range `(lowest, highest)`, a list of allowed sizes, or an expression
            of others (`K="2*N"`). Dimensions not named here are free: 0 and 1 included. Most stages run at the last
            size above 1 of a list, at a middling one of a range, or at the third number that it has: `(0, 40, 13)`.
        where: relations that sizes and whole parameters keep to: "Q <= K", ("N % 8 == 0", "k <= N").
        dtypes: floating or complex dtypes to check, the first being the one for stages that need only one.
        compute: "float32" promises that 16-bit inputs are computed in float32 and rounded once at the end,
            which makes the 16-bit checks sharper. None promises nothing.
        deterministic: True: any bit that differs between two runs is a finding. False: differences within
            the attainable error are expected (float atomics). None: they are noted.
        surrogate: True if the gradient is not meant to be the derivative of the forward (straight-through).
        extremes: names of the inputs that may hold anything: huge and tiny numbers, NaN, Inf; or a dict from names to
            "any" or "finite", which promises nothing about NaN and Inf. None: the described floating ones without a
            range (`low`, `high`), any.
        double_backward: True or "right": gradients of gradients must be right; False or "raises": asking for them must
            raise. None: either will do; what is silently wrong is a finding, and none at all a note.
        kinks: called like `fn`, returns by input name how far each element is from the next point without a
            derivative, in the input's own units. Kinks of the reference are found without it; this is for those that
            it hides, such as a coordinate computed otherwise than in `fn`.
        transforms: what the op promises to work under: "compile" (torch.compile with one graph, checked with the
            backend aot_eager), "inductor" (the same with code generation, slow), "vjp", "vmap" (torch.func), "jvp"
            (forward mode), "batched_grad" (torch.autograd.grad with is_grads_batched=True).
        algorithm_error: how many times the attainable error of the reference's formula the op's own algorithm may be
            off, where it is another one: sums by blocks, a transform, a function by another. None: it is the same;
            up to 4 times are undecided then, unless all elements share a factor, and more a finding.
        accept: findings that may stand, with the reason: `accept={"higher_order": "once_differentiable by design"}`.
            A class is a stage, "stage/kind" or "stage/kind/tensor", as findings print them. They are shown and fail
            nothing; one that does not occur any more fails. What only level full sees has `dict(reason=...,
            level="full")` instead of the reason.
        mutates: names of inputs that the op writes to by design. It gets copies of them, and what it makes of `x` is
            an output, "x after". A reference writes to them too, or returns their new values, the last of what it
            returns.
        layouts: strides that the op refuses by design: "contiguous" if inputs of any other may raise; or the exception
            by layout, `dict(transposed=ValueError)`. What is not refused must be right.
        random: True for an op that draws from torch's generators: it and the reference are called under one seed.
        batch_invariant: True: outputs and gradients of a row have the same bits in whatever batch it stands, and any
            other bit is a finding; the batch is the first dimension, or the one named here. None: it is noted.
            False: nobody looks.
        name: how reports call the op; `fn.__name__` unless given.

    Raises:
        SpecError: an argument is of another kind than it says here, `inputs` has no tensor, `sizes` or `where` is
            malformed or about a name that no dimension has, `accept` has a class that no stage tells, `mutates` names
            no input.
        UsageError: an unknown dtype.
    """
    _check_callables(fn, reference, inputs)
    _check_kinds(params, sizes, dict(deterministic=deterministic, surrogate=surrogate, random=random), name)
    arguments = arranged(fn, reference, inputs, params or {}, _sequence("mutates", mutates), bool(random))
    swept = {k: tuple(v) if isinstance(v, list) else (v,) for k, v in arguments.params.items()}
    if empty := [k for k, v in swept.items() if not v]:
        raise SpecError(f"`params` has no value for {empty}; give at least one")
    _check_promises(transforms, kinks, double_backward, algorithm_error)
    rules = {key: rule for key, rule in (sizes or {}).items() if _is_rule(key, rule)}
    derived = {name: rule for name, rule in (sizes or {}).items() if isinstance(rule, str)}
    flat, relations = _related(arguments.inputs, derived, dimensions.check_relations(where))
    spec = OpSpec(
        arguments.fn, arguments.reference, flat, name or getattr(fn, "__name__", None) or type(fn).__name__,
        params=swept, sizes=rules, dtypes=_dtypes(dtypes), deterministic=deterministic, surrogate=surrogate,
        compute=None if compute is None else dtype_name(compute, "compute"), kinks=kinks, where=relations,
        extremes=_names(extremes, flat), finite=_finite(extremes), transforms=tuple(transforms),
        double_backward=_ORDER_TWO.get(double_backward), algorithm_error=algorithm_error, accept=acceptances(accept),
        layouts=_layouts(layouts), random=random, batch_invariant=batch_invariant,
    )  # fmt: skip
    _check_batch(spec)
    _check_names(spec, sizes or {}, dimensions.check_relations(where), arguments.inputs)
    return spec


def _check_batch(spec: OpSpec) -> None:
    name, known = spec.batch_invariant, ", ".join(spec.size_names) or "none"
    if not isinstance(name, (str, bool)) and name is not None:
        raise SpecError(f"`batch_invariant` is {name!r}, expected True, False, None or the name of a dimension")
    if isinstance(name, str) and name not in spec.size_names:
        raise SpecError(
            f"`batch_invariant` is {name!r}, expected the name of a dimension; they are {known}"
            f"{near(name, spec.size_names)}"
        )
    if name is True and not spec.leading:
        raise SpecError(f"`batch_invariant` is True, but no tensor begins with a batch; name it (dimensions: {known})")


def is_kernel(value: Any) -> bool:
    """Whether a value is a Triton kernel, autotuned or with heuristics too."""
    return type(value).__module__.startswith("triton.")


def _check_callables(fn: Any, reference: Any, inputs: Any) -> None:
    if is_kernel(fn):
        name = getattr(getattr(fn, "fn", fn), "__name__", type(fn).__name__)
        raise SpecError(f"`fn` is the Triton kernel {name!r}, expected the function that launches it")
    if not callable(fn):
        raise SpecError(f"`fn` is {type(fn).__name__}, expected a callable op(*inputs, **params)")
    if reference is not None and not callable(reference):
        raise SpecError(f"`reference` is {type(reference).__name__}, expected a callable or None")
    expected = "expected a dict such as dict(x=retrograd.tensor('M', 'N')), concrete tensors, or a callable"
    # A tensor without dimensions has no length.
    empty = isinstance(inputs, Sized) and not hasattr(inputs, "is_floating_point") and not len(inputs)
    if inputs is None or isinstance(inputs, (str, bytes)) or empty:
        raise SpecError(f"`inputs` is missing; {expected}")
    if not callable(inputs) and not isinstance(inputs, Sized):
        raise SpecError(f"`inputs` is {type(inputs).__name__}; {expected}")


def _check_kinds(params: Any, sizes: Any, flags: Mapping[str, Any], name: Any) -> None:
    mappings = (("params", params, "dict(eps=[1e-6, 1e-2])"), ("sizes", sizes, "dict(N=(1, 512))"))
    for argument, value, example in mappings:
        if value is not None and not isinstance(value, Mapping):
            raise SpecError(f"`{argument}` is {value!r}, expected a dict such as {example}")
    for argument, value in flags.items():
        nothing = {"deterministic": ", or None that promises nothing", "random": ", or None to find out"}.get(
            argument, ""
        )
        if not isinstance(value, bool) and not (value is None and nothing):
            raise SpecError(f"`{argument}` is {value!r}, expected True or False{nothing}")
    if name is not None and not isinstance(name, str):
        raise SpecError(f"`name` is {name!r}, expected a string")


def _check_names(spec: OpSpec, rules: Mapping[str, Any], where: tuple[str, ...], inputs: Any) -> None:
    """SpecError if `sizes` or `where` is about what no input has, or if there is no tensor at all."""
    if callable(inputs):
        return
    if rules and not spec.tensor_specs:
        raise SpecError("`sizes` is given, but `inputs` are concrete tensors; describe them with retrograd.tensor(...)")
    values = inputs.values() if isinstance(inputs, Mapping) else ()
    tensors = [v for v in values if isinstance(v, TensorSpec) or hasattr(v, "is_floating_point")]
    if isinstance(inputs, Mapping) and not tensors:
        name, value = next(iter(inputs.items()))
        example = ", ".join(map(repr, value if isinstance(value, tuple) else ("M", "N")))
        raise SpecError(f"`inputs` has no tensor: {name!r} is {value!r}; expected retrograd.tensor({example})")
    described = [v for v in values if isinstance(v, (TensorSpec, SizeSpec))]
    known = {name for each in described for name in each.names} | set(spec.params)
    known |= {name for rule in rules.values() if isinstance(rule, str) for name in dimensions.names_of(rule)}
    known_by_relation = known | set(rules)
    asked = [("where", name) for relation in where for name in dimensions.names_of(relation)]
    related = {name for _, name in asked}
    for argument, name in [*(("sizes", name) for name in rules if name not in related), *asked]:
        names = known if argument == "sizes" else known_by_relation
        # Several ops may share a table of sizes: what is neither alone nor nearly another's name is meant for another.
        shared = argument == "sizes" and known & set(rules) and not near(name, names)
        if name not in names and not shared:
            raise SpecError(
                f"`{argument}` is about {name!r}, which no dimension of `inputs` has{near(name, names)}; "
                f"they have {', '.join(sorted(names)) or 'none'}"
            )


def _dtypes(dtypes: Sequence[Any]) -> tuple[str, ...]:
    if isinstance(dtypes, str) or not isinstance(dtypes, Iterable):
        raise UsageError(f"`dtypes` is {dtypes!r}, expected a sequence such as ['float32', 'bfloat16']")
    names = tuple(dtype_name(d, "dtypes") for d in dtypes)
    unknown = [d for d in names if d not in (*FLOATS, *COMPLEXES)]
    if unknown or not names:
        expected = ", ".join((*FLOATS, *COMPLEXES))
        raise UsageError(f"`dtypes` has {unknown or 'nothing'}; expected floating or complex dtypes: {expected}")
    return names


def _check_promises(transforms: Any, kinks: Any, double_backward: Any, algorithm_error: Any) -> None:
    if algorithm_error is not None and not (isinstance(algorithm_error, (int, float)) and algorithm_error >= 1):
        raise SpecError(f"`algorithm_error` is {algorithm_error!r}, expected a factor of at least 1 or None")
    unknown = [transforms] if isinstance(transforms, str) else sorted(set(transforms) - set(TRANSFORMS))
    if unknown:
        raise SpecError(f"`transforms` has {unknown}, expected a sequence of some of {', '.join(TRANSFORMS)}")
    if kinks is not None and not callable(kinks):
        raise SpecError(f"`kinks` is {type(kinks).__name__}, expected a callable kinks(*inputs, **params) or None")
    if not (isinstance(double_backward, bool) or double_backward in (None, "right", "raises")):
        raise SpecError(f"`double_backward` is {double_backward!r}, expected True ('right'), False ('raises') or None")


def _unbounded(inputs: Inputs) -> tuple[str, ...] | None:
    """The inputs that may hold anything, where some keep to a constraint or are concrete; None if none does."""
    described = inputs.items() if isinstance(inputs, Mapping) else ()
    specs = {name: value for name, value in described if isinstance(value, TensorSpec)}
    free = {n: s for n, s in specs.items() if s.values is None and s.concrete is None}
    if len(free) == len(specs):
        return None
    return tuple(n for n, s in free.items() if s.high is None and s.differentiable)


def _sequence(argument: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise SpecError(f"`{argument}` is {names!r}, expected a sequence of names such as ('x',)")
    return tuple(names)


def _layouts(layouts: Any) -> Any:
    if layouts is None or layouts == "contiguous":
        return layouts
    if not isinstance(layouts, Mapping) or not all(
        name in LAYOUTS and isinstance(kind, type) and issubclass(kind, Exception) for name, kind in layouts.items()
    ):
        raise SpecError(
            f"`layouts` is {layouts!r}, expected 'contiguous', or a dict from some of {', '.join(LAYOUTS)} to the "
            "exception that refuses it"
        )
    return dict(layouts)


def _names(extremes: Iterable[str] | None, inputs: Inputs) -> tuple[str, ...] | None:
    if extremes is None:
        return _unbounded(inputs)
    named = list(inputs) if isinstance(inputs, Mapping) else None
    if isinstance(extremes, str) or (named is not None and (set(extremes) - set(named))):
        raise SpecError(f"`extremes` is {extremes!r}; expected names of inputs: {named}")
    return tuple(extremes)


def _finite(extremes: Any) -> tuple[str, ...]:
    """Of which inputs `extremes` promises finite values alone."""
    if not isinstance(extremes, Mapping):
        return ()
    if wrong := [k for k, v in extremes.items() if v not in ("any", "finite")]:
        raise SpecError(f"`extremes` says {extremes[wrong[0]]!r} of {wrong[0]!r}, expected 'any' or 'finite'")
    return tuple(k for k, v in extremes.items() if v == "finite")


def _is_rule(name: str, rule: Any) -> bool:
    """Whether this is a rule for a size of its own, none that stands for an expression; SpecError if it is neither."""
    if isinstance(rule, str):
        dimensions.check_dim(rule, 1)
        return False
    values = rule if isinstance(rule, (tuple, list)) else [rule]
    valid = bool(values) and all(isinstance(v, int) and v >= 0 for v in values)
    if not valid or (isinstance(rule, tuple) and not (len(rule) in (2, 3) and rule[0] <= rule[-1] <= rule[1])):
        raise SpecError(
            f"`sizes[{name!r}]` is {rule!r}; expected a size, a range (lowest, highest[, ordinary]), a list of "
            "sizes or an expression such as '2*N'"
        )
    return True


def _related(inputs: Any, derived: Mapping[str, str], where: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
    """Inputs and relations in which names that stand for expressions are these, and what unique values ask of sizes."""
    if not isinstance(inputs, Mapping):
        return inputs, where
    related: dict[str, Any] = {}
    relations = [str(dimensions.substituted(relation, derived)) for relation in where]
    for name, value in inputs.items():
        if isinstance(value, SizeSpec):
            value = replace(value, dim=str(dimensions.substituted(value.dim, derived)))
        elif isinstance(value, TensorSpec):
            high = dimensions.substituted(value.high, derived) if isinstance(value.high, str) else value.high
            dims = tuple(dimensions.substituted(dim, derived) for dim in value.dims)
            value = replace(value, dims=dims, high=high)
            if value.values == "unique" and not value.floating:
                most = high if isinstance(high, str) else int(high or 0)
                relations.append(f"{dims[-1]} <= {most} - {int(value.low or 0)}".replace("...", ""))
        related[name] = value
    return related, tuple(relations)
