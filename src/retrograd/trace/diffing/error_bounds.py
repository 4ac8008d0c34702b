"""Error bounds: how far two correct runs may differ, propagated from the statistics of the tensors. Pure.

Each tensor has an error, in root mean square (rms) per element. An operator propagates the errors of its inputs and
adds its own rounding; independent errors add by their squares. With u the unit roundoff of the coarser of both dtypes,
v that of the accumulator (float32 for 16-bit dtypes) and K the length of the reduction:

- stored result: u rms(y); nothing where numbers are only moved.
- sum of K products: v sqrt(K) S, where S = max(rms(y), sqrt(K) rms(a) rms(b)) is the size of the partial sums, since
  K independent roundings of them add like a random walk (Higham and Mary 2019); errors of the inputs give
  sqrt(K) da rms(b) and sqrt(K) rms(a) db.
- sums, differences, and functions with a derivative up to about 1: the errors of the inputs.
- products, quotients, powers: relative errors. exp: the error becomes relative. log: the reverse.
- normalisation: the error times 1 / sigma, which is an output of the operator; softmax likewise by its derivative.
- anything else: one and a half times the relative errors.

`SAFETY` times this is allowed for rms (which changes by no more than the rms of the error), and for the least and
greatest element as much as the greatest of n errors of that size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from retrograd.trace.diffing.identity import base_name, names
from retrograd.trace.schema import Op, Stats

UNIT = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "complex64": 2.0**-24,
    "complex128": 2.0**-53,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
# What the estimate misses: errors that add instead of cancelling, and gains above the typical. See docs.
SAFETY = 4.0
GENERIC = 1.5

PRODUCTS = names(
    "mm bmm addmm baddbmm matmul linear dot mv addmv convolution _convolution cudnn_convolution "
    "mkldnn_convolution conv1d conv2d conv3d einsum _scaled_mm mkldnn_linear _mkl_linear _addmm_activation "
    "convolution_backward"
)
_ADDITIVE = names(
    "add sub rsub neg abs relu gelu silu elu tanh sigmoid sin cos erf clamp clamp_min clamp_max hardtanh "
    "leaky_relu maximum minimum where cat stack logsumexp nll_loss_forward masked_fill threshold "
    "max_pool2d_with_indices amax amin"
)
# They round nothing unless they change the dtype.
_MOVES = names(
    "view _unsafe_view reshape t transpose permute expand slice select split split_with_sizes unbind chunk "
    "squeeze unsqueeze detach clone copy alias as_strided _to_copy to contiguous embedding gather index "
    "index_select cat stack narrow flatten unflatten repeat roll flip _reshape_alias masked_fill where "
    "narrow_copy select_backward slice_backward constant_pad_nd zeros_like ones_like relu threshold_backward neg "
    "abs max_pool2d_with_indices amax amin clamp maximum minimum"
)
# By how much they multiply a relative error.
_POWERS = {"mul": 1.0, "div": 1.0, "square": 2.0, "pow": 3.0, "sqrt": 0.5, "rsqrt": 0.5, "reciprocal": 1.0}
_SUMS = names("sum cumsum nansum")
_NORMS = names(
    "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm _fused_rms_norm"
)


def unit(*dtypes: str) -> float:
    """Unit roundoff of the coarsest of the dtypes; 0 for integers."""
    return max((UNIT.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def numel(t: Stats) -> int:
    return math.prod(t.shape)


def reduction(op: Op) -> int:
    """How many terms are added up to one element of the first result."""
    shapes = [t.shape for t in op.inputs]
    name = base_name(op.name)
    out = max((numel(t) for t in op.outputs), default=1) or 1
    if name in ("convolution_backward",):
        return max(1, max(map(math.prod, shapes), default=1) * max(1, math.prod(shapes[-1])) // out // 4)
    if name in PRODUCTS and len(shapes) >= 2:
        left, right = shapes[-2:] if name in ("addmm", "baddbmm", "addmv", "_addmm_activation") else shapes[:2]
        if "conv" in name:
            return max(1, math.prod(right[1:]))
        return max(1, left[-1] if left else 1)
    if "attention" in name and len(shapes) >= 2 and shapes[0]:
        return max(1, shapes[0][-1], shapes[1][-2] if len(shapes[1]) > 1 else 1)
    return max(1, max(map(math.prod, shapes), default=1) // out)


def _size(t: Stats) -> float:
    return t.rms or 0.0


def _top(t: Stats) -> float:
    return max(abs(t.low or 0.0), abs(t.high or 0.0))


def errors(a: Op, b: Op, input_errors: Sequence[float]) -> list[float]:
    """Errors of the outputs, rms per element, of an operator that ran on both sides.

    Args:
        a, b: the operator in either run.
        input_errors: errors of the inputs of `a`, in the same measure; inf where one is unknown.
    """
    if len(input_errors) != len(a.inputs) or len(a.outputs) != len(b.outputs):
        return [math.inf] * len(a.outputs)
    if base_name(a.name).startswith(("_foreach_", "_fused_")):
        return [_output_error(a, b, k, _list_inputs(a, input_errors, k)) for k in range(len(a.outputs))]
    return [_output_error(a, b, k, list(zip(a.inputs, input_errors, strict=True))) for k in range(len(a.outputs))]


Inputs = list[tuple[Stats, float]]  # tensors with their errors


def _list_inputs(op: Op, input_errors: Sequence[float], k: int) -> Inputs:
    """The inputs that belong to output k of an operator on lists of tensors."""
    pairs = list(zip(op.inputs, input_errors, strict=True))
    return pairs[k :: max(1, len(op.outputs))] if len(pairs) >= len(op.outputs) else pairs


def _output_error(a: Op, b: Op, k: int, inputs: Inputs) -> float:
    y, z = a.outputs[k], b.outputs[k]
    chosen = [e for x, e in inputs if x.dtype != "bool"]  # a flipped mask is as small as what flipped it
    if math.inf in chosen or (y.dtype not in UNIT and any(e for _, e in inputs)):
        return math.inf
    if y.dtype not in UNIT:
        return 0.0
    inputs = [(x, e) for x, e in inputs if x.dtype in UNIT]
    stored, size = unit(y.dtype, z.dtype), max(_size(y), _size(z))
    if y.rms is None and z.rms is None:  # not measured: taken to be as large as its inputs
        size = max((_size(x) for x, _ in inputs), default=0.0)
    propagated = _propagated(a, k, inputs, size)
    if base_name(a.name) in _MOVES:
        propagated = max(propagated, *(e for x, e in inputs if x.rms is None), 0.0) if inputs else propagated
        finer = all(unit(x.dtype) >= stored for x, _ in inputs)
        return propagated if inputs and finer else math.hypot(propagated, stored * size)
    coarsest = unit(y.dtype, z.dtype, *(x.dtype for x, _ in inputs), *(x.dtype for x in b.inputs))
    accumulated = min(coarsest, UNIT["float32"])
    return math.hypot(propagated, stored * size, _rounding(a, inputs, size, accumulated, coarsest))


def _factors(op: Op, inputs: Inputs) -> Inputs:
    """The two tensors that are multiplied by each other; what is added comes first."""
    return inputs[-2:] if base_name(op.name) in ("addmm", "baddbmm", "addmv", "_addmm_activation") else inputs[:2]


def _rounding(op: Op, inputs: Inputs, size: float, v: float, u: float) -> float:
    name, length = base_name(op.name), reduction(op)
    if name in PRODUCTS and len(inputs) >= 2:
        (x, _), (w, _) = _factors(op, inputs)
        return v * math.sqrt(length) * max(size, math.sqrt(length) * _size(x) * _size(w))
    if "attention" in name and len(inputs) >= 3:
        return 2 * u * max(size, _size(inputs[2][0]))  # kernels keep the weights in the dtype of the inputs
    if name in _NORMS and inputs:
        return 4 * v * size + v * _top(inputs[0][0]) * _inverse_sigma(op) * size
    if name in _ADDITIVE:
        return v * max((_size(x) for x, _ in inputs), default=0.0)
    largest = max((_size(x) for x, _ in inputs), default=0.0)
    if name == "mean":
        return v * math.sqrt(length) * max(size, largest / math.sqrt(length))
    return v * math.sqrt(length) * max(size, math.sqrt(length) * largest if name in _SUMS else 0.0)


def _inverse_sigma(op: Op) -> float:
    return _top(op.outputs[-1]) if len(op.outputs) > 1 else 0.0


def _relative(x: Stats, e: float) -> float:
    size = _size(x)
    if x.rms is None:
        return 0.0  # unknown
    return e / size if size else (math.inf if e else 0.0)


def _propagated(op: Op, k: int, inputs: Inputs, size: float) -> float:
    """The error of output k that the errors of the inputs cause."""
    if not any(e for _, e in inputs):
        return 0.0
    name, first = base_name(op.name).removeprefix("_foreach_"), inputs[0]
    length = reduction(op)
    relative = math.hypot(*(_relative(x, e) for x, e in inputs))
    if name in PRODUCTS and name != "convolution_backward" and len(inputs) >= 2:
        (x, ex), (w, ew) = _factors(op, inputs)
        root = math.sqrt(length)
        return math.hypot(*(e for _, e in inputs[:-2]), root * ex * _size(w), root * _size(x) * ew)
    if name in ("add", "sub") and len(inputs) == 2:
        return math.hypot(inputs[0][1], _factor(op, "alpha") * inputs[1][1])
    if name in _ADDITIVE:
        return math.hypot(*(e for _, e in inputs))
    if name in ("lerp", "addcmul", "addcdiv") and len(inputs) > 1:
        return _updated(op, name, inputs)
    if name in _POWERS:
        return _POWERS[name] * relative * size
    if name in _SUMS or name == "mean":
        return max(math.sqrt(length) * first[1] / (length if name == "mean" else 1), relative * size)
    if name in _NORMS:
        return _normalised(op, k, inputs, size)
    return _special(op, name, inputs, size, relative)


def _factor(op: Op, name: str) -> float:
    """A number among the arguments, its size; 1 where it is left out."""
    match = re.search(rf"\b{name}=([-+.\de]+)", op.arguments)
    return abs(float(match[1])) if match else 1.0


def _updated(op: Op, name: str, inputs: Inputs) -> float:
    """Optimizers' operators: a value moves a little."""
    (_, e), (x, ex) = inputs[:2]
    if name == "lerp":
        return math.hypot(e, _factor(op, "weight") * ex)
    y, ey = inputs[-1]
    step = _size(x) * _size(y) if name == "addcmul" else _size(x) / _size(y) if _size(y) else math.inf
    relative = math.hypot(_relative(x, ex), _relative(y, ey))
    return math.hypot(e, GENERIC * _factor(op, "value") * step * relative) if relative else e


