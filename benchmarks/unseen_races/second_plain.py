"""Kernels that compute: tiles, rows, gathers and scatters, most of them alone with their results."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers, normal, racy


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def spans_kernel(x_ptr, start_ptr, out_ptr, BLOCK: tl.constexpr, INCLUSIVE: tl.constexpr):
    span, i = tl.program_id(0), tl.arange(0, BLOCK)
    start, end = tl.load(start_ptr + span), tl.load(start_ptr + span + 1)
    at = start + i
    mask = at <= end if INCLUSIVE else at < end
    x = tl.load(x_ptr + at, mask, other=0.0)
    tl.store(out_ptr + at, x - tl.sum(x, 0), mask)


def _spans(device, inclusive):
    starts = [0, 5, 5, 12, 28, 30]
    x, out = integers(31, low=1), torch.zeros(31, device=device)
    spans_kernel[(5,)](
        x.to(device), torch.tensor(starts, dtype=torch.int32).to(device), out, BLOCK=16, INCLUSIVE=inclusive
    )
    want = torch.zeros(31)
    for a, b in pairwise(starts):
        want[a:b] = x[a:b] - x[a:b].sum()
    return [Check(out, want)]


@healthy("sequences of several lengths in one tensor, an empty one too")
def spans_up_to_their_ends(device):
    return _spans(device, False)


@racy("out_ptr", "write/write", "a sequence's mask takes in the first element of the next one")
def spans_beyond_their_ends(device):
    _spans(device, True)


@triton.jit
def window_cache_kernel(
    k_ptr, cache_ptr, position, T, CAPACITY: tl.constexpr, D: tl.constexpr, LAST_ONLY: tl.constexpr
):
    """T tokens from a position on into a cache that goes round; only the last CAPACITY of them are to stay."""
    token, d = tl.program_id(0), tl.arange(0, D)
    if (token >= T - CAPACITY) | (LAST_ONLY == 0):
        slot = (position + token) % CAPACITY
        tl.store(cache_ptr + slot * D + d, tl.load(k_ptr + token * D + d))


def _window_cache(device, last_only):
    k, cache = integers(11, 16, low=1), torch.zeros(8, 16, device=device)
    window_cache_kernel[(11,)](k.to(device), cache, 5, 11, CAPACITY=8, D=16, LAST_ONLY=last_only)
    want = torch.zeros(8, 16)
    for token in range(11):
        want[(5 + token) % 8] = k[token]
    return [Check(cache, want)]


@healthy("of more tokens than a window has, those that will be overwritten are not written")
def window_of_the_last_tokens(device):
    return _window_cache(device, 1)


@racy("cache_ptr", "write/write", "more tokens than a window has are all written: the last may land first")
def window_of_too_many_tokens(device):
    _window_cache(device, 0)


@triton.jit
def swizzled_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, MISTAKE: tl.constexpr
):
    """C = 2 C + A B in groups of rows of tiles; the last group may be lower than the others."""
    pid, rows_of_tiles, cols_of_tiles = tl.program_id(0), tl.cdiv(M, TILE), tl.cdiv(N, TILE)
    group = pid // (GROUP * cols_of_tiles)
    height = GROUP if MISTAKE else tl.minimum(rows_of_tiles - group * GROUP, GROUP)
    inside = pid % (GROUP * cols_of_tiles)
    m = group * GROUP + inside % height
    n = (inside // height) % cols_of_tiles if MISTAKE == 0 else (inside // 2) % cols_of_tiles
    rows, cols, k = m * TILE + tl.arange(0, TILE), n * TILE + tl.arange(0, TILE), tl.arange(0, K)
    a = tl.load(a_ptr + rows[:, None] * K + k[None, :], (rows < M)[:, None], other=0.0)
    b = tl.load(b_ptr + k[:, None] * N + cols[None, :], (cols < N)[None, :], other=0.0)
    places, mask = c_ptr + rows[:, None] * N + cols[None, :], (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(places, 2 * tl.load(places, mask, other=0.0) + tl.dot(a, b), mask)


def _swizzled(device, mistake):
    a, b, c = integers(75, 16, seed=1), integers(16, 40, seed=2), integers(75, 40, seed=3)
    own = c.to(device, copy=True)
    swizzled_kernel[(15,)](a.to(device), b.to(device), own, 75, 40, K=16, TILE=16, GROUP=3, MISTAKE=mistake)
    return [Check(own, 2 * c + a @ b)]


@healthy("tiles in groups whose last one is lower, an epilogue in place")
def tiles_in_groups_of_rows(device):
    return _swizzled(device, 0)


@racy(
    "c_ptr",
    "read/write,write/write",
    "columns are counted by another height than rows: some tiles have two programs and are updated twice",
)
def tiles_in_groups_of_two_heights(device):
    _swizzled(device, 1)


@triton.jit
def flat_tiles_kernel(x_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, MISTAKE: tl.constexpr):
    pid = tl.program_id(0)
    across = tl.cdiv(M, ROWS) if MISTAKE else tl.cdiv(N, COLS)
    rows, cols = pid // across * ROWS + tl.arange(0, ROWS), pid % across * COLS + tl.arange(0, COLS)
    places, mask = x_ptr + rows[:, None] * N + cols[None, :], (rows[:, None] < M) & (cols[None, :] < N)
    if MISTAKE:
        mask = rows[:, None] * N + cols[None, :] < M * N
    tl.store(places, tl.load(places, mask, other=0.0) * 3, mask)


def _flat_tiles(device, mistake):
    x = integers(30, 20, low=1)
    own = x.to(device, copy=True)
    flat_tiles_kernel[(8,)](own, 30, 20, ROWS=8, COLS=16, MISTAKE=mistake)
    return [Check(own, 3 * x)]


@healthy("tiles of a matrix by one index, divided by how many there are across")
def tiles_by_one_index(device):
    return _flat_tiles(device, 0)


@racy(
    "x_ptr",
    "read/write,write/write",
    "the index is divided by how many tiles there are down, and the mask is a flat one",
)
def tiles_by_an_index_divided_wrongly(device):
    _flat_tiles(device, 1)


@triton.jit
def token_step_kernel(token_ptr, g_ptr, table_ptr, n, D: tl.constexpr, MISTAKE: tl.constexpr):
    """A step of an embedding in place: sorted tokens, a program for each first of its kind."""
    at, d = tl.program_id(0), tl.arange(0, D)
    token = tl.load(token_ptr + at)
    if MISTAKE == 0:  # noqa: SIM102
        if at > 0:  # noqa: SIM102
            if tl.load(token_ptr + at - 1) == token:
                return
    row = tl.load(table_ptr + token * D + d)
    more = 1
    while more == 1:
        row -= tl.load(g_ptr + at * D + d)
        at += 1
        more = 0
        if (at < n) & (MISTAKE == 0):
            more = (tl.load(token_ptr + at, at < n, other=-1) == token).to(tl.int32)
    tl.store(table_ptr + token * D + d, row)


def _token_steps(device, mistake):
    tokens = torch.tensor([0, 0, 2, 3, 3, 3, 5], dtype=torch.int32)
    g, table = integers(7, 16, seed=1), integers(6, 16, seed=2)
    own = table.to(device, copy=True)
    token_step_kernel[(7,)](tokens.to(device), g.to(device), own, 7, D=16, MISTAKE=mistake)
    return [Check(own, table.index_add(0, tokens.long(), -g))]


@healthy("gradients of equal tokens are added by the program of the first of them")
def step_of_the_first_of_equal_tokens(device):
    return _token_steps(device, 0)


@racy("table_ptr", "read/write,write/write", "each token steps for itself, equal ones at the same row")
def step_of_each_of_equal_tokens(device):
    _token_steps(device, 1)


@triton.jit
def merge_kernel(a_ptr, b_ptr, out_ptr, na, nb):
    """Each element finds its place in the other list by halving; ties go to the first list."""
    i = tl.program_id(0)
    if i < na:
        x = tl.load(a_ptr + i)
        low, high = 0, nb
        while low < high:
            middle = (low + high) // 2
            less = tl.load(b_ptr + middle) < x
            low = tl.where(less, middle + 1, low)
            high = tl.where(less, high, middle)
        tl.store(out_ptr + i + low, x)
    else:
        x = tl.load(b_ptr + i - na)
        low, high = 0, na
        while low < high:
            middle = (low + high) // 2
            less = tl.load(a_ptr + middle) <= x
            low = tl.where(less, middle + 1, low)
            high = tl.where(less, high, middle)
        tl.store(out_ptr + i - na + low, x)


@healthy("two sorted lists merged: every element computes its own place")
def merged_by_places(device):
    a, b = integers(13, seed=1, dtype=torch.int32).sort().values, integers(20, seed=2, dtype=torch.int32).sort().values
    (out,) = zeros(device, 33)
    merge_kernel[(33,)](a.to(device), b.to(device), out, 13, 20)
    return [Check(out, torch.cat([a, b]).sort().values)]


@triton.jit
def _segmented(flag_a, a, flag_b, b):
    return flag_a | flag_b, tl.where(flag_b == 1, b, a + b)


@triton.jit
def segmented_scan_kernel(x_ptr, head_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, cols < N, other=0.0)
    heads = tl.load(head_ptr + row * N + cols, cols < N, other=1)
    _, sums = tl.associative_scan((heads, x), 0, _segmented)
    tl.store(out_ptr + row * N + cols, sums, cols < N)


@healthy("sums that begin anew at marks, by a scan of pairs")
def sums_that_begin_anew(device):
    x, heads, out = (
        integers(4, 30, seed=1),
        integers(4, 30, low=0, high=2, seed=2, dtype=torch.int32),
        torch.zeros(4, 30, device=device),
    )
    segmented_scan_kernel[(4,)](x.to(device), heads.to(device), out, 30, BLOCK=32)
    want = x.clone()
    for i in range(1, 30):
        want[:, i] += torch.where(heads[:, i] == 1, 0.0, want[:, i - 1])
    return [Check(out, want)]


@triton.jit
def loss_kernel(logit_ptr, target_ptr, loss_ptr, N, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient goes where the logits were; rows that are ignored get zeros and leave early."""
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    places = logit_ptr + row * N + cols
    target = tl.load(target_ptr + row)
    if target == IGNORED:
        tl.store(places, tl.zeros((BLOCK,), tl.float32), cols < N)
        return
    x = tl.load(places, cols < N, other=-float("inf"))
    top = tl.max(x, 0)
    weights = tl.exp2(x - top)
    total = tl.sum(weights, 0)
    tl.store(loss_ptr + row, top - tl.load(logit_ptr + row * N + target))
    tl.debug_barrier()
    tl.store(places, weights / total - (cols == target).to(tl.float32), cols < N)


