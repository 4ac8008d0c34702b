"""Plans of how the kernels beside this file are compiled and launched: pure functions of sizes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

# Most that a kernel's 32-bit offsets, its tables and its packed records can hold.
_MAX_BYTES = (1 << 32) - 1
_MAX_ROWS = 65535  # of a grid
_MAX_QUERIES = 1 << 30
MAX_POINTS = 128
_MAX_CHANNELS = 128  # 4 a lane
_MAX_LEVELS = 16
_BAND = 48 * 1024  # bins of 4 bytes in a CTA's shared memory
SEGMENT = 64  # samples that a group of `cells` takes
SORT_UNIT = 256  # queries that the sort takes at a time
_L2_BYTES = 24 << 20  # of value that L2 keeps beside all else
_SLICE = 1024  # bins that a CTA of `scan` takes
SUMMING = ("cells", "reduce", "combine")  # kernels in which a lane has 4 elements of a row
UNIT_WIDTH = 16  # of a unit where queries are pixels
# Queries of all heads below which Triton's forward is ahead, in 16 bits where it asks for all points of a row together,
# up to so many numbers: 5.6 us against 10.6 for 2400 and 17.6 against 34.6 for 14400, in bfloat16 4.5 against 7.0 and
# 12.6 against 25.4 (H200).
_FEW_QUERIES, _TOGETHER = 1 << 14, 1024
# Additions to a pixel from which on samples are sorted first: between decoders (3) and encoders (64), not tuned.
_SORTED_ADDS = 6


@dataclass(frozen=True)
class Sizes:
    """Of one call."""

    batch: int  # B
    pixels: int  # S
    queries: int  # Q
    heads: int  # H
    channels: int  # C
    points: tuple[int, ...]  # of each level
    element_bytes: int  # of value

    @property
    def samples(self) -> int:
        """Q * K, of one image and head."""
        return self.queries * sum(self.points)

    def lanes(self, adds: bool) -> int:
        """Lanes that share a row of C elements: 16 bytes each, or 4 elements where a kernel adds to float32 sums."""
        return self.channels // 4 if adds else self.channels * self.element_bytes // 16

    @property
    def value_bytes(self) -> int:
        """Of value."""
        return self.batch * self.pixels * self.heads * self.channels * self.element_bytes


@dataclass(frozen=True)
class WalkPlan:
    """One kernel that walks over the queries."""

    threads: int  # of a CTA
    blocks: int  # CTAs on an SM at a time, for which registers are kept
    unit_queries: int  # queries that a CTA takes at a time, in the forward a warp
    tiled: bool  # whether units are tiles of the image where queries are pixels
    in_turn: bool  # whether CTAs take units in turn rather than neighbours; tiled units are always neighbours
    ctas: int  # in the grid


@dataclass(frozen=True)
class Sort:
    """The counting sort of samples by pixel or cell."""

    bins: int  # pixels, or the cells of all levels, a row and a column more than they have pixels
    chunks: int  # parts of the queries that are counted apart
    band: int  # bins that fit into shared memory at a time
    bands: int  # how many of these
    slices: int  # CTAs of `scan` for an image and head


@lru_cache(maxsize=1024)
def why_not(sizes: Sizes) -> str | None:
    """Why the kernels cannot compute a call of these sizes, or None if they can; cached, since every call asks."""
    row = sizes.channels * sizes.element_bytes
    limits = (
        (sizes.channels & (sizes.channels - 1) == 0, "C is no power of two"),
        (row % 16 == 0 and sizes.channels <= _MAX_CHANNELS, f"C is not 16 bytes or more, up to {_MAX_CHANNELS}"),
        (
            sizes.batch * sizes.heads * row * max(sizes.pixels, sizes.queries) <= _MAX_BYTES,
            "value or the output has 4 GiB or more",
        ),
        (
            sizes.queries < _MAX_QUERIES and sizes.batch * sizes.heads * sizes.samples < 1 << 32,
            "there are 2^32 samples or more",
        ),
        (sizes.batch * sizes.heads <= _MAX_ROWS, f"B * H is above {_MAX_ROWS}"),
        (sum(sizes.points) <= MAX_POINTS, f"there are more than {MAX_POINTS} points"),
        (len(sizes.points) <= _MAX_LEVELS, f"there are more than {_MAX_LEVELS} levels"),
    )
    return next((reason for holds, reason in limits if not holds), None)


def plan_queries(sizes: Sizes, processors: int, threads: int, blocks: int, *, adds: bool = False) -> WalkPlan:
    """For `backward`; `threads` and `blocks` are those of a call that fills the GPU."""
    groups = 32 // sizes.lanes(adds)
    in_turn = sizes.value_bytes > _L2_BYTES
    slots = processors * blocks
    tasks = sizes.batch * sizes.heads * -(-sizes.queries // groups)  # warps' worth of work
    if tasks < 2 * slots * threads // 32:
        # Too few to give every warp two: small CTAs, one task a warp, as many as there are.
        threads, blocks = 128, 1
        unit = threads // 32 * groups
        return WalkPlan(threads, blocks, unit, False, in_turn, sizes.batch * sizes.heads * -(-sizes.queries // unit))
    tiled = sizes.queries == sizes.pixels
    unit = max(threads // 32 * groups, 256) if tiled else threads // 32 * groups
    if tiled and unit % UNIT_WIDTH:
        tiled = False
    return WalkPlan(threads, blocks, unit, tiled, in_turn, slots)


def plan_forward(sizes: Sizes, processors: int, threads: int, blocks: int) -> WalkPlan:
    """For `forward`, whose warps take `unit_queries` at a time; `threads` and `blocks` as in `plan_queries`."""
    in_turn = sizes.value_bytes > _L2_BYTES
    slots, tasks = processors * blocks, sizes.batch * sizes.heads * sizes.queries
    warps = threads // 32
    if tasks < 4 * slots * warps:
        threads, blocks, warps = 128, 1, 4
        ctas = sizes.batch * sizes.heads * -(-sizes.queries // warps)
        return WalkPlan(threads, blocks, 1, False, in_turn, ctas)
    if sizes.queries == sizes.pixels:
        return WalkPlan(threads, blocks, UNIT_WIDTH, True, False, slots)
    # Neighbours, and yet several runs for every warp.
    run = max(1, min(UNIT_WIDTH, tasks // (8 * slots * warps)))
    return WalkPlan(threads, blocks, run, False, in_turn, slots)


class Way(Enum):
    """How grad_value comes: ADD atomically row by row, REDUCE sorted samples by pixel, CELLS add sorted cells up,
    ORDERED add them up in the order of the queries.
    """

    ADD = "add"
    REDUCE = "reduce"
    CELLS = "cells"
    ORDERED = "ordered"


def way(sizes: Sizes, deterministic: bool, known: bool = True) -> Way:
    """How grad_value is computed; `known`: the host knows the sizes of the levels, so how many cells there are."""
    many = 4 * sizes.samples >= _SORTED_ADDS * sizes.pixels
    if deterministic:
        return Way.ORDERED if many and known else Way.REDUCE
    return Way.CELLS if many else Way.ADD


def forward_pays(sizes: Sizes) -> bool:
    """Whether the forward is the faster one beside Triton's, as measured on an H200."""
    if sizes.batch * sizes.heads * sizes.queries >= _FEW_QUERIES:
        return True
    return sizes.element_bytes == 2 and sum(sizes.points) * sizes.channels > _TOGETHER


