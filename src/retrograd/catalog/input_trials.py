"""Trials of an op with inputs of this shape and that, until one runs."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from retrograd import config
from retrograd.check import cpu_kernels
from retrograd.check.schema import Case
from retrograd.check.sizes import names_of, shape, substituted
from retrograd.errors import UndecidedError

_SIZES = {"M": 3, "N": 5, "K": 4, "B": 2, "C": 4, "H": 6, "W": 7}
_DTYPES = ("float32", "float16", "bfloat16")
_EVEN = 16  # of dimensions of which kernels refuse odd sizes
_TRIES = 500

Dims = tuple["str | int", ...]
Inputs = Mapping[str, Dims]


@dataclass
class ProposedOp:
    """An op of somebody, and what it could take.

    Attributes:
        name: in its module.
        call: as Python writes it.
        run: what is called.
        choices: dimensions that each tensor could have, the plainest first.
        documented: dimensions that tensors have by its own words.
        indices: tensors of whole numbers below the last dimension of the first other one.
        params: numbers by name.
        wrapped: parameters of an autograd function, which takes no keywords; empty for everything else.
        applied: what takes them, as Python writes it.
        devices: whether its tensors are said to be on a GPU.
    """

    name: str
    call: str
    run: Any
    choices: dict[str, tuple[Dims, ...]] = field(default_factory=dict)
    documented: dict[str, Dims] = field(default_factory=dict)
    indices: tuple[str, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    wrapped: tuple[str, ...] = ()
    applied: str = ""
    devices: bool = True

    def high(self, inputs: Inputs) -> str | int:
        """The dimension that bounds whole numbers; 2 if no other tensor has any."""
        return next((dims[-1] for name, dims in inputs.items() if dims and name not in self.indices), 2)


@dataclass(frozen=True)
class Fit:
    """Inputs with which an op runs; `even`: dimensions that it takes in even sizes alone."""

    inputs: dict[str, Dims]
    dtype: str
    even: tuple[str, ...] = ()


def fitting(op: ProposedOp, reference: Any) -> Fit:
    """The shapes with which op and reference run: those that are documented, else the plainest.

    Raises:
        UndecidedError: it runs with none.
    """
    first = later = ""
    for dtype, even, inputs in itertools.product(_DTYPES, (False, True), _documented(op)):
        error = _tried(op, reference, inputs, dtype, _sizes(inputs, even))
        if not error:
            return Fit(inputs, dtype, _needed(op, reference, inputs, dtype) if even else ())
        first = first or f"{signature(inputs)}, as it is documented: {error}"
        if even and not later and error not in first:  # it has got beyond what refused unlike sizes
            later = f"; with all of {_EVEN}: {error}"
    places = itertools.product(*(range(len(shapes)) for shapes in op.choices.values()))
    combinations = sorted(places, key=lambda each: (sum(each), each))[:_TRIES]
    for dtype in _DTYPES:
        for each in combinations:
            inputs = {name: shapes[place] for (name, shapes), place in zip(op.choices.items(), each, strict=True)}
            error = _tried(op, reference, inputs, dtype, _SIZES)
            if not error:
                return Fit(_any_rank(op, reference, inputs, dtype), dtype)
            first = first or f"{signature(inputs)}: {error}"
    raise UndecidedError(
        f"{op.name!r} ran with none of {len(combinations)} combinations of shapes; the plainest was {first}{later}. "
        "Describe its inputs by hand: rg.op(fn, reference, inputs=dict(x=rg.tensor('M', 'N')))"
    )


def _documented(op: ProposedOp) -> list[dict[str, Dims]]:
    """The inputs as they are documented, others with dimensions of the first that is; none if none is documented.

    Heads HQ or HV beside H are tried as they stand, as twice as many, and as the same.
    """
    known = {name: op.documented[name] for name in op.choices if name in op.documented}
    first = next(iter(known.values()), ())
    parts = list(dict.fromkeys((first[-1:], first, first[:1], first[:-1])))
    choices = ([known[name]] if name in known else parts for name in op.choices)
    meant = [dict(zip(op.choices, each, strict=True)) for each in itertools.product(*choices)] if known else []
    names = {name for dims in known.values() for dim in dims for name in names_of(dim)}
    grouped = [name for name in names if len(name) == 2 and name[0] in names]
    for form in ("2*{}", "{}") if grouped else ():
        heads = {name: form.format(name[0]) for name in grouped}
        meant += [
            {name: tuple(substituted(dim, heads) for dim in dims) for name, dims in inputs.items()}
            for inputs in meant[: len(meant) // (1 if form == "2*{}" else 2)]
        ]
    return meant[:_TRIES]


def signature(inputs: Inputs) -> str:
    """Inputs in words, as "x [M..., N], w [N]"."""
    return ", ".join(f"{name} [{', '.join(map(str, dims))}]" for name, dims in inputs.items())


def _sizes(inputs: Inputs, even: bool = False) -> dict[str, Any]:
    """A size of each dimension: another one each, or, if `even`, the same for all but the first."""
    names = list(dict.fromkeys(name for dims in inputs.values() for dim in dims for name in names_of(dim)))
    free = (n for n in itertools.count(3) if n not in _SIZES.values())
    sizes: dict[str, Any] = {name: _SIZES.get(name) or next(free) for name in names}
    return sizes | (dict.fromkeys(names[1:], _EVEN) if even else {})


def _needed(op: ProposedOp, reference: Any, inputs: Inputs, dtype: str) -> tuple[str, ...]:
    """Dimensions that the op takes in even sizes alone, where the others have others as far as it lets them."""
    odd, sizes = _sizes(inputs), _sizes(inputs, even=True)
    for name in sizes:
        if not _tried(op, reference, inputs, dtype, {**sizes, name: odd[name]}):
            sizes[name] = odd[name]
    return tuple(name for name, size in sizes.items() if size == _EVEN)


def _any_rank(op: ProposedOp, reference: Any, inputs: dict[str, Dims], dtype: str) -> dict[str, Dims]:
    """The inputs with "M..." for M where rows stand alone and in several dimensions too."""
    free = {k: tuple("M..." if d == "M" and i == 0 else d for i, d in enumerate(v)) for k, v in inputs.items()}
    if free == inputs or any("M" in dims for dims in free.values()):
        return inputs
    works = not any(_tried(op, reference, free, dtype, {**_sizes(inputs), "M": leading}) for leading in ((), (2, 3)))
    return free if works else inputs


def _tried(op: ProposedOp, reference: Any, inputs: Inputs, dtype: str, sizes: Mapping[str, Any]) -> str:
    """Why op or reference does not run with these shapes, or ""; as on a GPU and, if Triton is there, as on a CPU."""
    error = _tried_here(op, reference, inputs, dtype, sizes)
    if error and "triton" in sys.modules:
        op.devices = not op.devices
        if not _tried_here(op, reference, inputs, dtype, sizes):
            return ""
        op.devices = not op.devices
    return error


def _tried_here(op: ProposedOp, reference: Any, inputs: Inputs, dtype: str, sizes: Mapping[str, Any]) -> str:
    import torch

    try:
        tensors = _drawn(op, inputs, dtype, sizes)
        with torch.no_grad(), kernels(op.devices):
            shapes = _shapes(_called(op, op.run, tensors))
            if not shapes:
                return "it returns no tensor"
            # A launcher that believes its tensors to be of another shape runs, and reads what lies beside them.
            run = cpu_kernels.current()
            if fault := next((f for f in run.faults if f.kind == "out of bounds"), None) if run else None:
                return fault.text()
            want = shapes if reference is None else _shapes(_called(op, reference, tensors))
    except Exception as error:
        lines = [type(error).__name__, *filter(None, map(str.strip, str(error).splitlines()))]
        # Triton's compiler says "at 3:24:", shows the code, and gives the reason last.
        reason = f" {lines[-1]}" if len(lines) > 2 and lines[1].endswith(":") else ""
        return ": ".join(lines[:2]) + reason
    return "" if want == shapes else f"results {shapes}, of the reference {want}"


def has_backward(op: ProposedOp, fit: Fit) -> bool:
    """Whether a result depends on the inputs, or a module's parameters, for autograd."""
    import torch

    sizes = {**_sizes(fit.inputs), **dict.fromkeys(fit.even, _EVEN)}
    drawn = _drawn(op, fit.inputs, fit.dtype, sizes)
    tensors = {name: t.requires_grad_(t.is_floating_point()) for name, t in drawn.items()}
    with torch.enable_grad(), kernels(op.devices):
        out = _called(op, op.run, tensors)
    return any(t.requires_grad for t in (out if isinstance(out, (tuple, list)) else (out,)) if hasattr(t, "shape"))


