"""Places that programs share or do not: in place, tiles at odd sizes, block pointers, descriptors, views, workspaces."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers, multiprocessors, racy


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def red_black_kernel(x_ptr, H, W, COLOUR: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr):
    """Every other point of a grid becomes the sum of its neighbours, which are of the other colour."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, col = i // W, i % W
    colour = i % 2 if FLAT else (row + col) % 2
    mine = (i < H * W) & (colour == COLOUR)
    total = tl.load(x_ptr + i - 1, mine & (col > 0), other=0.0) + tl.load(
        x_ptr + i + 1, mine & (col < W - 1), other=0.0
    )
    total += tl.load(x_ptr + i - W, mine & (row > 0), other=0.0) + tl.load(
        x_ptr + i + W, mine & (row < H - 1), other=0.0
    )
    tl.debug_barrier()
    tl.store(x_ptr + i, total, mine)


def _red_black(device, width, flat):
    x = integers(9, width)
    own, want = x.to(device, copy=True), x.clone()
    for colour in (0, 1):
        red_black_kernel[(triton.cdiv(9 * width, 16),)](own, 9, width, COLOUR=colour, BLOCK=16, FLAT=flat)
        p = torch.nn.functional.pad(want, (1, 1, 1, 1))
        sums = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]
        mine = (torch.arange(9)[:, None] + torch.arange(width)) % 2 == colour
        want = torch.where(mine, sums, want)
    return [Check(own, want)]


@healthy("red points from black ones and then black from red, in place, in two launches")
def red_and_black_points(device):
    return _red_black(device, 10, False)


@healthy("colours by the flat index are a chessboard where the width is odd")
def red_and_black_points_of_an_odd_width(device):
    return _red_black(device, 11, True)


@racy(
    "x_ptr",
    "read/write",
    "colours by the flat index are stripes where the width is even: above and below is the same colour",
)
def red_and_black_stripes(device):
    _red_black(device, 10, True)


@triton.jit
def block_pointer_kernel(x_ptr, out_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr, MISTAKE: tl.constexpr):
    offsets = (tl.program_id(0) * ROWS, tl.program_id(1) * COLS)
    source = tl.make_block_ptr(x_ptr, (M, N), (N, 1), offsets, (ROWS, COLS), (1, 0))
    target = tl.make_block_ptr(out_ptr, (M, N), (N, 1), offsets, (ROWS, COLS), (1, 0))
    x = tl.load(source, boundary_check=(0, 1), padding_option="zero") * 2
    if MISTAKE:
        tl.store(target, x, boundary_check=(0,))
    else:
        tl.store(target, x, boundary_check=(0, 1))


def _block_pointers(device, mistake):
    x = integers(13, 24, low=1)
    out = torch.zeros(13 * 24 + 32, device=device)
    block_pointer_kernel[(2, 2)](x.to(device), out, 13, 24, ROWS=8, COLS=16, MISTAKE=mistake)
    return [Check(out[: 13 * 24].view(13, 24), 2 * x)]


@healthy("block pointers that check both dimensions at odd sizes")
def block_pointers_checked_twice(device):
    return _block_pointers(device, False)


@racy("out_ptr", "write/write", "the store checks rows only: columns beyond the edge are the next row's first ones")
def block_pointers_checked_once(device):
    _block_pointers(device, True)


@triton.jit
def descriptor_kernel(x_ptr, out_ptr, M, N, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    source = tl.make_tensor_descriptor(x_ptr, (M, N), (N, 1), (ROWS, COLS))
    target = tl.make_tensor_descriptor(out_ptr, (M, width), (N, 1), (ROWS, COLS))
    for tile in range(tl.program_id(0), tl.cdiv(M, ROWS) * tl.cdiv(N, COLS), tl.num_programs(0)):
        row, col = tile // tl.cdiv(N, COLS) * ROWS, tile % tl.cdiv(N, COLS) * COLS
        target.store([row, col], source.load([row, col]) + 1)


def _descriptors(device, width):
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=device))
    x, out = integers(14, 20, low=1), torch.zeros(14 * 20 + 16, device=device)
    descriptor_kernel[(3,)](x.to(device), out, 14, 20, width, ROWS=8, COLS=16)
    return [Check(out[:280].view(14, 20), x + 1)]


