"""Memory that programs share without touching each other's: tiles, tails, views, order by kernels, one owner an element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers


@triton.jit
def add_in_place_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n)
    tl.store(x_ptr + i, x + tl.load(y_ptr + i, i < n), i < n)


@healthy("in place, each element by its own program, with a tail; masked lanes are loaded without a value")
def add_in_place(device):
    x, y = integers(107, seed=1), integers(107, seed=2)
    total = x.to(device, copy=True)
    add_in_place_kernel[(4,)](total, y.to(device), 107, BLOCK=32)
    return [Check(total, x + y)]


@healthy("a tensor added to itself in place: two arguments are one tensor, and each element has one owner")
def add_to_itself_in_place(device):
    x = integers(107)
    total = x.to(device, copy=True)
    add_in_place_kernel[(4,)](total, total, 107, BLOCK=32)
    return [Check(total, 2 * x)]


@triton.jit
def matrix_tiles_kernel(x_ptr, out_ptr, M, N, stride_m, stride_n, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_m + cols[None, :] * stride_n, mask, other=0.0)
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], x + tl.program_id(1), mask)


@healthy("tiles of a matrix of odd sizes, both dimensions masked")
def matrix_tiles_at_odd_sizes(device):
    x, out = integers(20, 41), torch.zeros(20, 41, device=device)
    matrix_tiles_kernel[(3, 3)](x.to(device), out, 20, 41, 41, 1, ROWS=8, COLS=16)
    return [Check(out, x + torch.arange(41) // 16)]


@healthy("a transposed view is read with its strides")
def matrix_tiles_of_a_transposed_view(device):
    x, out = integers(41, 20), torch.zeros(20, 41, device=device)
    view = x.to(device).t()
    matrix_tiles_kernel[(3, 3)](view, out, 20, 41, view.stride(0), view.stride(1), ROWS=8, COLS=16)
    return [Check(out, x.t() + torch.arange(41) // 16)]


@healthy("stride 0: all programs read the same row")
def matrix_tiles_of_an_expanded_row(device):
    x, out = integers(41), torch.zeros(20, 41, device=device)
    view = x.to(device).expand(20, 41)
    matrix_tiles_kernel[(3, 3)](view, out, 20, 41, view.stride(0), view.stride(1), ROWS=8, COLS=16)
    return [Check(out, (x + torch.arange(41) // 16).expand(20, 41))]


@triton.jit
def lanes_masked_away_kernel(x_ptr, out_ptr, n, STEP: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    i = pid * STEP + lanes
    tl.store(out_ptr + i, tl.load(x_ptr + i, i < n, other=0.0) * (pid + 1), (i < n) & (lanes < STEP))


@healthy("blocks of 32 lanes every 24 elements: the lanes that would overlap are masked away")
def overlapping_lanes_masked_away(device):
    x, out = integers(100), torch.zeros(100, device=device)
    lanes_masked_away_kernel[(5,)](x.to(device), out, 100, STEP=24, BLOCK=32)
    return [Check(out, x * (torch.arange(100) // 24 + 1))]


@triton.jit
def stencil_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(x_ptr + i - 1, (i > 0) & (i < n), other=0.0)
    right = tl.load(x_ptr + i + 1, i < n - 1, other=0.0)
    tl.store(out_ptr + i, left + right, i < n)


@healthy("neighbours read from one tensor, stored into another")
def stencil_out_of_place(device):
    x, out = integers(100), torch.zeros(100, device=device)
    stencil_kernel[(4,)](x.to(device), out, 100, BLOCK=32)
    padded = torch.nn.functional.pad(x, (1, 1))
    return [Check(out, padded[:-2] + padded[2:])]


@healthy("two launches in turn between two buffers")
def stencil_twice_between_buffers(device):
    x = integers(100)
    a, b = x.to(device, copy=True), torch.zeros(100, device=device)
    stencil_kernel[(4,)](a, b, 100, BLOCK=32)
    stencil_kernel[(4,)](b, a, 100, BLOCK=32)
    for _ in range(2):
        padded = torch.nn.functional.pad(x, (1, 1))
        x = padded[:-2] + padded[2:]
    return [Check(a, x)]


@triton.jit
def transpose_pair_kernel(x_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    i, j = tl.program_id(0), tl.program_id(1)
    if i > j:
        return
    rows, cols = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    upper = x_ptr + rows[:, None] * N + cols[None, :]
    lower = x_ptr + cols[:, None] * N + rows[None, :]
    a, b = tl.load(upper), tl.load(lower)
    tl.debug_barrier()
    tl.store(upper, tl.trans(b))
    if i != j:
        tl.store(lower, tl.trans(a))


@healthy("transposed in place by pairs of tiles, one program a pair; the others return early")
def transpose_in_place_by_pairs(device):
    x = integers(64, 64)
    turned = x.to(device, copy=True)
    transpose_pair_kernel[(4, 4)](turned, N=64, BLOCK=16)
    return [Check(turned, x.t())]


@triton.jit
def reverse_pair_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n // 2
    front, back = tl.load(x_ptr + i, mask), tl.load(x_ptr + n - 1 - i, mask)
    tl.store(x_ptr + i, back, mask)
    tl.store(x_ptr + n - 1 - i, front, mask)


@healthy("reversed in place, both ends of a pair by one program")
def reverse_in_place_by_pairs(device):
    x = torch.arange(101, dtype=torch.int32)
    turned = x.to(device, copy=True)
    reverse_pair_kernel[(4,)](turned, 101, BLOCK=16)
    return [Check(turned, x.flip(0))]


@triton.jit
def row_in_place_kernel(x_ptr, N, BLOCK: tl.constexpr):
    place = x_ptr + tl.program_id(0) * N + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < N
    x = tl.load(place, mask, other=0.0)
    tl.store(place, x - tl.sum(x), mask)


@healthy("whole rows in place, one program a row, rows no multiple of the block")
def rows_in_place(device):
    x = integers(7, 50)
    rows = x.to(device, copy=True)
    row_in_place_kernel[(7,)](rows, 50, BLOCK=64)
    return [Check(rows, x - x.sum(1, keepdim=True))]


@triton.jit
def rope_kernel(k_ptr, HALF: tl.constexpr):
    i = tl.arange(0, HALF)
    base = k_ptr + tl.program_id(0) * 2 * HALF
    first, second = tl.load(base + i), tl.load(base + HALF + i)
    tl.store(base + i, -second)
    tl.store(base + HALF + i, first)


@healthy("each head turned in place by its own program")
def rotation_of_heads_in_place(device):
    k = integers(8, 32)
    turned = k.to(device, copy=True)
    rope_kernel[(8,)](turned, HALF=16)
    return [Check(turned, torch.cat([-k[:, 16:], k[:, :16]], dim=1))]


@triton.jit
def scatter_kernel(index_ptr, x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(index_ptr + i, i < n, other=0)  # masked lanes aim at element 0, and store nothing
    tl.store(out_ptr + place, tl.load(x_ptr + i, i < n), i < n)


@healthy("scattered to a permutation of places")
def scatter_with_unique_indices(device):
    index = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    x, out = integers(60), torch.zeros(60, device=device)
    scatter_kernel[(4,)](index.to(device), x.to(device), out, 60, BLOCK=16)
    return [Check(out, torch.zeros(60).scatter(0, index, x))]


@triton.jit
def table_kernel(index_ptr, table_ptr, out_ptr, D: tl.constexpr):
    token = tl.program_id(0)
    cols = tl.arange(0, D)
    word = tl.load(index_ptr + token)
    scale = tl.load(table_ptr)  # the same element by every program
    tl.store(out_ptr + token * D + cols, tl.load(table_ptr + word * D + cols) * scale)


@healthy("programs read the same rows of a table, and all the same element")
def rows_of_a_table(device):
    index, table = torch.tensor([3, 1, 4, 1, 5, 0, 2, 1]), integers(7, 16, low=1)
    out = torch.zeros(8, 16, device=device)
    table_kernel[(8,)](index.to(device), table.to(device), out, D=16)
    return [Check(out, table[index] * table[0, 0])]


@triton.jit
def split_halves_kernel(x_ptr, even_ptr, odd_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    tl.store(even_ptr + 2 * i, x + 1, i < n)
    tl.store(odd_ptr + 2 * i, x - 1, i < n)


@healthy("two outputs are the even and the odd elements of one tensor: their ranges meet, their elements do not")
def outputs_between_each_other(device):
    x, buffer = integers(100), torch.zeros(200, device=device)
    split_halves_kernel[(4,)](x.to(device), buffer, buffer[1:], 100, BLOCK=32)
    return [Check(buffer, torch.stack([x + 1, x - 1], dim=1).flatten())]


@triton.jit
def workspace_kernel(x_ptr, float_ptr, int_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    x = tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK))
    tl.store(float_ptr + pid, tl.sum(x))
    tl.store(int_ptr + pid, pid)
    tl.debug_barrier()
    tl.store(out_ptr + pid, tl.load(float_ptr + pid) + tl.load(int_ptr + pid))  # what it stored itself


@healthy("floats and integers in two parts of a workspace, and a program reads back what it stored")
def workspace_in_two_parts(device):
    x, workspace, out = integers(8, 16), torch.zeros(16, device=device), torch.zeros(8, device=device)
    workspace_kernel[(8,)](x.to(device), workspace, workspace.view(torch.int32)[8:], out, BLOCK=16)
    return [Check(out, x.sum(1) + torch.arange(8))]


@triton.jit
def bytes_kernel(out_ptr, SHIFT: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(out_ptr + pid, (pid * SHIFT).to(out_ptr.dtype.element_ty))


@healthy("neighbouring bytes of one word, a program each: memory is bytes, not words")
def bytes_of_a_word(device):
    out = torch.zeros(16, dtype=torch.int8, device=device)
    bytes_kernel[(16,)](out, SHIFT=20)  # 7 * 20 overflows a byte
    return [Check(out, (torch.arange(16) * 20).to(torch.int8))]


@healthy("neighbouring halves of one word")
def halves_of_a_word(device):
    out = torch.zeros(16, dtype=torch.bfloat16, device=device)
    bytes_kernel[(16,)](out, SHIFT=3)
    return [Check(out, (torch.arange(16) * 3).to(torch.bfloat16))]


@triton.jit
def written_twice_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.zeros((BLOCK,), tl.float32), i < n)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    tl.store(out_ptr + i, x, (i < n) & (x > 0))


@healthy("a program zeroes its own tile before it stores into it")
def own_tile_written_twice(device):
    x, out = integers(100), torch.full((100,), 9.0, device=device)
    written_twice_kernel[(4,)](x.to(device), out, 100, BLOCK=32)
    return [Check(out, x.clamp(min=0))]
