"""Launch plans of the norms: tile sizes, warps and numbers of programs. Pure arithmetic, no torch, no triton.

What decides how a row is added up (tile width, rows a tile, warps, slices) depends on the row's width and dtypes
alone, never on the number of rows: y and grad_x of a row have the same bits in every batch. The tables are the best
plans without register spills of `benchmarks/norm_tune.py` on H200 (bfloat16, 2026-11).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from retrograd.runtime.triton.gpu import Backend, Gpu, ceil_div, next_power_of_2


class Kind(Enum):
    """How rows are spread over programs."""

    TILE = "tile"  # a program holds whole rows
    SLICES = "slices"  # a row is shared by programs that exchange their sums; all are resident together
    CLUSTERS = "clusters"  # a cluster of programs shares a row, which it reads once; `ops/norm/cuda`
    LOOPED = "looped"  # a program walks a row's columns several times
    FEW = "few"  # a program holds whole rows, another a block of columns of all rows: few rows are read twice


@dataclass(frozen=True)
class _RowsPlan:
    """`programs` programs (a head) of `num_warps` warps and [block_m, block_n] tiles."""

    kind: Kind
    block_m: int
    block_n: int
    num_warps: int
    programs: int


@dataclass(frozen=True)
class ForwardPlan(_RowsPlan):
    """How a forward is launched.

    `early`: TILE asks for weight and bias together with x. `unroll`: steps of a LOOPED walk that are done together.
    `loads`, `stores`: eviction policy of x and residual and cache modifier of y and s in a TILE, as Triton names them.
    `static_n`: the number of columns is compiled into the kernel of a TILE.
    """

    early: bool = False
    unroll: int = 1
    loads: str = ""
    stores: str = ""
    static_n: bool = False


@dataclass(frozen=True)
class BackwardPlan(_RowsPlan):
    """`programs` programs (a head) compute grad_x and, but for LOOPED, the sums for the vectors.

    LOOPED: grad_weight comes from a second grid of (columns / DW_BLOCK_N, heads, `parts`). `parts` is the number of
    rows of the float32 buffer of partial sums, which programs of [finalize_block_p, finalize_block_n] tiles add up.
    FEW: no `parts`; beside `programs` programs others add up columns, in [finalize_block_p, finalize_block_n] tiles.
    CLUSTERS: `slices` programs share a row and hold `num_stages` rows; how many clusters there are is the GPU's to say,
    and with it `programs`, `parts` and the finalizer's tile.
    """

    parts: int
    finalize_block_p: int
    finalize_block_n: int
    num_stages: int = 1
    slices: int = 1
    slice_n: int = 0
    ahead: int = 2
    max_registers: int | None = None


@dataclass(frozen=True)
class _Tile:
    """Rows a tile, warps, pipeline stages and programs a multiprocessor, for a width; `early` as in `ForwardPlan`."""

    block_m: int
    num_warps: int
    num_stages: int = 1
    resident: int = 1
    early: bool = False


@dataclass(frozen=True)
class _Slice:
    """Bytes of each tensor in a SLICES program, its warps, programs a multiprocessor, rows ahead, pipeline stages."""

    bytes: int
    num_warps: int
    resident: int
    ahead: int = 2
    num_stages: int = 3


# Columns per step when a row is walked in pieces; tiles of the second grid of such a backward.
LOOP_BLOCK_N = 4096
DW_BLOCK_M, DW_BLOCK_N = 16, 256
# Widest row that one program holds; wider rows are sliced (CUDA) or walked. Forward at 32768 columns: 92 % of the copy
# bandwidth in one tile, 99 % walked (H200). Backward at 16384 columns spills 48 bytes a thread on sm_90 and reaches
# 72 % where slices reach 96 %; AMD does not spill there.
FORWARD_TILE_LIMIT = {Backend.CUDA: 16384, Backend.HIP: 32768}
# The same with a residual, for rows of a power of two 16-bit elements: 99 % in one tile, 88 % walked (H200). On sm_100
# 24 bytes a thread would spill.
_RESIDUAL_TILE_LIMIT = 32768
# (LayerNorm, residual) -> widest row that stays with Triton where there is the clustered kernel (`ops/norm/cuda`).
# Above 32768 columns a walk no longer finds a row in L1 (83 % at 65536); LayerNorm, which walks three times, reaches
# 90 % at 32768, and 94 % in one tile at 16384, where the clustered kernel reaches 99 %. Rows that do not fill a tile of
# 16384 or 32768 do not: 16384 x 9216 add + RMSNorm 345 -> 283 us, RMSNorm 195 -> 142, 10922 x 24576 293 -> 249.
_FORWARD_TRITON_LIMIT = {(False, False): 32768, (False, True): 32768, (True, False): 8192, (True, True): 16384}
BACKWARD_TILE_LIMIT = {Backend.CUDA: 8192, Backend.HIP: 16384}

# Width -> tile of RMSNorm, of LayerNorm, of either with a residual; narrower rows share the first entry's number of
# elements. 16-bit inputs; wider ones halve block_m.
_FORWARD_TILES = {
    256: (_Tile(8, 4, early=True), _Tile(8, 2, early=True), _Tile(8, 2, early=True)),
    512: (_Tile(2, 1, early=True), _Tile(4, 2), _Tile(4, 2, early=True)),
    1024: (_Tile(2, 4, early=True), _Tile(2, 4, early=True), _Tile(2, 4, early=True)),
    2048: (_Tile(1, 4, early=True), _Tile(1, 4), _Tile(1, 4, early=True)),
    4096: (_Tile(1, 8, early=True), _Tile(1, 8), _Tile(1, 4, early=True)),
    8192: (_Tile(1, 8), _Tile(1, 8), _Tile(1, 16, early=True)),
    16384: (_Tile(1, 16), _Tile(1, 16), _Tile(1, 32, early=True)),
    32768: (_Tile(1, 32), _Tile(1, 32), _Tile(1, 32)),
}
# Column of these -> width -> the tile of rows of 16-byte pieces that do not fill it, where that is another. Their
# number of columns is compiled into the kernel, so that threads know what is not there (registers of LayerNorm at 5120
# columns 77 -> 60): from so many columns on (RMSNorm 32768 x 600 21.9 -> 22.9 us, LayerNorm 28.7 -> 24.0), with a
# residual where a quarter is empty (1024 x 3584 8.2 -> 9.5). H200, 32768 rows, us: LayerNorm 768 30.2 -> 26.7,
# 1536 55.4 -> 49.8, 2560 106 -> 84, 3072 116 -> 97, 5120 228 -> 181, 6144 251 -> 201, 7168 266 -> 225; RMSNorm 2560
# 89.7 -> 80.6, 3072 100.7 -> 96.6, 5120 170 -> 158; add + LayerNorm 5120 365 -> 313, 6144 409 -> 376.
_STATIC_FROM, _STATIC_FROM_CENTERED = 1024, 512
_PARTIAL_FORWARD_TILES = (
    {4096: _Tile(1, 4, early=True)},
    {1024: _Tile(2, 2, early=True), 2048: _Tile(1, 2, early=True), 4096: _Tile(1, 4)},
    {8192: _Tile(1, 8, early=True)},
)
_BACKWARD_TILES = {
    512: _Tile(4, 2, 3, 4),
    1024: _Tile(4, 4, 3, 2),
    2048: _Tile(1, 4, 4, 2),
    4096: _Tile(2, 8, 3, 1),
    8192: _Tile(1, 8, 3, 1),
    16384: _Tile(1, 16, 1, 1),
}
# (LayerNorm, tensors read) -> the same. With one warp a program nobody waits at 256 columns: LayerNorm 20.4 -> 18.9 us
# at 32768 rows and 55.7 -> 54.5 at 131072, with a residual 26.5 -> 23.3 and 72.2 -> 71.6, RMSNorm 23.5 -> 23.1 and
# 69.9 -> 68.8; RMSNorm without is slower.
_NARROW_TILES = {
    (False, 2): {128: _Tile(16, 2, 3, 4), 256: _Tile(8, 2, 3, 4)},
    (False, 3): {128: _Tile(32, 8, 4, 1), 256: _Tile(8, 1, 3, 4)},
    (True, 2): {128: _Tile(16, 2, 3, 4), 256: _Tile(4, 1, 3, 8)},
    (True, 3): {128: _Tile(32, 8, 4, 1), 256: _Tile(4, 1, 3, 8)},
}
# RMSNorm of rows of whole steps of so many 16-bit elements is walked above _WALK_FROM columns on NVIDIA: 102 % instead
# of 98 % at 8192, 99.5 % instead of 98.7 % at 16384 columns, with 32 registers a thread instead of 51 and more.
_WALK_STEP, _WALK_WARPS, _WALK_FROM = 4096, 16, 4096
# Tensors read -> bytes of each in a step of the walk: what 1024 threads hold without giving up a second program
# (one tensor), or with one program a multiprocessor (two).
_WALK_BYTES = {1: 16384, 2: 32768}
# Widest row, in bytes, whose vectors may come early: LayerNorm with a residual spills at 16384 float32.
_EARLY_BYTES = 32768
# Fewer bytes of x and residual are read and written past the caches above _STREAM_FROM columns: 4 to 7 % faster at 4 to
# 16 MiB (LayerNorm; RMSNorm at 16 MiB 1 % slower), but 2 to 4 % slower at 256 columns.
_STREAM_BYTES, _STREAM_FROM = 24 * 1024**2, 1024
# One tensor of up to 4096 columns by no policy at all: 1 to 4 % less at 4 and 8 MiB, 2 % less (RMSNorm) to 2.5 % more
# (LayerNorm) at 16 MiB; at 8192 columns 3 % more.
_PLAIN_UPTO = 4096
# So few rows of this width are alone on their multiprocessors, and registers for vectors that come early cost nothing:
# LayerNorm 512 x 4096 4.57 -> 4.52 us; at 32768 x 4096 it would be 8 % slower, at 512 x 8192 18 %; 1024 x 3072
# 5.86 -> 5.11, but 1024 x 3584 6.63 -> 7.06.
_EARLY_FEW = 4096
# (LayerNorm, tensors read) -> slice, the slice for wider rows, and how many bytes a row has, in the widest dtype read,
# above which that is taken.
_BACKWARD_SLICES = {
    (False, 2): (_Slice(16384, 8, 1), _Slice(8192, 4, 2, 3), 65536),
    (False, 3): (_Slice(4096, 4, 4), _Slice(16384, 8, 1), 65536),
    (True, 2): (_Slice(16384, 8, 1), _Slice(8192, 4, 2, 3, 4), 32768),
    (True, 3): (_Slice(8192, 4, 2), _Slice(16384, 8, 1), 65536),
}
# Rows in shared memory, columns a program at most, warps, and clusters: H200, LayerNorm and RMSNorm, share of the copy.
# At 16384 columns two programs of 8192 (96 and 98 %) are ahead of one (92, 94) and of four (95, 97), at 32768 eight of
# 4096, several on a multiprocessor (95, 96), of four (94, 96) and two (93, 95); from 65536 on programs of 16384 (96 to
# 98 %), although only 120 of 132 multiprocessors find a cluster of eight of them. Sixteen reach 87 %.
_CLUSTER_LAYOUTS = ((4, 8192, 16, (2,)), (3, 4096, 8, (8,)), (3, 16384, 8, (1, 2, 4, 8)))
# Of 227 KiB, less words and barriers.
_CLUSTER_BYTES = 216 * 1024
# So few rows a head are read twice: one kernel then, and nobody waits for a sum. In graphs on an H200, RMSNorm and
# LayerNorm, us: 7 x 8192 4.90 -> 2.48, 5.76 -> 3.72; 16 x 1024 3.48 -> 1.61, 3.57 -> 2.00; 128 x 4096 5.91 -> 3.59,
# 7.12 -> 4.51; 512 x 4096 8.20 -> 7.24, 8.88 -> 8.33; 512 x 256 4.35 -> 3.66, 4.47 -> 4.65. More were not measured.
_FEW_ROWS = 512
# LayerNorm above 4096 columns: 128 x 8192 8.91 -> 7.58, but 256 x 8192 10.23 -> 11.25.
_FEW_WIDE_CENTERED = 128
# Shared memory that every supported NVIDIA data-centre GPU gives a program (sm_80: 163 KiB), less what reductions need.
_PIPELINE_BYTES = 156 * 1024


@lru_cache(maxsize=4096)
def plan_forward(
    rows: int, n: int, itemsize: int, gpu: Gpu, *, centered: bool = False, streams: int = 1
) -> ForwardPlan:
    """Plan the forward of `rows` rows of n columns for each head.

    Args:
        rows: rows a head.
        n: columns.
        itemsize: bytes of the widest element that is read.
        gpu: what runs the kernels.
        centered: LayerNorm.
        streams: [rows, n] tensors that are read.
    """
    width = next_power_of_2(n)
    limit = FORWARD_TILE_LIMIT[gpu.backend]
    if streams > 1 and n == width and gpu.arch < 100 and itemsize <= 2:
        limit = _RESIDUAL_TILE_LIMIT
    cuda = gpu.backend is Backend.CUDA
    if cuda and not centered and streams == 1 and itemsize <= 2 and _WALK_FROM < n <= limit and n % _WALK_STEP == 0:
        return ForwardPlan(Kind.LOOPED, 1, _WALK_STEP, _WALK_WARPS, rows)
    if width <= limit:
        column = 2 if streams > 1 else int(centered)
        static_n = cuda and (_STATIC_FROM_CENTERED if centered and streams == 1 else _STATIC_FROM) < n < width
        static_n = static_n and n % 8 == 0 and (streams == 1 or _a_quarter_is_empty(n))
        tiles = {key: columns[column] for key, columns in _FORWARD_TILES.items()}
        tile = _tile(tiles | (_PARTIAL_FORWARD_TILES[column] if static_n else {}), width, itemsize, gpu)
        small = streams * rows * n * itemsize < _STREAM_BYTES and width > _STREAM_FROM
        # L2 is to lose what is written before what is read: at 32768 x 4096 99 instead of 95 %, with a residual 100
        # instead of 96 %, at 1024 columns 92 instead of 90 %; a kernel that reads y next has no less of it.
        loads, stores = ("evict_first", ".cs") if small else ("evict_last", "")
        if small and streams == 1 and width <= _PLAIN_UPTO:
            loads = stores = ""
        early = tile.early or (small and width == _EARLY_FEW and (n == width or _a_quarter_is_empty(n)))
        early = cuda and early and width * itemsize <= _EARLY_BYTES
        plan = ForwardPlan(Kind.TILE, tile.block_m, width, tile.num_warps, ceil_div(rows, tile.block_m), early=early)
        return replace(plan, loads=loads, stores=stores, static_n=static_n) if cuda else plan
    most = min(limit, _WALK_BYTES[min(streams, 2)] // itemsize)
    # Whole blocks need no mask: 88 % instead of 58 % for LayerNorm at 32768 columns.
    block_n = next((b for b in (most, most // 2, most // 4) if n % b == 0), most)
    warps = max(1, min(1024, block_n // 8) // gpu.lanes)
    return ForwardPlan(Kind.LOOPED, 1, block_n, warps, rows, unroll=2 if streams == 1 else 1)


@lru_cache(maxsize=4096)
def plan_forward_float8(rows: int, n: int, itemsize: int, gpu: Gpu, *, streams: int = 1) -> ForwardPlan:
    """Plan the forward whose y is float8: a TILE, or what nothing is launched with; arguments as of `plan_forward`.

    Half the warps, which wait for each other once more, for the largest y: RMSNorm 32768 x 4096 105 -> 95 us, LayerNorm
    131 -> 103. For the same reason RMSNorm is not walked (16384 x 8192 143 -> 100 us).
    """
    plan = plan_forward(rows, n, itemsize, gpu, centered=True, streams=streams)
    if plan.kind is not Kind.TILE or gpu.backend is not Backend.CUDA or n % 8:  # narrow loads take more registers
        return plan
    block_m = max(1, 2048 // plan.block_n)
    warps = (2 if n <= 2048 else 4 if n < 8192 else 8) * max(1, itemsize // 2)
    if streams > 1 and n > 6144:
        warps *= 2  # 168 registers otherwise
    return replace(plan, block_m=block_m, num_warps=warps, programs=ceil_div(rows, block_m))


@lru_cache(maxsize=4096)
def plan_backward(
    rows: int,
    n: int,
    heads: int,
    itemsize: int,
    gpu: Gpu,
    *,
    centered: bool = False,
    streams: int = 2,
    parts: int | None = None,
    few: bool = True,
) -> BackwardPlan:
    """Plan the backward for `heads` heads; arguments as of `plan_forward`, `parts` fixes the number of partial sums.

    Without `few` there are partial sums however few the rows are.
    """
    width = next_power_of_2(n)
    if width <= BACKWARD_TILE_LIMIT[gpu.backend]:
        tile = _tile(_NARROW_TILES[centered, streams] | _BACKWARD_TILES, width, itemsize, gpu)
        stage_bytes = streams * itemsize * tile.block_m * width
        roomy = gpu.backend is Backend.CUDA and _leaves_room(n, streams)
        stages = max(1, min(tile.num_stages + roomy, 1 + _PIPELINE_BYTES // (stage_bytes * tile.resident)))
        tiles = max(1, ceil_div(rows, tile.block_m))
        if few and parts is None and rows <= (_FEW_WIDE_CENTERED if centered and width > 4096 else _FEW_ROWS):
            block_p = min(64, max(8, next_power_of_2(rows)))
            columns = 1024 // block_p
            if block_p == 64:  # 16-byte loads by every thread
                columns = max(32 if width > 1024 else 16, 8 * gpu.lanes * tile.num_warps // 64)
            return BackwardPlan(Kind.FEW, tile.block_m, width, tile.num_warps, tiles, 0, block_p, columns)
        programs = min(tiles, parts or ceil_div(gpu.num_sms * tile.resident, heads))
        if parts is None:
            # As few as take no longer: with 528 at 256 columns the finalizer goes round twice, with 512 once.
            programs = ceil_div(tiles, ceil_div(tiles, programs))
        finalizer = finalizer_tile(programs, few_columns=n <= (1024 if centered else 4096))
        return BackwardPlan(Kind.TILE, tile.block_m, width, tile.num_warps, programs, programs, *finalizer, stages)
    # A fixed number of parts must not depend on how many groups of slices a GPU can hold. Rows that are not made of
    # 16-byte pieces are loaded element by element, for which the registers do not suffice.
    if gpu.backend is Backend.CUDA and heads == 1 and n % 8 == 0 and parts is None:
        narrow, wide, most = _BACKWARD_SLICES[centered, streams]
        sliced = _sliced_backward(rows, n, itemsize, wide if n * itemsize > most else narrow, gpu)
        if sliced is not None:
            return sliced
    wanted = parts or max(ceil_div(4 * gpu.num_sms, ceil_div(n, DW_BLOCK_N) * heads), min(gpu.num_sms, 2))
    parts = min(wanted, ceil_div(rows, DW_BLOCK_M))
    return BackwardPlan(Kind.LOOPED, 1, LOOP_BLOCK_N, LOOP_BLOCK_N // 512, rows, parts, *finalizer_tile(wanted))


@lru_cache(maxsize=4096)
def plan_clusters(n: int, itemsize: int) -> BackwardPlan | None:
    """Plan the backward of rows of n columns by clusters; None where no plan takes them.

    Args:
        n: columns.
        itemsize: bytes of the widest element that is read or written.
    """
    if n <= BACKWARD_TILE_LIMIT[Backend.CUDA]:
        return None
    piece = 16 // itemsize
    for slots, most, warps, clusters in _CLUSTER_LAYOUTS:
        for cluster in clusters:
            slice_n = n // cluster
            whole = n % cluster == 0 and slice_n % (32 * warps * piece) == 0
            row_bytes = 2 * itemsize * slice_n
            if whole and slice_n <= most and 3 * row_bytes <= _CLUSTER_BYTES:
                return BackwardPlan(
                    Kind.CLUSTERS, 1, slice_n, warps, 0, 0, 0, 0,
                    num_stages=min(slots, _CLUSTER_BYTES // row_bytes), slices=cluster, slice_n=slice_n,
                )  # fmt: skip
    return None


def _a_quarter_is_empty(n: int) -> bool:
    """Whether at least a quarter of a tile that rows of n columns need is not there."""
    return 4 * n <= 3 * next_power_of_2(n)


def _leaves_room(n: int, streams: int) -> bool:
    """Whether what is not there of a backward's tile is room for a stage more. 32768 rows of 768, us: 44 -> 41, 5120
    280 -> 242, but 3584 175 -> 189; with a residual 2560 171 -> 158, but 768 52 -> 54, LayerNorm 1280 84 -> 99.
    """
    width = next_power_of_2(n)
    return width > 512 and _a_quarter_is_empty(n) if streams == 2 else width > 2048 and 8 * n <= 5 * width


def _tile(table: dict[int, _Tile], width: int, itemsize: int, gpu: Gpu) -> _Tile:
    narrowest = min(table)
    tile = table[max(width, narrowest)]
    block_m = tile.block_m
    if width < narrowest:
        block_m = min(64, block_m * narrowest // width)
    block_m = max(1, 2 * block_m // max(itemsize, 2))
    # Fewer than 8 elements a thread are less than 16 bytes of a 16-bit tensor.
    warps = max(1, min(tile.num_warps, block_m * width // (8 * gpu.lanes), 1024 // gpu.lanes))
    return replace(tile, block_m=block_m, num_warps=warps)


def _sliced_backward(rows: int, n: int, itemsize: int, tile: _Slice, gpu: Gpu) -> BackwardPlan | None:
    slices, slice_n = _slices(n, tile.bytes // itemsize)
    groups = min(rows, tile.resident * gpu.num_sms // slices)
    if not groups:
        return None
    # So that `resident` programs fit: 65536 a multiprocessor, given out in eights.
    registers = min(255, 65536 // (32 * tile.num_warps * tile.resident) // 8 * 8)
    return BackwardPlan(
        Kind.SLICES,
        1,
        next_power_of_2(slice_n),
        tile.num_warps,
        groups * slices,
        groups,
        *finalizer_tile(groups),
        num_stages=tile.num_stages,
        slices=slices,
        slice_n=slice_n,
        ahead=tile.ahead,
        max_registers=registers,
    )


def _slices(n: int, most: int) -> tuple[int, int]:
    """(number of slices, columns a slice) of a row: at most `most` columns each, 128-byte pieces."""
    slices = ceil_div(n, most)
    return slices, 64 * ceil_div(n, 64 * slices)


def stays_with_triton(n: int, *, centered: bool, residual: bool) -> bool:
    """Whether a forward of rows of n columns is Triton's also where there is the clustered kernel."""
    walked = not centered and not residual and n % _WALK_STEP == 0
    partial = (8192 < n < 16384 and not walked) or 16384 < n < 32768
    return n <= _FORWARD_TRITON_LIMIT[centered, residual] and not partial


def finalizer_tile(parts: int, few_columns: bool = False) -> tuple[int, int]:
    """(parts, columns) of a finalizer tile: many parts at once, since a program waits 1 us for every step.

    512 x 8 takes 2.6 us less than 32 x 64 at 264 parts of 1024 columns (H200). Where there are few columns, and so few
    programs, 8 of them are best, where each thread still loads 16 bytes: RMSNorm 1024 x 256 4.69 -> 4.18 us,
    1024 x 1024 6.59 -> 6.19, 1024 x 4096 11.45 -> 11.21, but LayerNorm, of two vectors, 1024 x 2048 8.57 -> 8.76.
    """
    block_p = max(16, min(512, next_power_of_2(parts)))
    return block_p, 8 if few_columns and block_p >= 128 else 4096 // block_p
