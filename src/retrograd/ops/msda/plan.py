"""Launch plans of deformable attention: tile sizes, warps, unrolling. Pure arithmetic, no torch, no triton.

Numbers that were tuned stand in the tables at the top; `benchmarks/msda_notes.md` says how. None of them depends on
what decides the order of a sum, but for `OrderedPlan.entries`, which depends on the number of channels alone, and
`SamplePlan.together`: but for that a plan never makes the result of a query depend on the other queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from retrograd.runtime.triton.gpu import Backend, Gpu, next_power_of_2

Segment = tuple[int, int, int]


@dataclass(frozen=True)
class SamplePlan:
    """A program of `num_warps` handles a tile of `block_q` (query, head) pairs x `block_c` channels, padded.

    `together`: a forward has all points of a row in one tile. `apart`: levels have programs of their own in a backward.
    """

    block_q: int
    block_c: int
    num_warps: int
    together: bool = False
    apart: bool = False


@dataclass(frozen=True)
class OrderedPlan:
    """Deterministic grad_value: a program of one warp handles `block_p` (pixel, head) pairs x `block_c` channels.

    `entries` samples of each pixel are read together, each added to its own sum; the sums are added up last.
    """

    block_p: int
    block_c: int
    entries: int


@dataclass(frozen=True)
class PointsPlan:
    """Locations and weights of the fused form: a program makes those of `block_r` rows of `block_k` points, padded.

    On the way back it handles `block_q` queries with `block_h` heads at once.
    """

    block_r: int
    block_q: int
    block_h: int
    block_k: int
    num_warps: int


# Rows a thread and warps; of the gradients of locations and weights alone in 16 bits, and there before sm_90, where two
# rows a thread spill.
_TILE, _DOTS, _DOTS_AMPERE = (1, 4), (2, 1), (1, 2)
# Samples that are sorted at once; a batch of more is done in parts. Bounds the workspace (see `backward`).
SORTED_AT_ONCE = 1 << 24
# Rows a multiprocessor below which they would wait for memory one point after the other, in the forward (all that
# `cuda/plan.py` leaves to Triton on an H200) and in the backward; numbers of a row's points together, 32 a thread.
_FEW_ROWS, _APART_ROWS, _FEW_NUMBERS = 128, 32, 1024
_ENTRIES = 8
_GATHERED = 1024  # numbers of grad_out that a warp reads at once; twice as many spill
CELL_BLOCK = 256  # samples a program of the kernel that finds cells
_POINTS, _POINT_WARPS = 512, 4  # of a program that makes locations and weights, and its warps
_LOGITS = 32  # logits of a row at once; a tile of 64 rows is 16 numbers a thread of 128


@lru_cache(maxsize=4096)
def plan_samples(channels: int, itemsize: int, gpu: Gpu, *, dots: bool = False) -> SamplePlan:
    """Plan the tiles of the forward, or of the backward with atomic additions.

    Args:
        channels: C.
        itemsize: bytes of an element of value; 4 where there are additions, which are in float32 whatever value is.
        gpu: what runs the kernels.
        dots: whether only gradients of locations and weights are computed.
    """
    rows, warps = _TILE
    if dots and itemsize == 2:
        rows, warps = _DOTS_AMPERE if gpu.backend is Backend.CUDA and gpu.arch < 90 else _DOTS
    block_c, lanes = next_power_of_2(channels), gpu.lanes
    # 16 bytes a thread; a row of more than a warp would be added up through shared memory.
    threads = max(1, block_c * itemsize // 16)
    warps = warps if threads <= lanes else 1
    # One value a row and fewer rows than threads: what Triton then loads where it is needed, without exchanging it.
    return SamplePlan(max(1, min(rows * warps * lanes // threads, warps * lanes // 2)), block_c, warps)


@lru_cache(maxsize=4096)
def plan_ordered(channels: int, itemsize: int, gpu: Gpu) -> OrderedPlan:
    """Plan the deterministic grad_value; arguments as of `plan_samples`."""
    block_c = next_power_of_2(channels)
    entries = max(1, min(_ENTRIES, _GATHERED // block_c))
    # At least 16 bytes a thread; on a warp of 32, rows of 16 bits are gathered faster for two pixels at once.
    fill = gpu.lanes * 16 // itemsize
    block_p = max(fill // (block_c * entries), min(4 // itemsize, _GATHERED // (block_c * entries)), 1)
    return OrderedPlan(block_p, block_c, entries)


def plan_forward(channels: int, itemsize: int, points: int, rows: int, gpu: Gpu) -> SamplePlan:
    """Plan the forward of `rows` (query, head) pairs of all images with so many points each."""
    block_c, block_k = next_power_of_2(channels), next_power_of_2(points)
    few = gpu.backend is Backend.CUDA and rows < _FEW_ROWS * gpu.num_sms and block_c * block_k <= _FEW_NUMBERS
    if not few:
        return plan_samples(channels, itemsize, gpu)
    # As many rows as give a thread 16 bytes.
    return SamplePlan(max(1, gpu.lanes * 16 // (block_c * block_k * itemsize)), block_c, 1, together=True)


def plan_backward(channels: int, itemsize: int, rows: int, gpu: Gpu, *, dots: bool) -> SamplePlan:
    """Plan the backward with atomic additions; arguments as of `plan_forward` and `plan_samples`."""
    apart = gpu.backend is Backend.CUDA and rows < _APART_ROWS * gpu.num_sms
    return replace(plan_samples(channels, itemsize, gpu, dots=dots), apart=apart)


def plan_points(heads: int, points: int, gpu: Gpu) -> PointsPlan:
    """Plan what makes locations and weights of K points a row, and what leads back through them."""
    block_k = next_power_of_2(points)
    block_r = max(1, _POINTS // block_k)
    block_h = min(next_power_of_2(heads), block_r)
    warps = max(1, _POINT_WARPS * 32 // gpu.lanes)
    return PointsPlan(block_r, max(1, block_r // block_h), block_h, block_k, warps)


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