@healthy("gradients of a loss over the logits that they come from, a row a program")
def loss_over_its_logits(device):
    x, targets, loss = (
        integers(6, 20),
        torch.tensor([3, -1, 0, 19, 7, -1], dtype=torch.int32),
        torch.zeros(6, device=device),
    )
    own = x.to(device, copy=True)
    loss_kernel[(6,)](own, targets.to(device), loss, 20, IGNORED=-1, BLOCK=32)
    w = 2.0 ** x.double()
    grad = w / w.sum(1, keepdim=True) - torch.nn.functional.one_hot(targets.long().clamp_min(0), 20)
    known = targets >= 0
    want = torch.where(known, x.amax(1) - x.gather(1, targets.long().clamp_min(0)[:, None])[:, 0], 0.0)
    return [Check(own, torch.where(known[:, None], grad, 0.0), 1e-6), Check(loss, want)]


@triton.jit
def largest_kernel(x_ptr, value_ptr, index_ptr, N, K: tl.constexpr, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, cols < N, other=-float("inf"))
    for k in tl.static_range(K):
        top, at = tl.max(x, 0, return_indices=True)
        tl.store(value_ptr + row * K + k, top)
        tl.store(index_ptr + row * K + k, at)
        x = tl.where(cols == at, -float("inf"), x)