@healthy("persistent tiles through descriptors, cut at the width of the matrix")
def tiles_through_descriptors(device):
    return _descriptors(device, 20)


@racy("out_ptr", "write/write", "the descriptor has the padded width: zeros go over the next row")
def tiles_through_a_padded_descriptor(device):
    _descriptors(device, 32)


@triton.heuristics({"EVEN": lambda args: args["N"] % args["BLOCK"] == 0})
@triton.jit
def even_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    row, cols = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out_ptr + row * N + cols, tl.load(x_ptr + row * N + cols) * row)
    else:
        x = tl.load(x_ptr + row * N + cols, cols < N, other=0.0)
        tl.store(out_ptr + row * N + cols, x * row, cols < N)


@triton.heuristics({"EVEN": lambda args: args["N"] % 16 == 0})
@triton.jit
def wrongly_even_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    row, cols = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, cols < N, other=0.0)
    if EVEN:
        tl.store(out_ptr + row * N + cols, x * row)
    else:
        tl.store(out_ptr + row * N + cols, x * row, cols < N)


@healthy("a heuristic leaves masks out where blocks divide rows, and only there")
def masks_left_out_by_a_heuristic(device):
    checks = []
    for n in (48, 64):
        x, out = integers(5, n), torch.zeros(5, n, device=device)
        even_kernel[(5, triton.cdiv(n, 32))](x.to(device), out, n, BLOCK=32)
        checks.append(Check(out, x * torch.arange(5.0)[:, None]))
    return checks


@racy("out_ptr", "write/write", "the heuristic asks for multiples of 16 where blocks are of 32")
def masks_left_out_by_a_wrong_heuristic(device):
    out = torch.zeros(5 * 48 + 16, device=device)
    wrongly_even_kernel[(5, 2)](integers(5, 48, low=1).to(device), out, 48, BLOCK=32)


