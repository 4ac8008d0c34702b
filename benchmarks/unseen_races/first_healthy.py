"""Healthy kernels without a racy twin: what looks shared and is not, what is shared and ordered."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers, multiprocessors


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def foreach_kernel(weights, grads, sizes, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for t in tl.static_range(len(weights)):
        mask = i < sizes[t]
        tl.store(weights[t] + i, tl.load(weights[t] + i, mask) - scale * tl.load(grads[t] + i, mask), mask)


@healthy("a step of several tensors, which are a tuple of arguments")
def step_of_a_tuple_of_tensors(device):
    p, g = [integers(n, seed=n) for n in (30, 64, 7)], [integers(n, seed=n + 1) for n in (30, 64, 7)]
    own = tuple(t.to(device, copy=True) for t in p)
    foreach_kernel[(4,)](own, tuple(t.to(device) for t in g), (30, 64, 7), 2, BLOCK=16)
    return [Check(a, b - 2 * c) for a, b, c in zip(own, p, g, strict=True)]


@triton.jit
def dropout_kernel(x_ptr, out_ptr, n, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * 4 * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = tl.randint4x(seed, i)
    for k in tl.static_range(4):
        word = a if k == 0 else (b if k == 1 else (c if k == 2 else d))
        at = i + k * BLOCK
        x = tl.load(x_ptr + at, at < n, other=0.0)
        tl.store(out_ptr + at, tl.where(word % 2 == 0, x * 2, 0.0), at < n)


@healthy("dropout by four words of Philox an index, recomputed in the backward instead of a stored mask")
def dropout_drawn_again_in_the_backward(device):
    x, g, (out, dx) = integers(150, low=1, seed=1), integers(150, low=1, seed=2), torch.zeros(2, 150, device=device)
    dropout_kernel[(3,)](x.to(device), out, 150, 11, BLOCK=16)
    dropout_kernel[(3,)](g.to(device), dx, 150, 11, BLOCK=16)
    kept = out.cpu() != 0
    return [Check(dx, torch.where(kept, 2 * g, 0.0)), Check(out, torch.where(kept, 2 * x, 0.0))]


@triton.jit
def split_decode_kernel(q_ptr, k_ptr, v_ptr, part_ptr, top_ptr, sum_ptr, count_ptr, out_ptr,
                        SPLITS: tl.constexpr, T: tl.constexpr, D: tl.constexpr):  # fmt: skip
    head, split = tl.program_id(0), tl.program_id(1)
    d, t = tl.arange(0, D), split * (T // SPLITS) + tl.arange(0, T // SPLITS)
    places = (head * T + t[:, None]) * D + d[None, :]
    scores = tl.sum(tl.load(k_ptr + places) * tl.load(q_ptr + head * D + d)[None, :], 1)
    top = tl.max(scores, 0)
    weights = tl.exp2(scores - top)
    at = head * SPLITS + split
    tl.store(top_ptr + at, top)
    tl.store(sum_ptr + at, tl.sum(weights, 0))
    tl.store(part_ptr + at * D + d, tl.sum(weights[:, None] * tl.load(v_ptr + places), 0))
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + head, 1, sem="acq_rel") == SPLITS - 1:
        tl.debug_barrier()
        s = head * SPLITS + tl.arange(0, SPLITS)
        tops = tl.load(top_ptr + s)
        share = tl.exp2(tops - tl.max(tops, 0))
        total = tl.sum(share * tl.load(sum_ptr + s), 0)
        parts = tl.load(part_ptr + s[:, None] * D + d[None, :])
        tl.store(out_ptr + head * D + d, tl.sum(parts * share[:, None], 0) / total)


@healthy("attention of one query by splits of the keys; the last split of a head combines them")
def splits_combined_by_the_last(device):
    q, k, v = (
        integers(2, 16, low=0, high=2, seed=1),
        integers(2, 32, 16, low=0, high=2, seed=2),
        integers(2, 32, 16, seed=3),
    )
    out, part = torch.zeros(2, 16, device=device), torch.empty(2, 4, 16, device=device)
    tops, sums = torch.empty(2, 8, device=device)
    split_decode_kernel[(2, 4)](
        q.to(device), k.to(device), v.to(device), part, tops, sums, *zeros(device, 2), out, SPLITS=4, T=32, D=16
    )
    w = 2.0 ** torch.einsum("htd,hd->ht", k.double(), q.double())
    want = torch.einsum("ht,htd->hd", w / w.sum(1, keepdim=True), v.double())
    return [Check(out, want, 1e-5)]


@triton.jit
def tiled_softmax_kernel(x_ptr, N, BLOCK: tl.constexpr):
    """In place: once over the row for maximum and sum, once for the results."""
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    top, total = -float("inf"), 0.0
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + row * N + start + cols, start + cols < N, other=-float("inf"))
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp2(top - new) + tl.sum(tl.exp2(x - new), 0)
        top = new
    for start in range(0, N, BLOCK):
        mask = start + cols < N
        x = tl.load(x_ptr + row * N + start + cols, mask, other=-float("inf"))
        tl.store(x_ptr + row * N + start + cols, tl.exp2(x - top) / total, mask)


@healthy("a softmax in place over rows longer than a block, a program a row, twice over it")
def softmax_in_place_by_tiles(device):
    x = integers(5, 75, low=-3, high=4)
    own = x.to(device, copy=True)
    tiled_softmax_kernel[(5,)](own, 75, BLOCK=32)
    w = 2.0 ** x.double()
    return [Check(own, w / w.sum(1, keepdim=True), 1e-6)]


@triton.jit
def rotary_kernel(q_ptr, k_ptr, HEADS, KV_HEADS, HALF: tl.constexpr):
    """Pairs (2i, 2i + 1) turned by 90 degrees in place; programs beyond the key heads turn queries only."""
    token, head, i = tl.program_id(0), tl.program_id(1), tl.arange(0, HALF)
    q = q_ptr + (token * HEADS + head) * 2 * HALF + 2 * i
    a, b = tl.load(q), tl.load(q + 1)
    tl.store(q, -b)
    tl.store(q + 1, a)
    if head < KV_HEADS:
        k = k_ptr + (token * KV_HEADS + head) * 2 * HALF + 2 * i
        a, b = tl.load(k), tl.load(k + 1)
        tl.store(k, -b)
        tl.store(k + 1, a)


@healthy("queries and fewer keys turned in place in pairs of neighbours, each head by one program")
def neighbours_turned_in_place(device):
    q, k = integers(3, 4, 16, seed=1), integers(3, 2, 16, seed=2)
    own_q, own_k = q.to(device, copy=True), k.to(device, copy=True)
    rotary_kernel[(3, 4)](own_q, own_k, 4, 2, HALF=8)
    turned = [torch.stack([-t[..., 1::2], t[..., ::2]], -1).flatten(-2) for t in (q, k)]
    return [Check(own_q, turned[0]), Check(own_k, turned[1])]


@triton.jit
def bitonic_kernel(x_ptr, STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = pair // STRIDE * 2 * STRIDE + pair % STRIDE
    a, b = tl.load(x_ptr + low), tl.load(x_ptr + low + STRIDE)
    up = (low & SIZE) == 0
    tl.store(x_ptr + low, tl.where(up, tl.minimum(a, b), tl.maximum(a, b)))
    tl.store(x_ptr + low + STRIDE, tl.where(up, tl.maximum(a, b), tl.minimum(a, b)))


@healthy("a bitonic sort in place, a launch a step; both ends of a pair belong to one lane")
def sorted_by_pairs_in_place(device):
    x = integers(64, low=-100, high=100, dtype=torch.int32)
    own, size = x.to(device, copy=True), 2
    while size <= 64:
        stride = size // 2
        while stride:
            bitonic_kernel[(4,)](own, STRIDE=stride, SIZE=size, BLOCK=8)
            stride //= 2
        size *= 2
    return [Check(own, x.sort().values)]


@triton.jit
def jump_kernel(next_ptr, rank_ptr, next_out_ptr, rank_out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    after = tl.load(next_ptr + i, i < n, other=0)
    rank = tl.load(rank_ptr + i, i < n, other=0)
    tl.store(rank_out_ptr + i, rank + tl.load(rank_ptr + after, i < n, other=0), i < n)
    tl.store(next_out_ptr + i, tl.load(next_ptr + after, i < n, other=0), i < n)


@healthy("ranks of a list by pointer jumping, from one buffer into another")
def ranks_by_jumping(device):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    following = torch.empty(40, dtype=torch.int32)
    following[order[:-1]], following[order[-1]] = order[1:].to(torch.int32), int(order[-1])
    rank = torch.ones(40, dtype=torch.int32)
    rank[order[-1]] = 0
    a, b = [following.to(device), rank.to(device)], zeros(device, 40, 40)
    for _ in range(6):
        jump_kernel[(3,)](*a, *b, 40, BLOCK=16)
        a, b = b, a
    want = torch.empty(40, dtype=torch.int32)
    want[order] = torch.arange(39, -1, -1, dtype=torch.int32)
    return [Check(a[1], want)]


@triton.jit
def pool_gradient_kernel(
    index_ptr, dy_ptr, dx_ptr, n, outputs, WIDTH: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr
):
    """Each input collects from the windows that it is in, instead of each window scattering."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range((WIDTH + STEP - 1) // STEP):
        window = i // STEP - k
        inside = (i < n) & (window >= 0) & (window < outputs)
        chosen = tl.load(index_ptr + window, inside, other=-1)
        total += tl.where(chosen == i, tl.load(dy_ptr + window, inside, other=0.0), 0.0)
    tl.store(dx_ptr + i, total, i < n)


