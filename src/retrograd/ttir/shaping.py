"""Operations of TTIR on whole tensors: constants, shapes, products of matrices, histograms, reductions and scans.

`SHAPING` has a builder for each operation, as `operations.ELEMENTWISE`; reductions and scans take the function of their
region as well. Axis 0 of an array is the program, so axis k of a tensor is axis k + 1.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from retrograd.ttir.element_types import Array, element_type, from_bits, small_float, to_bits, truncate_tf32
from retrograd.ttir.ir import Operation
from retrograd.ttir.operations import Compute, as_it_is, attributes, integers, kind_of, refused

Combine = Callable[..., Sequence[Array]]
_DENSE = re.compile(r"dense<(.*)>\s*$", re.S)
# Combinations of two floats or integers that NumPy reduces along an axis by itself.
_REDUCES: dict[str, Any] = {
    "arith.addi": np.add, "arith.maxsi": np.maximum, "arith.minsi": np.minimum, "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor, "arith.maxnumf": np.fmax, "arith.minnumf": np.fmin,
    "arith.maximumf": np.maximum, "arith.minimumf": np.minimum,
}  # fmt: skip

# Those that it would not combine in halves, and does so two by two.
_HALVES: dict[str, Any] = {"arith.addf": np.add, "arith.mulf": np.multiply}


def full(values: Array, shape: tuple[int, ...]) -> Array:
    """An array with every axis of the tensor at its own extent; the axis of programs stays as it is."""
    wanted = (values.shape[0], *shape)
    return values if values.shape == wanted else np.broadcast_to(values, wanted)


def constant(operation: Operation) -> Array:
    """The value of arith.constant, all axes of extent 1 where it is the same everywhere."""
    kind, shape = kind_of(operation), operation.results[0].type.shape
    text = operation.text.strip()
    text = text[text.rfind("}") + 1 :].strip() if text.startswith("{") else text
    dense = _DENSE.search(text)
    if dense is None:
        return _numbers([text], operation).reshape((1,) * (len(shape) + 1))
    if dense[1].startswith('"0x'):
        raw = np.frombuffer(bytes.fromhex(dense[1][3:-1]), kind.memory)
        return kind.decode(raw).reshape(1, *shape)
    words = re.findall(r"[^\[\],\s]+", dense[1])
    values = _numbers(words, operation)
    return values.reshape((1,) * (len(shape) + 1) if len(words) == 1 else (1, *shape))


def _numbers(words: list[str], operation: Operation) -> Array:
    kind = kind_of(operation)
    if any(word.startswith("0x") for word in words) and kind.is_float:
        bits = np.array([int(word, 16) for word in words], f"u{kind.size}")
        return from_bits(bits, kind)
    if kind.is_float:
        return np.array([float(word) for word in words], kind.compute)
    return np.array([{"true": 1, "false": 0}.get(word) or int(word, 0) if word not in ("true", "false")
                     else word == "true" for word in words]).astype(kind.compute)  # fmt: skip


def _make_range(operation: Operation) -> Compute:
    ends = attributes(operation)
    values = np.arange(int(ends["start"]), int(ends["end"]), dtype=np.int32)[None]
    return lambda: values


def _splat(operation: Operation) -> Compute:
    return _splatting(len(operation.results[0].type.shape))


@functools.cache
def _splatting(axes: int) -> Compute:
    ones = (1,) * axes
    return lambda scalar: scalar.reshape(scalar.shape[0], *ones)


def _expand_dims(operation: Operation) -> Compute:
    return _expanding(int(attributes(operation)["axis"]) + 1)


@functools.cache
def _expanding(axis: int) -> Compute:
    index = (slice(None),) * axis + (None,)
    return lambda values: values[index]


def _reshape(operation: Operation) -> Compute:
    before, after = operation.operands[0].type.shape, operation.results[0].type.shape
    ones = (1,) * len(after)

    def reshape(values: Array) -> Array:
        if values.size == values.shape[0]:
            return values.reshape(values.shape[0], *ones)
        return full(values, before).reshape(values.shape[0], *after)

    return reshape


def _transpose(operation: Operation) -> Compute:
    order = (0, *(axis + 1 for axis in integers(attributes(operation)["order"])))
    return lambda values: values.transpose(order)


def _join(operation: Operation) -> Compute:
    return lambda a, b: np.stack(np.broadcast_arrays(a, b), axis=-1)


def _split(operation: Operation) -> Compute:
    return lambda values: (values[..., 0], values[..., -1])


def _concatenate(operation: Operation) -> Compute:
    first, second = (value.type.shape for value in operation.operands)

    def concatenate(a: Array, b: Array) -> Array:
        programs = max(a.shape[0], b.shape[0])
        parts = [np.broadcast_to(x, (programs, *shape)) for x, shape in ((a, first), (b, second))]
        return np.concatenate(parts, axis=1)

    return concatenate


def _gather(operation: Operation) -> Compute:
    axis = int(attributes(operation)["axis"]) + 1
    extent = operation.operands[0].type.shape[axis - 1]
    before = (slice(None),) * axis

    def gather(source: Array, index: Array) -> Array:
        if source.shape[axis] == 1:  # equal all along
            return source
        index = np.minimum(np.maximum(index, 0), extent - 1)
        first = int(index.flat[0])
        if index.size == 1 or (index == first).all():  # a row, as loops over rows take them: a fifth of the time
            row = source[(*before, slice(first, first + 1))]
            # Extents as of any other index: what an index from memory holds must not decide them.
            shape = tuple(map(max, row.shape, index.shape))
            return row if row.shape == shape else np.broadcast_to(row, shape)
        return np.take_along_axis(source, index, axis)

    return gather


def _histogram(operation: Operation) -> Compute:
    bins = operation.results[0].type.shape[0]
    shape = operation.operands[0].type.shape

    def histogram(values: Array, mask: Array | None = None) -> Array:
        programs = max(values.shape[0], 1 if mask is None else mask.shape[0])
        values = np.broadcast_to(values, (programs, *shape))
        counted = (values >= 0) & (values < bins)
        if mask is not None:
            counted = counted & mask
        flat = (np.arange(programs)[:, None] * bins + values)[counted]
        return np.bincount(flat, minlength=programs * bins).reshape(programs, bins).astype(np.int32)

    return histogram


def _dot(operation: Operation) -> Compute:
    shapes = [value.type.shape for value in operation.operands[:2]]
    kinds = [kind_of(operation, 0), kind_of(operation, 1)]
    result = kind_of(operation)
    precision = attributes(operation).get("inputPrecision", "ieee")
    to_tf32 = precision == "tf32" and kinds[0].name == "f32"

    def dot(a: Array, b: Array, c: Array) -> Array:
        a, b = full(a, shapes[0]), full(b, shapes[1])
        if to_tf32:
            a, b = truncate_tf32(a), truncate_tf32(b)
        product = _products(a, b).astype(result.compute)
        product = np.add(product, c, out=product) if len(product) >= len(c) else product + c
        return result.round(product) if result.round else product

    return dot


def _products(a: Array, b: Array) -> Array:
    """Products of tiles, (programs, m, k) and (programs, k, n), whose bits do not depend on a row's place in its tile.

    A GPU gives an element the same bits wherever it stands; a BLAS in float32 does not (OpenBLAS with AVX2: 398 of 5160
    elements of a matmul in tiles of 16 differ between two places). In float64 the products of float32 are exact, and
    what the order of the sum leaves is 2^29 times below float32's rounding. For float64 itself NumPy's long double has
    no BLAS: one loop, one order.
    """
    wide = np.longdouble if a.dtype == np.float64 else np.float64
    return np.matmul(a.astype(wide), b.astype(wide))


def _scaled_values(values: Array, word: str, kind: Any, packed_axis: int, scale: Array | None) -> Array:
    """An operand of dot_scaled in float32: unpacked, decoded and multiplied by the scales of some elements each."""
    if word == "e2m1":
        codes = to_bits(values, kind)
        both = np.stack([codes & 0xF, codes >> 4], axis=packed_axis + 1)
        shape = list(codes.shape)
        shape[packed_axis] *= 2
        # The sign is bit 3 of a code, and the second half of the table.
        values = small_float("f4E2M1FN").values[both].reshape(shape)
    elif not kind.is_float:
        values = small_float({"e4m3": "f8E4M3FN", "e5m2": "f8E5M2"}[word]).decode(to_bits(values, kind))
    if scale is None:
        return values
    count = values.shape[packed_axis] // scale.shape[-1]
    spread = np.repeat(scale, count, axis=-1)
    return values * (spread if packed_axis == values.ndim - 1 else np.swapaxes(spread, -1, -2)).astype(np.float32)


def _factors(scale: Array, kind: Any) -> Array:
    """Scales as numbers: nvfp4's are floats of 8 bits, those of the others exponents alone, of which 255 is NaN."""
    if kind.is_float:
        return scale
    exponents = scale.view(np.uint8)
    return np.where(exponents == 255, np.nan, np.exp2(exponents.astype(np.float32) - 127))


