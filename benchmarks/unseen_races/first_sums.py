"""Sums, extrema, counts and bits that several programs make together."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers, racy


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def argmax_kernel(x_ptr, best_ptr, index_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=-1)
    largest, at = tl.max(x, 0, return_indices=True)
    if tl.atomic_max(best_ptr, largest) < largest:
        tl.store(index_ptr, tl.program_id(0) * BLOCK + at)


@racy(
    "index_ptr",
    "write/write",
    "the maximum is atomic, and the index that goes with it is stored behind it: an older one may land later",
)
def index_of_an_atomic_maximum(device):
    x = torch.arange(200, dtype=torch.int32)
    argmax_kernel[(7,)](x.to(device), *zeros(device, 1, 1), 200, BLOCK=32)


@triton.jit
def packed_argmax_kernel(x_ptr, word_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0).to(tl.int64)
    tl.atomic_max(word_ptr, tl.max((x << 32) | (4294967295 - i.to(tl.int64)), 0), sem="relaxed")


@healthy("value above and index below in one word of 64 bits: the largest word has the first of the largest values")
def index_and_maximum_in_a_word(device):
    x, (word,) = integers(200, low=0, high=50, dtype=torch.int32), zeros(device, 1, dtype=torch.int64)
    packed_argmax_kernel[(7,)](x.to(device), word, 200, BLOCK=32)
    at = int((x == x.max()).nonzero()[0])
    return [Check(word, torch.tensor([(int(x.max()) << 32) | (2**32 - 1 - at)]))]


@triton.jit
def two_stage_argmin_kernel(x_ptr, least_ptr, index_ptr, N, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    i = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + i, i < N, other=float("inf"))
    least, at = tl.min(x, 0, return_indices=True)
    tl.store(least_ptr + row * tl.num_programs(1) + part, least)
    tl.store(index_ptr + row * tl.num_programs(1) + part, part * BLOCK + at)


@triton.jit
def choose_kernel(least_ptr, index_ptr, out_ptr, PARTS: tl.constexpr):
    row, parts = tl.program_id(0), tl.arange(0, PARTS)
    at = tl.argmin(tl.load(least_ptr + row * PARTS + parts), 0)
    tl.store(out_ptr + row, tl.load(index_ptr + row * PARTS + at))


@healthy("minima with their indices in one kernel, the choice between them in the next")
def index_of_the_minimum_in_two_kernels(device):
    x, (index, out) = integers(5, 100), zeros(device, 20, 5)
    least = torch.empty(20, device=device)
    two_stage_argmin_kernel[(5, 4)](x.to(device), least, index, 100, BLOCK=32)
    choose_kernel[(5,)](least, index, out, PARTS=4)
    return [Check(out, torch.stack([(r == r.min()).nonzero()[0, 0] for r in x]).to(torch.int32))]


@triton.jit
def pack_bits_kernel(x_ptr, word_ptr, n, BLOCK: tl.constexpr, MODE: tl.constexpr):
    """One bit for each element, 32 to a word; a program's elements begin and end within words."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0)
    bit = (x > 0).to(tl.int32) << (i % 32)
    if MODE == "or":
        tl.atomic_or(word_ptr + i // 32, bit, (i < n) & (x > 0), sem="relaxed")
    else:
        first = tl.program_id(0) * BLOCK // 32
        tl.store(word_ptr + first, tl.load(word_ptr + first) | tl.sum(bit, 0))


def _packed(device, mode):
    x, (words,) = integers(140, dtype=torch.int32), zeros(device, 5)
    pack_bits_kernel[(9,)](x.to(device), words, 140, BLOCK=16, MODE=mode)
    bits = torch.nn.functional.pad((x > 0).long(), (0, 20)).view(5, 32)
    want = (bits << torch.arange(32)).sum(1)
    return [Check(words, torch.where(want >= 2**31, want - 2**32, want).to(torch.int32))]


@healthy("a bit an element by atomic_or; two programs share each word")
def bits_by_atomic_or(device):
    return _packed(device, "or")


@racy(
    "word_ptr", "read/write,write/write", "two programs of 16 bits each put theirs into one word by load, or and store"
)
def bits_by_load_and_store(device):
    _packed(device, "store")


@triton.jit
def pack_nibbles_kernel(x_ptr, packed_ptr, n, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    if MISTAKE:  # even programs fill low nibbles, odd ones the high nibbles of the same bytes
        at = tl.program_id(0) // 2 * BLOCK + tl.arange(0, BLOCK)
        shift = tl.program_id(0) % 2 * 4
        x = tl.load(x_ptr + 2 * at + tl.program_id(0) % 2, at < n, other=0)
        tl.store(packed_ptr + at, tl.load(packed_ptr + at, at < n, other=0) | (x << shift).to(tl.uint8), at < n)
    else:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        low = tl.load(x_ptr + 2 * at, at < n, other=0)
        high = tl.load(x_ptr + 2 * at + 1, at < n, other=0)
        tl.store(packed_ptr + at, (low | (high << 4)).to(tl.uint8), at < n)


def _nibbles(device, mistake):
    x, packed = integers(90, low=0, high=16, dtype=torch.uint8), torch.zeros(45, dtype=torch.uint8, device=device)
    pack_nibbles_kernel[(6,)](x.to(device), packed, 45, BLOCK=16, MISTAKE=mistake)
    return [Check(packed, x[::2] | (x[1::2] << 4))]


@healthy("two nibbles of a byte by the program that owns the byte")
def nibbles_of_owned_bytes(device):
    return _nibbles(device, False)


@racy("packed_ptr", "read/write,write/write", "the two nibbles of a byte belong to two programs")
def nibbles_of_shared_bytes(device):
    _nibbles(device, True)


@triton.jit
def first_come_kernel(x_ptr, sum_ptr, count_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + cols)
    if tl.atomic_add(count_ptr, 1) == 0:
        tl.store(sum_ptr + cols, x)
    else:
        tl.atomic_add(sum_ptr + cols, x)


@racy("sum_ptr", "atomic/write", "who comes first stores instead of adding, and the second may have added by then")
def first_to_come_stores(device):
    first_come_kernel[(6,)](integers(6, 16).to(device), torch.empty(16, device=device), *zeros(device, 1), BLOCK=16)


@triton.jit
def moe_align_kernel(
    expert_ptr, rank_ptr, count_ptr, n, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, MISTAKE: tl.constexpr
):
    """Each token's rank within its expert: by what the counter returns, or, wrongly, by a look at it afterwards."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(expert_ptr + i, i < n, other=0)
    if MISTAKE:
        tl.atomic_add(count_ptr + e, 1, i < n, sem="relaxed")
        tl.store(rank_ptr + i, tl.load(count_ptr + e, i < n) - 1, i < n)
    else:
        tl.store(rank_ptr + i, tl.atomic_add(count_ptr + e, 1, i < n, sem="relaxed"), i < n)


@triton.jit
def offsets_kernel(count_ptr, offset_ptr, EXPERTS: tl.constexpr):
    e = tl.arange(0, EXPERTS)
    counts = tl.load(count_ptr + e)
    tl.store(offset_ptr + e, tl.cumsum(counts, 0) - counts)


@triton.jit
def permute_kernel(x_ptr, expert_ptr, rank_ptr, offset_ptr, out_ptr, D: tl.constexpr):
    token, d = tl.program_id(0), tl.arange(0, D)
    row = tl.load(offset_ptr + tl.load(expert_ptr + token)) + tl.load(rank_ptr + token)
    tl.store(out_ptr + row * D + d, tl.load(x_ptr + token * D + d))


def _moe_align(device, mistake):
    experts, x = integers(50, low=0, high=4, dtype=torch.int32), torch.arange(50.0)[:, None].repeat(1, 16)
    ranks, counts, offsets = zeros(device, 50, 4, 4)
    out = torch.zeros(50, 16, device=device)
    moe_align_kernel[(4,)](experts.to(device), ranks, counts, 50, BLOCK=16, EXPERTS=4, MISTAKE=mistake)
    if mistake:
        return []
    offsets_kernel[(1,)](counts, offsets, EXPERTS=4)
    permute_kernel[(50,)](x.to(device), experts.to(device), ranks, offsets, out, D=16)
    tokens = out.cpu()[:, 0].long()
    return [Check(experts[tokens], experts.sort().values), Check(tokens.sort().values, torch.arange(50))]


@healthy("tokens sorted by expert in three kernels: ranks by what a counter returns, offsets, scatter")
def experts_sorted_by_counters(device):
    return _moe_align(device, False)


@racy("count_ptr", "atomic/read", "the rank is read from the counter after it was added to, when others have added too")
def ranks_read_from_the_counter(device):
    _moe_align(device, True)


@triton.jit
def combine_kernel(y_ptr, row_ptr, gate_ptr, out_ptr, K: tl.constexpr, D: tl.constexpr, MISTAKE: tl.constexpr):
    d = tl.arange(0, D)
    if MISTAKE:
        token, k = tl.program_id(0) // K, tl.program_id(0) % K
        y = tl.load(y_ptr + tl.load(row_ptr + token * K + k) * D + d) * tl.load(gate_ptr + token * K + k)
        tl.store(out_ptr + token * D + d, tl.load(out_ptr + token * D + d) + y)
    else:
        token = tl.program_id(0)
        total = tl.zeros((D,), tl.float32)
        for k in tl.static_range(K):
            total += tl.load(y_ptr + tl.load(row_ptr + token * K + k) * D + d) * tl.load(gate_ptr + token * K + k)
        tl.store(out_ptr + token * D + d, total)


def _combine(device, mistake):
    y, rows, gates = (
        integers(24, 16),
        torch.randperm(24, generator=torch.Generator().manual_seed(0)),
        integers(12, 2, seed=3),
    )
    out = torch.zeros(12, 16, device=device)
    args = y.to(device), rows.to(torch.int32).to(device), gates.to(device), out
    combine_kernel[(24 if mistake else 12,)](*args, K=2, D=16, MISTAKE=mistake)
    return [Check(out, (y[rows].view(12, 2, 16) * gates[:, :, None]).sum(1))]


@healthy("a program a token adds what its two experts gave")
def experts_added_by_the_token(device):
    return _combine(device, False)


@racy(
    "out_ptr",
    "read/write,write/write",
    "a program for each expert of a token, both adding to the token by load and store",
)
def experts_added_by_each_choice(device):
    _combine(device, True)


@triton.jit
def segment_kernel(id_ptr, x_ptr, out_ptr, n, PER: tl.constexpr, MISTAKE: tl.constexpr):
    """Sums over sorted segments: those within a program are stored, the first and last of it may go on elsewhere."""
    start = tl.program_id(0) * PER
    end = tl.minimum(start + PER, n)
    first = tl.load(id_ptr + start)
    current, total = first, 0.0
    for i in range(start, end):
        segment = tl.load(id_ptr + i)
        if segment != current:
            if (current == first) & (MISTAKE == 0):
                tl.atomic_add(out_ptr + current, total)
            else:
                tl.store(out_ptr + current, total)
            total = 0.0
            current = segment
        total += tl.load(x_ptr + i)
    tl.atomic_add(out_ptr + current, total)


def _segments(device, mistake):
    ids, x = integers(60, low=0, high=12, dtype=torch.int32).sort().values, integers(60)
    out = torch.zeros(12, device=device)
    segment_kernel[(5,)](ids.to(device), x.to(device), out, 60, PER=12, MISTAKE=mistake)
    return [Check(out, torch.zeros(12).index_add(0, ids.long(), x))]


@healthy("sums of sorted segments: inner ones are stored, those that may be cut are added by atomics")
def segments_cut_by_programs(device):
    return _segments(device, 0)


@racy("out_ptr", "atomic/write,write/write", "a program stores its first segment, which began in the one before")
def segments_whose_first_is_stored(device):
    _segments(device, 1)


@triton.jit
def radix_count_kernel(x_ptr, count_ptr, n, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    digit = (tl.load(x_ptr + i, i < n, other=0) >> SHIFT) & 3
    counts = tl.histogram(digit, 4, mask=i < n)
    tl.store(count_ptr + tl.arange(0, 4) * tl.num_programs(0) + pid, counts)


@triton.jit
def radix_offset_kernel(count_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    counts = tl.load(count_ptr + i)
    tl.debug_barrier()
    tl.store(count_ptr + i, tl.cumsum(counts, 0) - counts)


@triton.jit
def radix_scatter_kernel(
    x_ptr, offset_ptr, out_ptr, n, SHIFT: tl.constexpr, BLOCK: tl.constexpr, MISTAKE: tl.constexpr
):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0)
    digit = (x >> SHIFT) & 3
    place = tl.zeros((BLOCK,), tl.int32)
    for d in tl.static_range(4):
        mine = ((digit == d) & (i < n)).to(tl.int32)
        start = tl.load(offset_ptr + d * tl.num_programs(0) + (0 if MISTAKE else pid))
        place = tl.where(mine == 1, start + tl.cumsum(mine, 0) - 1, place)
    tl.store(out_ptr + place, x, i < n)


def _radix(device, mistake):
    x = integers(60, low=0, high=16, dtype=torch.int32)
    a, b = x.to(device), torch.zeros(60, dtype=torch.int32, device=device)
    (counts,) = zeros(device, 16)
    for shift in (0, 2):
        radix_count_kernel[(4,)](a, counts, 60, SHIFT=shift, BLOCK=16)
        radix_offset_kernel[(1,)](counts, SIZE=16)
        radix_scatter_kernel[(4,)](a, counts, b, 60, SHIFT=shift, BLOCK=16, MISTAKE=mistake)
        a, b = b, a
    return [Check(a, x.sort().values)]


@healthy("a radix sort: counts of each block, a sum over them, a scatter; buffers change places")
def sorted_by_digits(device):
    return _radix(device, False)


@racy("out_ptr", "write/write", "each block counts its places from where the first block's begin")
def sorted_without_the_blocks_offset(device):
    _radix(device, True)


@triton.jit
def paged_write_kernel(k_ptr, slot_ptr, cache_ptr, D: tl.constexpr, PAGE: tl.constexpr, MISTAKE: tl.constexpr):
    token, d = tl.program_id(0), tl.arange(0, D)
    slot = tl.load(slot_ptr + token)
    if MISTAKE:
        slot = tl.maximum(slot, 0)
    else:
        if slot < 0:
            return
    k = tl.load(k_ptr + token * D + d)
    tl.store(cache_ptr + (slot // PAGE) * PAGE * D + (slot % PAGE) * D + d, k)


def _paged(device, mistake):
    k, cache = integers(10, 16, low=1), torch.zeros(4, 4, 16, device=device)
    slots = torch.tensor([5, 6, 7, -1, 12, 13, -1, -1, 0, 1], dtype=torch.int32)
    paged_write_kernel[(10,)](k.to(device), slots.to(device), cache, D=16, PAGE=4, MISTAKE=mistake)
    want = torch.zeros(16, 16)
    want[slots[slots >= 0].long()] = k[slots >= 0]
    return [Check(cache.view(16, 16), want)]


@healthy("keys into pages of a cache; tokens of slot -1 are padding and write nothing")
def keys_into_pages(device):
    return _paged(device, False)


@racy("cache_ptr", "write/write", "padding has slot -1, which becomes slot 0: padded tokens and a real one meet there")
def padding_into_the_first_slot(device):
    _paged(device, True)


@triton.jit
def quantise_cache_kernel(x_ptr, scale_ptr, q_ptr, n, BLOCK: tl.constexpr, FUSED: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    if FUSED:
        tl.atomic_max(scale_ptr, tl.max(tl.abs(x)))
        tl.debug_barrier()
    scale = tl.load(scale_ptr)
    tl.store(q_ptr + i, (x * 8 / scale).to(tl.int8), i < n)


@triton.jit
def amax_kernel(x_ptr, scale_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_max(scale_ptr, tl.max(tl.abs(tl.load(x_ptr + i, i < n, other=0.0))))


def _quantised(device, fused):
    x = integers(100)
    x[40] = -8.0
    scale, q = torch.zeros(1, device=device), torch.zeros(100, dtype=torch.int8, device=device)
    if not fused:
        amax_kernel[(4,)](x.to(device), scale, 100, BLOCK=32)
    quantise_cache_kernel[(4,)](x.to(device), scale, q, 100, BLOCK=32, FUSED=fused)
    return [Check(q, x.to(torch.int8))]


@healthy("the largest magnitude in one kernel, quantisation in the next")
def quantised_in_two_kernels(device):
    return _quantised(device, False)


@racy(
    "scale_ptr", "atomic/read", "one kernel makes the scale and divides by it, with a barrier of the block in between"
)
def quantised_in_the_kernel_that_makes_the_scale(device):
    _quantised(device, True)


@triton.jit
def adam_kernel(p_ptr, g_ptr, step_ptr, n, BLOCK: tl.constexpr, MISTAKE: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    step = tl.load(step_ptr) + 1
    p = tl.load(p_ptr + i, i < n, other=0.0)
    tl.store(p_ptr + i, p - tl.load(g_ptr + i, i < n, other=0.0) * step, i < n)
    if MISTAKE & (tl.program_id(0) == 0):
        tl.debug_barrier()
        tl.store(step_ptr, step)


@triton.jit
def count_step_kernel(step_ptr):
    tl.store(step_ptr, tl.load(step_ptr) + 1)


def _optimiser(device, mistake):
    p, g, (step,) = integers(100, seed=1), integers(100, seed=2), zeros(device, 1)
    own = p.to(device, copy=True)
    for _ in range(2):
        adam_kernel[(4,)](own, g.to(device), step, 100, BLOCK=32, MISTAKE=mistake)
        if not mistake:
            count_step_kernel[(1,)](step)
    return [Check(own, p - 3 * g), Check(step, torch.full((1,), 2, dtype=torch.int32))]


@healthy("the step is counted by a kernel of its own after the update")
def step_counted_behind_the_update(device):
    return _optimiser(device, False)


@racy("step_ptr", "read/write", "the first program counts the step while others may still have to read it")
def step_counted_by_the_first_program(device):
    _optimiser(device, True)