def _normalised(op: Op, k: int, inputs: Inputs, size: float) -> float:
    (_, e), inverse = inputs[0], _inverse_sigma(op)
    if k == 0:
        return math.hypot(e * inverse * size, *(size * _relative(x, d) for x, d in inputs[1:]))
    return e if k == 1 and len(op.outputs) > 2 else size * e * inverse


def _special(op: Op, name: str, inputs: Inputs, size: float, relative: float) -> float:
    x, e = inputs[0]
    if name in ("exp", "_softmax"):
        return 1.5 * e * size
    if name == "log":
        return _relative(x, e)
    if name == "_log_softmax":
        return 1.5 * e
    if name in ("_softmax_backward_data", "_log_softmax_backward_data") and len(inputs) > 1:
        y, ey = inputs[1]
        if name == "_log_softmax_backward_data":
            return math.hypot(e, 1.5 * ey * size)
        return math.hypot(1.5 * e * _size(y), 1.5 * _size(x) * ey)
    if "attention" in name and "backward" not in name and len(inputs) >= 3:
        (q, eq), (w, ew), (v, ev) = inputs[:3]
        return math.hypot(1.5 * _size(v) * eq * _size(w), 1.5 * _size(v) * _size(q) * ew, ev)
    if "norm_backward" in name and len(inputs) > 1:
        # Of the statistics that were saved nothing is said: a mean near 0 has no relative error worth the name.
        return GENERIC * math.hypot(*(_relative(x, e) for x, e in inputs[:2])) * size
    if name.endswith("_backward") and name != "convolution_backward":
        return relative * size
    if len(inputs) == 1 or name in _MOVES:  # also functions nobody described
        return max(e, relative * size) if name not in _MOVES else relative * size
    return GENERIC * relative * size


def allowed(t: Stats, error: float) -> tuple[float, float]:
    """By how much the rms, and the least or greatest element, may differ for an error of this rms."""
    if not error:
        return 0.0, 0.0
    size, count = _size(t), max(numel(t), 2)
    peak = math.sqrt(2 * math.log(count)) + (_top(t) / size if size else 0.0)
    return SAFETY * error, SAFETY * error * peak


def excess(s: Stats, t: Stats, error: float) -> float:
    """By how many times two tensors differ more than allowed; 0 where nothing that was recorded differs."""
    if None in (s.rms, t.rms, s.low, t.low, s.high, t.high):
        return 0.0
    coarse = max((s, t), key=_size)
    for_rms, for_peak = allowed(coarse, error)
    worst = 0.0
    for x, y, tolerance in ((s.rms, t.rms, for_rms), (s.low, t.low, for_peak), (s.high, t.high, for_peak)):
        difference = abs(x - y)  # type: ignore[operator]
        if difference:
            worst = max(worst, difference / tolerance if tolerance else math.inf)
    return worst