def _dot_scaled(operation: Operation) -> Compute:
    words = dict(re.findall(r"(lhs|rhs) = (\w+)", operation.text))
    left_text, _, right_text = operation.text.partition(",")
    has_scales = [" scale " in left_text, " scale " in right_text.partition(",")[0]]
    types = [value.type for value in operation.operands]
    if "k_pack = false" in operation.text:
        raise refused(operation, "operands packed along another axis than that of the sum")

    def dot(*operands: Array) -> Array:
        each = [full(x, type.shape) for x, type in zip(operands, types, strict=True)]
        kinds = iter(element_type(type.element) for type in types)
        rest = iter(each)
        sides = []
        for side, word, has_scale in zip((0, 1), (words["lhs"], words["rhs"]), has_scales, strict=True):
            values, kind = next(rest), next(kinds)
            scale = _factors(next(rest), next(kinds)) if has_scale else None
            axis = values.ndim - 1 if side == 0 else values.ndim - 2
            sides.append(_scaled_values(values, word, kind, axis, scale))
        return _products(sides[0], sides[1]).astype(np.float32) + next(rest)

    return dot


SHAPING: dict[str, Callable[[Operation], Compute]] = {
    "tt.broadcast": lambda operation: as_it_is,
    "tt.cat": _concatenate,
    "tt.dot": _dot,
    "tt.dot_scaled": _dot_scaled,
    "tt.expand_dims": _expand_dims,
    "tt.gather": _gather,
    "tt.histogram": _histogram,
    "tt.join": _join,
    "tt.make_range": _make_range,
    "tt.reshape": _reshape,
    "tt.splat": _splat,
    "tt.split": _split,
    "tt.trans": _transpose,
    "tt.unsplat": lambda operation: lambda values: values.reshape(values.shape[0]),
    "ub.poison": lambda operation: (
        lambda: np.zeros((1,) * (len(operation.results[0].type.shape) + 1), kind_of(operation).compute)
    ),
}


