"""Inputs of a case: concrete sizes, values and layouts by a spec; and the cases that a spec allows."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from retrograd.check import constraints, extreme_values, sizes
from retrograd.check.input_specs import COMPLEX, SizeSpec, TensorSpec
from retrograd.check.layouts import lay_out, repeat_values
from retrograd.check.outputs import inexact, promoted
from retrograd.check.schema import Case, Size
from retrograd.check.seeds import derive
from retrograd.check.sizes import elements
from retrograd.check.spec import OpSpec
from retrograd.errors import SpecError, UsageError

# Base sizes by order of the names: no two equal, none a power of two, so that swapped or padded sizes show.
_BASE = (7, 48, 5, 12, 3, 9)
_VARIED = 0.3  # of the size of a module's parameter, how far it is drawn from what it is


def torch_dtype(name: str) -> torch.dtype:
    """torch.bfloat16 for "bfloat16"; what "complex" stands for depends on the case."""
    return getattr(torch, name)


def allows(spec: OpSpec, name: str, size: Size) -> bool:
    """Whether the spec's size rule for this dimension allows a size."""
    rule = spec.sizes.get(name)
    if rule is None:
        return True
    if isinstance(rule, tuple):
        return rule[0] <= elements(size) <= rule[1]
    return elements(size) in (rule if isinstance(rule, list) else [rule])


def fitted(spec: OpSpec, case: Case, keep: str = "") -> Case | None:
    """The case, in which other sizes than `keep` may have changed so that all expressions and relations hold.

    None where no change of one or two of them does that.
    """
    return sizes.fitted(spec.expressions, spec.where, case, lambda name, size: allows(spec, name, size), keep)


def resized(spec: OpSpec, case: Case, name: str, size: Size) -> Case | None:
    """The case with another size of a dimension, and of others what fits it; None where the spec does not allow it."""
    return fitted(spec, case.with_size(name, size), name) if allows(spec, name, size) else None


def base_case(spec: OpSpec, dtype: str) -> Case:
    """The ordinary case of a spec: middling sizes, first value of each parameter."""
    chosen: dict[str, Size] = {}
    for name, preset in zip(spec.size_names, itertools.cycle(_BASE), strict=False):
        rule = spec.sizes.get(name)
        size = preset
        if isinstance(rule, tuple):
            size = rule[2] if len(rule) == 3 else min(max(preset, rule[0]), rule[1])
        elif rule is not None:
            named = rule if isinstance(rule, list) else [int(rule)]
            size = next((n for n in reversed(named) if n > 1), named[-1])  # of a size of 1 strides say nothing
        chosen[name] = (size,) if name in spec.free_rank else size
    case = fitted(spec, Case(dtype).but(sizes=chosen, params={k: v[0] for k, v in spec.params.items()}))
    if case is None:
        raise SpecError(
            f"no sizes of {spec.name} fit `where` {list(spec.where)} and dimensions "
            f"{list(spec.expressions)} near {chosen}; name some that do in `sizes`"
        )
    return case


def combinations(spec: OpSpec) -> int:
    """How many combinations of parameter values there are."""
    return math.prod(map(len, spec.params.values()))


def param_cases(spec: OpSpec, case: Case, most: int = 6) -> list[Case]:
    """The case with every combination of parameter values; beyond `most` with those that cover every pair of them."""
    values = list(spec.params.values())
    if combinations(spec) <= most:
        chosen = list(itertools.product(*values))
    else:
        chosen = [tuple(v[i] for v, i in zip(values, row, strict=True)) for row in _pairwise([len(v) for v in values])]
    every = (fitted(spec, case.but(params=dict(zip(spec.params, row, strict=True)))) for row in chosen)
    return [other for other in every if other is not None]


def _pairwise(counts: list[int]) -> list[tuple[int, ...]]:
    """Rows of places, the first of each first, in which each two places of any two parameters stand together."""
    columns = list(itertools.combinations(range(len(counts)), 2))
    missing = {(a, i, b, j) for a, b in columns for i in range(counts[a]) for j in range(counts[b])}
    rows = [(0,) * len(counts)]
    while missing := missing - {(a, rows[-1][a], b, rows[-1][b]) for a, b in columns}:
        a, i, b, j = min(missing)
        row: dict[int, int] = {a: i, b: j}
        for c in (c for c in range(len(counts)) if c not in row):
            # The value that brings most of the missing pairs with those that are chosen.
            row[c] = max(range(counts[c]), key=lambda k: sum(_pair(c, k, d, m) in missing for d, m in row.items()))
        rows.append(tuple(row[c] for c in range(len(counts))))
    return rows


def _pair(a: int, i: int, b: int, j: int) -> tuple[int, int, int, int]:
    return (a, i, b, j) if a < b else (b, j, a, i)


