"""Accumulation by load, add and store where several programs add to one place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import integers, racy

LOST = "one of two additions that load the same old value is lost"


@triton.jit
def weight_gradient_kernel(x_ptr, dy_ptr, dw_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask, other=0.0)
    dy = tl.load(dy_ptr + row * N + cols, mask, other=0.0)
    dw = tl.load(dw_ptr + cols, mask, other=0.0)
    tl.store(dw_ptr + cols, dw + x * dy, mask)


@racy("dw_ptr", "read/write,write/write", LOST)
def weight_gradient_of_rows(device):
    x, dy = integers(12, 50, seed=1).to(device), integers(12, 50, seed=2).to(device)
    dw = torch.zeros(50, device=device)
    weight_gradient_kernel[(12,)](x, dy, dw, 50, BLOCK=64)


@triton.jit
def bias_gradient_kernel(dy_ptr, db_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    dy = tl.load(dy_ptr + rows[:, None] * N + cols[None, :], mask, other=0.0)
    db = tl.load(db_ptr + cols, cols < N, other=0.0)
    tl.store(db_ptr + cols, db + tl.sum(dy, axis=0), cols < N)


@racy("db_ptr", "read/write,write/write", "programs of one column of tiles add to the same bias; " + LOST)
def bias_gradient_of_tiles(device):
    dy = integers(40, 33).to(device)
    db = torch.zeros(33, device=device)
    bias_gradient_kernel[(3, 3)](dy, db, 40, 33, ROWS=16, COLS=16)


@triton.jit
def bias_overwrite_kernel(dy_ptr, db_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + row * N + cols, cols < N, other=0.0)
    tl.store(db_ptr + cols, dy, cols < N)


@racy("db_ptr", "write/write", "every row stores its own gradient as the bias': the last one stays, whichever it is")
def bias_gradient_overwritten(device):
    dy = integers(8, 20).to(device)
    bias_overwrite_kernel[(8,)](dy, torch.zeros(20, device=device), 20, BLOCK=32)


@triton.jit
def histogram_kernel(x_ptr, count_ptr, n, BLOCK: tl.constexpr, BINS: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0)
    counts = tl.histogram(x, BINS, mask=i < n)
    bins = tl.arange(0, BINS)
    tl.store(count_ptr + bins, tl.load(count_ptr + bins) + counts)


@racy("count_ptr", "read/write,write/write", "programs add their histograms by plain stores; " + LOST)
def histogram_by_stores(device):
    x = integers(500, low=0, high=16, dtype=torch.int32).to(device)
    histogram_kernel[(4,)](x, torch.zeros(16, dtype=torch.int32, device=device), 500, BLOCK=128, BINS=16)


@triton.jit
def loss_kernel(x_ptr, loss_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, cols < N, other=0.0)
    tl.store(loss_ptr, tl.load(loss_ptr) + tl.sum(x * x))


@racy("loss_ptr", "read/write,write/write", "each row adds its loss to one scalar; " + LOST)
def loss_in_one_scalar(device):
    loss_kernel[(10,)](integers(10, 30).to(device), torch.zeros(1, device=device), 30, BLOCK=32)


@triton.jit
def amax_kernel(x_ptr, amax_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    largest = tl.max(tl.abs(x))
    if largest > tl.load(amax_ptr):
        tl.store(amax_ptr, largest)


@racy(
    "amax_ptr", "read/write,write/write", "between the comparison and the store another program may store a larger one"
)
def amax_by_comparison(device):
    x = (torch.arange(300.0) + 1).to(device)  # each block has a larger maximum, so that each program stores
    amax_kernel[(5,)](x, torch.zeros(1, device=device), 300, BLOCK=64)


@triton.jit
def split_k_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K, BLOCK_K: tl.constexpr):
    rows, cols = tl.arange(0, M), tl.arange(0, N)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    a = tl.load(a_ptr + rows[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + cols[None, :])
    c_ptrs = c_ptr + rows[:, None] * N + cols[None, :]
    tl.store(c_ptrs, tl.load(c_ptrs) + tl.dot(a, b))


@racy("c_ptr", "read/write,write/write", "the parts of K add into one tile of C without atomics; " + LOST)
def split_k_without_atomics(device):
    a, b = integers(16, 64, seed=1).to(device), integers(64, 16, seed=2).to(device)
    split_k_kernel[(4,)](a, b, torch.zeros(16, 16, device=device), M=16, N=16, K=64, BLOCK_K=16)


@triton.jit
def embedding_gradient_kernel(index_ptr, dy_ptr, dw_ptr, D: tl.constexpr):
    token = tl.program_id(0)
    cols = tl.arange(0, D)
    word = tl.load(index_ptr + token)
    dy = tl.load(dy_ptr + token * D + cols)
    place = dw_ptr + word * D + cols
    tl.store(place, tl.load(place) + dy)


@racy("dw_ptr", "read/write,write/write", "two tokens are the same word; " + LOST)
def embedding_gradient_of_repeated_words(device):
    index = torch.tensor([3, 1, 4, 1, 5, 0, 2, 6], device=device)
    embedding_gradient_kernel[(8,)](index, integers(8, 16).to(device), torch.zeros(7, 16, device=device), D=16)


@triton.jit
def scatter_kernel(index_ptr, x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(index_ptr + i, i < n, other=0)
    tl.store(out_ptr + place, tl.load(x_ptr + i, i < n), i < n)


@racy("out_ptr", "write/write", "two programs store other values at one index; which stays is left to the GPU")
def scatter_with_repeated_indices(device):
    index = torch.arange(60)
    index[45] = 3  # a program of its own, far from the first one that has it
    scatter_kernel[(4,)](
        index.to(device), torch.arange(60.0, device=device), torch.zeros(60, device=device), 60, BLOCK=16
    )


@triton.jit
def key_gradient_kernel(q_ptr, dk_ptr, T: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr):
    head = tl.program_id(0)
    place = tl.arange(0, T)[:, None] * D + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + head * T * D + place)
    tl.store(dk_ptr + (head // GROUP) * T * D + place, q * 2)


@racy("dk_ptr", "write/write", "the query heads that share a key head overwrite each other's gradient of it")
def key_gradient_of_grouped_heads(device):
    q = integers(8, 16, 16).to(device)
    key_gradient_kernel[(8,)](q, torch.zeros(2, 16, 16, device=device), T=16, D=16, GROUP=4)


@triton.jit
def halo_kernel(dy_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + i, i < n, other=0.0)
    for tap in tl.static_range(3):
        place = i + tap
        dx = tl.load(dx_ptr + place, i < n, other=0.0)
        tl.store(dx_ptr + place, dx + dy, i < n)
        tl.debug_barrier()


@racy("dx_ptr", "read/write,write/write", "neighbouring programs add to the two elements of the halo; " + LOST)
def convolution_gradient_of_the_halo(device):
    halo_kernel[(4,)](integers(120).to(device), torch.zeros(122, device=device), 120, BLOCK=32)


@triton.autotune([triton.Config({"BLOCK": b}) for b in (32, 64)], key=["n"])
@triton.jit
def tuned_sum_kernel(x_ptr, total_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total_ptr, tl.sum(tl.load(x_ptr + i, i < n, other=0.0)))


@racy("total_ptr", "autotune", "each configuration that is tried adds to the sum: reset_to_zero is missing")
def autotune_without_reset(device):
    x = (integers(200, low=1, high=5)).to(device)
    tuned_sum_kernel[lambda meta: (triton.cdiv(200, meta["BLOCK"]),)](x, torch.zeros(1, device=device), 200)


@triton.autotune([triton.Config({"BLOCK": b}) for b in (32, 64)], key=["n"])
@triton.jit
def tuned_scale_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, i < n) * 3, i < n)


@racy("x_ptr", "autotune", "each configuration that is tried triples the tensor in place: restore_value is missing")
def autotune_in_place(device):
    x = integers(100, low=1, high=5).to(device)
    tuned_scale_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, 100)


@triton.autotune([triton.Config({"BLOCK": b}) for b in (32, 64)], key=["n"], reset_to_zero=["dw_ptr"])
@triton.jit
def tuned_gradients_kernel(x_ptr, dw_ptr, db_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    tl.atomic_add(dw_ptr, tl.sum(x * x))
    tl.atomic_add(db_ptr, tl.sum(x))


@racy("db_ptr", "autotune", "of two sums in one tensor the first is reset between trials")
def autotune_with_one_of_two_sums_reset(device):
    dw, db = torch.zeros(2, 1, device=device)
    x = integers(100, low=1, high=5).to(device)
    tuned_gradients_kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, dw, db, 100)


@triton.autotune([triton.Config({"BLOCK": b}) for b in (32, 64)], key=["n"])
@triton.jit
def tuned_tiles_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    tile = tl.program_id(0) // 3
    i = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n, other=0.0)
    if tl.program_id(0) < 3:
        if tl.program_id(0) == 0:
            tl.store(out_ptr + i, x, i < n)
    else:
        tl.atomic_add(out_ptr + i, x, i < n)


@racy("out_ptr", "autotune", "the first tile is stored, shares of the others are added: reset_to_zero is missing")
def autotune_of_tiles_that_are_stored_or_added(device):
    x = integers(200, low=1, high=5).to(device)
    tuned_tiles_kernel[lambda meta: (3 * triton.cdiv(200, meta["BLOCK"]),)](x, torch.zeros(200, device=device), 200)
