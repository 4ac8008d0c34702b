"""Healthy kernels of the fifth set: places of one program each, kernels one after the other, relaxed atomics alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers, multiprocessors


def whole(*values):
    return torch.tensor(values, dtype=torch.int32)


@triton.jit
def squares_kernel(g_ptr, norm_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + i, i < n, other=0.0)
    tl.atomic_add(norm_ptr, tl.sum(g * g, 0), sem="relaxed")


@triton.jit
def clip_kernel(g_ptr, norm_ptr, limit, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.where(tl.load(norm_ptr) > limit * limit, 0.5, 1.0)
    tl.store(g_ptr + i, tl.load(g_ptr + i, i < n, other=0.0) * factor, i < n)


# The plain load of the norm is a kernel later than the atomics.
@healthy("a gradient is clipped in place by a norm that the kernel before added up by atomics")
def gradient_clipped_by_a_kernel_of_its_own(device):
    g = integers(200)
    own, norm = g.to(device, copy=True), torch.zeros(1, device=device)
    squares_kernel[(4,)](own, norm, 200, BLOCK=64)
    clip_kernel[(7,)](own, norm, 20.0, 200, BLOCK=32)
    return [Check(own, g / 2), Check(norm, g.square().sum()[None])]


@triton.jit
def chunk_maxima_kernel(x_ptr, owner_ptr, start_ptr, end_ptr, top_ptr, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    i = tl.load(start_ptr + chunk) + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < tl.load(end_ptr + chunk), other=0.0)
    tl.atomic_max(top_ptr + tl.load(owner_ptr + chunk), tl.max(tl.abs(x), 0), sem="relaxed")


# Chunks of one tensor meet in its word by atomics only.
@healthy("largest magnitudes of a list of tensors, whose chunks are in a table, by atomics a tensor")
def magnitudes_of_a_list_of_tensors(device):
    sizes = [40, 7, 33]
    x, parts, rows = integers(80, low=-90, high=90), [], []
    for tensor, first in enumerate((0, 40, 47)):
        parts.append(x[first : first + sizes[tensor]].abs().max())
        rows += [(tensor, at, first + sizes[tensor]) for at in range(first, first + sizes[tensor], 16)]
    owner, start, end = whole(*rows).T.contiguous().to(device)
    top = torch.zeros(3, device=device)
    chunk_maxima_kernel[(len(rows),)](x.to(device), owner, start, end, top, BLOCK=16)
    return [Check(top, torch.stack(parts))]


@triton.jit
def spmm_by_rows_kernel(start_ptr, col_ptr, val_ptr, b_ptr, c_ptr, N: tl.constexpr):
    row, n = tl.program_id(0), tl.arange(0, N)
    place = c_ptr + row * N + n
    acc = tl.load(place)
    for e in range(tl.load(start_ptr + row), tl.load(start_ptr + row + 1)):
        acc += tl.load(val_ptr + e) * tl.load(b_ptr + tl.load(col_ptr + e) * N + n)
    tl.store(place, acc)


# A row of C is loaded and stored by one program.
@healthy("a sparse product by compressed rows is added to C, a program a row")
def sparse_rows_by_a_program_each(device):
    start, col = whole(0, 2, 7, 7, 10, 11), whole(3, 1, 0, 2, 3, 1, 4, 0, 2, 4, 1)
    val, b, c = integers(11, seed=1), integers(5, 16, seed=2), integers(5, 16, seed=3)
    dense, own = torch.zeros(5, 5), c.to(device, copy=True)
    for row in range(5):
        dense[row, col[start[row] : start[row + 1]].long()] = val[start[row] : start[row + 1]]
    spmm_by_rows_kernel[(5,)](start.to(device), col.to(device), val.to(device), b.to(device), own, N=16)
    return [Check(own, c + dense @ b)]


@triton.jit
def tap_gradient_kernel(x_ptr, dy_ptr, dw_ptr, batches, L, BLOCK: tl.constexpr):
    tap = tl.program_id(0)
    steps = L - tl.num_programs(0) + 1
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for batch in range(batches):
        dy = tl.load(dy_ptr + batch * steps + i, i < steps, other=0.0)
        total += dy * tl.load(x_ptr + batch * L + tap + i, i < steps, other=0.0)
    tl.atomic_add(dw_ptr + tap, tl.sum(total, 0), sem="relaxed", scope="cta")


# The batch is a loop inside of the program that has the weight, to which nobody else adds: its own scope is enough.
@healthy("a convolution's weight gradient, a program a tap, is added to what was there")
def convolution_weights_by_taps(device):
    x, dy, dw = integers(4, 30, seed=1), integers(4, 26, seed=2), integers(5, seed=3)
    own = dw.to(device, copy=True)
    tap_gradient_kernel[(5,)](x.to(device), dy.to(device), own, 4, 30, BLOCK=32)
    return [Check(own, dw + torch.stack([(dy * x[:, tap : tap + 26]).sum() for tap in range(5)]))]


@triton.jit
def append_kernel(k_ptr, page_ptr, length_ptr, cache_ptr, PAGES: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr):
    seq, d = tl.program_id(0), tl.arange(0, D)
    length = tl.load(length_ptr + seq)
    page = tl.load(page_ptr + seq * PAGES + length // PAGE)
    tl.store(cache_ptr + (page * PAGE + length % PAGE) * D + d, tl.load(k_ptr + seq * D + d))
    tl.debug_barrier()
    tl.store(length_ptr + seq, length + 1)


# Page 0 is common to sequences 0 and 2 and full; the pages they append to are their own, as are the lengths.
@healthy("forked sequences append to pages of their own, and count their lengths up in place")
def forked_sequences_with_last_pages_of_their_own(device):
    k, cache = integers(4, 16, low=-99, high=99), torch.zeros(6, 4, 16, device=device)
    length = whole(5, 6, 5, 2).to(device)
    pages = whole([0, 3], [1, 4], [0, 5], [2, 2]).to(device)
    append_kernel[(4,)](k.to(device), pages, length, cache, PAGES=2, PAGE=4, D=16)
    want = torch.zeros(6, 4, 16)
    want[3, 1], want[4, 2], want[5, 1], want[2, 2] = k
    return [Check(cache, want), Check(length, whole(6, 7, 6, 3))]


@triton.jit
def add_frames_kernel(x_ptr, out_ptr, first, HOP: tl.constexpr, FRAME: tl.constexpr):
    frame, j = 2 * tl.program_id(0) + first, tl.arange(0, FRAME)
    place = out_ptr + frame * HOP + j
    tl.store(place, tl.load(place) + tl.load(x_ptr + frame * FRAME + j))


# Frames of a launch do not overlap; those of the second launch overlap those of the first.
@healthy("frames that overlap are added by load and store, even ones in one launch and odd ones in the next")
def frames_added_by_two_launches(device):
    x, out, want = integers(6, 16), torch.zeros(56, device=device), torch.zeros(56)
    for first in range(2):
        add_frames_kernel[(3,)](x.to(device), out, first, HOP=8, FRAME=16)
    for frame in range(6):
        want[frame * 8 : frame * 8 + 16] += x[frame]
    return [Check(out, want)]


@triton.jit
def wrapped_loads_kernel(a_ptr, b_ptr, c_ptr, M, K: tl.constexpr, T: tl.constexpr):
    rows = tl.program_id(0) * T + tl.arange(0, T)[:, None]
    k, n = tl.arange(0, K), tl.arange(0, T)[None, :]
    a = tl.load(a_ptr + rows % M * K + k[None, :])
    acc = tl.dot(a, tl.load(b_ptr + k[:, None] * T + n), input_precision="ieee")
    place, mask = c_ptr + rows * T + n, (rows < M) & (n >= 0)
    tl.store(place, tl.load(place, mask, other=0.0) + acc, mask)


# Rows wrap around in A, which nobody writes; in C they are masked.
@healthy("rows of A wrap around instead of being masked, those of C are masked and updated in place")
def wrapped_loads_and_masked_updates(device):
    a, b, c = integers(40, 16, seed=1), integers(16, 16, seed=2), integers(40, 16, seed=3)
    own = c.to(device, copy=True)
    wrapped_loads_kernel[(3,)](a.to(device), b.to(device), own, 40, K=16, T=16)
    return [Check(own, c + a @ b)]


@triton.jit
def nine_points_kernel(x_ptr, r, c, W: tl.constexpr, BLOCK: tl.constexpr):
    row, col = 2 * tl.program_id(0) + r + 1, tl.arange(0, BLOCK)
    mine = (col > 0) & (col < W - 1) & (col % 2 == c)
    at = x_ptr + row * W + col
    total = tl.zeros((BLOCK,), tl.float32)
    for dr in tl.static_range(-1, 2):
        for dc in tl.static_range(-1, 2):
            total += tl.load(at + dr * W + dc, mine, other=0.0)
    tl.debug_barrier()
    tl.store(at, total, mine)


# Points of one launch are two apart in both directions, so that no stored one is anybody's neighbour.
@healthy("a stencil of nine points in place in four colours, a launch each")
def nine_points_in_four_colours(device):
    x = integers(10, 20, low=0, high=4)
    own, want = x.to(device, copy=True), x.clone()
    for r, c in ((0, 0), (0, 1), (1, 0), (1, 1)):
        nine_points_kernel[(4,)](own, r, c, W=20, BLOCK=32)
        sums = torch.zeros(10, 20)
        sums[1:-1, 1:-1] = want.unfold(0, 3, 1).unfold(1, 3, 1).sum((2, 3))
        mine = torch.zeros(10, 20, dtype=torch.bool)
        mine[1 + r : 9 : 2, 2 - c : 19 : 2] = True
        want = torch.where(mine, sums, want)
    return [Check(own, want)]


@triton.jit
def drop_kernel(x_ptr, bits_ptr, y_ptr, seed, WORDS: tl.constexpr):
    w = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    lane = tl.arange(0, 32)[None, :]
    i = w[:, None] * 32 + lane
    keep = (tl.randint(seed, i) & 1).to(tl.int32)
    tl.store(y_ptr + i, tl.load(x_ptr + i) * (2 * keep).to(tl.float32))
    tl.store(bits_ptr + w, tl.sum(keep << lane, 1))


@triton.jit
def drop_again_kernel(dy_ptr, bits_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = (tl.load(bits_ptr + i // 32, i < n, other=0) >> (i % 32)) & 1
    tl.store(dy_ptr + i, tl.load(dy_ptr + i, i < n, other=0.0) * (2 * keep).to(tl.float32), i < n)


# A word of the mask is made by the program that has all of its 32 elements.
@healthy("a dropout mask of a bit an element, in words of one program each; the backward goes in place")
def dropout_bits_packed_by_their_owner(device):
    x, dy = integers(512, low=1), integers(512, low=1, seed=1)
    bits, y, own = (
        torch.zeros(16, dtype=torch.int32, device=device),
        torch.zeros(512, device=device),
        dy.to(device, copy=True),
    )
    drop_kernel[(4,)](x.to(device), bits, y, 7, WORDS=4)
    drop_again_kernel[(8,)](own, bits, 512, BLOCK=64)
    kept = y.cpu() != 0
    return [Check(y, torch.where(kept, 2 * x, 0)), Check(own, torch.where(kept, 2 * dy, 0))]


@triton.jit
def take_largest_kernel(x_ptr, limit, count_ptr, out_ptr, at_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=-1)
    keep = x >= limit
    slot = tl.atomic_add(count_ptr + i * 0, 1, keep, sem="relaxed")
    tl.store(out_ptr + slot, x, keep)
    tl.store(at_ptr + slot, i, keep)


# Each lane that keeps its number gets a slot of its own from the same counter.
@healthy("the 20 largest of different numbers, each to the slot that its lane drew by an atomic with a mask")
def largest_by_slots_of_lanes(device):
    x = torch.randperm(200, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    count, out, at = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 20, 20))
    take_largest_kernel[(4,)](x.to(device), 180, count, out, at, 200, BLOCK=64)
    return [Check(out.sort().values, torch.arange(180, 200).to(torch.int32)), Check(out, x[at.cpu().long()])]


@triton.jit
def parity_kernel(x_ptr, parity_ptr, n, BLOCK: tl.constexpr):
    row, j = tl.program_id(0), tl.arange(0, BLOCK)
    tl.atomic_xor(parity_ptr + j, tl.load(x_ptr + row * n + j, j < n, other=0), j < n, sem="relaxed")


# All seven programs share each word by atomics alone, which commute; relaxed is enough, since the host reads.
@healthy("parity of blocks over seven disks by atomic xor with a mask")
def parity_by_atomic_xor(device):
    x = integers(7, 50, low=0, high=1 << 30, dtype=torch.int32)
    parity, want = torch.zeros(50, dtype=torch.int32, device=device), torch.zeros(50, dtype=torch.int32)
    parity_kernel[(7,)](x.to(device), parity, 50, BLOCK=64)
    for row in x:
        want ^= row
    return [Check(parity, want)]


@triton.jit
def strike_out_kernel(forbidden_ptr, left_ptr, n, BLOCK: tl.constexpr):
    rule, j = tl.program_id(0), tl.arange(0, BLOCK)
    forbidden = tl.load(forbidden_ptr + rule * n + j, j < n, other=0)
    tl.atomic_and(left_ptr + j, forbidden ^ -1, forbidden != 0, sem="acq_rel")


# A word is only ever changed by atomics, and bits only go away.
@healthy("rules strike candidates out of words of bits by atomic and, where they forbid any")
def candidates_struck_out_by_atomic_and(device):
    forbidden = integers(6, 27, low=0, high=9, dtype=torch.int32) // 6 * integers(6, 27, low=0, high=512, seed=1).int()
    left, want = torch.full((27,), 511, dtype=torch.int32, device=device), torch.full((27,), 511, dtype=torch.int32)
    strike_out_kernel[(6,)](forbidden.to(device), left, 27, BLOCK=32)
    for row in forbidden:
        want &= ~row
    return [Check(left, want)]


@triton.jit
def earliest_kernel(user_ptr, time_ptr, first_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    user = tl.load(user_ptr + i, i < n, other=0)
    tl.atomic_min(first_ptr + user, tl.load(time_ptr + i, i < n, other=0), i < n, sem="relaxed", scope="sys")


# Users repeat in a program and among programs; minima are atomic, for the system too.
@healthy("first times of users in words of 64 bits, by atomic minima at repeated indices")
def first_times_by_atomic_minima(device):
    user, time = integers(90, low=0, high=9).long(), integers(90, low=-(1 << 20), high=1 << 20, seed=1).long() << 20
    first = torch.full((9,), 1 << 60, dtype=torch.int64, device=device)
    earliest_kernel[(6,)](user.to(device), time.to(device), first, 90, BLOCK=16)
    return [Check(first, torch.stack([time[user == u].min() for u in range(9)]))]


@triton.jit
def look_up_gradient_kernel(dy_ptr, id_ptr, dw_ptr, tokens, PER: tl.constexpr, D: tl.constexpr):
    t, d = tl.program_id(0) * PER + tl.arange(0, PER)[:, None], tl.arange(0, D)[None, :]
    row = tl.load(id_ptr + t, t < tokens, other=0)
    dy = tl.load(dy_ptr + t * D + d, (t < tokens) & (d >= 0), other=0.0)
    tl.atomic_add(dw_ptr + row * D + d, dy, (t < tokens) & (d >= 0), sem="relaxed")


# Rows 0, 1 and 3 are added to by several programs, by atomics of 16 bits; the sums are whole and small.
@healthy("rows of an embedding's gradient in float16 by atomics; ids repeat")
def look_up_gradient_in_half(device):
    ids, dy = whole(3, 1, 3, 3, 0, 2, 1, 3, 0, 0, 4), integers(11, 16, dtype=torch.float16)
    dw = torch.zeros(5, 16, dtype=torch.float16, device=device)
    look_up_gradient_kernel[(3,)](dy.to(device), ids.to(device), dw, 11, PER=4, D=16)
    return [Check(dw, torch.zeros(5, 16).index_add(0, ids, dy.float()).half())]


@triton.jit
def quantised_momentum_kernel(q_ptr, scale_ptr, g_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(q_ptr + i).to(tl.int32) * tl.load(scale_ptr + pid) + tl.load(g_ptr + i)
    scale = tl.max(tl.abs(m), 0) // 128 + 1
    tl.debug_barrier()
    tl.store(q_ptr + i, (m // scale).to(tl.int8))
    tl.store(scale_ptr + pid, scale)


# Blocks of a scale are blocks of a program; // of whole numbers goes to zero.
@healthy("a momentum of 8 bits with a scale a block is unpacked, added to and packed again in place")
def quantised_momentum_in_place(device):
    q, scale, g = (
        integers(128, low=-127, high=128).to(torch.int8),
        integers(4, low=1).int(),
        integers(128, seed=1).int(),
    )
    own_q, own_scale = q.to(device, copy=True), scale.to(device, copy=True)
    quantised_momentum_kernel[(4,)](own_q, own_scale, g.to(device), BLOCK=32)
    m = (q.int().view(4, 32) * scale[:, None]) + g.view(4, 32)
    want = m.abs().amax(1) // 128 + 1
    packed = torch.div(m, want[:, None], rounding_mode="trunc").to(torch.int8)
    return [Check(own_q, packed.flatten()), Check(own_scale, want.int())]


@triton.jit
def gate_and_up_kernel(dy_ptr, gate_up_ptr, N: tl.constexpr):
    row, n = tl.program_id(0), tl.program_id(1) * 16 + tl.arange(0, 16)
    at = gate_up_ptr + row * 2 * N + n
    gate, up, dy = tl.load(at), tl.load(at + N), tl.load(dy_ptr + row * N + n)
    tl.store(at, dy * up)
    tl.store(at + N, dy * gate)


# A program has the same columns of both halves and loads both before it stores either.
@healthy("gradients of gate and up are stored over both, a program for the same columns of both")
def gate_and_up_by_the_same_program(device):
    dy, both = integers(5, 32, seed=1), integers(5, 64, seed=2)
    own = both.to(device, copy=True)
    gate_and_up_kernel[(5, 2)](dy.to(device), own, N=32)
    return [Check(own, torch.cat([dy * both[:, 32:], dy * both[:, :32]], 1))]


@triton.jit
def snake_kernel(x_ptr, tiles, BLOCK: tl.constexpr):
    pid, programs = tl.program_id(0), tl.num_programs(0)
    for turn in range(tl.cdiv(tiles, programs)):
        tile = turn * programs + tl.where(turn % 2 == 0, pid, programs - 1 - pid)
        if tile < tiles:
            i = tile * BLOCK + tl.arange(0, BLOCK)
            tl.store(x_ptr + i, tl.load(x_ptr + i) + tile)


# Each turn has as many tiles as there are programs, one for each of them, forwards or backwards.
@healthy("persistent programs go over tiles as a snake, to and fro, in place")
def tiles_to_and_fro(device):
    programs = multiprocessors()
    tiles = 3 * programs - 7
    x = integers(tiles, 16)
    own = x.to(device, copy=True)
    snake_kernel[(programs,)](own, tiles, BLOCK=16)
    return [Check(own, x + torch.arange(tiles)[:, None])]


@triton.jit
def edge_difference_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    after = tl.load(x_ptr + tl.minimum(i + 1, n - 1))
    tl.store(out_ptr + i, after - tl.load(x_ptr + tl.minimum(i, n - 1)), i < n)


# Eight programs clamp to element 69, and only load it; stores are masked.
@healthy("differences with the next element; indices of loads are clamped to the last one, stores are masked")
def indices_clamped_for_loads_only(device):
    x, out = integers(70), torch.zeros(70, device=device)
    edge_difference_kernel[(8,)](x.to(device), out, 70, BLOCK=16)
    return [Check(out, torch.cat([x[1:] - x[:-1], torch.zeros(1)]))]