def _operands_along(operands: Sequence[Array], extent: int, axis: int) -> list[Array]:
    """Operands with all of a tensor's axis, which has this extent, and the others as they are."""
    widened = []
    for values in operands:
        shape = (*values.shape[:axis], extent, *values.shape[axis + 1 :])
        widened.append(values if values.shape == shape else np.broadcast_to(values, shape))
    return widened


def reduction(operation: Operation, simple: str, combine: Combine) -> Compute:
    """tt.reduce: halves of the axis are combined until there is no second half, as GPUs do with their threads.

    Args:
        operation: the reduction.
        simple: name of the operation if it is all that the region does with its two arguments, else "".
        combine: the region's function of two elements of each operand.
    """
    axis = int(attributes(operation)["axis"]) + 1
    extent = operation.operands[0].type.shape[axis - 1]
    one_bit = kind_of(operation, 0).name == "i1"  # where NumPy's sums count, and its largest number is not signed
    by_numpy = None if one_bit else _REDUCES.get(simple)
    in_halves = _HALVES.get(simple)
    rounding = kind_of(operation).round
    before = (slice(None),) * axis

    def reduce(*operands: Array) -> Any:
        values = _operands_along(operands, extent, axis)
        if by_numpy is not None:
            dtype = {"dtype": values[0].dtype} if values[0].dtype.kind == "i" else {}
            return by_numpy.reduce(values[0], axis=axis, **dtype)
        if simple == "arith.addf" and rounding is None and axis == values[0].ndim - 1:
            return np.add.reduce(np.ascontiguousarray(values[0]), axis=axis)
        while values[0].shape[axis] > 1:
            half = values[0].shape[axis] // 2
            first, second = (*before, slice(half)), (*before, slice(half, None))
            if in_halves is not None:  # a fifth of the time that the region takes
                whole = in_halves(values[0][first], values[0][second])
                values = [whole if rounding is None else rounding(whole)]
                continue
            values = [*combine(*(x[first] for x in values), *(x[second] for x in values))]
        results = tuple(x.squeeze(axis) for x in values)
        return results[0] if len(results) == 1 else results

    return reduce


