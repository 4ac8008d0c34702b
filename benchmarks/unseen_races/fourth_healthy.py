"""Healthy kernels of the fourth set: programs that seem to share places and do not, or share them by atomics alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers, multiprocessors


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def persistent_partials_kernel(dy_ptr, x_ptr, part_ptr, rows, N: tl.constexpr):
    pid = tl.program_id(0)
    cols = tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    for row in range(pid, rows, tl.num_programs(0)):
        total += tl.load(dy_ptr + row * N + cols) * tl.load(x_ptr + row * N + cols)
    tl.store(part_ptr + pid * N + cols, total)


@triton.jit
def add_rows_kernel(part_ptr, out_ptr, rows, N: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(rows):
        total += tl.load(part_ptr + row * N + cols)
    tl.store(out_ptr + cols, total)


# Each program has a row of the buffer, and the second kernel comes after the first in the stream.
@healthy("a partial row per multiprocessor, added up by a second kernel; some rows are sums of nothing")
def rms_norm_partials_by_two_kernels(device):
    programs, rows = multiprocessors(), 57
    dy, x = integers(rows, 32, seed=1), integers(rows, 32, seed=2)
    part, out = torch.empty(programs, 32, device=device), torch.zeros(32, device=device)
    persistent_partials_kernel[(programs,)](dy.to(device), x.to(device), part, rows, N=32)
    add_rows_kernel[(2,)](part, out, programs, N=32, BLOCK=16)
    return [Check(out, (dy * x).sum(0))]


@triton.jit
def split_k_atomic_kernel(a_ptr, b_ptr, bias_ptr, c_ptr, K: tl.constexpr, SPLITS: tl.constexpr, T: tl.constexpr):
    m, split = tl.program_id(0), tl.program_id(1)
    r, c = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    acc = tl.zeros((T, T), tl.float32)
    for k in range(split * T, K, SPLITS * T):
        a = tl.load(a_ptr + (m * T + r) * K + k + c)
        acc += tl.dot(a, tl.load(b_ptr + (k + r) * T + c), input_precision="ieee")
    if split == 0:
        acc += tl.load(bias_ptr + c)
    tl.atomic_add(c_ptr + (m * T + r) * T + c, acc, sem="relaxed")


# Relaxed atomics are atomic; of numbers that are not whole, the rounding would depend on the order.
@healthy("splits of K are added by relaxed atomics to what was zeroed before, the bias by the first one")
def split_k_by_relaxed_atomics(device):
    a, b, bias = integers(32, 96, seed=1), integers(96, 16, seed=2), integers(16, seed=3)
    c = torch.zeros(32, 16, device=device)
    split_k_atomic_kernel[(2, 3)](a.to(device), b.to(device), bias.to(device), c, K=96, SPLITS=3, T=16)
    return [Check(c, a @ b + bias)]


@triton.jit
def double_strided_kernel(x_ptr, tiles, n, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + i, tl.load(x_ptr + i, i < n) * 2, i < n)


@healthy("a persistent kernel in place: tiles pid, pid + programs, and so on are nobody else's")
def persistent_in_place(device):
    programs = multiprocessors()
    n = (2 * programs + 3) * 16 - 5
    x = integers(n)
    own = x.to(device, copy=True)
    double_strided_kernel[(programs,)](own, triton.cdiv(n, 16), n, BLOCK=16)
    return [Check(own, 2 * x)]


@triton.jit
def double_chunks_of_remainder_kernel(x_ptr, tiles, BLOCK: tl.constexpr):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    each, more = tiles // programs, tiles % programs
    first = pid * each + tl.minimum(pid, more)
    for tile in range(first, first + each + (pid < more).to(tl.int32)):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + i, tl.load(x_ptr + i) * 2)


@healthy("chunks of tiles in place, the first ones longer by one, none of which meet")
def chunks_that_share_the_remainder(device):
    programs = multiprocessors()
    tiles = 2 * programs + programs // 2 + 1
    x = integers(tiles * 16)
    own = x.to(device, copy=True)
    double_chunks_of_remainder_kernel[(programs,)](own, tiles, BLOCK=16)
    return [Check(own, 2 * x)]


@triton.jit
def moved_back_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, OWN: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    i = tl.minimum(first, n - BLOCK) + tl.arange(0, BLOCK)
    mask = i >= first if OWN else i >= 0
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask) * 3, mask)


# The milder kind: both programs store three times the same x.
@healthy("the last tile is moved back over the one before, and stores there the same values to another tensor")
def last_tile_moved_back_to_another_tensor(device):
    x, out = integers(100), torch.zeros(100, device=device)
    moved_back_kernel[(4,)](x.to(device), out, 100, BLOCK=32, OWN=False)
    return [Check(out, 3 * x)]


# Load and store are masked, both: elements 68..95 are touched by the program before only.
@healthy("the last tile is moved back in place, and a mask leaves it what is its own")
def last_tile_moved_back_and_masked(device):
    x = integers(100)
    own = x.to(device, copy=True)
    moved_back_kernel[(4,)](own, own, 100, BLOCK=32, OWN=True)
    return [Check(own, 3 * x)]


@triton.jit
def transpose_pairs_kernel(x_ptr, N: tl.constexpr, T: tl.constexpr):
    m, n = tl.program_id(0), tl.program_id(1)
    if m <= n:
        r, c = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
        upper, lower = x_ptr + (m * T + r) * N + n * T + c, x_ptr + (n * T + r) * N + m * T + c
        a, b = tl.load(upper), tl.load(lower)
        tl.debug_barrier()
        tl.store(lower, tl.trans(a))
        tl.store(upper, tl.trans(b))


# On the diagonal both stores write the same tile with the same values, by the same program.
@healthy("a transposition in place: program (m, n) swaps both tiles, program (n, m) does nothing")
def transposed_in_place_by_pairs(device):
    x = integers(48, 48, low=-100, high=100)
    own = x.to(device, copy=True)
    transpose_pairs_kernel[(3, 3)](own, N=48, T=16)
    return [Check(own, x.mT)]


@triton.jit
def smooth_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(x_ptr + i - 1, (i > 0) & (i < n), other=0.0)
    right = tl.load(x_ptr + i + 1, i + 1 < n, other=0.0)
    tl.store(out_ptr + i, left + tl.load(x_ptr + i, i < n) + right, i < n)


@healthy("a stencil from one half of a buffer to the other and back, by a launch each")
def stencil_there_and_back(device):
    x = integers(120)
    buf = torch.cat([x, torch.zeros(120)]).to(device)
    for a, b in ((0, 120), (120, 0)):
        smooth_kernel[(4,)](buf[a : a + 120], buf[b : b + 120], 120, BLOCK=32)
    want = x.clone()
    for _ in range(2):
        want = want + torch.cat([torch.zeros(1), want[:-1]]) + torch.cat([want[1:], torch.zeros(1)])
    return [Check(buf[:120], want)]


@triton.jit
def pack_bytes_kernel(q_ptr, packed_ptr, n, BLOCK: tl.constexpr):
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.zeros((BLOCK,), tl.uint8)
    for k in tl.static_range(4):
        word |= (tl.load(q_ptr + 4 * j + k, 4 * j + k < n, other=0) << (2 * k)).to(tl.uint8)
    tl.store(packed_ptr + j, word, 4 * j < n)


@healthy("four numbers of 2 bits in a byte, all four by the program that has the byte")
def crumbs_of_a_byte_by_one_program(device):
    q = integers(150, low=0, high=4, dtype=torch.uint8)
    packed = torch.zeros(38, dtype=torch.uint8, device=device)
    pack_bytes_kernel[(5,)](q.to(device), packed, 150, BLOCK=8)
    four = torch.cat([q, torch.zeros(2, dtype=torch.uint8)]).view(38, 4)
    return [Check(packed, four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6)]


@triton.jit
def or_nibbles_kernel(q_ptr, word_ptr, WORDS: tl.constexpr):
    k = tl.program_id(0)
    j = tl.arange(0, WORDS)
    tl.atomic_or(word_ptr + j, tl.load(q_ptr + k * WORDS + j) << (4 * k), sem="relaxed")


@healthy("eight programs put a nibble each into every word by an atomic or")
def nibbles_of_a_word_by_atomic_or(device):
    q, (word,) = integers(8, 32, low=0, high=16, dtype=torch.int32), zeros(device, 32)
    or_nibbles_kernel[(8,)](q.to(device), word, WORDS=32)
    want = sum(q[k].long() << (4 * k) for k in range(8))
    return [Check(word, torch.where(want >= 2**31, want - 2**32, want).to(torch.int32))]


@triton.jit
def sorted_segments_kernel(dy_ptr, order_ptr, start_ptr, row_ptr, dw_ptr, D: tl.constexpr):
    segment, cols = tl.program_id(0), tl.arange(0, D)
    total = tl.zeros((D,), tl.float32)
    for k in range(tl.load(start_ptr + segment), tl.load(start_ptr + segment + 1)):
        total += tl.load(dy_ptr + tl.load(order_ptr + k) * D + cols)
    place = dw_ptr + tl.load(row_ptr + segment) * D + cols
    tl.store(place, tl.load(place) + total)


# As many programs as different ids: rows are read, added to and stored by one program each.
@healthy("an embedding's gradient by sorted segments, added by load and store to what was there")
def embedding_gradient_by_segments(device):
    ids = torch.tensor([7, 1, 2, 2, 7, 0, 3, 4, 2, 6, 8, 9, 7, 10])
    dy, old = integers(14, 16, seed=1), integers(11, 16, seed=2)
    rows, counts = ids.unique(return_counts=True)
    start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)
    dw = old.to(device, copy=True)
    order = ids.argsort(stable=True).to(torch.int32)
    sorted_segments_kernel[(len(rows),)](
        dy.to(device), order.to(device), start.to(device), rows.to(torch.int32).to(device), dw, D=16
    )  # fmt: skip
    return [Check(dw, old.index_add(0, ids, dy))]


@triton.jit
def compact_kernel(x_ptr, out_ptr, count_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0)
    keep = (x > 0).to(tl.int32)
    base = tl.atomic_add(count_ptr, tl.sum(keep, 0), sem="relaxed")
    tl.store(out_ptr + base + tl.cumsum(keep, 0) - 1, x, keep != 0)


# The addition returns where the block's slots begin; which block comes first is open, so the result is sorted.
@healthy("positive numbers are moved together, each block to the slots that an atomic counter gave it")
def compacted_by_an_atomic_counter(device):
    x = integers(200, dtype=torch.int32)
    (out, count), kept = zeros(device, 200, 1), x[x > 0]
    compact_kernel[(7,)](x.to(device), out, count, 200, BLOCK=32)
    return [Check(out[: len(kept)].sort().values, kept.sort().values), Check(count, torch.tensor([len(kept)]).int())]


@triton.jit
def halves_of_pairs_kernel(x_ptr, re_ptr, im_ptr, step, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid // 2 * BLOCK + tl.arange(0, BLOCK)
    out = re_ptr if pid % 2 == 0 else im_ptr
    tl.store(out + i * step, tl.load(x_ptr + i) + pid % 2)


# Their extents in memory overlap, their elements do not.
@healthy("even elements of a buffer are one argument and odd ones another, written by different programs")
def interleaved_views_of_one_buffer(device):
    x, pairs = integers(64), torch.zeros(64, 2, device=device)
    halves_of_pairs_kernel[(8,)](x.to(device), pairs[:, 0], pairs[:, 1], 2, BLOCK=16)
    return [Check(pairs, torch.stack([x, x + 1], 1))]


@triton.jit
def absolute_sums_kernel(bits_ptr, x_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(bits_ptr + i, tl.load(bits_ptr + i) & 0x7FFFFFFF)
    tl.debug_barrier()
    tl.store(out_ptr + pid, tl.sum(tl.load(x_ptr + i), 0))


@healthy("signs are cleared in a view of int32 and the floats are loaded again, by the program that cleared them")
def floats_and_their_bits(device):
    x = integers(128)
    own, out = x.to(device, copy=True), torch.zeros(8, device=device)
    absolute_sums_kernel[(8,)](own.view(torch.int32), own, out, BLOCK=16)
    return [Check(out, x.abs().view(8, 16).sum(1))]


@triton.jit
def histogram_atomic_kernel(x_ptr, hist_ptr, n, BLOCK: tl.constexpr, BINS: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.histogram(tl.load(x_ptr + i, i < n, other=0), BINS, mask=i < n)
    tl.atomic_add(hist_ptr + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@healthy("histograms of blocks are added by atomics, where they are not 0")
def histogram_of_blocks_by_atomics(device):
    x, (hist,) = integers(200, low=0, high=16, dtype=torch.int32), zeros(device, 16)
    histogram_atomic_kernel[(4,)](x.to(device), hist, 200, BLOCK=64, BINS=16)
    return [Check(hist, torch.bincount(x, minlength=16).to(torch.int32))]


@triton.jit
def ordered_max_kernel(x_ptr, key_ptr, BLOCK: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0)
    bits = tl.load(x_ptr + row * N + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int32, bitcast=True)
    tl.atomic_max(key_ptr + row, tl.max(bits ^ ((bits >> 31) & 0x7FFFFFFF), 0), sem="relaxed")


@triton.jit
def decode_max_kernel(key_ptr, out_ptr, ROWS: tl.constexpr):
    key = tl.load(key_ptr + tl.arange(0, ROWS))
    tl.store(out_ptr + tl.arange(0, ROWS), (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))


@healthy("maxima of floats, negative ones too, by atomics on integers of the same order, decoded by the next kernel")
def float_maxima_by_integers(device):
    x = integers(4, 64, low=-60, high=-2)
    x[1] += 50
    key, out = torch.full((4,), -(2**31), dtype=torch.int32, device=device), torch.zeros(4, device=device)
    ordered_max_kernel[(4, 4)](x.to(device), key, BLOCK=16, N=64)
    decode_max_kernel[(1,)](key, out, ROWS=4)
    return [Check(out, x.amax(1))]


@triton.jit
def argmax_kernel(x_ptr, best_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0)
    key = (x.to(tl.int64) << 32) | (n - i).to(tl.int64)
    tl.atomic_max(best_ptr, tl.max(tl.where(i < n, key, 0), 0), sem="relaxed")


# One word holds value and place: no two accesses that could come apart, and of equals the first wins in any order.
@healthy("value and place of a maximum in one word of 64 bits, raised by an atomic")
def argmax_in_one_word(device):
    x, best = integers(250, low=1, high=40, dtype=torch.int32), torch.zeros(1, dtype=torch.int64, device=device)
    argmax_kernel[(8,)](x.to(device), best, 250, BLOCK=32)
    return [Check(best, ((x.long() << 32) | (250 - torch.arange(250))).max()[None])]


@triton.jit
def own_scratch_kernel(x_ptr, scratch_ptr, out_ptr, BLOCK: tl.constexpr):
    base = tl.program_id(0) * BLOCK
    j = tl.arange(0, BLOCK)
    tl.store(scratch_ptr + base + j, tl.load(x_ptr + base + j) * 2)
    tl.debug_barrier()
    tl.store(out_ptr + base + j, tl.load(scratch_ptr + base + BLOCK - 1 - j))


@healthy("each program stores to its own scratch, has a barrier, and loads that backwards")
def scratch_of_its_own_reversed(device):
    x, scratch, out = integers(128), torch.empty(128, device=device), torch.zeros(128, device=device)
    own_scratch_kernel[(8,)](x.to(device), scratch, out, BLOCK=16)
    return [Check(out, 2 * x.view(8, 16).flip(1).flatten())]


@triton.jit
def lanes_kernel(x_ptr, n, BLOCK: tl.constexpr):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, BLOCK)
    mine = (i < n) & (i % programs == pid)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mine, other=0.0) * (pid + 1), mine)


# All programs name all elements; the masks of two programs have none in common.
@healthy("every program goes over the whole tensor in place, with a mask of every third element")
def masks_that_share_nothing(device):
    x = integers(100)
    own = x.to(device, copy=True)
    lanes_kernel[(3,)](own, 100, BLOCK=128)
    return [Check(own, x * (torch.arange(100) % 3 + 1))]
