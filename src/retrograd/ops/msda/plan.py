"""Launch plans of deformable attention: tile sizes, warps, unrolling. Pure arithmetic, no torch, no triton.

Numbers that were tuned stand in the tables at the top; `benchmarks/msda_notes.md` says how. None of them depends on
what decides the order of a sum, but for `OrderedPlan.entries`, which depends on the number of channels alone: a plan
never makes the result of a query depend on the other queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from retrograd.runtime.triton.gpu import Backend, Gpu, next_power_of_2

Segment = tuple[int, int, int]


@dataclass(frozen=True)
class SamplePlan:
    """A program of `num_warps` handles a tile of `block_q` (query, head) pairs x `block_c` channels.

    Attributes:
        block_q: rows of the tile.
        block_c: columns, the channels of a head padded to a power of two.
        block_h: heads in the tile, a divisor of H; the rows are queries x these heads.
        num_warps: warps of a program.
        unroll: points that are done together.
    """

    block_q: int
    block_c: int
    block_h: int
    num_warps: int
    unroll: int = 1


@dataclass(frozen=True)
class OrderedPlan:
    """Deterministic grad_value: a program handles `block_p` (pixel, head) pairs, `entries` of their samples at once.

    Attributes:
        block_p, block_h, block_c, num_warps: as in `SamplePlan`, with pixels for queries.
        entries: samples of each pixel that are read together, each added to its own sum; the sums are added up last.
        block_n: samples a program of the kernel that finds cells.
    """

    block_p: int
    block_c: int
    block_h: int
    num_warps: int
    entries: int
    block_n: int


@dataclass(frozen=True)
class _Tile:
    rows_a_thread: int
    num_warps: int
    unroll: int = 1


# (rows a thread, warps, unroll) by bytes of an element. The backward adds in float32, whatever value is.
_FORWARD = {2: _Tile(1, 4), 4: _Tile(1, 4)}
_BACKWARD = {4: _Tile(1, 4)}
_DOTS = {2: _Tile(2, 1), 4: _Tile(1, 4)}
_DOTS_AMPERE = {2: _Tile(1, 2), 4: _Tile(1, 4)}  # two rows a thread spill there
# Samples that are sorted at once; a batch of more is done in parts. Bounds the workspace (see `backward`).
SORTED_AT_ONCE = 1 << 24
_ENTRIES = 8
_GATHERED = 1024  # numbers of grad_out that a warp reads at once; twice as many spill
_CELL_BLOCK = 256
_LOGITS = 32  # logits of a row at once; a tile of 64 rows is 16 numbers a thread of 128
# An interpreted operation costs 60-100 us up to about this many elements.
_INTERPRETER_ELEMENTS = 32768


@lru_cache(maxsize=4096)
def plan_forward(rows: int, heads: int, channels: int, itemsize: int, gpu: Gpu) -> SamplePlan:
    """Plan the forward.

    Args:
        rows: queries of an image.
        heads: H.
        channels: C.
        itemsize: bytes of an element of value.
        gpu: what runs the kernels.
    """
    return _samples(_FORWARD, rows, heads, channels, itemsize, gpu)


@lru_cache(maxsize=4096)
def plan_backward(rows: int, heads: int, channels: int, gpu: Gpu) -> SamplePlan:
    """Plan the backward with atomic additions; arguments as of `plan_forward`."""
    return _samples(_BACKWARD, rows, heads, channels, 4, gpu)


@lru_cache(maxsize=4096)
def plan_dots(rows: int, heads: int, channels: int, itemsize: int, gpu: Gpu) -> SamplePlan:
    """Plan the gradients of locations and weights alone; arguments as of `plan_forward`."""
    tiles = _DOTS_AMPERE if gpu.backend is Backend.CUDA and gpu.arch < 90 else _DOTS
    return _samples(tiles, rows, heads, channels, itemsize, gpu)


@lru_cache(maxsize=4096)
def plan_ordered(pixels: int, heads: int, channels: int, itemsize: int, gpu: Gpu) -> OrderedPlan:
    """Plan the deterministic grad_value; `pixels` is S, the others as of `plan_forward`."""
    block_c = next_power_of_2(channels)
    if gpu.backend is Backend.INTERPRETER:
        entries = _ENTRIES
        block_p = min(next_power_of_2(pixels * heads), max(1, _INTERPRETER_ELEMENTS // (block_c * entries)))
        return OrderedPlan(block_p, block_c, heads, 4, entries, 8192)
    entries = max(1, min(_ENTRIES, _GATHERED // block_c))
    # At least 16 bytes a thread; on a warp of 32, rows of 16 bits are gathered faster for two pixels at once.
    fill = gpu.lanes * 16 // itemsize
    block_p = max(fill // (block_c * entries), min(4 // itemsize, _GATHERED // (block_c * entries)), 1)
    return OrderedPlan(block_p, block_c, 1, 1, entries, _CELL_BLOCK)


def logits_at_once(points: int) -> int:
    """How many of a row's K logits are columns of one tile while their maximum and sum are found: a power of two."""
    return min(next_power_of_2(points), _LOGITS)


def segments(points: tuple[int, ...], width: int) -> tuple[Segment, ...]:
    """Points of the levels in runs, between which a backward program stores what it has.

    Args:
        points: points of each level.
        width: results of so many points fit into its tiles.

    Returns:
        (level, count, stored) of each run: `count` points; `level` is the level that begins here, -1 if it goes on;
        `stored` is the number of points whose results are stored after the run, 0 if the tiles go on.
    """
    runs: list[list[int]] = []
    room = width
    for level, count in enumerate(points):
        begins = level
        while True:
            run = min(count, room)
            runs.append([begins, run, 0])
            count, room, begins = count - run, room - run, -1
            if not room:
                runs[-1][2], room = width, width
            if not count:
                break
    if room < width:
        runs[-1][2] = width - room
    return tuple((level, count, stored) for level, count, stored in runs)


def _samples(tiles: dict[int, _Tile], rows: int, heads: int, channels: int, itemsize: int, gpu: Gpu) -> SamplePlan:
    block_c = next_power_of_2(channels)
    if gpu.backend is Backend.INTERPRETER:
        block_q = min(next_power_of_2(rows * heads), max(1, _INTERPRETER_ELEMENTS // block_c))
        return SamplePlan(block_q, block_c, heads, 4)
    tile = tiles[itemsize]
    lanes = gpu.lanes
    # 16 bytes a thread; a row of more than a warp would be added up through shared memory.
    threads = max(1, block_c * itemsize // 16)
    warps = tile.num_warps if threads <= lanes else 1
    # One value a row and fewer rows than threads: what Triton then loads where it is needed, without exchanging it.
    block_q = max(1, min(tile.rows_a_thread * warps * lanes // threads, warps * lanes // 2))
    return SamplePlan(block_q, block_c, 1, warps, tile.unroll)
