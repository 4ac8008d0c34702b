"""Reasons of a NaN or Inf: a sentence from the operator and the ranges of its inputs. No torch.

Only what follows from operator, dtype and ranges is stated; where several reasons remain, the sentence says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from retrograd.trace import function_domains
from retrograd.trace.diffing.identity import base_name, names
from retrograd.trace.schema import OPTIMIZER, Op
from retrograd.trace.value_ranges import known_input, spread

LARGEST = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}
# Exponents of the least normal number and of the largest.
NORMAL = {
    "float16": (-14, 15),
    "bfloat16": (-126, 127),
    "float32": (-126, 127),
    "float8_e4m3fn": (-6, 8),
    "float8_e5m2": (-14, 15),
}
_LITERAL = re.compile(r"=-?inf\b|[\[ ]-?inf\b")
_NUMBER = r"-?\d[\d.]*(?:e[+-]?\d+)?"
_NAN = re.compile(r"(?:^|=|[\[ ])nan\b")
_FACTOR = re.compile(r"\b(alpha|lr)=(-?inf|nan)\b")  # of a step of an optimizer: no mask
_ANY_FACTOR = re.compile(r"\b(\w+)=(-?inf|nan)\b")
_SQUARES = names("var std var_mean std_mean mse_loss linalg_vector_norm norm dist cdist _cdist_forward renorm")
_SUMS = names("mm bmm addmm baddbmm addmv mv dot convolution sum cumsum mean linear conv2d")
_PRODUCTS = names("mul pow square addcmul prod cumprod _foreach_mul")
_NORMS = names("native_layer_norm native_group_norm native_batch_norm _fused_rms_norm")
_QUOTIENTS = names("addcdiv _foreach_addcdiv _fused_adam _fused_adamw _fused_adagrad")
_SOFTMAX = names("_softmax _log_softmax softmax log_softmax _safe_softmax logsumexp")


def only_allocates(op: Op) -> bool:
    """Whether the operator only makes memory, whose content means nothing."""
    return op.name.startswith("aten.") and "empty" in base_name(op.name)


def adopts(op: Op) -> bool:
    """Whether the operator only shows memory that is there, as torch.load does: its content came from outside."""
    return op.name.startswith("aten.set_.source_Storage")


def writes_infinity(op: Op) -> bool:
    """Whether an infinity is among the arguments, as in masked_fill(mask, -inf): deliberate, if no optimizer's."""
    return op.owner != OPTIMIZER and bool(_LITERAL.search(f" {_FACTOR.sub('', op.arguments)}"))


def writes_nan(op: Op) -> bool:
    """Whether a NaN is among the arguments, as in full((), nan) of a branch of `where`: it is deliberate there."""
    return bool(_NAN.search(_FACTOR.sub("", op.arguments)))


def explain(op: Op) -> str:
    """The reason in a sentence; "" where none is plain."""
    nan = any(s.nan for s in op.outputs)
    last = _from_infinities if nan else _overflow
    written = (_written, _empty_reduction, _corrected_bias, _without_eps, infinite_factor, _huge_argument)
    for rule in (*written, _by_name, last):
        reason = rule(op, nan)
        if reason:
            return reason
    return ""


def _range(op: Op) -> tuple[float, float]:
    """Least and greatest finite element of the first input."""
    return op.inputs[0].low or 0.0, op.inputs[0].high or 0.0


def _largest(op: Op) -> float:
    return LARGEST.get(next((s.dtype for s in op.outputs if s.bad), ""), math.inf)


def _written(op: Op, nan: bool) -> str:
    """NaN where a condition or a mask asked for it."""
    if nan and base_name(op.name) == "where" and any(s.nan == math.prod(s.shape) for s in op.inputs):
        return "NaN is written deliberately: it is one of the two that the condition chooses from"
    return "NaN is written deliberately: it is among the arguments" if nan and writes_nan(op) else ""


def _empty_reduction(op: Op, nan: bool) -> str:
    if nan and base_name(op.name) in ("mean", "var", "std", "var_mean", "std_mean", "nanmean"):
        counts = [math.prod(s.shape) for s in op.inputs]
        if 0 in counts:
            return "the mean of no elements is 0/0"
        if base_name(op.name) != "mean" and counts and counts[0] == math.prod(op.outputs[0].shape):
            return "the variance of one element with Bessel's correction is 0/0"
    if nan and base_name(op.name) in ("nll_loss_forward", "nll_loss2d_forward"):
        return "every target is the ignored one (or all weights are 0), so the mean over the others is 0/0"
    return ""


def _without_eps(op: Op, nan: bool) -> str:
    """Norms, and optimizers that divide by a root of the second moment."""
    if not nan:
        return ""
    zero = re.search(r"\beps=0(\.0)?\b", op.arguments) is not None
    if zero and op.name == "retrograd::norm_fwd":
        return "with eps = 0 a row of zeros is divided by 0"
    if zero and base_name(op.name) in _NORMS:
        return "with eps = 0 a row whose numbers are all equal (of an RMS norm: all zero) is 0/0"
    if re.match(r"_fused_adamw?$", base_name(op.name)) and (low := _second_moment(op)) < 0:
        return f"root of a negative number: the second moment goes down to {low:.4g}"
    if base_name(op.name) in _QUOTIENTS and not any(s.bad for s in op.inputs):
        return "0/0 or inf/inf in the quotient that is added" + ": eps = 0, and a second moment is zero" * zero
    return ""