def _drawn(op: ProposedOp, inputs: Inputs, dtype: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Normal random tensors of these shapes, or whole numbers, on a GPU if there is one."""
    import torch

    case = Case(dtype, sizes=tuple(sizes.items()))
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Any] = {}
    for name, dims in inputs.items():
        size = shape(dims, case)
        if name in op.indices:
            (high,) = shape((op.high(inputs),), case)
            tensors[name] = torch.randint(high, size, generator=generator).to(device())
        else:
            values = torch.randn(size, generator=generator, dtype=torch.float64)
            tensors[name] = values.to(device(), getattr(torch, dtype))
    return tensors


def device() -> str:
    """Where ops are tried."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _called(op: ProposedOp, function: Any, tensors: Mapping[str, Any]) -> Any:
    if op.wrapped:  # an autograd function takes no keywords
        return function(*({**tensors, **op.params}[name] for name in op.wrapped))
    parameters = dict(op.run.named_parameters()) if hasattr(op.run, "named_parameters") else {}
    return function(*tensors.values(), **op.params, **({} if function is op.run else parameters))


def _shapes(out: Any) -> list[list[int]]:
    parts = out if isinstance(out, (tuple, list)) else (out,)
    return [list(t.shape) for t in parts if hasattr(t, "shape")]


def kernels(devices: bool) -> contextlib.AbstractContextManager[Any]:
    """A context in which Triton kernels run: as they are on a GPU, executed on CPU tensors elsewhere."""
    import torch

    if torch.cuda.is_available() or "triton" not in sys.modules or config.interpreting():
        return contextlib.nullcontext()
    return cpu_kernels.as_on_gpu(devices)