def backward_pays(sizes: Sizes, deterministic: bool) -> bool:
    """Likewise; where rows are added one by one, Triton takes 504 us for 543 in float32, 699 for 660 in bfloat16."""
    return sizes.element_bytes == 2 or way(sizes, deterministic) is not Way.ADD


def cells_ctas(sizes: Sizes, threads: int) -> int:
    """CTAs of `cells` for an image and head, if every sample touches something."""
    return -(-sizes.samples // (threads // sizes.lanes(adds=True) * SEGMENT))


def combine_ctas(sizes: Sizes, threads: int) -> int:
    """CTAs of `combine` for an image and head."""
    return -(-sizes.pixels // (threads // sizes.lanes(adds=True)))


def parts(sizes: Sizes, sort: Sort) -> int:
    """Sums of four corners that `cells` keeps for an image and head: a cell's, and of one that goes on in a segment."""
    return sort.bins + -(-sizes.samples // SEGMENT)


def plan_sort(sizes: Sizes, processors: int, levels: tuple[tuple[int, int], ...] = ()) -> Sort:
    """For the counting sort by pixel, or of `levels` by cell."""
    bins = sum((h + 1) * (w + 1) for h, w in levels) if levels else sizes.pixels
    wanted = 8 * processors // (sizes.batch * sizes.heads * len(sizes.points))
    bands = -(-bins // _BAND)
    return Sort(
        bins=bins,
        chunks=max(1, min(wanted, sizes.queries // SORT_UNIT)),
        band=bins if bands == 1 else _BAND,
        bands=bands,
        slices=-(-bins // _SLICE),
    )
