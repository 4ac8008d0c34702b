"""Launcher of wide_forward.cu: plan, macros, arguments; knows no formula."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from retrograd.ops.norm.arguments import NormResults, NormTensors, WantedOutput
from retrograd.ops.norm.cuda.inputs import NUMBERS, SIZES, aligned_rows, aligned_vector, arch_of, load, require_clusters
from retrograd.ops.norm.shapes import empty_results, heads_of, without_elements
from retrograd.ops.norm.spec import NormSpec
from retrograd.runtime.cuda import driver

SOURCE = Path(__file__).with_name("wide_forward.cu")
_CLUSTERS = (1, 2, 4, 8, 16)  # above 8 not every GPU can place them
_MOST_BATCH = 8


@dataclass(frozen=True)
class WidePlan:
    """How one kernel is compiled and launched."""

    cluster: int  # CTAs that share a row
    threads: int  # in a CTA
    resident: int  # CTAs a multiprocessor for which registers are limited
    batch: int  # 16-byte pieces of the weight that a thread asks for at once
    bulk: bool  # Whether one thread copies the whole slice
    shared_bytes: int  # of dynamic shared memory
    # pieces of x that a thread takes ahead, so that later pieces of weight and bias come into their places in shared
    # memory; 0: they come into registers, `batch` at a time
    hold: int = 0


@dataclass(frozen=True)
class _Layout:
    """`resident` CTAs of `threads` share a multiprocessor, each with at most `most_bytes` of x and residual.

    `registers` of a thread hold the pieces of weight and bias that it asks for at once; `whole`: all of them. `hold` as
    in `WidePlan`.
    """

    threads: int
    resident: int
    most_bytes: int
    registers: int
    whole: bool = False
    hold: int = 0


# A multiprocessor has 227 KiB; the struct Shared takes less than 5 of them in a CTA and the driver 1.
_THREE = _Layout(512, 3, 64 * 1024, 16)
_TWO = _Layout(512, 2, 104 * 1024, 32)
_ONE = _Layout(1024, 1, 128 * 1024, 32, whole=True)  # nobody else computes while the last piece is waited for
_WIDEST = _Layout(512, 1, 220 * 1024, 32)
# LayerNorm, whose weight and bias take twice the registers, by turns on one H200: 279 -> 267 us at 65536 columns (two
# CTAs), 283 -> 271 at 131072 (four), 267 -> 266 at 32768; at 16384, of four pieces a thread, nothing is gained.
_AHEAD = _Layout(512, 3, 64 * 1024, 16, hold=2)
_AHEAD_WIDER = _Layout(256, 3, 64 * 1024, 32, hold=6)
_HOLD_FROM_PIECES = 8


class ForwardKind(NamedTuple):
    """What a kernel is compiled for, beside its plan: dtypes, and which parts of the formula there are."""

    x: torch.dtype
    residual: torch.dtype | None
    weight: torch.dtype | None
    bias: torch.dtype | None
    y: torch.dtype
    s: torch.dtype
    centered: bool
    own_s: bool = False  # s is stored
    offset: bool = False  # weight_offset is not 0

    @property
    def vec(self) -> int:
        """Elements that a thread takes at once, as in wide_forward.cu."""
        return 16 // max(SIZES[self.x], SIZES[self.residual], SIZES[self.y], SIZES[self.s])


def norm_fwd_wide(
    tensors: NormTensors, spec: NormSpec, wanted: WantedOutput, *, plan: WidePlan | None = None
) -> NormResults:
    """Launch the forward for wide rows; see `arguments`. `plan`: launch plan, None asks `plan_wide`.

    Tensors have no heads and are on a GPU of compute capability 9.0 or more, N is a multiple of 8. Rows that do not
    start at multiples of 16 bytes are copied.

    Raises:
        ValueError: N is no multiple of 8, a vector has heads, or a row does not fit into shared memory.
        RuntimeError: x is not on such a GPU.
        NativeBuildError: there is no NVRTC.

    Numerics: float32 inside; correctly rounded square root and divisions; LayerNorm's squares are about the mean of 32
    threads' elements and then combined. The same bits for a row whatever M is, for one plan.
    """
    x, weight, bias, residual = tensors
    rows, n = x.shape
    device = x.device
    require_clusters("norm_fwd_wide", device)
    outs = empty_results(tensors, spec, wanted)
    if rows == 0 or n == 0:
        return without_elements(outs, spec.empty_rstd)
    if n % 8:
        raise ValueError(f"`x` has {n} columns, expected a multiple of 8; use impl='triton'")
    if heads_of(weight, bias) > 1:
        raise ValueError(f"`weight` or `bias` has {heads_of(weight, bias)} heads, expected one; use impl='triton'")
    x, residual = aligned_rows(x), aligned_rows(residual)
    weight, bias = aligned_vector(weight), aligned_vector(bias)
    kind = ForwardKind(
        x=x.dtype,
        residual=None if residual is None else residual.dtype,
        weight=None if weight is None else weight.dtype,
        bias=None if bias is None else bias.dtype,
        y=wanted.out_dtype,
        s=wanted.s_dtype,
        centered=spec.centered,
        own_s=outs.s is not None,
        offset=spec.weight_offset != 0,
    )
    plan = plan or plan_wide(n, kind, arch_of(device.index))
    with torch.cuda.device(device):
        kernel = _kernel(device.index, n, kind, plan)
        pointers = (x, residual, weight, bias, *outs)
        args = (
            *(ctypes.c_void_p(0 if t is None else t.data_ptr()) for t in pointers),
            *(ctypes.c_longlong(v) for v in (x.stride(0), 0 if residual is None else residual.stride(0))),
            ctypes.c_float(spec.eps),
            ctypes.c_float(spec.weight_offset),
        )
        kernel.launch(rows, args)
    return outs


@cache
def plan_wide(n: int, kind: ForwardKind, arch: int = 90, cluster: int | None = None) -> WidePlan:
    """The plan for rows of n columns, the best of `benchmarks/norm_tune.py` on H200 (bfloat16, 2026-11).

    The fewer CTAs share a row, the better: 65536 columns of RMSNorm reach 98 % of the copy bandwidth in one CTA of 1024
    threads and 96 % in two of 512. LayerNorm has more to wait for and wants three CTAs on a multiprocessor, for which a
    residual leaves no registers where the slice has the most columns.

    Args:
        n: columns.
        kind: dtypes, and which norm.
        arch: compute capability times ten.
        cluster: CTAs that share a row; None chooses.

    Raises:
        ValueError: a CTA's slice does not fit into shared memory.
    """
    centered = kind.centered
    candidates = [(1, _AHEAD), (1, _THREE)] if centered and kind.residual is None else []
    candidates += [(1, _TWO), (1, _ONE)]
    candidates += [(2, _AHEAD)] if centered else [(2, _TWO), (2, _ONE)]
    candidates += [(2, _THREE), (4, _AHEAD_WIDER), (4, _THREE), (8, _THREE)]
    candidates += [(8, _TWO), (16, _THREE), (16, _TWO), (16, _WIDEST)]
    for size, layout in candidates:
        slice_bytes = _slice_bytes(n, kind, size)
        # On sm_100 two pieces of two vectors spill beside a residual; RMSNorm's single one is slower with four.
        few = layout is _THREE and (not centered or (arch >= 100 and kind.residual is not None))
        batch = _batch(n, kind, size, layout.threads, layout.registers // 2 if few else layout.registers)
        fits = (
            slice_bytes <= layout.most_bytes
            and (not layout.whole or batch == _pieces(n, kind, size, layout.threads))
            and (not layout.hold or (centered and _may_hold(n, kind, size, layout.threads)))
            and not (layout.hold and arch >= 100 and kind.x.itemsize == 4)  # 8 bytes a thread would spill
        )
        if fits and cluster in (None, size):
            bulk = size == 2 and not centered
            return WidePlan(size, layout.threads, layout.resident, batch, bulk, slice_bytes, layout.hold)
    asked = f"a cluster of {cluster}" if cluster else "any cluster"
    raise ValueError(f"a row of {n} columns does not fit into the shared memory of {asked}; use impl='triton'")


def _pieces(n: int, kind: ForwardKind, cluster: int, threads: int) -> int:
    """Pieces of 16 bytes of the widest tensor that a thread has of a row."""
    return -(-64 * -(-n // (64 * cluster)) // (threads * kind.vec))


def _batch(n: int, kind: ForwardKind, cluster: int, threads: int, registers: int) -> int:
    """Pieces of weight and bias that `registers` hold."""
    each = max(4, kind.vec * (SIZES[kind.weight] + SIZES[kind.bias]) // 4)
    most = registers // each if each <= 8 else 1  # widened, two float32 vectors take as many registers again
    return max(1, min(_MOST_BATCH, most, _pieces(n, kind, cluster, threads)))


def _may_hold(n: int, kind: ForwardKind, cluster: int, threads: int) -> bool:
    """Whether pieces of weight and bias fit the places of x, all of them there, and are many enough."""
    alike = kind.residual is None and len({SIZES[t] for t in (kind.x, kind.weight, kind.bias)}) == 1
    pieces = _pieces(n, kind, cluster, threads)
    whole = n == cluster * threads * kind.vec * pieces
    return alike and kind.s == kind.x and whole and pieces >= _HOLD_FROM_PIECES


def fits_wide(n: int, x: torch.dtype, residual: torch.dtype | None) -> bool:
    """Whether rows of n columns fit into the shared memory of the largest cluster."""
    return _slice_bytes(n, ForwardKind(x, residual, None, None, x, x, False), _CLUSTERS[-1]) <= _WIDEST.most_bytes


def _slice_bytes(n: int, kind: ForwardKind, cluster: int) -> int:
    """Of x and residual in a CTA."""
    return 64 * -(-n // (64 * cluster)) * (SIZES[kind.x] + SIZES[kind.residual])


def options_of(n: int, kind: ForwardKind, plan: WidePlan) -> tuple[str, ...]:
    """For NVRTC, all but the architecture."""
    macros = dict(
        N=n, CLUSTER=plan.cluster, THREADS=plan.threads, RESIDENT=plan.resident, BATCH=plan.batch, HOLD=plan.hold,
        BULK=int(plan.bulk),
        CENTERED=int(kind.centered), X_TYPE=NUMBERS[kind.x], RESIDUAL_TYPE=NUMBERS[kind.residual],
        WEIGHT_TYPE=NUMBERS[kind.weight], BIAS_TYPE=NUMBERS[kind.bias], Y_TYPE=NUMBERS[kind.y],
        S_TYPE=NUMBERS[kind.s], STORE_S=int(kind.own_s), HAS_OFFSET=int(kind.offset),
    )  # fmt: skip
    return ("--std=c++17", "-default-device", *(f"-D{name}={value}" for name, value in macros.items()))


@cache
def _kernel(device_index: int, n: int, kind: ForwardKind, plan: WidePlan) -> driver.LoadedKernel:
    return load(
        SOURCE, options_of(n, kind, plan), device_index,
        cluster=plan.cluster, threads=plan.threads, shared_bytes=plan.shared_bytes,
    )  # fmt: skip
