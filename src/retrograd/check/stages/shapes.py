"""shapes: 0, 1, block edges, primes, more than two dimensions, tall, wide, ends of ranges, beside blocks of kernels."""

from __future__ import annotations

import itertools
import math
import sys

from retrograd.check import cpu_kernels
from retrograd.check.inputs import allows, fitted, resized
from retrograd.check.schema import Case, Size
from retrograd.check.sizes import elements, names_of
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext
from retrograd.check.stages.mutation import overwritten
from retrograd.check.stages.oracle import judged
from retrograd.compat.triton_launch import count_launches, through_triton

# In order of how often each finds something: level quick takes the first ones.
_SIZES = (1, 0, 129, 64, 2, 33, 128, 37, 16, 17, 256, 4, 257, 1000, 8)
_LEADS: tuple[tuple[int, ...], ...] = ((1,), (0,), (2, 3, 5), (33,), (), (64,), (129,), (1, 1, 4))
# Beyond a small block each, in numbers of blocks that do not divide each other: what programs share has remainders.
_UNLIKE = (37, 23, 53, 19, 29)
_LONG = (1025, 2049, 4097)  # one more than the blocks that rows are cut into, or kept in whole
_PARTS = (20, 12, 6, 3)  # sizes short of a block, where the ordinary one fills its
_UNCOMPARED = 6  # sizes of an op without a reference
_SMALL = (3, 1)  # what the other sizes become where a long one would take too long beside them
_WATCHED = 2  # sizes too dear for a truth at which kernels are watched
_GROWN, _LITTLE = 4, 1 << 12  # times the ordinary case, or elements: beyond both they may be executed for seconds


def _sweep(context: StageContext) -> tuple[list[Case], list[Case]]:
    """The cases that are always run: ends of ranges, all sizes alike, long rows; and those in turn for each size."""
    base, spec = context.base, context.spec
    rank_free = spec.free_rank
    by_name, always = list[list[Case]](), list[Case]()
    for name, size in base.sizes:
        options: tuple[Size, ...] = _LEADS if name in rank_free else _SIZES
        rule = spec.sizes.get(name)
        ends = [(n,) if name in rank_free else n for n in (rule if isinstance(rule, (list, tuple)) else ())]
        always += [case for end in reversed(ends) if end != size for case in _fitting(context, base, name, end)]
        tried = [o for o in dict.fromkeys((*options, *ends)) if o != size]
        usual = [elements(o) for o in (size, *tried) if allows(spec, name, o)]
        if isinstance(rule, tuple) and not any(n > 1 and n % 2 for n in usual):  # a narrow range, which ends at 12
            always += _fitting(context, base, name, (rule[1] - 1,) if name in rank_free else rule[1] - 1)
        swept = (resized(spec, base, name, o) for o in tried)
        by_name.append([case for case in swept if case is not None])
    turns = max(map(len, by_name), default=0)
    always += _corners(context, [(n,) for n in (1, 2, 33)])
    last = next((tensor.dims[-1] for tensor in spec.tensors.values() if tensor.dims), None)
    for name in () if last is None or last in {f"{free}..." for free in rank_free} else names_of(last):
        if name in dict(base.sizes):
            always += [case for n in _LONG for case in _fitting(context, base, name, n, _SMALL[0])]
    always += _corners(context, [_UNLIKE] if len(base.sizes) > 1 else [])
    return always, [column[i] for i in range(turns) for column in by_name if i < len(column)]


def _corners(context: StageContext, corners: list[tuple[int, ...]]) -> list[Case]:
    """The ordinary case with other sizes everywhere, given in turn, where the spec allows them."""
    spec, every = context.spec, list[Case]()
    for corner in corners:
        taken = zip((name for name, _ in context.base.sizes), itertools.cycle(corner), strict=False)
        case = context.base.but(sizes={name: (n,) if name in spec.free_rank else n for name, n in taken})
        every += [case] if all(allows(spec, *size) for size in case.sizes) and fitted(spec, case) == case else []
    return every


def _beside_blocks(context: StageContext) -> list[Case]:
    """For each dimension, sizes beside the blocks that the op's Triton kernels were built with at the ordinary case."""
    if "triton" not in sys.modules:
        return []
    with count_launches() as count, through_triton():
        context.runner.run(context.base)
    every = list[Case]()
    blocks = sorted(count.blocks, reverse=True)  # beside the small ones are usual sizes
    for beside in (1, -1, 0):  # one element in a block of its own finds most
        for block, (name, size) in itertools.product(blocks, context.base.sizes):
            if block + beside != elements(size):
                every += _fitting(context, context.base, name, block + beside)
    return every


