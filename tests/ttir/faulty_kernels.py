"""Kernels with one mistake each, and their healthy neighbours, run without a GPU in a process of their own.

python tests/ttir/faulty_kernels.py    # a line of JSON a specimen: its faults, and what it printed
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import libdevice

from retrograd import cpu_triton
from retrograd.ttir.interleaving import run_in_turns

SPECIMENS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {}


def specimen(**options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(run: Callable[[], Any]) -> Callable[[], Any]:
        SPECIMENS[run.__name__] = run, options
        return run

    return register


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i), i < n)


@specimen()
def reads_beyond_the_end():
    copy_kernel[(2,)](torch.ones(100), torch.zeros(100), 100, BLOCK=64)


@triton.jit
def shifted_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    shift = tl.where(program > 0, n, 0)
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + program * BLOCK + i, tl.load(x_ptr + i.to(tl.int64) + shift))


@specimen()
def chooses_an_offset_that_is_beyond_the_end():
    shifted_kernel[(2,)](torch.ones(64), torch.zeros(128), 1, BLOCK=64)


@specimen()
def reads_beyond_the_end_of_a_view():
    copy_kernel[(2,)](torch.ones(200)[:100], torch.zeros(100), 100, BLOCK=64)


@specimen()
def writes_between_rows():
    copy_kernel[(1,)](torch.ones(64), torch.zeros(8, 16)[:, :8], 64, BLOCK=64)


@specimen()
def stays_inside():
    copy_kernel[(2,)](torch.ones(128), torch.zeros(100), 100, BLOCK=64)


@triton.jit
def overflow_kernel(x_ptr, stride, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.program_id(0) * stride + tl.arange(0, BLOCK), 1.0)


@specimen()
def overflows_32_bits():
    overflow_kernel[(3,)](torch.zeros(64), 1 << 30, BLOCK=16)


@triton.jit
def wrapped_kernel(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * stride * 65536 + i)
    tl.store(out_ptr + tl.program_id(0) * BLOCK + i, x)


@specimen()
def overflows_into_the_tensor():
    wrapped_kernel[(2,)](torch.zeros(64), torch.zeros(32), 65536, BLOCK=16)


@specimen()
def overflows_below_the_tensor():
    wrapped_kernel[(2,)](torch.zeros(64), torch.zeros(32), 32768, BLOCK=16)


@triton.jit
def unsigned_kernel(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK).to(tl.uint32) * stride.to(tl.uint32) // 65536
    tl.store(out_ptr + i, tl.load(x_ptr + i))


@triton.jit
def hash_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = i * 1664525 + 1013904223
    h = (h ^ (h >> 15)) * 1540483477
    first = (h & 0x7FFFFFFF) % n
    second = (h.to(tl.uint32) % n.to(tl.uint32)).to(tl.int32)
    tl.store(out_ptr + i, tl.load(x_ptr + first) + tl.load(x_ptr + second))


@specimen()
def hashes_in_32_bits():
    hash_kernel[(3,)](torch.zeros(100), torch.zeros(96), 100, BLOCK=32)
    unsigned_kernel[(1,)](torch.zeros(64), torch.zeros(64), 65536 * 3, BLOCK=16)


@triton.jit
def returning_kernel(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    far = tl.program_id(0) * stride + i
    tl.store(out_ptr + tl.program_id(0) * BLOCK + i, tl.load(x_ptr + (far - tl.program_id(0) * stride)))


@specimen()
def goes_far_and_comes_back():
    returning_kernel[(3,)](torch.zeros(16), torch.zeros(48), 1 << 30, BLOCK=16)


@specimen()
def overflows_where_nothing_is_read():
    masked_kernel[(3,)](torch.zeros(64), torch.zeros(48), 1 << 30, BLOCK=16)


@triton.jit
def masked_kernel(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * stride + i, mask=(tl.program_id(0) == 0) & (i < BLOCK), other=0.0)
    tl.store(out_ptr + tl.program_id(0) * BLOCK + i, x)


@triton.jit
def crooked_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load((x_ptr + 1).to(tl.pointer_type(tl.int32))))


@specimen()
def reads_crooked():
    crooked_kernel[(1,)](torch.zeros(16, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32))


@triton.jit
def triangle_kernel(a_ptr, out_ptr, MASK: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i[:, None] * BLOCK + i[None, :])
    if MASK:
        a = tl.where(i[:, None] >= i[None, :], a, 0.0)
    tl.store(out_ptr + i, tl.sum(a, 1))


def _triangle(mask: bool) -> float:
    a, out = torch.empty(16, 16), torch.empty(16)
    rows, columns = torch.tril_indices(16, 16)
    a[rows, columns] = 1.0
    triangle_kernel[(1,)](a, out, mask, BLOCK=16)
    return out.sum().item()


@specimen()
def masks_what_nobody_has_written():
    assert _triangle(True) == 136


@specimen()
def sums_what_nobody_has_written():
    _triangle(False)


@triton.jit
def indexed_kernel(index_ptr, x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + (tl.load(index_ptr + i) & 7)))


@specimen()
def goes_where_nobody_has_said():
    indexed_kernel[(1,)](torch.empty(16, dtype=torch.int32), torch.ones(8), torch.zeros(16), BLOCK=16)


@triton.jit
def masked_places_kernel(index_ptr, x_ptr, out_ptr, n, far, BLOCK: tl.constexpr, STORES: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    places = tl.load(index_ptr + offsets) + tl.where(offsets < 12, 0, far)
    x = tl.load(x_ptr + places, mask=offsets < n)
    if STORES:
        tl.store(out_ptr + places, x, mask=offsets < n)
        tl.atomic_add(out_ptr + places, x, mask=offsets < n)
    else:
        tl.store(out_ptr + offsets, x, mask=offsets < n)


def masked_places(n, far, stores):
    """12 of 16 indices are written."""
    places = torch.empty(16, dtype=torch.int32)
    places[:12] = torch.arange(12, dtype=torch.int32)
    masked_places_kernel[(1,)](places, torch.ones(16), torch.zeros(16), n, far, BLOCK=16, STORES=stores)


@specimen()
def goes_only_where_somebody_has_said():
    masked_places(12, 0, True)


@specimen()
def goes_far_where_nobody_has_said():
    """How far is by chance, and no second mistake."""
    masked_places(13, 1 << 20, False)


@specimen()
def padding_that_nobody_has_written():
    padded = torch.empty(4, 20)
    padded[:, :16] = 1.0
    assert (padded * 2)[:, :16].sum().item() == 128


@triton.jit
def waiting_kernel(flag_ptr):
    while tl.atomic_add(flag_ptr, 0) == 0:
        pass


@specimen()
def waits_for_ever():
    waiting_kernel[(3,)](torch.zeros(1, dtype=torch.int32))


@specimen()
def waits_alone_for_ever():
    waiting_kernel[(1,)](torch.zeros(1, dtype=torch.int32))


@triton.jit
def counting_kernel(out_ptr, step):
    i = 0
    while i < 10:
        i += step
    tl.store(out_ptr, i)


@specimen(limit=1000)
def counts_for_ever():
    counting_kernel[(1,)](torch.zeros(1, dtype=torch.int32), 0)


@triton.jit
def stepping_kernel(out_ptr, stop, step):
    total = 0
    for i in range(0, stop, step):
        total += i
    tl.store(out_ptr, total)


@specimen()
def steps_of_zero():
    stepping_kernel[(1,)](torch.zeros(1, dtype=torch.int32), 16, 0)


@specimen(limit=1000)
def counts_long():
    out = torch.zeros(1, dtype=torch.int32)
    stepping_kernel[(1,)](out, 5000, 2)
    assert out.item() == 2499 * 2500


@triton.jit
def long_kernel(out_ptr, rounds, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    while rounds > 0:
        rounds -= 1
        i += 1
    tl.store(out_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), i)


@specimen(limit=1000)
def goes_round_long_in_each_program():
    out = torch.zeros(8, 1 << 17, dtype=torch.int32)
    long_kernel[(8,)](out, 900, BLOCK=1 << 17)
    assert out[:, -1].tolist() == list(range(900, 908))


@triton.jit
def ticket_kernel(next_ptr, serving_ptr, out_ptr):
    ticket = tl.atomic_add(next_ptr, 1)
    while tl.atomic_add(serving_ptr, 0, sem="acquire") != ticket:
        pass
    tl.store(out_ptr, tl.load(out_ptr) + 1)
    tl.atomic_add(serving_ptr, 1, sem="release")


@specimen(limit=100)
def queues_with_tickets():
    out = torch.zeros(1, dtype=torch.int32)
    ticket_kernel[(40,)](*torch.zeros(2, 1, dtype=torch.int32), out)
    assert out.item() == 40


@triton.jit
def asserting_kernel(n):
    tl.device_assert(tl.program_id(0) < n, "too many programs")
    tl.device_print("program", tl.program_id(0))


@specimen()
def asserts():
    asserting_kernel[(3,)](2, debug=True)


@triton.jit
def adding_kernel(x_ptr, total_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total_ptr, tl.sum(tl.load(x_ptr + i)))


@specimen(orders=3)
def adds_in_any_order():
    adding_kernel[(32,)](torch.randn(2048, generator=torch.Generator().manual_seed(0)), torch.zeros(1), BLOCK=64)


@specimen(orders=3)
def counts_in_any_order():
    adding_kernel[(32,)](torch.ones(2048), torch.zeros(1), BLOCK=64)


@triton.jit
def locked_kernel(x_ptr, total_ptr, lock_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.sum(tl.load(x_ptr + i))
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(total_ptr, tl.load(total_ptr) + x)
    tl.atomic_xchg(lock_ptr, 0)


@specimen(orders=3)
def adds_under_a_lock():
    x = torch.randn(2048, generator=torch.Generator().manual_seed(0))
    locked_kernel[(32,)](x, torch.zeros(1), torch.zeros(1, dtype=torch.int32), BLOCK=64)


@triton.jit
def two_widths_kernel(words_ptr, halves_ptr):
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(words_ptr, 7)
    else:
        tl.store(halves_ptr + 1, tl.full((), 1, tl.int16))


@specimen()
def meets_in_two_widths():
    words = torch.zeros(1, dtype=torch.int32)
    two_widths_kernel[(2,)](words, words.view(torch.int16))


@triton.jit
def handed_on_kernel(word_ptr, out_ptr):
    pid = tl.program_id(0)
    if pid == 0:
        tl.atomic_xchg(word_ptr, 7, sem="relaxed")
    else:
        seen = tl.inline_asm_elementwise(
            """
            {
                .reg .pred %there;
                again:
                ld.relaxed.gpu.global.b64 $0, [$1];
                setp.ne.s64 %there, $0, 0;
                @%there bra done;
                bra again;
                done:
            }
            """,
            "=&l,l",
            [word_ptr.to(tl.int64)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
        tl.store(out_ptr + pid, seen)


@specimen(seed=3)
def waits_in_assembly():
    out = torch.zeros(4, dtype=torch.int64)
    handed_on_kernel[(4,)](torch.zeros(1, dtype=torch.int64), out)
    assert out.tolist() == [0, 7, 7, 7]


@triton.jit
def now():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def sleepy_kernel(flag_ptr, out_ptr, LIMIT: tl.constexpr):
    pid = tl.program_id(0)
    start = now()
    flag = tl.atomic_add(flag_ptr, 0, sem="acquire")
    while (flag == 0) & (now() - start < LIMIT):
        flag = tl.atomic_add(flag_ptr, 0, sem="acquire")
    tl.store(out_ptr + 2 * pid, flag)
    tl.store(out_ptr + 2 * pid + 1, now() - start)


@specimen()
def waits_for_a_time():
    out = torch.zeros(3, 2, dtype=torch.int64)
    sleepy_kernel[(3,)](torch.zeros(1, dtype=torch.int32), out, LIMIT=100_000)
    assert out[:, 0].tolist() == [0, 0, 0]
    assert bool((out[:, 1] >= 100_000).all())


@triton.jit
def napping_kernel(out_ptr, LIMIT: tl.constexpr):
    start = now()
    while now() - start < LIMIT:
        pass
    tl.store(out_ptr + tl.program_id(0), now() - start)


@specimen()
def waits_for_nothing_but_time():
    out = torch.zeros(3, dtype=torch.int64)
    napping_kernel[(3,)](out, LIMIT=1_000_000)
    assert bool((out >= 1_000_000).all())


@triton.jit
def lane_kernel(x_ptr):
    lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(x_ptr, lane)


@specimen()
def asks_for_its_lane():
    lane_kernel[(1,)](torch.zeros(1, dtype=torch.int32))


@triton.jit
def unknown_kernel(x_ptr):
    tl.inline_asm_elementwise("vote.sync.any.pred p, p, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@specimen()
def asks_for_a_vote():
    unknown_kernel[(1,)](torch.zeros(1))


@triton.jit
def waiting_in_assembly_kernel(flag_ptr, EVERY: tl.constexpr):
    if EVERY | (tl.program_id(0) > 0):
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred %there;
                again:
                ld.acquire.gpu.global.b32 $0, [$1];
                setp.eq.s32 %there, $0, 2;
                @!%there bra again;
            }
            """,
            "=&r,l", [flag_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.atomic_xchg(flag_ptr, 1, sem="release")


@specimen()
def waits_in_assembly_for_ever():
    waiting_in_assembly_kernel[(3,)](torch.zeros(1, dtype=torch.int32), EVERY=False)


@specimen()
def waits_in_assembly_for_nobody():
    waiting_in_assembly_kernel[(2,)](torch.zeros(1, dtype=torch.int32), EVERY=True)


@triton.jit
def counting_in_assembly_kernel(count_ptr):
    tl.inline_asm_elementwise(
        "red.release.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0;", "=r,l", [count_ptr.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@specimen()
def adds_in_assembly():
    counting_in_assembly_kernel[(2,)](torch.zeros(1, dtype=torch.int32))


@triton.jit
def offsets_kernel(x_ptr, out_ptr):
    """Two words behind each other, by an offset and by an address that assembly computes; then one is stored."""
    word = tl.inline_asm_elementwise(
        """
        {
            .reg .b64 %next;
            .reg .b32 %a;
            add.s64 %next, $1, 4;
            ld.global.b32 %a, [$1 + 8];
            ld.global.b32 $0, [%next];
            add.s32 $0, $0, %a;
            st.global.b32 [$2], $0;
        }
        """,
        "=&r,l,l", [x_ptr.to(tl.int64), out_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out_ptr + 1, word)


@specimen()
def goes_by_offsets_in_assembly():
    out = torch.zeros(2, dtype=torch.int32)
    offsets_kernel[(1,)](torch.tensor([1, 20, 300], dtype=torch.int32), out)
    assert out.tolist() == [320, 320]


@triton.jit
def locking_kernel(sum_ptr, lock_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1, sem="acquire") == 1:
        pass
    tl.store(sum_ptr, tl.load(sum_ptr) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0, sem="release")


@specimen(seed=3)
def waits_in_a_crowd():
    """Who waits for a lock that another one has taken again is not asked: of 150 each would be, 75 times."""
    turns: list[int] = []

    def counted(*arguments: Any) -> Any:
        ended, made = run_in_turns(*arguments)
        turns.append(made)
        return ended, made

    total = torch.zeros(1)
    with mock.patch("retrograd.ttir.execution.run_in_turns", counted):
        locking_kernel[(150,)](total, torch.zeros(1, dtype=torch.int32))
    assert total.item() == 150
    assert max(turns) < 150 * 30, turns


@specimen()
def compares_devices():
    """As Triton's tutorials do, before the first launch."""
    device = triton.runtime.driver.active.get_active_torch_device()
    x = torch.rand(4, device=device)
    assert x.device == device
    assert torch.empty_like(x).device == device
    assert (x + x).device == device


@triton.jit
def descriptor_maximum_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    box = tl.make_tensor_descriptor(out_ptr, [BLOCK, BLOCK], [BLOCK, 1], [BLOCK, BLOCK])
    box.atomic_max([0, 0], tl.load(x_ptr + i[:, None] * BLOCK + i[None, :]))


@specimen()
def takes_maxima_by_a_descriptor():
    x, out = torch.randn(16, 16).half(), torch.zeros(16, 16, dtype=torch.half)
    descriptor_maximum_kernel[(1,)](x, out, BLOCK=16)


@gluon.jit
def gluon_copy_kernel(x_ptr, y_ptr, BLOCK: gl.constexpr):
    i = gl.arange(0, BLOCK, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(y_ptr + i, gl.load(x_ptr + i))


@specimen()
def copies_in_gluon():
    gluon_copy_kernel[(1,)](torch.ones(128), torch.zeros(128), BLOCK=128)


@triton.jit
def tanh_of_square_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, libdevice.tanh(tl.dot(x, x)))


@specimen(gpu="gfx942")
def is_told_of_an_amd_gpu():
    """With options that NVIDIA's backend refuses, and functions of AMD's device library."""
    x, y = torch.eye(16, device="cuda"), torch.zeros(16, 16, device="cuda")
    tanh_of_square_kernel[(1,)](x, y, BLOCK=16, waves_per_eu=2, matrix_instr_nonkdim=16)
    assert torch.allclose(y.double(), torch.eye(16).double().tanh(), rtol=2.0**-22)
    properties = torch.cuda.get_device_properties(0)
    assert (properties.gcnArchName, properties.multi_processor_count, properties.warp_size) == ("gfx942", 304, 64)
    assert torch.version.hip


@triton.jit
def sums_in_steps_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, N, step=BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, at < N, other=0.0)
    tl.store(out_ptr, tl.sum(total))


@specimen()
def counts_by_a_keyword():
    sums_in_steps_kernel[(1,)](torch.ones(64), torch.zeros(1), 64, BLOCK=16)


@triton.jit
def row_sums_kernel(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    tl.store(out_ptr + row, tl.sum(tl.load(x_ptr + row * stride + tl.arange(0, BLOCK))))


@specimen()
def goes_on_beyond_a_row():
    """As launchers mean it that give x[i] for the place where row i begins."""
    x, out = torch.ones(8, 64), torch.zeros(4)
    row_sums_kernel[(4,)](x[2], out, 64, BLOCK=64)
    assert out.tolist() == [64.0] * 4


@specimen()
def goes_on_beyond_all_rows():
    row_sums_kernel[(4,)](torch.ones(8, 64)[7], torch.zeros(4), 64, BLOCK=64)


@triton.jit
def filling_kernel(out_ptr, stride, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.program_id(0) * stride + tl.arange(0, BLOCK), -1.0)


@specimen()
def fills_padding_that_it_has_allocated():
    """As launchers mean it that allocate whole blocks and hand on what counts of them."""
    out = torch.empty(8, 16)
    filling_kernel[(8,)](out[:, :9], 16, BLOCK=16)
    assert bool((out == -1.0).all())


@specimen()
def fills_what_lies_beside_a_view():
    out = torch.empty(8, 16)
    out[:, 9:] = 2.0
    filling_kernel[(7,)](out[:, :9], 16, BLOCK=16)


@specimen()
def hands_on_what_nobody_has_written():
    """Into memory that somebody has written, where nothing was followed."""
    out = torch.zeros(64)
    copy_kernel[(1,)](torch.empty(64), out, 64, BLOCK=64)
    assert isinstance(float(out.sum()), float)


@specimen()
def hands_it_on_into_what_was_empty():
    """Into memory that nobody had written, and somebody has since."""
    out = torch.empty(64)
    out.zero_()
    copy_kernel[(1,)](torch.empty(64), out, 64, BLOCK=64)
    assert isinstance(float(out.sum()), float)


@specimen()
def hands_on_what_it_masks():
    x, out = torch.empty(64), torch.zeros(64)
    x[:50] = 1.0
    copy_kernel[(1,)](x, out, 50, BLOCK=64)
    assert float(out.sum()) == 50.0


@specimen()
def takes_nought_times_what_nobody_has_written():
    """Which is no number where memory holds none."""
    factors = torch.zeros(64)
    assert isinstance(float((torch.empty(64) * factors).sum()), float)


@specimen()
def hands_numpy_what_is_written_in_part():
    out = torch.empty(64, device="cuda")
    copy_kernel[(1,)](torch.ones(64, device="cuda"), out, 50, BLOCK=64)
    assert out.cpu().numpy()[:50].sum() == 50.0


@specimen()
def lists_what_is_written_in_part():
    out = torch.empty(64)
    copy_kernel[(1,)](torch.ones(64), out, 50, BLOCK=64)
    assert len(out.tolist()) == 64


@specimen()
def has_numpy_fill_memory():
    out = torch.empty(64)
    out.numpy()[:] = 1.0
    copy_kernel[(1,)](out, torch.zeros(64), 64, BLOCK=64)
    copy_kernel[(1,)](torch.ones(64), rest := torch.empty(64), 50, BLOCK=64)
    assert (float(out.sum()), len(rest[:50].tolist())) == (64.0, 50)


def packed():
    """Bits in columns, the last of which is added to what nobody has written; a row of it, again and again."""
    out = torch.empty(64, 8)
    out[:, :7] = 0.0
    for column in range(8):
        out[:, column] += 1.0
    return out, out[:1].expand(4, 8) * 2.0


@specimen()
def adds_to_a_column_that_nobody_has_written():
    out, rows = packed()
    copy_kernel[(1,)](out, rows, 0, BLOCK=64)
    assert isinstance(float(rows[0, 7]), float)


@specimen()
def reads_beside_a_column_that_nobody_has_written():
    out, rows = packed()
    copy_kernel[(1,)](out, rows, 0, BLOCK=64)
    assert (float(out[:, :7].sum()), float(rows[:, :7].sum())) == (448.0, 56.0)


@specimen()
def leaves_out_what_nobody_has_written():
    products = torch.addmm(torch.empty(4, 4), torch.ones(4, 4), torch.ones(4, 4), beta=0)
    assert float(products.sum()) == 64.0
    assert float(torch.where(torch.ones(64, dtype=torch.bool), 2.0, torch.empty(64)).sum()) == 128.0


@triton.jit
def block_sums_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, SWAPS: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    if SWAPS:
        tl.atomic_xchg(out_ptr + offsets, values, mask=offsets < n)
    else:
        tl.atomic_add(out_ptr, tl.sum(values, 0))


@specimen()
def adds_to_what_nobody_has_written():
    out = torch.empty(1)
    block_sums_kernel[(4,)](torch.ones(64), out, 64, BLOCK=16, SWAPS=False)
    assert isinstance(float(out), float)


@specimen()
def adds_what_nobody_has_written():
    out = torch.zeros(1)
    block_sums_kernel[(4,)](torch.empty(64), out, 64, BLOCK=16, SWAPS=False)
    assert isinstance(float(out), float)


@specimen()
def swaps_into_what_nobody_has_written():
    """And adds no more than has been written."""
    x, out, total = torch.empty(64), torch.empty(64), torch.zeros(1)
    x[:50] = 1.0
    block_sums_kernel[(4,)](x, out, 50, BLOCK=16, SWAPS=True)
    block_sums_kernel[(4,)](x, total, 50, BLOCK=16, SWAPS=False)
    assert float(out[:50].sum()) == float(total) == 50.0


@triton.jit
def scatter_kernel(index_ptr, x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.load(index_ptr + offsets), tl.load(x_ptr + offsets))


def scattered(places, values):
    """8 values into 8 places by two programs."""
    out = torch.zeros(8)
    scatter_kernel[(2,)](torch.tensor(places), torch.tensor(values), out, BLOCK=4)
    return out


@specimen()
def stores_twice_to_one_place():
    """Lanes of one store, of which a GPU keeps the bits of any."""
    scattered([7, 1, 2, 3, 4, 5, 6, 5], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])


@specimen()
def stores_what_is_not_a_number():
    """Which is the same number for all that, and stores the same number twice."""
    out = scattered([7, 1, 2, 1, 4, 5, 6, 3], [float("nan"), 2.0, 3.0, 2.0, 5.0, 6.0, 7.0, 8.0])
    assert out[1:7].tolist() == [2.0, 3.0, 8.0, 5.0, 6.0, 7.0]


@triton.jit
def last_one_kernel(counter_ptr, out_ptr, SWAPS: tl.constexpr):
    if SWAPS:
        tl.atomic_xchg(counter_ptr + tl.arange(0, 2) * 0, 0)
    if tl.atomic_add(counter_ptr, 1) == tl.num_programs(0) - 1:
        tl.store(out_ptr, 1.0)


@specimen()
def counts_on_from_what_nobody_has_written():
    last_one_kernel[(4,)](torch.empty(1, dtype=torch.int32), torch.zeros(1), SWAPS=False)


@specimen()
def counts_on_from_what_it_has_swapped_in():
    last_one_kernel[(1,)](torch.empty(1, dtype=torch.int32), torch.zeros(1), SWAPS=True)


@triton.jit
def histogram_kernel(words_ptr, counts_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(counts_ptr + at, tl.load(words_ptr + at, mask=at < n, other=0))


def counted(words):
    counts = torch.zeros(16, dtype=torch.int32)
    histogram_kernel[(1,)](words, counts[:9], len(words), BLOCK=16)
    return counts


@specimen()
def adds_zeros_to_padding_that_it_has_cleared():
    assert counted(torch.ones(9, dtype=torch.int32)).tolist() == [1] * 9 + [0] * 7


@specimen()
def adds_to_what_lies_beside_a_view():
    counted(torch.ones(16, dtype=torch.int32))


@dataclass
class Address:
    """A place in memory that holds no tensor."""

    place: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.place


@specimen()
def comes_by_an_address():
    x, out = torch.ones(8, 64), torch.zeros(8)
    row_sums_kernel[(6,)](Address(x[2].data_ptr(), x.dtype), Address(out[2].data_ptr(), out.dtype), 64, BLOCK=64)
    assert out.tolist() == [0.0] * 2 + [64.0] * 6


@triton.jit
def any_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.max(tl.load(x_ptr + tl.arange(0, BLOCK)), 0))


def any_by_a_kernel(x):
    out = torch.empty((), dtype=torch.bool, device=x.device)
    any_kernel[(1,)](x.view(torch.int8), out.view(torch.int8), BLOCK=len(x))
    return out


@specimen()
def overrides_an_operator():
    """For CUDA: what the executor itself asks of torch must not come to the kernel."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("any", any_by_a_kernel, "CUDA")
    unwritten = torch.empty(9, device="cuda")
    assert torch.ones(16, device="cuda", dtype=torch.bool).any().item()
    library._destroy()
    del unwritten


def main() -> None:
    for name, (run, options) in SPECIMENS.items():
        row: dict[str, Any] = {"name": name, "error": ""}
        with cpu_triton(**options) as session:
            printed: list[str] = []
            session.printed = printed.append
            try:
                run()
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"
        row["faults"] = [[f.kind, f.argument, f.element, f.count, f.text()] for f in session.faults]
        row["printed"] = printed
        row["report"] = session.report()
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
