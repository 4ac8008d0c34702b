"""Healthy kernels of the fifth set: choices of addresses, graphs, ranks, experts, prefix sums, descriptors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers
from triton.tools.tensor_descriptor import TensorDescriptor


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def row_and_end_mark_kernel(x_ptr, out_ptr, rows, N: tl.constexpr):
    row, n = tl.program_id(0), tl.arange(0, N)
    tl.store(out_ptr + row * N + n, tl.load(x_ptr + row * N + n) * 2)
    tl.store(out_ptr + rows * N + n, tl.full((N,), -1.0, tl.float32))


# The milder kind: what all programs store in the last row is the same.
@healthy("every program stores its row, and the same mark of the end behind all rows")
def end_mark_stored_by_all(device):
    x, out = integers(6, 16), torch.zeros(7, 16, device=device)
    row_and_end_mark_kernel[(6,)](x.to(device), out, 6, N=16)
    return [Check(out, torch.cat([2 * x, torch.full((1, 16), -1.0)]))]


@triton.jit
def losers_aside_kernel(x_ptr, out_ptr, count_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0)
    keep = (x % 3 == 0) & (i < n)
    base = tl.atomic_add(count_ptr, tl.sum(keep.to(tl.int32), 0), sem="relaxed")
    place = tl.where(keep, base + tl.cumsum(keep.to(tl.int32), 0) - 1, n + i)
    tl.store(out_ptr + place, x, i < n)


# Kept numbers go to slots that the counter gave, the others each to a place that only their own index has.
@healthy("a choice of addresses: kept numbers to slots by a counter, the others to a spare part by their index")
def losers_stored_aside(device):
    x, (out, count) = integers(100, low=1, high=99, dtype=torch.int32), zeros(device, 200, 1)
    losers_aside_kernel[(4,)](x.to(device), out, count, 100, BLOCK=32)
    kept = x[x % 3 == 0]
    aside = torch.where(x % 3 == 0, 0, x)
    return [Check(out[: len(kept)].sort().values, kept.sort().values), Check(out[100:], aside)]


@triton.jit
def two_to_minus(k):
    return ((127 - k) << 23).to(tl.float32, bitcast=True)


@triton.jit
def merged(word, m, s):
    """Maximum above, sum of 2**(x - maximum) below as bits of a float32."""
    of_word = (word >> 32).to(tl.int32)
    top = tl.maximum(of_word, m)
    total = (word & 0x7FFFFFFF).to(tl.int32).to(tl.float32, bitcast=True) * two_to_minus(top - of_word)
    total += s * two_to_minus(top - m)
    return (top.to(tl.int64) << 32) | total.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def softmax_word_kernel(x_ptr, word_ptr, TILES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(x_ptr + (row * TILES + tl.program_id(1)) * BLOCK + tl.arange(0, BLOCK))
    m = tl.max(x, 0)
    s = tl.sum(two_to_minus(m - x), 0)
    old = tl.atomic_or(word_ptr + row, 0, sem="relaxed")
    seen = tl.atomic_cas(word_ptr + row, old, merged(old, m, s), sem="relaxed")
    while seen != old:
        old = seen
        seen = tl.atomic_cas(word_ptr + row, old, merged(old, m, s), sem="relaxed")


# Maximum and sum change together, in one word. Powers of two are exact in every order.
@healthy("an online softmax to base 2: maximum and sum of a row in one word, which compare and swap replaces")
def softmax_sums_merged_by_swaps(device):
    x, word = integers(4, 64, low=0, high=16, dtype=torch.int32), torch.zeros(4, dtype=torch.int64, device=device)
    softmax_word_kernel[(4, 4)](x.to(device), word, TILES=4, BLOCK=16)
    top = x.amax(1)
    total = torch.exp2((x - top[:, None]).double()).sum(1).float()
    return [Check(word, (top.long() << 32) | total.view(torch.int32).long())]


@triton.jit
def hook_roots_kernel(u_ptr, v_ptr, old_ptr, new_ptr, edges, BLOCK: tl.constexpr):
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u, v = tl.load(u_ptr + e, e < edges, other=0), tl.load(v_ptr + e, e < edges, other=0)
    a, b = tl.load(old_ptr + u), tl.load(old_ptr + v)
    tl.atomic_min(new_ptr + tl.maximum(a, b), tl.minimum(a, b), e < edges, sem="relaxed")


@triton.jit
def jump_kernel(new_ptr, old_ptr, next_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    root = tl.load(new_ptr + tl.load(new_ptr + i, i < n, other=0))
    tl.store(old_ptr + i, root, i < n)
    tl.store(next_ptr + i, root, i < n)


# Who is lowered by atomics is read a kernel later; three buffers change their parts.
@healthy("components of a graph: roots are hooked by atomics in one buffer by what another says; then labels jump")
def components_between_three_buffers(device):
    order = torch.randperm(24, generator=torch.Generator().manual_seed(5))
    keep = torch.arange(23) != 9
    u, v = (t[keep].to(torch.int32).to(device) for t in (order[:-1], order[1:]))
    old, new, other = (torch.arange(24, dtype=torch.int32).to(device) for _ in range(3))
    for _ in range(24):
        hook_roots_kernel[(3,)](u, v, old, new, 22, BLOCK=8)
        jump_kernel[(2,)](new, old, other, 24, BLOCK=16)
        new, other = other, new
    want = torch.empty(24, dtype=torch.int32)
    want[order[:10]], want[order[10:]] = order[:10].min().int(), order[10:].min().int()
    return [Check(old, want)]


@triton.jit
def expand_kernel(start_ptr, to_ptr, level_ptr, front_ptr, count_ptr, next_ptr, next_count_ptr, level):
    for k in range(tl.program_id(0), tl.load(count_ptr), tl.num_programs(0)):
        node = tl.load(front_ptr + k)
        for e in range(tl.load(start_ptr + node), tl.load(start_ptr + node + 1)):
            to = tl.load(to_ptr + e)
            if tl.atomic_cas(level_ptr + to, -1, level, sem="relaxed") == -1:
                tl.store(next_ptr + tl.atomic_add(next_count_ptr, 1, sem="relaxed"), to)


# A frontier is read in the launch after the one that filled it, and its slots are drawn.
@healthy("a breadth-first search, a launch a level: nodes are claimed by a swap, slots of the next frontier drawn")
def frontiers_of_a_launch_each(device):
    n, levels = 30, 12
    edges = [[j for j in (i + 1, i + 5) if j < n] for i in range(n)]
    start = torch.tensor([0, *(len(e) for e in edges)]).cumsum(0).to(torch.int32).to(device)
    to = torch.tensor([j for e in edges for j in e], dtype=torch.int32).to(device)
    level = torch.tensor([0] + [-1] * (n - 1), dtype=torch.int32).to(device)
    fronts = [torch.zeros(n, dtype=torch.int32, device=device) for _ in range(levels)]
    counts = [torch.tensor([int(k == 0)], dtype=torch.int32).to(device) for k in range(levels)]
    for k in range(levels - 1):
        expand_kernel[(4,)](start, to, level, fronts[k], counts[k], fronts[k + 1], counts[k + 1], k + 1)
    return [Check(level, torch.tensor([i // 5 + i % 5 for i in range(n)], dtype=torch.int32))]


@triton.jit
def ranks_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, ALL: tl.constexpr):
    i, j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ALL)
    x, every = tl.load(x_ptr + i, i < n, other=0), tl.load(x_ptr + j, j < n, other=0)
    less = (every[None, :] < x[:, None]) | ((every[None, :] == x[:, None]) & (j[None, :] < i[:, None]))
    rank = tl.sum((less & (j < n)[None, :]).to(tl.int32), 1)
    tl.store(out_ptr + rank, x, i < n)


# Ranks are a permutation, equal numbers by their index.
@healthy("a sort by counting who is less: each number is stored at its rank, which no other has")
def numbers_stored_at_their_ranks(device):
    x, (out,) = integers(60, dtype=torch.int32), zeros(device, 60)
    ranks_kernel[(4,)](x.to(device), out, 60, BLOCK=16, ALL=64)
    return [Check(out, x.sort().values)]


@triton.jit
def count_experts_kernel(expert_ptr, count_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(count_ptr + tl.load(expert_ptr + i, i < n, other=0), 1, i < n, sem="relaxed")


@triton.jit
def pad_experts_kernel(count_ptr, first_ptr, E: tl.constexpr, PAD: tl.constexpr):
    e = tl.arange(0, E)
    padded = tl.cdiv(tl.load(count_ptr + e), PAD) * PAD
    tl.store(first_ptr + e, tl.cumsum(padded, 0) - padded)
    tl.debug_barrier()
    tl.store(count_ptr + e, tl.zeros((E,), tl.int32))


@triton.jit
def place_tokens_kernel(expert_ptr, count_ptr, first_ptr, slot_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(expert_ptr + i, i < n, other=0)
    rank = tl.atomic_add(count_ptr + expert, 1, i < n, sem="relaxed")
    tl.store(slot_ptr + tl.load(first_ptr + expert) + rank, i, i < n)


@triton.jit
def expert_blocks_kernel(x_ptr, slot_ptr, first_ptr, y_ptr, n, E: tl.constexpr, PAD: tl.constexpr, D: tl.constexpr):
    s = tl.program_id(0) * PAD + tl.arange(0, PAD)
    expert = tl.sum((tl.load(first_ptr + tl.arange(0, E)) <= tl.program_id(0) * PAD).to(tl.int32), 0) - 1
    token, d = tl.load(slot_ptr + s)[:, None], tl.arange(0, D)[None, :]
    mask = (token < n) & (d >= 0)
    tl.store(y_ptr + token * D + d, tl.load(x_ptr + token * D + d, mask, other=0.0) * (expert + 1), mask)


# Every token is in one slot; empty slots hold n and are masked. Counters are cleared a kernel before they count again.
@healthy("tokens are put into blocks of 8 of their expert in four kernels; padded slots store nothing")
def experts_padded_to_blocks(device):
    expert = integers(40, low=0, high=4, dtype=torch.int32)
    x, y, (count, first) = integers(40, 16, seed=1), torch.zeros(40, 16, device=device), zeros(device, 4, 4)
    slot = torch.full((72,), 40, dtype=torch.int32, device=device)
    of_tokens = expert.to(device)
    count_experts_kernel[(3,)](of_tokens, count, 40, BLOCK=16)
    pad_experts_kernel[(1,)](count, first, E=4, PAD=8)
    place_tokens_kernel[(5,)](of_tokens, count, first, slot, 40, BLOCK=8)
    expert_blocks_kernel[(9,)](x.to(device), slot, first, y, 40, E=4, PAD=8, D=16)
    return [Check(y, x * (expert + 1)[:, None])]


@triton.jit
def add_back_kernel(x_ptr, y_ptr, back, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(x_ptr + i - back, (i >= back) & (i < n), other=0.0)
    tl.store(y_ptr + i, tl.load(x_ptr + i, i < n, other=0.0) + before, i < n)


# A launch loads one buffer and stores the other; the next one changes their parts.
@healthy("prefix sums by doubling, a launch a step, from one buffer to the other and back")
def prefix_sums_by_doubling(device):
    x = integers(100)
    a, b = x.to(device, copy=True), torch.zeros(100, device=device)
    for k in range(7):
        add_back_kernel[(4,)](a, b, 1 << k, 100, BLOCK=32)
        a, b = b, a
    return [Check(a, x.cumsum(0))]


@triton.jit
def double_by_descriptor_kernel(x_ptr, M, N, TM: tl.constexpr, TN: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[M, N], strides=[N, 1], block_shape=[TM, TN])
    m, n = tl.program_id(0) * TM, tl.program_id(1) * TN
    x.store([m, n], x.load([m, n]) * 2)


# Tiles are cut at rows 50 and columns 40; without the cut the last ones would go on into the next row.
@healthy("tiles are doubled in place by descriptors made on the device, cut at both borders")
def tiles_doubled_by_descriptors(device):
    triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
    x = integers(50, 40)
    own = x.to(device, copy=True)
    double_by_descriptor_kernel[(4, 2)](own, 50, 40, TM=16, TN=32)
    return [Check(own, 2 * x)]


@triton.jit
def raise_boxes_kernel(x_ptr, out, STEP: tl.constexpr, BOX: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0) * STEP
    r, c = tl.arange(0, BOX)[:, None], tl.arange(0, N)[None, :]
    out.atomic_max([row, 0], tl.load(x_ptr + (tl.program_id(0) * BOX + r) * N + c))


# Rows 4..7 are in the boxes of programs 0 and 1, which raise them atomically; a maximum has no order.
@healthy("boxes of 8 rows every 4 rows are raised by a descriptor to maxima, atomically")
def boxes_raised_by_a_descriptor(device):
    x, out = integers(5, 8, 32, dtype=torch.int32), torch.full((24, 32), -99, dtype=torch.int32, device=device)
    raise_boxes_kernel[(5,)](x.to(device), TensorDescriptor.from_tensor(out, [8, 32]), STEP=4, BOX=8, N=32)
    want = torch.full((24, 32), -99, dtype=torch.int32)
    for box in range(5):
        want[4 * box : 4 * box + 8] = torch.maximum(want[4 * box : 4 * box + 8], x[box])
    return [Check(out, want)]