def _alike_blocks(context: StageContext) -> list[Case]:
    """For each two dimensions, the one as large as the block of the other, which is no whole block itself.

    A kernel that asks whether the wrong dimension fills its block leaves out masks that it needs, there alone.
    """
    spec, base, rank_free = context.spec, context.base, context.spec.free_rank
    every = list[Case]()
    for (name, _), (other, size) in itertools.permutations(base.sizes, 2):
        for part in (elements(size), *_PARTS):
            short: Size = (part,) if other in rank_free else part
            whole: Size = (_block(part),) if name in rank_free else _block(part)
            if part != _block(part) and allows(spec, other, short) and allows(spec, name, whole):
                every += _fitting(context, base.with_size(other, short), name, whole)
                break
    return [case for case in every if any(elements(n) in _blocks_of(case) for _, n in case.sizes)]


def _block(n: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(n - 1, 0).bit_length()


def _blocks_of(case: Case) -> set[int]:
    """Blocks of dimensions that do not fill theirs."""
    return {_block(n) for _, size in case.sizes for n in (elements(size),) if n != _block(n)}


def _fitting(context: StageContext, base: Case, name: str, size: Size, most: int = sys.maxsize) -> list[Case]:
    """The case with one size, the others at most so large, and lower where it costs too much. None if none fits."""
    case = resized(context.spec, base, name, size)
    if case is None:
        return []
    for small in _SMALL:
        if most > small and context.cost.allows(context.runner, case):
            break
        for other, usual in base.sizes:
            if other != name and elements(usual) != small and allows(context.spec, other, small):
                lowered = fitted(context.spec, case.with_size(other, small), name)
                case = case if lowered is None else lowered
    return [case]


def _extent(case: Case) -> int:
    return math.prod(max(elements(size), 1) for _, size in case.sizes)


def cases(context: StageContext) -> list[Case]:
    """The sweep, without what costs too much."""
    always, in_turn = _sweep(context)
    beside = _beside_blocks(context)
    alike = _alike_blocks(context) if beside else []
    every = list(dict.fromkeys([*always, *in_turn, *beside, *alike]))
    most = context.budget.shapes
    chosen = dict.fromkeys([*in_turn[:most], *always, *beside[: most // 3], *alike[: most // 3]])
    # The largest first: smaller ones need not be counted then.
    allowed = {case: context.cost.allows(context.runner, case) for case in sorted(chosen, key=_extent, reverse=True)}
    cheap = context.cost.afford(context.runner, [case for case in chosen if allowed[case]])
    context.ran("sizes", len(cheap), len(every))
    return [*cheap, *_watched(context, [case for case in chosen if case not in cheap])]


def _watched(context: StageContext, left: list[Case]) -> list[Case]:
    """Of sizes that are too dear for a truth the largest of some dimensions: what kernels do to memory needs none.

    A scan that is one program's up to 128 steps races from the next one on, which no recurrence of 33 steps shows.
    """
    if context.spec.reference is None or not (context.emulated() and cpu_kernels.current()):
        return []
    grown = dict[tuple[str, ...], Case]()
    most = max(_GROWN * _extent(context.base), _LITTLE)
    for case in sorted((case for case in left if _extent(case) <= most), key=_extent, reverse=True):
        larger = tuple(name for name, size in case.sizes if elements(size) > elements(context.base.size(name)))
        grown.setdefault(larger, case)
    chosen = [case for larger, case in grown.items() if larger][:_WATCHED]
    context.unjudged.update(chosen)
    if chosen:
        at = " and ".join(case.text() for case in chosen)
        context.notes[f"at {at} no result was compared, as a truth takes too long: kernels were watched there"] = None
    return chosen


def without_reference(context: StageContext) -> list[Case]:
    """Sizes at which memory is to be looked at where this stage does not run, as nothing says what is right there."""
    return cases(context)[:_UNCOMPARED] if context.spec.reference is None else []


def check(context: StageContext, case: Case) -> CaseOutcome:
    """One run beside the truth; an input may be overwritten at some sizes alone, where an op takes another path."""
    run = context.runner.run(case)
    if case in context.unjudged and context.case is None:
        return CaseOutcome(power=None, power_text="")
    out = judged(context, case, run)
    names = overwritten(context, case, run)
    if names and not overwritten(context, context.base, context.runner.run(context.base)):  # that is stage mutation's
        for name in names:
            out.find("input", f"input `{name}` was overwritten, which it is not at {context.base.text()}", case, name)
    return out


STAGE = Stage(
    "shapes", "0, 1, block edges, primes, any rank", 70, check, cases,
    needs_reference=True, after=("oracle", "contract"), hears=True, sharded=True,
)  # fmt: skip