def parse_case(spec: OpSpec, dtype: str, text: str) -> Case:
    """Read what `Case.text` writes; UsageError names the word that does not fit the spec."""
    case = base_case(spec, dtype)
    known, params, layouts, values = dict(case.sizes), dict(case.params), {}, {}
    draw = 0
    for word in text.split():
        key, eq, value = word.partition("=")
        name, colon, layout = word.partition(":")
        holder, at, extreme = word.partition("@")
        try:
            if eq and key in known:
                tuple_size = tuple(int(v) for v in value.strip("()").split("x") if v)
                known[key] = tuple_size if isinstance(known[key], tuple) else int(value)
            elif eq and key in params:
                params[key] = next(v for v in spec.params[key] if repr(v).replace(" ", "") == value)
            elif eq and key == "draw":
                draw = int(value)
            elif colon and not eq:
                layouts[name] = layout
            elif at and extreme in (*extreme_values.NAMES, *extreme_values.EVERY_END, extreme_values.KINK):
                values[holder] = extreme
            else:
                raise ValueError(word)
        except (ValueError, StopIteration):
            raise UsageError(
                f"`--case` has {word!r}, which does not fit {spec.name}; sizes are {list(known)}, "
                f"parameters { {k: list(v) for k, v in spec.params.items()} }, layouts look like x:transposed, "
                f"values like x@nan ({', '.join(extreme_values.NAMES)})"
            ) from None
    case = case.but(sizes=known, params=params, layouts=layouts, draw=draw, values=values)
    if not sizes.fits(spec.expressions, spec.where, case):
        bounds = [*spec.where, *(f"{dim} >= 0" for dim in spec.expressions)]
        raise UsageError(f"`--case` is {text!r}, which does not fit {spec.name}: {', '.join(bounds)}")
    return case


def _values(name: str, spec: TensorSpec, case: Case, seed: int) -> torch.Tensor:
    if spec.concrete is not None:
        return _concrete(spec, case, seed)
    shape = sizes.shape(spec.dims, case)
    gen = torch.Generator().manual_seed(seed)
    dtype = torch_dtype(case.dtype if spec.dtype is None else spec.dtype)
    if spec.dtype == COMPLEX:
        dtype = torch_dtype(case.dtype).to_complex()
    extreme = dict(case.values).get(name)
    if dtype == torch.bool:
        drawn = torch.rand(shape, generator=gen) < 0.5
        return torch.full_like(drawn, extreme == "highest") if extreme in extreme_values.ENDS else drawn
    high = sizes.size_of(spec.high, case) if isinstance(spec.high, str) else spec.high
    if not dtype.is_floating_point and not dtype.is_complex:
        low, top = int(spec.low or 0), math.prod(high) if isinstance(high, tuple) else int(high or 0)
        if spec.values is not None:
            return _constrained_integers(name, spec, shape, low, top, dtype, gen)
        if extreme in extreme_values.ENDS:
            return torch.full(shape, low if extreme == "lowest" else max(top, 1) - 1, dtype=dtype)
        named = [v for _, v in case.params if isinstance(v, int) and not isinstance(v, bool) and low <= v < top]
        return _integers(low, max(top, low + 1), shape, gen, case.draw, named).to(dtype)
    wide = promoted(dtype, torch.float64)
    if high is not None:
        low = float(spec.low or 0.0)
        numbers = extreme_values.at_end(torch.rand(shape, generator=gen, dtype=wide), extreme)
        numbers = numbers * (float(high) - low)  # type: ignore[arg-type]
        numbers = numbers + (complex(low, low) if dtype.is_complex else low)
    else:
        numbers = torch.randn(shape, generator=gen, dtype=wide)
    if isinstance(spec.scale, tuple):
        low, top = map(math.log, spec.scale)
        rows = (*shape[:-1], 1) if shape else ()
        numbers = numbers * (torch.rand(rows, generator=gen, dtype=torch.float64) * (top - low) + low).exp()
    else:
        numbers = numbers * spec.scale
    return numbers.to(dtype) if spec.values is None else constraints.draw(name, spec, numbers, dtype, gen)


def _integers(
    low: int, top: int, shape: tuple[int, ...], gen: torch.Generator, number: int, named: Sequence[int]
) -> torch.Tensor:
    """Whole numbers of every kind: all of a small range, both ends of a large one, duplicates, in no order.

    Those that are `named` by parameters, as `padding_idx=1` does, are among them where there is room.

    Further draws are sorted along the last dimension, and of two values alone, in turn.
    """
    count, span = math.prod(shape), top - low
    drawn = torch.randint(low, top, (count,), generator=gen)
    if span <= count:
        drawn[:span] = torch.arange(low, top)
    elif count > 3:
        drawn[0], drawn[1], drawn[2] = low, top - 1, drawn[3]
        for place, value in zip(range(4, count), named, strict=False):
            drawn[place] = value
    drawn = drawn[torch.randperm(count, generator=gen)].view(shape)
    if number % 3 == 1 and shape:
        return drawn.sort(-1).values
    return torch.where(drawn % 2 == 0, *drawn.flatten()[[0, -1]]) if number % 3 == 2 and count else drawn