@triton.jit
def bias_rows_kernel(dy_ptr, db_ptr, stride, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(db_ptr + row * stride + cols, tl.load(dy_ptr + row * N + cols, cols < N) + row, cols < N)


@healthy("partial gradients, a row for each program")
def partial_rows(device):
    dy, db = integers(6, 20), torch.zeros(6, 20, device=device)
    bias_rows_kernel[(6,)](dy.to(device), db, db.stride(0), 20, BLOCK=32)
    return [Check(db, dy + torch.arange(6.0)[:, None])]


@racy("db_ptr", "write/write", "the rows of partial gradients were expanded and not allocated: all of them are one")
def partial_rows_that_are_expanded(device):
    db = torch.zeros(1, 20, device=device).expand(6, 20)
    bias_rows_kernel[(6,)](integers(6, 20).to(device), db, db.stride(0), 20, BLOCK=32)


@triton.jit
def transpose_kernel(x_ptr, out_ptr, M, N, TILE: tl.constexpr):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    inside = (rows < M) & (cols < N)
    tl.store(out_ptr + cols * M + rows, tl.load(x_ptr + rows * N + cols, inside), inside)


@healthy("a matrix of odd sizes transposed into memory of its own")
def transposed_into_its_own(device):
    x, out = integers(20, 37), torch.zeros(37, 20, device=device)
    transpose_kernel[(2, 3)](x.to(device), out, 20, 37, TILE=16)
    return [Check(out, x.t().contiguous())]


@racy(
    "x_ptr,out_ptr",
    "read/write",
    "the output is the transposed view of the input: other programs' tiles are overwritten",
)
def transposed_into_a_view(device):
    x = integers(40, 40).to(device)
    transpose_kernel[(3, 3)](x, x.t(), 40, 40, TILE=16)


@triton.jit
def shift_state_kernel(state_ptr, x_ptr, y_ptr, W: tl.constexpr, D, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """The last W inputs of each channel, moved up by one in place: by who owns the channel, or wrongly by step."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if SPLIT:
        step = tl.program_id(1)
        if step < W - 1:
            tl.store(state_ptr + step * D + d, tl.load(state_ptr + (step + 1) * D + d, d < D), d < D)
        else:
            tl.store(state_ptr + step * D + d, tl.load(x_ptr + d, d < D), d < D)
    else:
        for step in tl.static_range(W - 1):
            s = tl.load(state_ptr + (step + 1) * D + d, d < D, other=0.0)
            tl.store(state_ptr + step * D + d, s, d < D)
            total += s
        x = tl.load(x_ptr + d, d < D, other=0.0)
        tl.store(state_ptr + (W - 1) * D + d, x, d < D)
        tl.store(y_ptr + d, total + x, d < D)


def _shifted(device, split):
    state, x, y = integers(4, 40, seed=1), integers(40, seed=2), torch.zeros(40, device=device)
    own = state.to(device, copy=True)
    shift_state_kernel[(3, 4 if split else 1)](own, x.to(device), y, W=4, D=40, BLOCK=16, SPLIT=split)
    want = torch.cat([state[1:], x[None]])
    return [Check(own, want), Check(y, want.sum(0))]


@healthy("the window of a causal convolution moved up in place, channels a program each")
def window_moved_up_by_channels(device):
    return _shifted(device, False)


@racy("state_ptr", "read/write", "steps of the window have programs of their own: one reads what the next overwrites")
def window_moved_up_by_steps(device):
    _shifted(device, True)


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, cos_ptr, part_ptr, SPLITS: tl.constexpr, T: tl.constexpr, D: tl.constexpr, MISTAKE: tl.constexpr
):
    """Scores of one query with keys in splits; the query is turned first, in registers or, wrongly, in place."""
    head, split = tl.program_id(0), tl.program_id(1)
    d, t = tl.arange(0, D), split * (T // SPLITS) + tl.arange(0, T // SPLITS)
    q = tl.load(q_ptr + head * D + d) * tl.load(cos_ptr + d)
    if MISTAKE:
        tl.store(q_ptr + head * D + d, q)
        tl.debug_barrier()
        q = tl.load(q_ptr + head * D + d)
    k = tl.load(k_ptr + (head * T + t[:, None]) * D + d[None, :])
    tl.store(part_ptr + head * T + t, tl.sum(k * q[None, :], 1))


def _decode(device, mistake):
    q, k, cos = integers(3, 16, seed=1), integers(3, 32, 16, seed=2), integers(16, low=2, high=4, seed=3)
    out = torch.zeros(3, 32, device=device)
    decode_kernel[(3, 4)](
        q.to(device, copy=True), k.to(device), cos.to(device), out, SPLITS=4, T=32, D=16, MISTAKE=mistake
    )
    return [Check(out, torch.einsum("htd,hd->ht", k, q * cos))]


@healthy("each split of the keys turns the query for itself")
def query_turned_by_each_split(device):
    return _decode(device, False)


@racy(
    "q_ptr", "read/write,write/write", "each split of the keys turns the query in place, which is turned once a split"
)
def query_turned_in_place_by_each_split(device):
    _decode(device, True)


@triton.jit
def running_mean_kernel(x_ptr, mean_ptr, running_ptr, M, N, ROWS: tl.constexpr, MISTAKE: tl.constexpr):
    rows, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    mean = tl.load(mean_ptr + c)
    x = tl.load(x_ptr + rows * N + c, rows < M, other=0.0)
    tl.store(x_ptr + rows * N + c, x - mean, rows < M)
    if MISTAKE | (tl.program_id(0) == 0):
        tl.store(running_ptr + c, tl.load(running_ptr + c) * 0.5 + mean * 0.5)


def _running_mean(device, mistake):
    x, mean, running = integers(20, 6, seed=1), integers(6, seed=2), torch.full((6,), 4.0, device=device)
    own = x.to(device, copy=True)
    running_mean_kernel[(3, 6)](own, mean.to(device), running, 20, 6, ROWS=8, MISTAKE=mistake)
    return [Check(own, x - mean), Check(running, 2 + mean / 2)]


@healthy("rows less their mean in place; the running mean is updated by the first program of each channel")
def running_mean_by_the_first_rows(device):
    return _running_mean(device, False)


@racy(
    "running_ptr",
    "read/write,write/write",
    "the running mean is updated by every program of a channel, once for each block of rows",
)
def running_mean_by_all_rows(device):
    _running_mean(device, True)


@triton.jit
def scratch_kernel(x_ptr, scratch_ptr, out_ptr, tiles, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    """Persistent programs reverse tiles by way of a scratch with two halves in turn."""
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    turn = 0
    for tile in range(pid, tiles, tl.num_programs(0)):
        place = scratch_ptr + ((pid % SLOTS) * 2 + turn) * BLOCK
        tl.store(place + cols, tl.load(x_ptr + tile * BLOCK + cols))
        tl.debug_barrier()
        tl.store(out_ptr + tile * BLOCK + cols, tl.load(place + BLOCK - 1 - cols))
        turn = 1 - turn


def _scratch(device, slots):
    programs = min(multiprocessors(), 64)
    x, out = integers(150, 16), torch.zeros(150, 16, device=device)
    scratch = torch.empty(64, 2, 16, device=device)
    scratch_kernel[(programs,)](x.to(device), scratch, out, 150, BLOCK=16, SLOTS=slots)
    return [Check(out, x.flip(1))]


@healthy("a program a multiprocessor, each with two halves of scratch of its own")
def scratch_of_each_program(device):
    return _scratch(device, 64)


@racy(
    "scratch_ptr",
    "read/write,write/write",
    "scratch for 32 programs, of which a GPU starts as many as it has multiprocessors",
)
def scratch_for_half_of_the_multiprocessors(device):
    _scratch(device, 32)


@triton.jit
def grouped_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    start_ptr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    MISTAKE: tl.constexpr,
):
    """Rows of A in groups, each with a B of its own; tiles of all groups are counted through."""
    done = 0
    tile = tl.program_id(0)
    for g in range(GROUPS):
        start, end = tl.load(start_ptr + g), tl.load(start_ptr + g + 1)
        tiles = tl.cdiv(end - start, TILE)
        while (tile >= done) & (tile < done + tiles):
            rows = start + (tile - done) * TILE + tl.arange(0, TILE)
            k, n = tl.arange(0, K), tl.arange(0, N)
            a = tl.load(a_ptr + rows[:, None] * K + k[None, :], (rows < end)[:, None], other=0.0)
            b = tl.load(b_ptr + g * K * N + k[:, None] * N + n[None, :])
            mask = rows < (tl.load(start_ptr + GROUPS) if MISTAKE else end)
            tl.store(c_ptr + rows[:, None] * N + n[None, :], tl.dot(a, b), mask[:, None])
            tile += tl.num_programs(0)
        done += tiles


def _grouped(device, mistake):
    sizes = [5, 0, 20, 16, 7]
    a, b, c = integers(48, 16, low=1, seed=1), integers(5, 16, 16, low=1, seed=2), torch.zeros(48, 16, device=device)
    start = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0).to(torch.int32)
    args = a.to(device), b.to(device), c, start.to(device)
    grouped_kernel[(3,)](*args, GROUPS=5, N=16, K=16, TILE=16, MISTAKE=mistake)
    return [Check(c, torch.cat([x @ w for x, w in zip(a.split(sizes), b, strict=True)]))]


@healthy("products of groups of rows by persistent programs; a group's last tile ends where the group does")
def groups_of_rows(device):
    return _grouped(device, False)


@racy(
    "c_ptr",
    "write/write",
    "the mask ends with all rows and not with the group's: its last tile stores zeros into the next group",
)
def groups_of_rows_masked_by_all(device):
    _grouped(device, True)


@triton.jit
def windows_kernel(x_ptr, stride, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + cols)
    tl.store(x_ptr + row * stride + cols, x - tl.max(x))


@healthy("windows that do not overlap, each less its largest element, in place")
def windows_beside_each_other(device):
    x = integers(64)
    own = x.to(device, copy=True)
    windows = own.unfold(0, 16, 16)
    windows_kernel[(4,)](windows, windows.stride(0), BLOCK=16)
    return [Check(own.view(4, 16), x.view(4, 16) - x.view(4, 16).amax(1, keepdim=True))]


@racy("x_ptr", "read/write,write/write", "windows of 16 at every eighth element, changed in place")
def windows_that_overlap(device):
    windows = integers(64).to(device).unfold(0, 16, 8)
    windows_kernel[(7,)](windows, windows.stride(0), BLOCK=16)