@healthy("the largest four of each row, one after another")
def largest_of_rows(device):
    x, values, (index,) = normal(5, 50), torch.zeros(5, 4, device=device), zeros(device, 20)
    largest_kernel[(5,)](x.to(device), values, index, 50, K=4, BLOCK=64)
    want = x.topk(4)
    return [Check(values, want.values), Check(index.view(5, 4), want.indices.to(torch.int32))]


@triton.jit
def paged_read_kernel(
    q_ptr, cache_ptr, table_ptr, length_ptr, out_ptr, PAGES: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr
):
    row, d, t = tl.program_id(0), tl.arange(0, D), tl.arange(0, PAGE)
    length, q = tl.load(length_ptr + row), tl.load(q_ptr + row * D + d)
    total = tl.zeros((D,), tl.float32)
    for page in range(tl.cdiv(length, PAGE)):
        number = tl.load(table_ptr + row * PAGES + page)
        mask = page * PAGE + t < length
        k = tl.load(cache_ptr + (number * PAGE + t[:, None]) * D + d[None, :], mask[:, None], other=0.0)
        total += tl.sum(k * tl.sum(k * q[None, :], 1)[:, None], 0)
    tl.store(out_ptr + row * D + d, total)


@healthy("pages that two rows share are read by both")
def pages_shared_by_readers(device):
    q, cache, out = (
        integers(3, 16, low=-2, high=3, seed=1),
        integers(6, 4, 16, low=-2, high=3, seed=2),
        torch.zeros(3, 16, device=device),
    )
    table, lengths = (
        torch.tensor([[0, 3, 5], [0, 3, 1], [2, 0, 0]], dtype=torch.int32),
        torch.tensor([10, 9, 3], dtype=torch.int32),
    )
    paged_read_kernel[(3,)](
        q.to(device), cache.to(device), table.to(device), lengths.to(device), out, PAGES=3, PAGE=4, D=16
    )
    want = []
    for row in range(3):
        k = cache[table[row].long()].flatten(0, 1)[: int(lengths[row])]
        want.append((k * (k @ q[row])[:, None]).sum(0))
    return [Check(out, torch.stack(want))]


