"""Why an operator gives another output from the same inputs, where that is plain, and what to do about it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from retrograd.trace.diffing import error_bounds
from retrograd.trace.diffing.identity import base
from retrograd.trace.diffing.schema import Kind
from retrograd.trace.diffing.verdicts import Judged
from retrograd.trace.schema import Op, Stats

# Operators that add in an order that may change between runs, on a GPU at least, as their documentation says.
UNORDERED = re.compile(
    r"index_add|scatter_add|scatter_reduce|index_reduce|index_put|^put$|embedding.*backward|embedding_bag|bincount|histc"
    r"|grid_sampler_\dd_backward|upsample.*backward|interpolate|(?:reflection|replication)_pad.*backward"
    r"|adaptive_(?:avg|max)_pool.*backward|(?:avg_pool3d|max_pool3d_with_indices|fractional_max_pool.*)_backward"
    r"|ctc_loss_backward|nll_loss2d|cumsum|deform_attn.*b(?:ack)?wa?r?d|attention.*backward"
)
# Relative error of a sum of products whose factors were rounded first. Independent roundings to 2^-p give a spread of
# 0.8 2^-p; least and greatest element show between a thirtieth and four of it, but for one case in a thousand.
_TF32 = (2.0**-16, 2.0**-9)
_HALF = (2.0**-9, 2.0**-5)


_CHOSEN = 2**32  # a seed that nobody set is a random number of 64 bits


@dataclass(frozen=True)
class Setting:
    """What is the same in both runs."""

    device: bool
    seeds: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Reason:
    """A kind with what, why and what to do, in words."""

    kind: Kind
    what: str
    why: str = ""
    advice: str = ""


def reason(found: Judged, setting: Setting) -> Reason:
    """The plainest reason there is for an operator of which both runs have one and that is the first to differ."""
    a, b = found.pair.a, found.pair.b
    assert a is not None
    assert b is not None
    if found.differs:
        return _itself(found, a, b)
    if found.random:
        return _random(b, setting)
    if any(t.bad for t in a.outputs) != any(t.bad for t in b.outputs):
        side = "B" if any(t.bad for t in b.outputs) else "A"
        return Reason("nonfinite", f"{b.name} gives NaN or Inf in {side} alone, from the same inputs", _size(found))
    if not setting.device:
        return Reason(
            "operator" if found.excess > 1 else "order",
            f"{b.name} gives another output from the same inputs on another device",
            _size(found) if found.excess > 1 else f"another kernel adds in another order: {_size(found)}",
            "" if found.excess > 1 else "compare with --attainable: rounding then does not count",
        )
    return _product(found, b) or _unordered(found, b) or _other(found, b)


def _itself(found: Judged, a: Op, b: Op) -> Reason:
    if found.differs == "replaced":
        return Reason("replaced", f"{a.name} in A is {b.name} in B", "" if any(found.inputs) else _size(found))
    if found.differs in ("argument", "number"):
        return Reason("argument", f"{b.name} has other arguments: {a.arguments or 'none'} -> {b.arguments or 'none'}")
    if found.differs == "shape":
        sizes = " -> ".join(", ".join(str(list(t.shape)) for t in op.outputs) for op in (a, b))
        return Reason("shape", f"{b.name} gives other sizes from inputs of the same sizes: {sizes}")
    names = " -> ".join(", ".join(t.dtype for t in op.outputs) for op in (a, b))
    return Reason(
        "dtype",
        f"{b.name} gives another dtype from the same inputs: {names}",
        "autocast or a cast in one of the runs",
        "compare with --attainable if both are meant: rounding then does not count",
    )


def _random(b: Op, setting: Setting) -> Reason:
    what = f"{b.name} draws other random numbers, from the same inputs"
    if not setting.device:
        return Reason("random", what, "generators of different devices draw different numbers from the same seed")
    one, other = setting.seeds
    why = "the states of the generators differ"
    if one != other and all(seed.isdigit() and int(seed) < _CHOSEN for seed in (one, other)):
        why += f"; the seeds that were set last: {one} and {other}"
    return Reason("random", what, why, "set the same seed in both runs (torch.manual_seed) before the first draw")


def _product(found: Judged, b: Op) -> Reason | None:
    if base(b.name) not in error_bounds.PRODUCTS and "attention" not in b.name:
        return None
    what = f"{b.name} gives another output from the same inputs"
    if not any(t.dtype == "float32" for t in b.outputs) or found.excess <= 1:
        return None
    relative = _relative(found)
    if _TF32[0] <= relative < _TF32[1]:
        return Reason(
            "product",
            what,
            f"{_size(found)}: near 2^-11, as when factors are rounded to TF32",
            "compare torch.get_float32_matmul_precision() and torch.backends.cuda.matmul.allow_tf32 of both runs",
        )
    if _HALF[0] <= relative < _HALF[1]:
        return Reason(
            "product",
            what,
            f"{_size(found)}: near 2^-8, as when factors are rounded to bfloat16",
            "compare torch.get_float32_matmul_precision() and autocast of both runs",
        )
    return None


def _unordered(found: Judged, b: Op) -> Reason | None:
    if not UNORDERED.search(base(b.name)):
        return None
    return Reason(
        "nondeterministic",
        f"{b.name} gives other bits from the same inputs",
        f"it may add in whatever order threads come (atomics): {_size(found)}",
        "torch.use_deterministic_algorithms(True) takes an ordered kernel where there is one and refuses where not",
    )


def _other(found: Judged, b: Op) -> Reason:
    what = f"{b.name} gives another output from the same inputs"
    if found.unwritten and found.excess > 1 and ".out" not in b.name:
        return Reason(
            "uninitialised", what, "one of its inputs is memory of aten.empty that no operator wrote", "fill it first"
        )
    if found.excess > 1:
        return Reason("operator", what, f"{_size(found)}: more than rounding explains", "compare its code in both runs")
    return Reason(
        "order",
        what,
        f"{_size(found)}, as another order of additions makes: another kernel, version or number of threads, or an "
        "operator that is not deterministic",
        "repeat one of the runs: what differs there again is not deterministic (retrograd trace repeat)",
    )


def _relative(found: Judged) -> float:
    a, b = found.pair.a, found.pair.b
    assert a is not None
    assert b is not None
    return max((_apart(s, t) for s, t in zip(a.outputs, b.outputs, strict=False)), default=0.0)


def _apart(s: Stats, t: Stats) -> float:
    size = max(s.rms or 0.0, t.rms or 0.0)
    pairs = ((s.rms, t.rms), (s.low, t.low), (s.high, t.high))
    return max((abs(x - y) / size for x, y in pairs if size and x is not None and y is not None), default=0.0)


def _size(found: Judged) -> str:
    """By how much, in words."""
    relative = _relative(found)
    if not relative:
        return "only single bits differ: least, greatest and rms are the same"
    said = f"least, greatest or rms differs by {relative:.1e} of the rms"
    return f"{said}, {found.excess:.2g} times the attainable error" if 0 < found.excess < 1e30 else said