def _second_moment(op: Op) -> float:
    """The least after a fused Adam, which writes parameters, gradients, first and second moments, maxima; or before."""
    count = len(op.outputs) // (5 if "amsgrad=True" in op.arguments else 4)
    before, after = (stats[3 * count : 4 * count] for stats in (op.inputs, op.outputs))
    return min((new.low or old.low or 0.0 for old, new in zip(before, after, strict=False)), default=0.0)


def _corrected_bias(op: Op, nan: bool) -> str:
    """Of a fused Adam, which divides by 1 - beta**step."""
    beta = re.search(r"\b(beta[12])=1(\.0)?(?![\d.])", op.arguments) if "_fused_adam" in op.name else None
    return f"division by zero: the bias correction 1 - {beta[1]}**step is 0, as {beta[1]} = 1" if beta else ""


def infinite_factor(op: Op, nan: bool) -> str:
    """The argument of an optimizer's operator that is infinite or NaN, in a sentence; "" if none is."""
    factor = (_ANY_FACTOR if op.owner == OPTIMIZER else _FACTOR).search(op.arguments)
    return f"its {factor[1]}, of a learning rate or weight decay perhaps, is {factor[2]}" if factor is not None else ""


def _huge_argument(op: Op, nan: bool) -> str:
    """A number among the arguments that is infinite in the dtype it is computed in, which is at least float32."""
    if nan and base_name(op.name) in _PRODUCTS and re.search(r"\bother=-?inf\b", op.arguments):
        return "0 times inf: the other number is infinite" if any(s.zero for s in op.inputs) else ""
    dtype = "float64" if any(s.dtype == "float64" for s in op.outputs) else "float32"
    for text in re.findall(rf"\b(?:other|alpha|beta|value)=({_NUMBER})", op.arguments):
        if abs(float(text)) > LARGEST[dtype]:
            zeros = nan and base_name(op.name) in _PRODUCTS and any(s.zero for s in op.inputs)
            product = "; 0 times inf where the input is zero" if zeros else ""
            return f"the number {text} is infinite in {dtype}, whose largest is {LARGEST[dtype]:.5g}{product}"
    return ""


def _divided(op: Op, nan: bool, name: str) -> str:
    at = int(name == "addcdiv")  # what is added to is first
    dividend, divisor = known_input(op, at), known_input(op, at + 1)
    if divisor is None and "other=0" in op.arguments:
        return "0/0: it divides by the number 0" if nan else "division by the number 0"
    if divisor is None or not divisor.zero:
        return ""
    if nan and dividend is not None and dividend.zero:
        return f"0/0: the divisor has {divisor.zero} zeros, and the dividend has {dividend.zero}"
    return f"division by zero: the divisor has {divisor.zero} zeros"


def _exponential(op: Op, nan: bool, name: str) -> str:
    largest, (low, high) = _largest(op), _range(op)
    if nan or math.isinf(largest):
        return ""
    limit = math.log(largest, 2.0 if name == "exp2" else math.e)
    if name in ("cosh", "sinh"):
        limit, high = limit + math.log(2), max(high, -low)
    elif name in ("i0", "special_i1"):  # e^x / sqrt(2 pi x) where x is large
        limit, high = limit + math.log(2 * math.pi * limit) / 2, max(high, -low)
    if high < limit * 0.999:
        return ""
    return f"{name} overflows {op.outputs[0].dtype} beyond {limit:.4g}, and its input reaches {high:.4g}"


def _logarithm(op: Op, nan: bool, name: str) -> str:
    low, zeros = _range(op)[0], op.inputs[0].zero
    edge = -1 if name == "log1p" else 0
    if nan and low < edge:
        return f"{name} of numbers below {edge}: its input goes down to {low:.4g}"
    if not nan and low <= edge:
        return f"{name}({edge}) is -inf" + (f": its input has {zeros} zeros" if edge == 0 and zeros else "")
    return ""


def _root(op: Op, nan: bool, name: str) -> str:
    low, zeros = _range(op)[0], op.inputs[0].zero
    if nan and low < 0:
        return f"{name} of negative numbers: its input goes down to {low:.4g}"
    # 1/0 of a complex number is NaN, too.
    if (not nan or op.inputs[0].dtype.startswith("complex")) and zeros and name.endswith(("rsqrt", "reciprocal")):
        return f"{name}(0): its input has {zeros} zeros"
    return ""


