"""Plain loads and stores: gradients, caches, permutations, phases of a launch, tiles at odd sizes, grids of a GPU."""

from __future__ import annotations

import functools
import operator

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers, multiprocessors, racy


def zeros(device, *shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=device)


def own(x, device):
    return x.to(device, copy=True)


@triton.jit
def relative_bias_kernel(ds_ptr, db_ptr, N: tl.constexpr, ATOMIC: tl.constexpr):
    row, col = tl.program_id(0), tl.arange(0, N)
    ds, at = tl.load(ds_ptr + row * N + col), db_ptr + row - col + N - 1
    if ATOMIC:
        tl.atomic_add(at, ds, sem="relaxed")
    else:
        tl.store(at, tl.load(at) + ds)


@healthy("each row adds to the distances that it has by atomics")
def bias_by_distance_by_atomics(device, atomic=True):
    ds, db = integers(16, 16), zeros(device, 31)
    relative_bias_kernel[(16,)](ds.to(device), db, N=16, ATOMIC=atomic)
    distance = torch.arange(16)[:, None] - torch.arange(16) + 15
    return [Check(db, torch.zeros(31).index_add_(0, distance.flatten(), ds.flatten()))]


@racy("db_ptr", "read/write,write/write", "rows share the distances between query and key and add without atomics")
def bias_by_distance_by_rows(device):
    bias_by_distance_by_atomics(device, False)


@triton.jit
def centre_kernel(x_ptr, sum_ptr, out_ptr, N: tl.constexpr, PHASE: tl.constexpr):
    p, i = tl.program_id(0), tl.arange(0, N)
    if PHASE != "apply":
        tl.store(sum_ptr + p, tl.sum(tl.load(x_ptr + i * N + p), 0))
    if PHASE != "sum":
        tl.store(out_ptr + p * N + i, N * tl.load(x_ptr + p * N + i) - tl.load(sum_ptr + i))


@healthy("channels are summed in a launch and applied in the next one")
def channels_centred_in_two_launches(device, phases=("sum", "apply")):
    x, out, sums = integers(16, 16), zeros(device, 16, 16), zeros(device, 16)
    for phase in phases:
        centre_kernel[(16,)](x.to(device), sums, out, N=16, PHASE=phase)
    return [Check(out, 16 * x - x.sum(0))]


@racy("sum_ptr", "read/write", "sums of other programs' channels are read in the launch that makes them")
def channels_centred_in_one_launch(device):
    channels_centred_in_two_launches(device, ("both",))