def _concrete(spec: TensorSpec, case: Case, seed: int) -> torch.Tensor:
    """The values of a concrete tensor in the dtype under test, or in that of its description."""
    value: torch.Tensor = spec.concrete
    if spec.varied and value.numel():
        wide = value.to(torch.promote_types(value.dtype, torch.float64))
        noise = torch.randn(wide.shape, generator=torch.Generator().manual_seed(seed), dtype=wide.dtype)
        size = wide.abs().square().mean().sqrt()
        value = wide + _VARIED * torch.where(size > 0, size, 1.0) * noise.to(wide.device)
    if spec.dtype is not None:
        kind = torch_dtype(spec.dtype)
    else:
        kind = torch_dtype(case.dtype) if spec.floating else value.dtype
        kind = kind.to_complex() if value.is_complex() and not kind.is_complex else kind
    return value.to(kind)


def _constrained_integers(
    name: str, spec: TensorSpec, shape: tuple[int, ...], low: int, top: int, dtype: torch.dtype, gen: torch.Generator
) -> torch.Tensor:
    if spec.values == "unique":
        rows = math.prod(shape[:-1])
        drawn = [torch.randperm(top - low, generator=gen)[: shape[-1]] + low for _ in range(rows)]
        return torch.stack(drawn).view(shape).to(dtype) if drawn else torch.zeros(shape, dtype=dtype)
    numbers = torch.zeros(shape, dtype=torch.float64)
    if spec.values == "sorted":
        numbers = torch.randint(low, max(top, 1), shape, generator=gen)
    return constraints.draw(name, spec, numbers, dtype, gen)


def _supplied(spec: OpSpec, case: Case, seed: int) -> dict[str, Any]:
    """Inputs that are concrete or made by the user's callable, by name."""
    supplied: Any = spec.inputs
    if isinstance(supplied, Callable):  # type: ignore[arg-type]
        flat = dict(case.sizes)
        try:
            supplied = supplied(derive(seed, "inputs", case.draw) % 2**31, torch_dtype(case.dtype), flat)  # type: ignore[operator]
        except Exception as error:
            raise SpecError(
                f"`inputs` of {spec.name} raised {type(error).__name__}: {error} at {case.text()}"
            ) from error
    if isinstance(supplied, torch.Tensor):
        supplied = (supplied,)
    named = supplied.items() if isinstance(supplied, Mapping) else ((f"input{i}", v) for i, v in enumerate(supplied))  # type: ignore[arg-type]
    out = {}
    for name, value in named:
        if inexact(value) and not callable(spec.inputs):
            wanted = torch_dtype(case.dtype)
            value = value.detach().to(wanted.to_complex() if value.is_complex() else wanted)
        out[name] = value
    return out


def draw(spec: OpSpec, case: Case, seed: int) -> dict[str, Any]:
    """The values of a case's inputs by name, whatever their layouts, on the CPU; not to be written to."""
    out: dict[str, Any] = {}
    for name, value in (spec.tensor_specs or _supplied(spec, case, seed)).items():
        if isinstance(value, SizeSpec):
            value = value.at(case)
        if isinstance(value, TensorSpec):
            value = _values(name, value, case, derive(seed, "input", name, case.draw))
        if isinstance(value, torch.Tensor) and dict(case.values).get(name) in extreme_values.NAMES:
            value = extreme_values.alter(value, dict(case.values)[name])
        out[name] = value
    return out


def repeatable(value: Any) -> bool:
    """Whether `place` makes a fresh one of a value: of tensors, numbers, words, and lists, tuples and dicts of those.

    Others, such as objects or tensors in lists, an op may change, and only whoever made them can make them anew.
    """
    return isinstance(value, torch.Tensor) or _is_plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (int, float, complex, str, bytes, torch.dtype, torch.device))


def place(drawn: Mapping[str, Any], case: Case, device: str) -> dict[str, Any]:
    """Fresh tensors with the values that `draw` made, on a device, laid out as the case says; they need no gradient."""
    out = dict(drawn)
    for name, value in drawn.items():
        if isinstance(value, torch.Tensor):
            fresh, layout = value.detach().to(device, copy=True), case.layout(name) if case.layouts else ""
            if layout:
                fresh = lay_out(repeat_values(fresh, layout), layout)
            out[name] = fresh if layout or fresh.is_contiguous() else fresh.contiguous()
        elif isinstance(value, (list, tuple, dict)) and _is_plain(value):
            out[name] = copy.deepcopy(value)
    return out


def materialise(spec: OpSpec, case: Case, seed: int, device: str) -> dict[str, Any]:
    """The inputs of a case by name, laid out as it says; tensors are fresh and need no gradient."""
    return place(draw(spec, case, seed), case, device)


def differentiable(spec: OpSpec, inputs: Mapping[str, Any]) -> list[str]:
    """Names of the inputs a gradient is asked for."""
    tensors = spec.tensors
    return [n for n, value in inputs.items() if inexact(value) and (n not in tensors or tensors[n].differentiable)]