def _power(op: Op, nan: bool, name: str) -> str:
    if written := re.search(rf"exponent=({_NUMBER})", op.arguments):
        least = most = float(written[1])
        powers = f"{least:g}"
    elif exponents := known_input(op, 1):
        least, most, powers = exponents.low or 0.0, exponents.high or 0.0, spread(exponents)
    else:
        return ""
    low, zeros = _range(op)[0], op.inputs[0].zero
    if nan and low < 0:  # of finite numbers nothing else gives NaN
        return f"negative numbers to the power {powers}: the base goes down to {low:.4g}"
    if not nan and least < 0 and zeros:
        return f"0 to the power {powers}: the base has {zeros} zeros" + ", or an overflow" * (most > 0)
    return ""


# All but the first are asked where the range of the first input is known.
_RULES: dict[str, Callable[[Op, bool, str], str]] = {
    **dict.fromkeys(("div", "true_divide", "_foreach_div", "remainder", "fmod", "addcdiv", "reciprocal_div"), _divided),
    **dict.fromkeys(("exp", "exp2", "expm1", "_foreach_exp", "cosh", "sinh", "i0", "special_i1"), _exponential),
    **dict.fromkeys(("log", "log2", "log10", "log1p", "_foreach_log"), _logarithm),
    **dict.fromkeys(("sqrt", "rsqrt", "reciprocal", "_foreach_sqrt", "_foreach_rsqrt", "_foreach_reciprocal"), _root),
    **dict.fromkeys(("pow", "float_power", "_foreach_pow"), _power),
    **function_domains.RULES,
}


def _by_name(op: Op, nan: bool) -> str:
    name = base_name(op.name)
    rule = _RULES.get(name)
    reason = rule(op, nan, name) if rule is not None and (rule is _divided or known_input(op, 0)) else ""
    # The derivatives of sqrt, log, pow and norm are infinite at 0.
    function = op.node.rstrip("0123456789").removesuffix("Backward")
    return f"{reason}, in the derivative of {function.lower()}" if reason and function and not op.inside else reason


def _from_infinities(op: Op, nan: bool) -> str:
    """NaN from infinities, masks among them."""
    name = base_name(op.name)
    infinite = [s for s in op.inputs if s.inf]
    if name in _SOFTMAX or "attention" in name:
        if infinite:
            return "softmax of a row that is -inf only (everything masked) is 0/0; or a row has +inf"
        return (
            "softmax of a row that is -inf only: everything in it is masked, or its scores overflow"
            if "attention" in name
            else ""
        )
    if not infinite:
        return ""
    if name in ("sub", "add", "addmm", "_foreach_add", "sum", "cumsum"):
        return f"inf - inf: {_where(op)}"
    if name in ("mul", "addcmul", "_foreach_mul"):
        other = [s for s in op.inputs if s.zero]
        return f"0 times inf: {_where(op)}" if other else ""
    if name == "div":
        return f"inf / inf: {_where(op)}"
    if name in _SUMS:
        return f"inf - inf or 0 times inf in a sum of products: {_where(op)}"
    if "norm" in name or name in ("var", "var_mean", "std"):
        return f"inf - inf where the mean is taken off: {_where(op)}"
    return f"inf - inf, 0 times inf or inf / inf within it: {_where(op)}"


def _where(op: Op) -> str:
    return ", ".join(f"input {at + 1} has {s.inf} infinities" for at, s in enumerate(op.inputs) if s.inf)


def _overflow(op: Op, nan: bool) -> str:
    largest, name = _largest(op), base_name(op.name)
    reach = [max(abs(s.low or 0.0), abs(s.high or 0.0)) for s in op.inputs if s.low is not None]
    if math.isinf(largest) or not reach:
        return ""
    dtype = next(s.dtype for s in op.outputs if s.bad)
    limit = f"the largest {dtype} is {largest:.5g}"
    reached = ", ".join(f"{value:.4g}" for value in reach)
    reached += "".join(
        f" ({text})" for text in re.findall(rf"\b(?:other|alpha|value|exponent)={_NUMBER}", op.arguments)
    )
    top = max(reach)
    if top > largest and not any(s.dtype == dtype for s in op.inputs):  # a copy, by FSDP2 of several in one
        return f"overflow: a number of {top:.4g} was cast to {dtype}, and {limit}"
    if "::" in op.name:
        return (
            f"the kernel divides by zero or goes beyond the largest {dtype}, {largest:.5g}; its inputs reach {reached}"
        )
    if name in ("copy", "_foreach_copy") and top > largest:
        return f"overflow: a number of {top:.4g} was cast to {dtype}, and {limit}"
    if op.node == "AccumulateGrad":
        return f"overflow: a gradient is added to that of a backward before, both reach {reached}, and {limit}"
    if name in _SUMS or "norm" in name or "backward" in name or name in _PRODUCTS or name in ("add", "sub"):
        return f"overflow: the inputs reach {reached}, and {limit}"
    if name in _SQUARES and top * top * max(math.prod(op.inputs[0].shape), 1) > largest:
        return f"overflow: squares of numbers that reach {reached} are added, and {limit}"
    if name == "div":
        return f"overflow: a quotient is too large ({limit}); the inputs reach {reached}"
    return ""
