"""shapes: 0, 1, block edges, primes, more than two dimensions, tall and wide."""

from __future__ import annotations

import math

from retrograd.check.inputs import allows, free_rank
from retrograd.check.schema import Case, Size
from retrograd.check.spec import OpSpec, TensorSpec
from retrograd.check.stages._base import Stage, StageContext
from retrograd.check.stages.oracle import judged

_ID = "shapes"
# In order of how often each finds something: level quick takes the first ones.
_SIZES = (1, 0, 129, 64, 2, 33, 128, 37, 16, 17, 256, 4, 257, 1000, 8)
_LEADS: tuple[tuple[int, ...], ...] = ((1,), (0,), (2, 3, 5), (33,), (), (64,), (129,), (1, 1, 4))
_LONG = (1000, 257)
_MOST_ELEMENTS = 1 << 16


def _sweep(context: StageContext) -> list[Case]:
    base, spec = context.base, context.spec
    rank_free = free_rank(spec)
    by_name: list[list[Case]] = []
    for name, size in base.sizes:
        options: tuple[Size, ...] = _LEADS if name in rank_free else _SIZES
        rule = spec.sizes.get(name)
        extra = list(rule) if isinstance(rule, (list, tuple)) else []
        tried = [o for o in dict.fromkeys((*options, *extra)) if o != size and allows(spec, name, o)]
        by_name.append([base.with_size(name, o) for o in tried])
    turns = max(map(len, by_name), default=0)
    out = [column[i] for i in range(turns) for column in by_name if i < len(column)]
    corners = [all_sizes(base, rank_free, n) for n in (1, 2, 33)]
    corners = [c for c in corners if all(allows(spec, k, v) for k, v in c.sizes)]
    return [*out[: context.budget.shapes], *corners, *_long_rows(base, spec)]


def _long_rows(base: Case, spec: OpSpec) -> list[Case]:
    """The case with long rows: more than one block or warp takes, and in all more elements than 12 bits count."""
    last = next((t.dims[-1] for t in (spec.tensor_specs or {}).values() if isinstance(t, TensorSpec) and t.dims), None)
    if not isinstance(last, str) or last.endswith("..."):
        return []
    return [base.with_size(last, n) for n in _LONG if allows(spec, last, n)][:1]


def all_sizes(base: Case, rank_free: frozenset[str], n: int) -> Case:
    """The case with every dimension of size `n`."""
    return base.but(sizes={k: (n,) if k in rank_free else n for k, _ in base.sizes})


def cases(context: StageContext) -> list[Case]:
    """The sweep, without shapes too large for a sweep."""

    def most_elements(case: Case) -> int:
        # Of a tensor with every dimension; a size of 0 must not hide the others.
        return math.prod(max(n, 1) for _, size in case.sizes for n in (size if isinstance(size, tuple) else (size,)))

    return [c for c in dict.fromkeys(_sweep(context)) if most_elements(c) <= _MOST_ELEMENTS]


STAGE = Stage(
    _ID, "0, 1, block edges, primes, any rank", 70, cases, lambda context, case: judged(context, case, _ID),
    needs_reference=True, after=("oracle", "contract"), sharded=True,
)  # fmt: skip
