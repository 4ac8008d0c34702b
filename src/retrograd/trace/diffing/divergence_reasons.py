"""Reasons of a divergence: why an operator gives another output from the same inputs, and advice. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from retrograd.trace.diffing import error_bounds
from retrograd.trace.diffing.identity import base_name
from retrograd.trace.diffing.schema import UNKNOWN, DivergenceCause
from retrograd.trace.diffing.verdicts import PairVerdict
from retrograd.trace.schema import Op

# Operators that add in an order that may change between runs, on a GPU at least, as their documentation says.
UNORDERED = re.compile(
    r"index_add|scatter_add|scatter_reduce|index_reduce|index_put|^put$|embedding.*backward|embedding_bag|bincount|histc"
    r"|grid_sampler_\dd_backward|upsample.*backward|interpolate|(?:reflection|replication)_pad.*backward"
    r"|adaptive_(?:avg|max)_pool.*backward|(?:avg_pool3d|max_pool3d_with_indices|fractional_max_pool.*)_backward"
    r"|ctc_loss_backward|nll_loss2d|cumsum|deform_attn.*b(?:ack)?wa?r?d|attention.*backward"
)
# Relative error of a sum of products whose factors were rounded first. Independent roundings to 2^-p give a spread of
# 0.8 2^-p; least and greatest element show between a thirtieth and four of it, but for one case in a thousand.
_ROUNDED_FACTORS = (
    (2.0**-16, 2.0**-9, "near 2^-11, as when factors are rounded to TF32", "torch.backends.cuda.matmul.allow_tf32"),
    (2.0**-9, 2.0**-5, "near 2^-8, as when factors are rounded to bfloat16", "autocast"),
)
# Why a dtype is another one in one of the runs, and advice.
CAST = (
    "autocast, or a cast in one of the runs",
    "compare with --attainable if both are meant: rounding then does not count",
)
# Why operators of an eager and of a compiled run do not correspond, and advice.
COMPILED = (
    "compiled code fuses operators, and what is fused is not seen: none of these is known to be missing",
    "record that run with compiled='eager' (--compiled eager), which names the operators; last bits may change",
)
_CHOSEN = 2**32  # a seed that nobody set is a random number of 64 bits


@dataclass(frozen=True)
class RunConditions:
    """Whether both runs are on the same kind of device, the seeds that were set last, and in what else they differ."""

    device: bool
    seeds: tuple[str, str] = ("", "")
    settings: tuple[str, ...] = ()  # "mkldnn.enabled is True in A, False in B": flags, variables and versions


def reason(verdict: PairVerdict, conditions: RunConditions) -> DivergenceCause:
    """The plainest reason there is for an operator of which both runs have one and that is the first to differ."""
    a, b = verdict.pair.both
    if verdict.differs:
        return _operator_itself(verdict, a, b)
    if verdict.reads:
        return DivergenceCause("operand", f"{b.name} reads another value: {verdict.reads}")
    if verdict.random:
        return _random(b, conditions)
    unseen = any(t.digest == UNKNOWN for t in b.inputs)
    if any(t.bad for t in a.outputs) != any(t.bad for t in b.outputs):
        side = "B" if any(t.bad for t in b.outputs) else "A"
        return DivergenceCause(
            "nonfinite",
            f"{b.name} gives NaN or Inf in {side} alone{'' if unseen else ', from the same inputs'}",
            _size(verdict),
        )
    if unseen:
        description = f"{b.name} gives another output, from inputs that were not all compared"
        advice = "look at what made them as well: it was not seen, or only parts of a sum are known"
        return DivergenceCause("operator", description, _size(verdict), advice)
    if not conditions.device:
        return DivergenceCause(
            "operator" if verdict.excess > 1 else "order",
            f"{b.name} gives another output from the same inputs on another device",
            _size(verdict) if verdict.excess > 1 else f"another kernel adds in another order: {_size(verdict)}",
            "" if verdict.excess > 1 else "compare with --attainable: rounding then does not count",
        )
    cause = _product(verdict, b) or _unordered(verdict, b) or _other(verdict, b)
    if not conditions.settings:
        return cause
    why = f"the runs differ in their settings: {'; '.join(conditions.settings)}; {cause.why}"
    return replace(cause, why=why, advice=f"run both with the same settings; {cause.advice}")


def _operator_itself(verdict: PairVerdict, a: Op, b: Op) -> DivergenceCause:
    if verdict.differs == "replaced":
        return DivergenceCause(
            "replaced", f"{a.name} in A is {b.name} in B", "" if any(verdict.inputs) else _size(verdict)
        )
    if verdict.differs in ("argument", "number"):
        return DivergenceCause(
            "argument", f"{b.name} has other arguments: {a.arguments or 'none'} -> {b.arguments or 'none'}"
        )
    if verdict.differs == "shape":
        sizes = " -> ".join(", ".join(str(list(t.shape)) for t in op.outputs) for op in (a, b))
        return DivergenceCause("shape", f"{b.name} gives other sizes from inputs of the same sizes: {sizes}")
    names = " -> ".join(", ".join(t.dtype for t in op.outputs) for op in (a, b))
    return DivergenceCause("dtype", f"{b.name} gives another dtype from the same inputs: {names}", *CAST)


def _random(b: Op, conditions: RunConditions) -> DivergenceCause:
    description = f"{b.name} draws other random numbers, from the same inputs"
    if not conditions.device:
        return DivergenceCause(
            "random", description, "generators of different devices draw different numbers from the same seed"
        )
    seed_a, seed_b = conditions.seeds
    why = "the states of the generators differ"
    if seed_a != seed_b and all(seed.isdigit() and int(seed) < _CHOSEN for seed in conditions.seeds):
        why += f"; the seeds that were set last: {seed_a} and {seed_b}"
    return DivergenceCause(
        "random", description, why, "set the same seed in both runs (torch.manual_seed) before the first draw"
    )


def _product(verdict: PairVerdict, b: Op) -> DivergenceCause | None:
    if base_name(b.name) not in error_bounds.PRODUCTS and "attention" not in b.name:
        return None
    if not any(t.dtype == "float32" for t in b.outputs) or verdict.excess <= 1:
        return None
    description, relative = f"{b.name} gives another output from the same inputs", _relative(verdict)
    for low, high, why, setting in _ROUNDED_FACTORS:
        if low <= relative < high:
            advice = f"compare torch.get_float32_matmul_precision() and {setting} of both runs"
            return DivergenceCause("product", description, f"{_size(verdict)}: {why}", advice)
    return None


def _unordered(verdict: PairVerdict, b: Op) -> DivergenceCause | None:
    if not UNORDERED.search(base_name(b.name)):
        return None
    return DivergenceCause(
        "nondeterministic",
        f"{b.name} gives other bits from the same inputs",
        f"it may add in whatever order threads come (atomics): {_size(verdict)}",
        "torch.use_deterministic_algorithms(True) takes an ordered kernel where there is one and refuses where not",
    )


def _other(verdict: PairVerdict, b: Op) -> DivergenceCause:
    description = f"{b.name} gives another output from the same inputs"
    if verdict.unwritten and verdict.excess > 1 and ".out" not in b.name:
        return DivergenceCause(
            "uninitialised",
            description,
            "one of its inputs is memory of aten.empty that no operator wrote",
            "fill it first",
        )
    if verdict.excess > 1:
        return DivergenceCause(
            "operator", description, f"{_size(verdict)}: more than rounding explains", "compare its code in both runs"
        )
    return DivergenceCause(
        "order",
        description,
        f"{_size(verdict)}, as another order of additions makes: another kernel, version or number of threads, or an "
        "operator that is not deterministic",
        "repeat one of the runs: what differs there again is not deterministic (retrograd trace repeat)",
    )


def _relative(verdict: PairVerdict) -> float:
    a, b = verdict.pair.both
    worst = 0.0
    for s, t in zip(a.outputs, b.outputs, strict=False):
        size = max(s.rms or 0.0, t.rms or 0.0)
        pairs = ((s.rms, t.rms), (s.low, t.low), (s.high, t.high))
        worst = max(worst, *(abs(x - y) / size for x, y in pairs if size and x is not None and y is not None), 0.0)
    return worst


def _size(verdict: PairVerdict) -> str:
    """The size of the difference, in words."""
    relative = _relative(verdict)
    if not relative:
        return "only single bits differ: least, greatest and rms are the same"
    difference = f"least, greatest or rms differs by {relative:.1e} of the rms"
    return f"{difference}, {verdict.excess:.2g} times the attainable error" if 0 < verdict.excess < 1e30 else difference
