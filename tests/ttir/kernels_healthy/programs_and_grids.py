"""Unwritten memory that is masked away, persistent programs, grids by the number of SMs, orders of programs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers, multiprocessors


@triton.jit
def unwritten_kernel(x_ptr, out_ptr, used, N: tl.constexpr):
    cols = tl.arange(0, N)
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * N + cols)  # past `used` nobody has written
    tl.store(out_ptr + row, tl.sum(tl.where(cols < used, x, 0.0)))


@healthy("memory that nobody wrote is loaded and then masked away")
def unwritten_lanes_masked_away(device):
    x, padded, out = integers(4, 20), torch.empty(4, 32, device=device), torch.zeros(4, device=device)
    padded[:, :20] = x.to(device)
    unwritten_kernel[(4,)](padded, out, 20, N=32)
    return [Check(out, x.sum(1))]


@triton.jit
def triangle_kernel(a_ptr, x_ptr, out_ptr, N: tl.constexpr):
    rows, cols = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    base = tl.program_id(0) * N * N
    a = tl.load(a_ptr + base + rows * N + cols)
    a = tl.where(rows >= cols, a, 0.0)
    x = tl.load(x_ptr + tl.program_id(0) * N + tl.arange(0, N))
    tl.store(out_ptr + tl.program_id(0) * N + tl.arange(0, N), tl.sum(a * x[None, :], axis=1))


@healthy("the unwritten triangle of a matrix is loaded with the rest and masked")
def unwritten_triangle(device):
    a, x = integers(3, 16, 16, seed=1), integers(3, 16, seed=2)
    lower = torch.empty(3, 16, 16, device=device)
    i, j = torch.tril_indices(16, 16)
    lower[:, i, j] = a[:, i, j].to(device)
    out = torch.zeros(3, 16, device=device)
    triangle_kernel[(3,)](lower, x.to(device), out, N=16)
    return [Check(out, torch.einsum("bij,bj->bi", a.tril(), x))]


@triton.jit
def persistent_kernel(x_ptr, n, tiles, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + i, tl.load(x_ptr + i, i < n) * 2, i < n)


@healthy("persistent programs step by as many as there are; one more program than tiles finds nothing to do")
def persistent_tiles(device):
    x = integers(300)
    for programs in (4, 11):
        doubled = x.to(device, copy=True)
        persistent_kernel[(programs,)](doubled, 300, 10, BLOCK=32)
    return [Check(doubled, 2 * x)]


@triton.jit
def rows_of_program_kernel(x_ptr, rows, per_program, N, BLOCK: tl.constexpr):
    start = tl.program_id(0) * per_program
    cols = tl.arange(0, BLOCK)
    for row in range(start, tl.minimum(start + per_program, rows)):
        place = x_ptr + row * N + cols
        tl.store(place, tl.load(place, cols < N) * 2, cols < N)


@healthy("rows dealt out by the number of SMs, the last program with fewer")
def rows_by_the_number_of_sms(device):
    programs = min(multiprocessors(), 64)
    x = integers(64, 20)
    doubled = x.to(device, copy=True)
    rows_of_program_kernel[(programs,)](doubled, 64, triton.cdiv(64, programs), 20, BLOCK=32)
    return [Check(doubled, 2 * x)]


@triton.jit
def partial_rows_kernel(x_ptr, partial_ptr, rows, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        total += tl.load(x_ptr + row * N + cols, cols < N, other=0.0)
    tl.store(partial_ptr + tl.program_id(0) * N + cols, total, cols < N)


@healthy("a row of partial sums for each program, added up by torch: the usual dw of norms")
def partial_sums_by_the_number_of_sms(device):
    programs = min(multiprocessors(), 64)
    x, partial = integers(64, 20), torch.empty(programs, 20, device=device)
    partial_rows_kernel[(programs,)](x.to(device), partial, 64, 20, BLOCK=32)
    return [Check(partial.sum(0), x.sum(0))]


@triton.jit
def first_program_kernel(x_ptr, out_ptr, total_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    x = tl.load(x_ptr + pid * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + pid, tl.max(x))
    if pid == 0:
        tl.store(total_ptr, tl.num_programs(0))


@healthy("only the first program stores the scalar")
def scalar_by_the_first_program(device):
    x, out, total = integers(6, 16), torch.zeros(6, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    first_program_kernel[(6,)](x.to(device), out, total, BLOCK=16)
    return [Check(out, x.amax(1)), Check(total, torch.tensor([6], dtype=torch.int32))]


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr
):
    pid = tl.program_id(0)
    grid_m, grid_n = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    group = pid // (GROUP * grid_n)
    first = group * GROUP
    height = min(grid_m - first, GROUP)
    pid_m = first + (pid % (GROUP * grid_n)) % height
    pid_n = (pid % (GROUP * grid_n)) // height
    rows, cols = pid_m * TILE_M + tl.arange(0, TILE_M), pid_n * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for k in range(0, tl.cdiv(K, TILE_K)):
        ks = k * TILE_K + tl.arange(0, TILE_K)
        a = tl.load(a_ptr + (rows % M)[:, None] * K + ks[None, :], ks[None, :] < K, other=0.0)
        b = tl.load(b_ptr + ks[:, None] * N + (cols % N)[None, :], ks[:, None] < K, other=0.0)
        total = tl.dot(a, b, total)
    total = tl.where(total > 0, total, total * 0.5)
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], total.to(tl.float16), (rows < M)[:, None] & (cols < N)[None, :])


@healthy("a product of matrices in grouped order at odd sizes; rows that wrap around are read, not stored")
def matmul_in_grouped_order(device):
    a = integers(70, 40, low=-4, high=4, seed=1, dtype=torch.float16)
    b = integers(40, 50, low=-4, high=4, seed=2, dtype=torch.float16)
    c = torch.zeros(70, 50, dtype=torch.float16, device=device)
    matmul_kernel[(5 * 4,)](a.to(device), b.to(device), c, 70, 50, 40, TILE_M=16, TILE_N=16, TILE_K=16, GROUP=3)
    expected = a.float() @ b.float()
    return [Check(c, torch.where(expected > 0, expected, expected / 2).half())]


@triton.jit
def swizzled_kernel(out_ptr, M, N, GROUP: tl.constexpr):
    i, j = tl.swizzle2d(tl.program_id(0), tl.program_id(1), M, N, GROUP)
    tl.store(out_ptr + i * N + j, tl.program_id(0) * N + tl.program_id(1))


@healthy("tl.swizzle2d is a permutation of the programs")
def swizzled_programs(device):
    out = torch.full((35,), -1, dtype=torch.int32, device=device)
    swizzled_kernel[(5, 7)](out, 5, 7, GROUP=2)
    return [Check(out.sort().values, torch.arange(35, dtype=torch.int32))]


@triton.jit
def cube_kernel(out_ptr):
    i, j, k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, m, p = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    tl.store(out_ptr + (i * m + j) * p + k, n * 10000 + i * 100 + j * 10 + k)


@healthy("a grid of three dimensions")
def grid_of_three_dimensions(device):
    out = torch.zeros(2, 3, 4, dtype=torch.int32, device=device)
    cube_kernel[(2, 3, 4)](out)
    i, j, k = torch.meshgrid(torch.arange(2), torch.arange(3), torch.arange(4), indexing="ij")
    return [Check(out, (20000 + i * 100 + j * 10 + k).to(torch.int32))]