def scan(operation: Operation, simple: str, combine: Combine) -> Compute:
    """tt.scan: each element combined with all before it, in doubling steps; arguments as in `reduction`."""
    axis = int(attributes(operation)["axis"]) + 1
    extent = operation.operands[0].type.shape[axis - 1]
    reverse = attributes(operation).get("reverse") == "true"
    in_order = simple == "arith.addi" and kind_of(operation).name != "i1"
    in_order = in_order or (simple == "arith.addf" and kind_of(operation).round is None)

    def run(*operands: Array) -> Any:
        values = _operands_along(operands, extent, axis)
        if reverse:
            values = [np.flip(x, axis) for x in values]
        if in_order:
            values = [np.cumsum(values[0], axis=axis, dtype=values[0].dtype)]
        else:
            values = _doubling(values, axis, combine)
        results = tuple(np.flip(x, axis) if reverse else x for x in values)
        return results[0] if len(results) == 1 else results

    return run


def _doubling(values: list[Array], axis: int, combine: Combine) -> list[Array]:
    extent = values[0].shape[axis]
    for step in range(math.ceil(math.log2(extent)) if extent > 1 else 0):
        distance = 1 << step
        before = [np.take(x, np.arange(extent - distance), axis=axis) for x in values]
        after = [np.take(x, np.arange(distance, extent), axis=axis) for x in values]
        first = [np.take(x, np.arange(distance), axis=axis) for x in values]
        combined = combine(*before, *after)
        joined = []
        for head, tail in zip(first, combined, strict=True):
            shape = tuple(
                max(a, b) if i != axis else a for i, (a, b) in enumerate(zip(head.shape, tail.shape, strict=True))
            )
            joined.append(np.concatenate([np.broadcast_to(head, shape), tail], axis=axis))
        values = joined
    return values


def map_elements(operation: Operation, combine: Combine) -> Compute:
    """tt.map_elementwise: a region on each element, or on `pack` neighbours at a time."""
    pack = int(attributes(operation).get("pack", "1"))
    shape = operation.operands[0].type.shape

    def run(*operands: Array) -> Any:
        if pack == 1:
            results = tuple(combine(*operands))
        else:
            whole = [full(x, shape).reshape(x.shape[0], -1, pack) for x in operands]
            parts = combine(*(x[..., i] for x in whole for i in range(pack)))
            groups = [parts[i : i + pack] for i in range(0, len(parts), pack)]
            results = tuple(np.stack(np.broadcast_arrays(*g), -1).reshape(-1, *shape) for g in groups)
        return results[0] if len(results) == 1 else results

    return run