@triton.jit
def bit_reversal_kernel(x_ptr, LOG: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = i * 0
    for bit in tl.static_range(LOG):
        j |= ((i >> bit) & 1) << (LOG - 1 - bit)
    mask = i < j if PAIRS else i >= 0
    a, b = tl.load(x_ptr + i, mask), tl.load(x_ptr + j, mask)
    tl.store(x_ptr + i, b, mask)
    if PAIRS:
        tl.store(x_ptr + j, a, mask)


@healthy("the lower index of each pair swaps both elements, and nobody else touches them")
def bits_reversed_by_pairs(device, pairs=True):
    x = integers(64)
    mine = own(x, device)
    bit_reversal_kernel[(4,)](mine, LOG=6, BLOCK=16, PAIRS=pairs)
    return [Check(mine, x[[int(f"{i:06b}"[::-1], 2) for i in range(64)]])]


@racy("x_ptr", "read/write", "each element is fetched from where another program stores its own")
def bits_reversed_by_elements(device):
    bits_reversed_by_pairs(device, False)


@triton.jit
def keep_kernel(x_ptr, keep_ptr, base_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    x, keep = tl.load(x_ptr + i), tl.load(keep_ptr + i)
    tl.debug_barrier()
    tl.store(out_ptr + tl.load(base_ptr + pid) + tl.cumsum(keep, 0) - keep, x, keep != 0)


@healthy("kept tokens are closed up in another tensor")
def kept_tokens_elsewhere(device, in_place=False, first=None):
    x, i = integers(64, low=1), torch.arange(64)
    keep = (i < first if first else i % 3 != 0).int()
    base = (keep.view(4, 16).sum(1).cumsum(0) - keep.view(4, 16).sum(1)).int()
    mine, out = own(x, device), zeros(device, 64)
    keep_kernel[(4,)](mine, keep.to(device), base.to(device), mine if in_place else out, BLOCK=16)
    want = x.clone() if in_place else torch.zeros(64)
    want[: int(keep.sum())] = x[keep != 0]
    return [Check(mine if in_place else out, want)]


@healthy("kept tokens are closed up in place where only the last ones are dropped: each stays where it is")
def kept_tokens_that_do_not_move(device):
    return kept_tokens_elsewhere(device, True, 40)


@racy("x_ptr,out_ptr", "read/write", "kept tokens are closed up in place, over what the block before may not have read")
def kept_tokens_in_place(device):
    kept_tokens_elsewhere(device, True)


@triton.jit
def deposit_kernel(cell_ptr, part_ptr, charge_ptr, grid_ptr, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cell, part, charge = tl.load(cell_ptr + i), tl.load(part_ptr + i), tl.load(charge_ptr + i)
    for side in tl.static_range(2):
        at, share = grid_ptr + cell + side, charge * (part if side else 4 - part)
        if ATOMIC:
            tl.atomic_add(at, share, sem="relaxed")
        else:
            tl.store(at, tl.load(at) + share)


@healthy("particles of the same cells in several programs, by atomics")
def particles_deposited_by_atomics(device, atomic=True):
    cell = torch.arange(48) * 7 % 20
    part, charge, grid = integers(48, low=0, high=5, seed=1), integers(48, low=1, seed=2), zeros(device, 21)
    deposit_kernel[(3,)](cell.int().to(device), part.to(device), charge.to(device), grid, BLOCK=16, ATOMIC=atomic)
    want = torch.zeros(21).index_add_(0, cell, charge * (4 - part)).index_add_(0, cell + 1, charge * part)
    return [Check(grid, want)]


@racy("grid_ptr", "read/write,write/write", "particles of several programs lie in the same cells: 48 of them in 20")
def particles_deposited_by_stores(device):
    particles_deposited_by_atomics(device, False)


@triton.jit
def prepend_kernel(token_ptr, x_ptr, out_ptr, rows, T, D: tl.constexpr):
    b, t, d = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    out = out_ptr + (b * rows + t) * D + d
    if t == 0:
        tl.store(out, tl.load(token_ptr + d))
    else:
        tl.store(out, tl.load(x_ptr + (b * T + t - 1) * D + d))


@healthy("sequences that become longer by a token lie further from each other")
def token_before_each_sequence(device, rows=7):
    token, x, out = integers(16, low=10, high=20, seed=1), integers(3, 6, 16), zeros(device, 3, 7, 16)
    prepend_kernel[(3, 7)](token.to(device), x.to(device), out, rows, 6, D=16)
    return [Check(out, torch.cat([token.expand(3, 1, 16), x], 1))]


@racy("out_ptr", "write/write", "sequences that became longer still lie as far apart as before: first row on last row")
def token_over_the_last_of_the_sequence_before(device):
    token_before_each_sequence(device, 6)


@triton.jit
def warm_kernel(x_ptr, y_ptr, n, WARM: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    at = tl.program_id(0) * (BLOCK - WARM) - WARM + lane
    inside = (at >= 0) & (at < n)
    y = tl.cumsum(tl.load(x_ptr + at, inside, other=0.0), 0)
    tl.store(y_ptr + at, y, inside if ALL else inside & (lane >= WARM))


@healthy("elements that warm a filter up are loaded by two tiles and stored by one")
def filter_that_is_warmed_up(device, everything=False):
    x, y = integers(80, low=1), zeros(device, 80)
    warm_kernel[(4,)](x.to(device), y, 80, WARM=8, BLOCK=32, ALL=everything)
    want = torch.stack([x[max(0, t // 24 * 24 - 8) : t + 1].sum() for t in range(80)])
    return [Check(y, want)]


@racy("y_ptr", "write/write", "what a tile got while it warmed up is stored over the right results of the tile before")
def filter_that_stores_its_warm_up(device):
    filter_that_is_warmed_up(device, True)


@triton.jit
def dense_kernel(at_ptr, value_ptr, dense_ptr, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at, value = dense_ptr + tl.load(at_ptr + i), tl.load(value_ptr + i)
    if ATOMIC:
        tl.atomic_add(at, value, sem="relaxed")
    else:
        tl.store(at, tl.load(at) + value)


def _dense(device, period, atomic):
    at, value, dense = torch.arange(40) * 11 % period, integers(40, low=1), zeros(device, 8, 8)
    dense_kernel[(5,)](at.int().to(device), value.to(device), dense, BLOCK=8, ATOMIC=atomic)
    return [Check(dense, torch.zeros(64).index_add_(0, at, value).view(8, 8))]


@healthy("coordinates that occur once are added to a dense matrix without atomics")
def coordinates_that_are_coalesced(device):
    return _dense(device, 64, False)


@healthy("coordinates that occur twice are added to a dense matrix by atomics")
def coordinates_twice_by_atomics(device):
    return _dense(device, 24, True)


@racy("dense_ptr", "read/write,write/write", "coordinates 24 entries apart are equal, and added without atomics")
def coordinates_that_are_not_coalesced(device):
    _dense(device, 24, False)


@triton.jit
def beams_kernel(cache_ptr, parent_ptr, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    x = tl.load(cache_ptr + tl.load(parent_ptr + rows)[:, None] * D + cols)
    tl.debug_barrier()
    tl.store(cache_ptr + rows[:, None] * D + cols, x)


@healthy("beams take the caches of their parents in place, all beams of some columns in one program")
def beams_reordered_by_columns(device, rows=4, cols=16, parents=(2, 0, 1, 3)):
    cache, parent = integers(4, 64), torch.tensor(parents)
    mine = own(cache, device)
    beams_kernel[(4 // rows, 64 // cols)](mine, parent.int().to(device), D=64, ROWS=rows, COLS=cols)
    return [Check(mine, cache[parent])]


@healthy("two beams in a program, and both of their parents too: they change places")
def beams_of_parents_in_the_same_program(device):
    return beams_reordered_by_columns(device, 2, 64, (1, 0, 3, 2))


@racy("cache_ptr", "read/write", "two beams in a program, which take in place the caches of parents in the other one")
def beams_reordered_by_beams(device):
    beams_reordered_by_columns(device, 2, 64)


@triton.jit
def skip_kernel(p_ptr, g_ptr, found_ptr, BLOCK: tl.constexpr, PHASE: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + i)
    if (tl.max(tl.abs(g), 0) > 1e30) & (PHASE != "step"):
        tl.store(found_ptr, 1)
    if PHASE != "look":
        go = (i >= 0) & (tl.load(found_ptr) == 0)
        tl.store(p_ptr + i, tl.load(p_ptr + i, go) - g, go)


@healthy("a step is left out in the launch behind that which looks for infinities")
def step_left_out_in_the_next_launch(device, phases=("look", "step"), huge=True):
    p, g, found = integers(64, seed=1), integers(64, seed=2), zeros(device, 1, dtype=torch.int32)
    g[5] = float("inf") if huge else 1.0
    mine = own(p, device)
    for phase in phases:
        skip_kernel[(4,)](mine, g.to(device), found, BLOCK=16, PHASE=phase)
    return [Check(mine, p if huge else p - g), Check(found, torch.tensor([huge]).int())]


@healthy("a flag would be read in the launch in which it is set, but no gradient is infinite: nobody sets it")
def step_of_finite_gradients(device):
    return step_left_out_in_the_next_launch(device, ("both",), False)


@racy("found_ptr", "read/write", "the flag of an infinity is read in the launch in which another program may set it")
def step_left_out_in_the_same_launch(device):
    step_left_out_in_the_next_launch(device, ("both",))


@triton.jit
def chunks_kernel(x_ptr, M, N: tl.constexpr, MISTAKE: tl.constexpr):
    pid, programs, cols = tl.program_id(0), tl.num_programs(0), tl.arange(0, N)
    start = pid * (M // programs) if MISTAKE else pid * tl.cdiv(M, programs)
    for row in range(start, tl.minimum(start + tl.cdiv(M, programs), M)):
        tl.store(x_ptr + row * N + cols, 2 * tl.load(x_ptr + row * N + cols) + 1)


@healthy("97 rows in chunks, one for each multiprocessor")
def chunks_for_each_multiprocessor(device, mistake=False):
    x = integers(97, 16)
    mine = own(x, device)
    chunks_kernel[(max(2, min(multiprocessors(), 64)),)](mine, 97, N=16, MISTAKE=mistake)
    return [Check(mine, 2 * x + 1)]


@racy("x_ptr", "read/write,write/write", "chunks start by a quotient rounded down and are as long as one rounded up")
def chunks_rounded_both_ways(device):
    chunks_for_each_multiprocessor(device, True)


@triton.jit
def split_rows_kernel(x_ptr, out_ptr, M, N: tl.constexpr, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(1), M, tl.num_programs(1)):
        total += tl.load(x_ptr + row * N + cols)
    if ATOMIC:
        tl.atomic_add(out_ptr + cols, total, sem="relaxed")
    else:
        tl.store(out_ptr + cols, tl.load(out_ptr + cols) + total)


@healthy("as many parts of a sum as the GPU has multiprocessors for, by atomics")
def parts_for_the_multiprocessors(device, atomic=True):
    x, out = integers(48, 32), zeros(device, 32)
    parts = max(2, min(multiprocessors() // 2, 16))
    split_rows_kernel[(2, parts)](x.to(device), out, 48, N=32, BLOCK=16, ATOMIC=atomic)
    return [Check(out, x.sum(0))]


@racy("out_ptr", "read/write,write/write", "parts by the number of multiprocessors add up as if there were one part")
def parts_of_larger_gpus(device):
    parts_for_the_multiprocessors(device, False)


@triton.jit
def checksum_body(x_ptr, word_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_xor(word_ptr, tl.xor_sum(tl.load(x_ptr + i, i < n, other=0), 0), sem="relaxed")


SIZES = [triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})]


@triton.autotune(SIZES, key=["n"], reset_to_zero=["word_ptr"])
@triton.jit
def reset_checksum_kernel(x_ptr, word_ptr, n, BLOCK: tl.constexpr):
    checksum_body(x_ptr, word_ptr, n, BLOCK)


@triton.autotune(SIZES, key=["n"])
@triton.jit
def left_checksum_kernel(x_ptr, word_ptr, n, BLOCK: tl.constexpr):
    checksum_body(x_ptr, word_ptr, n, BLOCK)


@healthy("a checksum by exclusive or starts at 0 in every trial")
def checksum_that_is_reset(device, kernel=reset_checksum_kernel):
    x, word = integers(200, low=0, high=1 << 20, dtype=torch.int32), zeros(device, 1, dtype=torch.int32)
    kernel[lambda meta: (triton.cdiv(200, meta["BLOCK"]),)](x.to(device), word, 200)
    return [Check(word, torch.tensor([functools.reduce(operator.xor, x.tolist())], dtype=torch.int32))]


@racy("word_ptr", "autotune", "trials leave their checksums: an even number of them gives 0, an odd one the right word")
def checksum_of_all_trials(device):
    checksum_that_is_reset(device, left_checksum_kernel)


@triton.jit
def paths_kernel(from_ptr, to_ptr, length_ptr, far_ptr, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = far_ptr + tl.load(from_ptr + i)
    if ATOMIC:
        far = tl.atomic_add(source, 0, sem="relaxed")
    else:
        far = tl.load(source)
    tl.atomic_min(far_ptr + tl.load(to_ptr + i), far + tl.load(length_ptr + i), sem="relaxed")


@healthy("distances are read by atomics while they fall by atomics, until no path is longer than the launches")
def paths_read_by_atomics(device, atomic=True, apart=False):
    start = torch.arange(32) * 5 % (6 if apart else 12)
    end = torch.arange(32) * 7 % 6 + 6 if apart else torch.arange(32) * 7 % 11 + 1
    length, far = integers(32, low=1, high=9, dtype=torch.int32), torch.full((12,), 1000, dtype=torch.int32)
    far[0] = 0
    mine = own(far, device)
    for _ in range(12 if atomic else 1):
        edges = (start.int().to(device), end.int().to(device), length.to(device))
        paths_kernel[(4,)](*edges, mine, BLOCK=8, ATOMIC=atomic)
        for a, b, d in zip(start.tolist() * 12, end.tolist() * 12, length.tolist() * 12, strict=True):
            far[b] = min(int(far[b]), int(far[a]) + d)
    return [Check(mine, far)]


@healthy("distances are loaded while others are lowered by atomics: no edge begins where another one ends")
def paths_between_two_sides(device):
    return paths_read_by_atomics(device, False, True)


@racy("far_ptr", "atomic/read", "distances are loaded while other programs lower them by atomics")
def paths_read_by_loads(device):
    paths_read_by_atomics(device, False)


@triton.jit
def symmetric_kernel(a_ptr, N, TILE: tl.constexpr, HALF: tl.constexpr):
    ti, tj = tl.program_id(0), tl.program_id(1)
    if (ti <= tj) | (HALF == 0):
        i, j = ti * TILE + tl.arange(0, TILE)[:, None], tj * TILE + tl.arange(0, TILE)[None, :]
        both = tl.load(a_ptr + i * N + j) + tl.load(a_ptr + j * N + i)
        tl.debug_barrier()
        tl.store(a_ptr + i * N + j, both)
        if (ti < tj) & (HALF == 1):
            tl.store(a_ptr + j * N + i, both)


@healthy("a matrix is made symmetric in place by pairs of tiles")
def symmetric_by_pairs_of_tiles(device, half=1):
    a = integers(48, 48)
    mine = own(a, device)
    symmetric_kernel[(3, 3)](mine, 48, TILE=16, HALF=half)
    return [Check(mine, a + a.T)]


@racy("a_ptr", "read/write", "each tile is stored by its program while that of the mirrored tile may still read it")
def symmetric_by_tiles(device):
    symmetric_by_pairs_of_tiles(device, 0)


@triton.jit
def append_kernel(q_ptr, k_ptr, cache_ptr, out_ptr, last, D: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr):
    split, d = tl.program_id(0), tl.arange(0, D)
    if split == (0 if FIRST else last // ROWS):
        tl.store(cache_ptr + last * D + d, tl.load(k_ptr + d))
    tl.debug_barrier()
    rows = split * ROWS + tl.arange(0, ROWS)
    keys = tl.load(cache_ptr + rows[:, None] * D + d[None, :], (rows <= last)[:, None], other=0.0)
    tl.store(out_ptr + rows, tl.sum(keys * tl.load(q_ptr + d)[None, :], 1), rows <= last)


@healthy("a key is put into the cache by the split that reads it")
def key_appended_by_its_split(device, first=False, last=20):
    q, k, cache, out = integers(16, seed=1), integers(16, seed=2), integers(32, 16), zeros(device, 32)
    append_kernel[(4,)](q.to(device), k.to(device), own(cache, device), out, last, D=16, ROWS=8, FIRST=first)
    cache[last] = k
    return [Check(out[: last + 1], cache[: last + 1] @ q)]


@healthy("the first split puts the key into the cache, which is so short that no other one reads any of it")
def key_appended_by_the_only_split(device):
    return key_appended_by_its_split(device, True, 5)


@racy("cache_ptr", "read/write", "a key is put into the cache by the first split, and read by the third one")
def key_appended_by_the_first_split(device):
    key_appended_by_its_split(device, True)