@triton.jit
def butterfly_kernel(x_ptr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = pair // STRIDE * 2 * STRIDE + pair % STRIDE
    a, b = tl.load(x_ptr + low), tl.load(x_ptr + low + STRIDE)
    tl.store(x_ptr + low, a + b)
    tl.store(x_ptr + low + STRIDE, a - b)


@healthy("a Walsh-Hadamard transform in place, a launch a step")
def transform_in_place(device):
    x = integers(64)
    own, want = x.to(device, copy=True), x.clone()
    for step in range(6):
        butterfly_kernel[(4,)](own, STRIDE=1 << step, BLOCK=8)
        a, b = want.view(-1, 2, 1 << step).unbind(1)
        want = torch.stack([a + b, a - b], 1).flatten()
    return [Check(own, want)]


@triton.jit
def edges_kernel(source_ptr, target_ptr, x_ptr, out_ptr, least_ptr, n, D: tl.constexpr, BLOCK: tl.constexpr):
    e, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    mask = (e < n)[:, None]
    source, target = tl.load(source_ptr + e, e < n, other=0), tl.load(target_ptr + e, e < n, other=0)
    x = tl.load(x_ptr + source[:, None] * D + d[None, :], mask, other=0.0)
    tl.atomic_add(out_ptr + target[:, None] * D + d[None, :], x, mask, sem="relaxed")
    tl.atomic_min(least_ptr + target[:, None] * D + d[None, :], x, mask, sem="relaxed")


@healthy("messages along edges added, and their minima, by atomics of floats of both signs")
def messages_along_edges(device):
    source, target = (
        integers(40, low=0, high=9, seed=1, dtype=torch.int32),
        integers(40, low=0, high=9, seed=2, dtype=torch.int32),
    )
    x, out, least = integers(9, 16), torch.zeros(9, 16, device=device), torch.full((9, 16), 100.0, device=device)
    edges_kernel[(5,)](source.to(device), target.to(device), x.to(device), out, least, 40, D=16, BLOCK=8)
    sent = x[source.long()]
    places = target.long()[:, None].expand(-1, 16)
    return [Check(out, torch.zeros(9, 16).index_add(0, target.long(), sent)),
            Check(least, torch.full((9, 16), 100.0).scatter_reduce(0, places, sent, "amin"))]  # fmt: skip


@triton.jit
def labels_kernel(edge_ptr, label_ptr, changed_ptr):
    """Labels go along edges; they are read by atomics, since others lower them meanwhile."""
    e = tl.program_id(0)
    a, b = tl.load(edge_ptr + 2 * e), tl.load(edge_ptr + 2 * e + 1)
    of_a, of_b = tl.atomic_add(label_ptr + a, 0, sem="relaxed"), tl.atomic_add(label_ptr + b, 0, sem="relaxed")
    low = tl.minimum(of_a, of_b)
    if of_a != of_b:
        tl.atomic_min(label_ptr + a, low, sem="relaxed")
        tl.atomic_min(label_ptr + b, low, sem="relaxed")
        tl.atomic_or(changed_ptr, 1, sem="relaxed")


@healthy("components of a graph by labels that only fall, launched until none does")
def components_by_falling_labels(device):
    edges = torch.tensor([[0, 1], [1, 2], [4, 5], [2, 3], [6, 7], [7, 4]], dtype=torch.int32).to(device)
    labels, rounds = torch.arange(9, dtype=torch.int32).to(device), 0
    while rounds < 9:
        (changed,) = zeros(device, 1)
        labels_kernel[(6,)](edges, labels, changed)
        rounds += 1
        if not int(changed):
            break
    return [Check(labels, torch.tensor([0, 0, 0, 0, 4, 4, 4, 4, 8], dtype=torch.int32))]


class Matrix(NamedTuple):
    data: torch.Tensor
    rows: int
    cols: int


@triton.jit
def record_kernel(a, b, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < a.cols
    tl.store(b.data + row * b.cols + cols, tl.load(a.data + row * a.cols + cols, mask) + a.rows, mask)


@healthy("records of a tensor and its sizes as arguments")
def records_as_arguments(device):
    x, out = integers(4, 20), torch.zeros(4, 20, device=device)
    record_kernel[(4,)](Matrix(x.to(device), 4, 20), Matrix(out, 4, 20), BLOCK=32)
    return [Check(out, x + 4)]


@triton.jit(noinline=True)
def take(lock_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass


@triton.jit
def helped_kernel(x_ptr, sum_ptr, lock_ptr):
    pid = tl.program_id(0)
    take(lock_ptr)
    tl.debug_barrier()
    tl.store(sum_ptr, tl.load(sum_ptr) * 1 + tl.load(x_ptr + pid))
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


@healthy("a lock taken by a function that is not inlined")
def lock_of_a_function(device):
    x, total = integers(6), torch.zeros(1, device=device)
    helped_kernel[(6,)](x.to(device), total, *zeros(device, 1))
    return [Check(total, x.sum().view(1))]


def _prune(configs, args, **_):
    return [config for config in configs if config.kwargs["BLOCK"] <= 32]


@triton.autotune(
    [triton.Config({"BLOCK": b}) for b in (16, 32, 64)],
    key=["n"], prune_configs_by={"early_config_prune": _prune}, reset_to_zero=["count_ptr"],
)  # fmt: skip
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned_count_kernel(x_ptr, count_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i) if EVEN else tl.load(x_ptr + i, i < n, other=0)
    tl.atomic_add(count_ptr + tl.arange(0, 16), tl.histogram(x, 16, mask=i < n))


@healthy("counts of an autotuned kernel with pruning, heuristics and a reset")
def tuned_counts_that_are_reset(device):
    x, (counts,) = integers(100, low=0, high=16, dtype=torch.int32), zeros(device, 16)
    tuned_count_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x.to(device), counts, 100)
    return [Check(counts, x.bincount(minlength=16).to(torch.int32))]


@triton.jit
def clusters_kernel(x_ptr, y_ptr, out_ptr, near_ptr, far_ptr, CLUSTER: tl.constexpr, BLOCK: tl.constexpr):
    """A barrier of two steps: within clusters first, then between the last ones of each, who let the others go."""
    pid, n, cols = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    cluster = pid // CLUSTER
    tl.store(y_ptr + pid * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols) * 5)
    tl.debug_barrier()
    if tl.atomic_add(near_ptr + cluster, 1, sem="acq_rel") == CLUSTER - 1:
        tl.atomic_add(far_ptr, 1, sem="acq_rel")
        while tl.atomic_add(far_ptr, 0, sem="acquire") < n // CLUSTER:
            pass
        tl.atomic_add(near_ptr + cluster, 1, sem="release")
    else:
        while tl.atomic_add(near_ptr + cluster, 0, sem="acquire") <= CLUSTER:
            pass
    tl.debug_barrier()
    tl.store(out_ptr + pid * BLOCK + cols, tl.load(y_ptr + ((pid + CLUSTER) % n) * BLOCK + cols))


@healthy("a barrier between clusters of programs and within them")
def barrier_of_two_steps(device):
    x, (y, out) = integers(6, 16), torch.zeros(2, 6, 16, device=device)
    clusters_kernel[(6,)](x.to(device), y, out, *zeros(device, 3, 1), CLUSTER=2, BLOCK=16)
    return [Check(out, 5 * x.roll(-2, 0))]


@triton.jit
def block_sparse_kernel(a_ptr, b_ptr, c_ptr, start_ptr, col_ptr, N: tl.constexpr, TILE: tl.constexpr):
    row, i, n = tl.program_id(0), tl.arange(0, TILE), tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for block in range(tl.load(start_ptr + row), tl.load(start_ptr + row + 1)):
        k = tl.load(col_ptr + block) * TILE + i
        a = tl.load(a_ptr + (block * TILE + i[:, None]) * TILE + i[None, :])
        total += tl.dot(a, tl.load(b_ptr + k[:, None] * N + n[None, :]))
    tl.store(c_ptr + (row * TILE + i[:, None]) * N + n[None, :], total)


@healthy("blocks of a sparse matrix times a dense one")
def product_of_sparse_blocks(device):
    blocks, b, c = (
        integers(5, 16, 16, low=-3, high=4, seed=1),
        integers(64, 32, low=-3, high=4, seed=2),
        torch.zeros(48, 32, device=device),
    )
    start, cols = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([0, 3, 1, 2, 3], dtype=torch.int32)
    block_sparse_kernel[(3, 2)](blocks.to(device), b.to(device), c, start.to(device), cols.to(device), N=32, TILE=16)
    want = torch.zeros(48, 32)
    for row in range(3):
        for e in range(int(start[row]), int(start[row + 1])):
            want[row * 16 : row * 16 + 16] += blocks[e] @ b[int(cols[e]) * 16 : int(cols[e]) * 16 + 16]
    return [Check(c, want)]


@triton.jit
def host_tiles_kernel(source, target, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    target.store([col, row], source.load([row, col]).T)


@healthy("tiles transposed from a descriptor of the host into another")
def tiles_of_descriptors_of_the_host(device):
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, out = integers(20, 24), torch.zeros(24, 20, device=device)
    source = TensorDescriptor.from_tensor(x.to(device), [8, 16])
    host_tiles_kernel[(3, 2)](source, TensorDescriptor.from_tensor(out, [16, 8]), ROWS=8, COLS=16)
    return [Check(out, x.t().contiguous())]


@triton.jit
def interleaved_kernel(x_ptr, out_ptr, n, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Programs of one head are HEADS apart in memory: their elements lie between each other's."""
    head, i = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i * HEADS + head, i < n, other=0.0)
    tl.store(x_ptr + i * HEADS + head, x * (head + 1), i < n)
    tl.atomic_add(out_ptr + head, tl.sum(x, 0))


@healthy("heads whose elements lie between each other's, in place, with a sum of each")
def heads_between_each_other(device):
    x, out = integers(50, 3), torch.zeros(3, device=device)
    own = x.to(device, copy=True)
    interleaved_kernel[(3, 4)](own, out, 50, HEADS=3, BLOCK=16)
    return [Check(own, x * torch.arange(1.0, 4.0)), Check(out, x.sum(0))]


@triton.jit
def product_by_swaps_kernel(x_ptr, out_ptr):
    """The larger magnitude of two floats of 64 bits, which no atomic has, by compare and swap on their bits."""
    x = tl.load(x_ptr + tl.program_id(0))
    bits = out_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    old = tl.atomic_or(bits, 0, sem="relaxed")
    done = 0
    while done == 0:
        held = old.to(tl.float64, bitcast=True)
        new = tl.where(tl.abs(x) > tl.abs(held), x, held)
        seen = tl.atomic_cas(bits, old, new.to(tl.int64, bitcast=True), sem="relaxed")
        done = (seen == old).to(tl.int32)
        old = seen


@healthy("the largest magnitude of doubles by compare and swap")
def magnitude_by_swaps(device):
    x, out = normal(20, dtype=torch.float64), torch.zeros(1, dtype=torch.float64, device=device)
    product_by_swaps_kernel[(20,)](x.to(device), out)
    return [Check(out, x[x.abs().argmax()].view(1))]