@healthy("gradients of overlapping windows of a maximum, collected by the inputs")
def gradients_collected_by_inputs(device):
    x = integers(61, low=-50, high=50)
    y, index = torch.nn.functional.max_pool1d(x[None, None], 3, 2, return_indices=True)
    dy, dx = integers(y.numel(), seed=4), torch.zeros(61, device=device)
    args = index.flatten().to(torch.int32).to(device), dy.to(device), dx
    pool_gradient_kernel[(4,)](*args, 61, y.numel(), WIDTH=3, STEP=2, BLOCK=16)
    return [Check(dx, torch.zeros(61).index_add(0, index.flatten(), dy))]


@triton.jit
def upsample_gradient_kernel(dy_ptr, dx_ptr, n, m, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + i, i < n, other=0.0)
    left = tl.minimum(i // 2, m - 1)
    right = tl.minimum(left + 1, m - 1)
    tl.atomic_add(dx_ptr + left, tl.where(i % 2 == 0, dy, dy * 0.5), i < n, sem="relaxed")
    tl.atomic_add(dx_ptr + right, dy * 0.5, (i < n) & (i % 2 == 1), sem="relaxed")


@healthy("the gradient of linear upsampling, scattered by atomics to both neighbours")
def gradient_of_upsampling_by_atomics(device):
    dy, dx = integers(80), torch.zeros(40, device=device)
    upsample_gradient_kernel[(5,)](dy.to(device), dx, 80, 40, BLOCK=16)
    left = torch.arange(80) // 2
    share = torch.where(torch.arange(80) % 2 == 0, dy, dy / 2)
    want = torch.zeros(40).index_add(0, left, share)
    want = want.index_add(0, (left[1::2] + 1).clamp_max(39), dy[1::2] / 2)
    return [Check(dx, want)]


@triton.jit
def packed_hash_kernel(key_ptr, table_ptr, SLOTS: tl.constexpr):
    """Key above, count below, in one word that compare and swap replaces as a whole."""
    key = tl.load(key_ptr + tl.program_id(0)).to(tl.int64)
    at = (key * 7) % SLOTS
    done = 0
    while done == 0:
        word = tl.atomic_or(table_ptr + at, 0, sem="relaxed")
        if (word == 0) | ((word >> 32) == key):
            new = (key << 32) | ((word & 4294967295) + 1)
            done = (tl.atomic_cas(table_ptr + at, word, new, sem="relaxed") == word).to(tl.int32)
        else:
            at = (at + 1) % SLOTS


@healthy("keys counted in a hash table whose words have key and count")
def keys_counted_in_a_table(device):
    keys, (table,) = integers(20, low=1, high=6, dtype=torch.int32), zeros(device, 8, dtype=torch.int64)
    packed_hash_kernel[(20,)](keys.to(device), table, SLOTS=8)
    words = table.cpu()[table.cpu() != 0].sort().values
    found, counts = keys.long().unique(return_counts=True)
    return [Check(words, (found << 32) | counts)]


@triton.jit
def own_histogram_kernel(x_ptr, part_ptr, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(pid * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        counts += tl.histogram(tl.load(x_ptr + i, i < n, other=0), BINS, mask=i < n)
    tl.store(part_ptr + pid * BINS + tl.arange(0, BINS), counts)


@triton.jit
def add_histograms_kernel(part_ptr, out_ptr, parts, BINS: tl.constexpr):
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    for p in range(parts):
        total += tl.load(part_ptr + p * BINS + bins)
    tl.store(out_ptr + bins, total)


@healthy("a histogram of each multiprocessor's program, added up by a second kernel")
def histograms_of_each_multiprocessor(device):
    x, programs = integers(500, low=0, high=16, dtype=torch.int32), min(multiprocessors(), 48)
    part, out = torch.empty(programs, 16, dtype=torch.int32, device=device), *zeros(device, 16)
    own_histogram_kernel[(programs,)](x.to(device), part, 500, BINS=16, BLOCK=8)
    add_histograms_kernel[(1,)](part, out, programs, BINS=16)
    return [Check(out, x.bincount(minlength=16).to(torch.int32))]


@triton.jit
def unique_kernel(x_ptr, bits_ptr, first_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0)
    old = tl.atomic_or(bits_ptr + x // 32, (1 << (x % 32)), i < n, sem="relaxed")
    tl.store(first_ptr + i, ((old >> (x % 32)) & 1 == 0).to(tl.int32), i < n)


@healthy("the old word of atomic_or says who set a bit first: one program for each value")
def one_of_each_value(device):
    x, (bits, first) = integers(100, low=0, high=60, dtype=torch.int32), zeros(device, 2, 100)
    unique_kernel[(7,)](x.to(device), bits, first, 100, BLOCK=16)
    return [Check(x[first.cpu() == 1].sort().values, x.unique())]


@triton.jit
def pop_kernel(head_ptr, next_ptr, value_ptr, out_ptr):
    """A stack that is only emptied: what is behind a node was written by an earlier launch."""
    node = tl.atomic_add(head_ptr, 0, sem="relaxed")
    after = tl.load(next_ptr + node)
    seen = tl.atomic_cas(head_ptr, node, after, sem="relaxed")
    while seen != node:
        node = seen
        after = tl.load(next_ptr + node)
        seen = tl.atomic_cas(head_ptr, node, after, sem="relaxed")
    tl.store(out_ptr + tl.program_id(0), tl.load(value_ptr + node))


@healthy("programs pop from a stack that an earlier launch filled")
def stack_that_is_emptied(device):
    head = torch.full((1,), 6, dtype=torch.int32, device=device)
    following, values = torch.arange(-1, 6, dtype=torch.int32).clamp_min(0), torch.arange(7, dtype=torch.int32) * 10
    (out,) = zeros(device, 6)
    pop_kernel[(6,)](head, following.to(device), values.to(device), out)
    return [Check(out.sort().values, torch.arange(10, 61, 10, dtype=torch.int32))]


@triton.jit
def norm_sums_kernel(x_ptr, part_ptr, count_ptr, dw_ptr, M, N, PROGRAMS, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(pid, M, PROGRAMS):
        total += tl.load(x_ptr + row * N + cols, cols < N, other=0.0)
    tl.store(part_ptr + pid * N + cols, total, cols < N)
    tl.debug_barrier()
    if tl.atomic_add(count_ptr, 1, sem="acq_rel") == PROGRAMS - 1:
        tl.debug_barrier()
        total = tl.zeros((BLOCK,), tl.float32)
        for p in range(PROGRAMS):
            total += tl.load(part_ptr + p * N + cols, cols < N, other=0.0)
        tl.store(dw_ptr + cols, total, cols < N)


@healthy("a gradient of weights by a row of sums each multiprocessor and the last program")
def gradient_by_multiprocessors_and_the_last(device):
    x, dw, programs = integers(70, 20), torch.zeros(20, device=device), min(multiprocessors(), 30)
    part = torch.empty(programs, 20, device=device)
    norm_sums_kernel[(programs,)](x.to(device), part, *zeros(device, 1), dw, 70, 20, programs, BLOCK=32)
    return [Check(dw, x.sum(0))]


@triton.jit
def next_seed_kernel(seed_ptr, count_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    seed = tl.load(seed_ptr)
    tl.store(out_ptr + pid * BLOCK + tl.arange(0, BLOCK), seed * 10 + tl.arange(0, BLOCK))
    tl.debug_barrier()
    if tl.atomic_add(count_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.debug_barrier()
        tl.store(seed_ptr, seed + 1)
        tl.store(count_ptr, 0)


@healthy(
    "the state of a generator is advanced by the last program, after all have read it; the counter by a plain store"
)
def state_advanced_by_the_last(device):
    seed, count, out = zeros(device, 1, 1, 64)
    for _ in range(3):
        next_seed_kernel[(4,)](seed, count, out, BLOCK=16)
    return [
        Check(seed, torch.full((1,), 3, dtype=torch.int32)),
        Check(out[:16], torch.arange(16, dtype=torch.int32) + 20),
    ]


@triton.jit
def double_check_kernel(ready_ptr, lock_ptr, table_ptr, out_ptr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if tl.atomic_add(ready_ptr, 0, sem="acquire") == 0:
        while tl.atomic_cas(lock_ptr, 0, 1, sem="acquire") == 1:
            pass
        tl.debug_barrier()
        if tl.atomic_add(ready_ptr, 0, sem="acquire") == 0:
            tl.store(table_ptr + cols, cols * 3)
            tl.debug_barrier()
            tl.atomic_xchg(ready_ptr, 1, sem="release")
        tl.debug_barrier()
        tl.atomic_xchg(lock_ptr, 0, sem="release")
    tl.debug_barrier()
    tl.store(out_ptr + pid * BLOCK + cols, tl.load(table_ptr + cols))


@healthy("a table made under a lock, looked for before and after the lock is taken, each time with acquire")
def table_looked_for_twice(device):
    ready, lock, table, out = zeros(device, 1, 1, 16, 80)
    double_check_kernel[(5,)](ready, lock, table, out, BLOCK=16)
    return [Check(out.view(5, 16), (torch.arange(16, dtype=torch.int32) * 3).repeat(5, 1))]


@triton.jit
def butterfly_kernel(x_ptr, slot_ptr, step_ptr, out_ptr, LOG: tl.constexpr, BLOCK: tl.constexpr):
    """All programs have the sum of all in the end: each step adds a partner's value, which has a slot for each step."""
    pid, n, cols = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    total = tl.load(x_ptr + pid * BLOCK + cols)
    for step in tl.static_range(LOG):
        tl.store(slot_ptr + (step * n + pid) * BLOCK + cols, total)
        tl.debug_barrier()
        tl.atomic_xchg(step_ptr + pid, step + 1, sem="release", scope="sys")
        partner = pid ^ (1 << step)
        while tl.atomic_add(step_ptr + partner, 0, sem="acquire", scope="sys") <= step:
            pass
        tl.debug_barrier()
        total += tl.load(slot_ptr + (step * n + partner) * BLOCK + cols)
    tl.store(out_ptr + pid * BLOCK + cols, total)


@healthy("an all-reduce between programs by exchanges with partners")
def sums_exchanged_with_partners(device):
    x, out, slots = integers(8, 16), torch.zeros(8, 16, device=device), torch.empty(3, 8, 16, device=device)
    butterfly_kernel[(8,)](x.to(device), slots, *zeros(device, 8), out, LOG=3, BLOCK=16)
    return [Check(out, x.sum(0).repeat(8, 1))]


@triton.jit
def ring_kernel(x_ptr, sent_ptr, signal_ptr, BLOCK: tl.constexpr):
    """A reduction that goes round: each passes its sum so far on, then the whole goes round once more."""
    pid, n, cols = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    right, own = (pid + 1) % n, tl.load(x_ptr + pid * BLOCK + cols)
    if pid > 0:
        while tl.atomic_add(signal_ptr + pid, 0, sem="acquire", scope="sys") < 1:
            pass
        tl.debug_barrier()
        own += tl.load(sent_ptr + pid * BLOCK + cols)
    tl.store(sent_ptr + right * BLOCK + cols, own)
    tl.debug_barrier()
    tl.atomic_add(signal_ptr + right, 1, sem="release", scope="sys")
    if pid < n - 1:
        while tl.atomic_add(signal_ptr + pid, 0, sem="acquire", scope="sys") < tl.where(pid == 0, 1, 2):
            pass
        tl.debug_barrier()
        own = tl.load(sent_ptr + pid * BLOCK + cols)
        if right < n - 1:
            tl.store(sent_ptr + right * BLOCK + cols, own)
            tl.debug_barrier()
            tl.atomic_add(signal_ptr + right, 1, sem="release", scope="sys")
    tl.store(x_ptr + pid * BLOCK + cols, own)


@healthy("sums that go round a ring of programs twice, signals at the scope of the system")
def sums_round_a_ring(device):
    x, sent = integers(5, 16), torch.zeros(5, 16, device=device)
    own = x.to(device, copy=True)
    ring_kernel[(5,)](own, sent, *zeros(device, 5), BLOCK=16)
    return [Check(own, x.sum(0).repeat(5, 1))]


@triton.jit
def quarter_turn_kernel(x_ptr, N: tl.constexpr, TILE: tl.constexpr):
    """A square matrix turned by 90 degrees in place, four tiles at a time by one program."""
    half, last = N // TILE // 2, N - 1
    i, j = tl.program_id(0) // half, tl.program_id(0) % half
    r, c = i * TILE + tl.arange(0, TILE)[:, None], j * TILE + tl.arange(0, TILE)[None, :]
    a, b = tl.load(x_ptr + r * N + c), tl.load(x_ptr + c * N + last - r)
    d, e = tl.load(x_ptr + (last - r) * N + last - c), tl.load(x_ptr + (last - c) * N + r)
    tl.debug_barrier()
    tl.store(x_ptr + r * N + c, e)
    tl.store(x_ptr + c * N + last - r, a)
    tl.store(x_ptr + (last - r) * N + last - c, b)
    tl.store(x_ptr + (last - c) * N + r, d)


@healthy("a matrix turned in place: the four tiles that change places belong to one program")
def quarter_turn_in_place(device):
    x = integers(32, 32)
    own = x.to(device, copy=True)
    quarter_turn_kernel[(4,)](own, N=32, TILE=8)
    return [Check(own, x.rot90(-1))]


@triton.jit
def copy_pages_kernel(cache_ptr, pair_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    pair, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source, target = tl.load(pair_ptr + 2 * pair), tl.load(pair_ptr + 2 * pair + 1)
    tl.store(cache_ptr + target * SIZE + i, tl.load(cache_ptr + source * SIZE + i))


@healthy("pages of a cache copied within it: no page is both read and written")
def pages_copied_within_a_cache(device):
    cache, pairs = integers(8, 32), torch.tensor([[0, 5], [0, 6], [3, 7]], dtype=torch.int32)
    own = cache.to(device, copy=True)
    copy_pages_kernel[(3, 2)](own, pairs.to(device), SIZE=32, BLOCK=16)
    want = cache.clone()
    want[pairs[:, 1].long()] = cache[pairs[:, 0].long()]
    return [Check(own, want)]


@triton.jit
def bucket_kernel(x_ptr, count_ptr, bucket_ptr, n, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0)
    place = tl.atomic_add(count_ptr + x % 4, 1, i < n, sem="relaxed")
    tl.store(bucket_ptr + x % 4 * CAPACITY + place, x, (i < n) & (place < CAPACITY))


@healthy("buckets with a capacity: who draws a place beyond it stores nothing")
def buckets_with_a_capacity(device):
    x, (counts, buckets) = torch.arange(1, 61, dtype=torch.int32), zeros(device, 4, 40)
    bucket_kernel[(4,)](x.to(device), counts, buckets, 60, CAPACITY=10, BLOCK=16)
    held = buckets.cpu().view(4, 10)
    return [Check(held % 4, torch.arange(4, dtype=torch.int32)[:, None].repeat(1, 10)), Check(counts, torch.full((4,), 15, dtype=torch.int32)),
            Check(held.unique(), held.flatten().sort().values)]  # fmt: skip


@triton.jit
def overflow_kernel(g_ptr, inf_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + i, i < n, other=0.0)
    if tl.max(tl.abs(g), 0) > 6:
        tl.store(inf_ptr, 1.0)


@healthy(
    "every program that sees an overflow stores 1: a note that two write the same value is right, an accusation is not"
)
def overflow_noted_by_all_that_see_it(device):
    seen = torch.zeros(1, device=device)
    overflow_kernel[(6,)](integers(90).to(device), seen, 90, BLOCK=16)
    return [Check(seen, torch.ones(1))]


@triton.jit
def wrapped_matmul_kernel(a_ptr, b_ptr, c_ptr, M, N: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr):
    rows = (tl.program_id(0) * TILE + tl.arange(0, TILE)) % M
    n, k = tl.arange(0, N), tl.arange(0, K)
    product = tl.dot(tl.load(a_ptr + rows[:, None] * K + k[None, :]), tl.load(b_ptr + k[:, None] * N + n[None, :]))
    tl.store(c_ptr + rows[:, None] * N + n[None, :], product)


@healthy("rows that wrap around are computed and stored twice, with the same value: a note and no accusation")
def wrapped_rows_stored_twice(device):
    a, b, c = integers(40, 16, seed=1), integers(16, 16, seed=2), torch.zeros(40, 16, device=device)
    wrapped_matmul_kernel[(3,)](a.to(device), b.to(device), c, 40, N=16, K=16, TILE=16)
    return [Check(c, a @ b)]
