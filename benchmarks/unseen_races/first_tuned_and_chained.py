"""Autotuned kernels, tasks that wait for other tasks, inline assembly that orders, and pairs of kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from programs import Check, healthy, integers, racy


def zeros(device, *sizes, dtype=torch.int32):
    return [torch.zeros(n, dtype=dtype, device=device) for n in sizes]


@triton.jit
def norm_gradient_body(x_ptr, dy_ptr, dw_ptr, db_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (rows < M) & (cols < N)
    x = tl.load(x_ptr + rows * N + cols, inside, other=0.0)
    dy = tl.load(dy_ptr + rows * N + cols, inside, other=0.0)
    col = tl.arange(0, BLOCK)
    tl.atomic_add(dw_ptr + col, tl.sum(x * dy, 0), col < N)
    tl.atomic_add(db_ptr + col, tl.sum(dy, 0), col < N)


CONFIGS = [triton.Config({"ROWS": rows}) for rows in (4, 8)]


@triton.autotune(CONFIGS, key=["M", "N"], reset_to_zero=["dw_ptr", "db_ptr"])
@triton.jit
def both_reset_kernel(x_ptr, dy_ptr, dw_ptr, db_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    norm_gradient_body(x_ptr, dy_ptr, dw_ptr, db_ptr, M, N, ROWS, BLOCK)


@triton.autotune(CONFIGS, key=["M", "N"], reset_to_zero=["dw_ptr"])
@triton.jit
def one_reset_kernel(x_ptr, dy_ptr, dw_ptr, db_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    norm_gradient_body(x_ptr, dy_ptr, dw_ptr, db_ptr, M, N, ROWS, BLOCK)


def _zero_both(args):
    args["dw_ptr"].zero_()
    args["db_ptr"].zero_()


HOOKED = [triton.Config({"ROWS": rows}, pre_hook=_zero_both) for rows in (4, 8)]


@triton.autotune(HOOKED, key=["M", "N"])
@triton.jit
def hooked_kernel(x_ptr, dy_ptr, dw_ptr, db_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    norm_gradient_body(x_ptr, dy_ptr, dw_ptr, db_ptr, M, N, ROWS, BLOCK)


def _tuned_gradient(device, kernel):
    x, dy, (dw, db) = integers(20, 12, seed=1), integers(20, 12, seed=2), torch.zeros(2, 12, device=device)
    kernel[lambda meta: (triton.cdiv(20, meta["ROWS"]),)](x.to(device), dy.to(device), dw, db, 20, 12, BLOCK=16)
    return [Check(dw, (x * dy).sum(0)), Check(db, dy.sum(0))]


@healthy("both sums of an autotuned kernel are reset between trials")
def tuned_with_both_sums_reset(device):
    return _tuned_gradient(device, both_reset_kernel)


@healthy("a hook of each configuration zeroes both sums before it runs")
def tuned_with_a_hook_that_zeroes(device):
    return _tuned_gradient(device, hooked_kernel)


@racy("db_ptr", "autotune", "two sums, one of which is reset between trials")
def tuned_with_one_of_two_sums_reset(device):
    _tuned_gradient(device, one_reset_kernel)


@triton.autotune([triton.Config({"BLOCK": b}) for b in (16, 32)], key=["n"], restore_value=["p_ptr"])
@triton.jit
def momentum_kernel(p_ptr, m_ptr, g_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(m_ptr + i, i < n) * 2 + tl.load(g_ptr + i, i < n)
    tl.store(m_ptr + i, m, i < n)
    tl.store(p_ptr + i, tl.load(p_ptr + i, i < n) - m, i < n)


@triton.autotune([triton.Config({"BLOCK": b}) for b in (16, 32)], key=["n"], restore_value=["p_ptr", "m_ptr"])
@triton.jit
def restored_momentum_kernel(p_ptr, m_ptr, g_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(m_ptr + i, i < n) * 2 + tl.load(g_ptr + i, i < n)
    tl.store(m_ptr + i, m, i < n)
    tl.store(p_ptr + i, tl.load(p_ptr + i, i < n) - m, i < n)


def _momentum(device, kernel):
    p, m, g = integers(50, seed=1), integers(50, seed=2), integers(50, seed=3)
    own_p, own_m = p.to(device, copy=True), m.to(device, copy=True)
    kernel[lambda meta: (triton.cdiv(50, meta["BLOCK"]),)](own_p, own_m, g.to(device), 50)
    return [Check(own_p, p - 2 * m - g), Check(own_m, 2 * m + g)]


@healthy("an optimiser that is tuned in place restores both of its tensors")
def tuned_optimiser_that_restores_both(device):
    return _momentum(device, restored_momentum_kernel)


@racy("m_ptr", "autotune", "the parameter is restored between trials, the momentum is not")
def tuned_optimiser_that_restores_one(device):
    _momentum(device, momentum_kernel)


@triton.autotune([triton.Config({"BLOCK": b}) for b in (16, 32)], key=["n"])
@triton.jit
def relu_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.maximum(tl.load(x_ptr + i, i < n, other=0.0), 0.0), i < n)


@healthy("in place and tuned without restoring, which changes nothing: a second time it gives the same")
def tuned_in_place_where_twice_is_once(device):
    x = integers(50)
    own = x.to(device, copy=True)
    relu_kernel[lambda meta: (triton.cdiv(50, meta["BLOCK"]),)](own, 50)
    return [Check(own, x.clamp_min(0))]


@triton.jit
def wave_kernel(a_ptr, b_ptr, d_ptr, flag_ptr, n, TILE: tl.constexpr, WAIT: tl.constexpr):
    """Edit distances by tiles: each waits for the tiles to its left and above, as far as WAIT says."""
    ti, tj, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if tj > 0:
        while tl.atomic_add(flag_ptr + ti * tiles + tj - 1, 0, sem="acquire") == 0:
            pass
    if (WAIT == "both") & (ti > 0):
        while tl.atomic_add(flag_ptr + (ti - 1) * tiles + tj, 0, sem="acquire") == 0:
            pass
    tl.debug_barrier()
    for r in range(ti * TILE + 1, ti * TILE + TILE + 1):
        for c in range(tj * TILE + 1, tj * TILE + TILE + 1):
            same = (tl.load(a_ptr + r - 1) == tl.load(b_ptr + c - 1)).to(tl.int32)
            up = tl.load(d_ptr + (r - 1) * (n + 1) + c) + 1
            left = tl.load(d_ptr + r * (n + 1) + c - 1) + 1
            diagonal = tl.load(d_ptr + (r - 1) * (n + 1) + c - 1) + 1 - same
            tl.store(d_ptr + r * (n + 1) + c, tl.minimum(tl.minimum(up, left), diagonal))
            tl.debug_barrier()
    tl.atomic_xchg(flag_ptr + ti * tiles + tj, 1, sem="release")


def _distances(device, wait):
    a, b = integers(9, low=0, high=3, seed=1, dtype=torch.int32), integers(9, low=0, high=3, seed=2, dtype=torch.int32)
    d = torch.zeros(10, 10, dtype=torch.int32)
    d[0], d[:, 0] = torch.arange(10), torch.arange(10)
    own = d.to(device, copy=True)
    wave_kernel[(3, 3)](a.to(device), b.to(device), own, *zeros(device, 9), 9, TILE=3, WAIT=wait)
    for r in range(1, 10):
        for c in range(1, 10):
            d[r, c] = min(d[r - 1, c] + 1, d[r, c - 1] + 1, d[r - 1, c - 1] + int(a[r - 1] != b[c - 1]))
    return [Check(own, d)]


@healthy("a wave of tiles: left and above are waited for, and the diagonal one was before both")
def wave_of_tiles(device):
    return _distances(device, "both")


@racy("d_ptr", "read/write", "tiles wait for the one to the left and read the one above as well")
def wave_that_waits_on_one_side(device):
    _distances(device, "left")


@triton.jit
def triangular_kernel(start_ptr, col_ptr, value_ptr, b_ptr, x_ptr, flag_ptr, MISTAKE: tl.constexpr):
    """x = b - L x for a sparse strictly lower L, a program a row, which waits for the rows that it needs."""
    row = tl.program_id(0)
    x = tl.load(b_ptr + row)
    for e in range(tl.load(start_ptr + row), tl.load(start_ptr + row + 1)):
        col = tl.load(col_ptr + e)
        if (MISTAKE == 0) | (e == tl.load(start_ptr + row)):
            while tl.atomic_add(flag_ptr + col, 0, sem="acquire") == 0:
                pass
        tl.debug_barrier()
        x -= tl.load(value_ptr + e) * tl.load(x_ptr + col)
    tl.store(x_ptr + row, x)
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr + row, 1, sem="release")


def _triangular(device, mistake):
    lower = integers(12, 12, low=-1, high=2).tril(-1)
    b, x = integers(12, seed=1), torch.zeros(12, device=device)
    rows, cols = lower.nonzero(as_tuple=True)
    start = torch.tensor([0, *rows.bincount(minlength=12).cumsum(0).tolist()], dtype=torch.int32)
    args = start.to(device), cols.to(torch.int32).to(device), lower[rows, cols].to(device), b.to(device)
    triangular_kernel[(12,)](*args, x, *zeros(device, 12), MISTAKE=mistake)
    want = torch.zeros(12)
    for row in range(12):
        want[row] = b[row] - lower[row] @ want
    return [Check(x, want)]


@healthy("a sparse triangular system: a row waits for each row that it reads")
def rows_that_wait_for_all_they_read(device):
    return _triangular(device, 0)


@racy("x_ptr", "read/write", "a row waits for the first of those that it reads")
def rows_that_wait_for_the_first_they_read(device):
    _triangular(device, 1)


@triton.jit
def _fence(x):
    return tl.inline_asm_elementwise(
        "fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fence_kernel(x_ptr, data_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if pid == 0:
        if EARLY:
            _fence(cols)
        tl.store(data_ptr + cols, tl.load(x_ptr + cols) + 3)
        if not EARLY:
            _fence(cols)
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr, 1, sem="relaxed")
    else:
        while tl.atomic_add(flag_ptr, 0, sem="relaxed") == 0:
            pass
        tl.debug_barrier()
        _fence(cols)
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))


def _fenced(device, early):
    x, out, data = integers(16), torch.zeros(3, 16, device=device), torch.zeros(16, device=device)
    fence_kernel[(3,)](x.to(device), data, *zeros(device, 1), out, BLOCK=16, EARLY=early)
    return [Check(out[1:], (x + 3).repeat(2, 1))]


@healthy("fences between data and a relaxed flag, on both sides")
def flag_between_fences(device):
    return _fenced(device, False)


@racy("data_ptr", "read/write", "the producer's fence stands before its data")
def flag_whose_fence_stands_before_the_data(device):
    _fenced(device, True)


@triton.jit
def _signal(address, ORDER: tl.constexpr):
    if ORDER == "release":
        tl.inline_asm_elementwise(
            "red.release.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0;",
            "=r,l",
            [address],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "red.relaxed.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0;",
            "=r,l",
            [address],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _await(address, goal):
    tl.inline_asm_elementwise(
        """
        {
            .reg .u32 %seen;
            .reg .pred %less;
            again:
                ld.acquire.gpu.global.u32 %seen, [$1];
                setp.lt.u32 %less, %seen, $2;
                @%less bra again;
            mov.u32 $0, %seen;
        }
        """,
        "=r,l,r", [address, goal], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def asm_barrier_kernel(x_ptr, y_ptr, out_ptr, count_ptr, BLOCK: tl.constexpr, ORDER: tl.constexpr):
    pid, n, cols = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    tl.store(y_ptr + pid * BLOCK + cols, tl.load(x_ptr + pid * BLOCK + cols) * 2)
    tl.debug_barrier()
    _signal(count_ptr.to(tl.int64), ORDER)
    _await(count_ptr.to(tl.int64), n)
    tl.debug_barrier()
    tl.store(out_ptr + pid * BLOCK + cols, tl.load(y_ptr + (n - 1 - pid) * BLOCK + cols))


def _asm_barrier(device, order):
    x, (y, out) = integers(4, 16), torch.zeros(2, 4, 16, device=device)
    asm_barrier_kernel[(4,)](x.to(device), y, out, *zeros(device, 1), BLOCK=16, ORDER=order)
    return [Check(out, 2 * x.flip(0))]


@healthy("a barrier of the grid in inline assembly: a reduction that releases, loads that acquire")
def barrier_in_assembly(device):
    return _asm_barrier(device, "release")


@racy("y_ptr", "read/write", "the arrival in inline assembly is relaxed")
def barrier_in_assembly_with_relaxed_arrivals(device):
    _asm_barrier(device, "relaxed")


@triton.jit
def store_release_kernel(x_ptr, data_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr):
    pid, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(data_ptr + cols, tl.load(x_ptr + cols) + 1)
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "st.release.gpu.global.u32 [$1], 1; mov.u32 $0, 0;", "=r,l", [flag_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
    else:
        _await(flag_ptr.to(tl.int64), 1)
        tl.debug_barrier()
        tl.store(out_ptr + pid * BLOCK + cols, tl.load(data_ptr + cols))


@healthy("a flag stored with release in inline assembly and loaded with acquire")
def flag_in_assembly(device):
    x, out, data = integers(16), torch.zeros(3, 16, device=device), torch.zeros(16, device=device)
    store_release_kernel[(3,)](x.to(device), data, *zeros(device, 1), out, BLOCK=16)
    return [Check(out[1:], (x + 1).repeat(2, 1))]


@triton.jit
def swap_lock_kernel(x_ptr, sum_ptr, lock_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + cols)
    tl.inline_asm_elementwise(
        """
        {
            .reg .u32 %old;
            .reg .pred %taken;
            again:
                atom.acquire.gpu.global.cas.b32 %old, [$1], 0, 1;
                setp.ne.u32 %taken, %old, 0;
                @%taken bra again;
            mov.u32 $0, %old;
        }
        """,
        "=r,l", [lock_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.debug_barrier()
    tl.store(sum_ptr + cols, tl.load(sum_ptr + cols) + x)
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        "atom.release.gpu.global.exch.b32 $0, [$1], 0;", "=r,l", [lock_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@healthy("a lock whose swap and exchange are inline assembly")
def lock_in_assembly(device):
    x, total = integers(5, 16), torch.zeros(16, device=device)
    swap_lock_kernel[(5,)](x.to(device), total, *zeros(device, 1), BLOCK=16)
    return [Check(total, x.sum(0))]


@triton.jit
def flash_gradient_kernel(
    q_ptr, k_ptr, dq_ptr, dk_ptr, T: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, MISTAKE: tl.constexpr
):
    """Gradients of sum((q k^T)^2) / 2, a program a block of keys: dk stays, dq is added to by all of them."""
    head, block = tl.program_id(0), tl.program_id(1)
    d, keys = tl.arange(0, D), block * TILE + tl.arange(0, TILE)
    k = tl.load(k_ptr + (head * T + keys[:, None]) * D + d[None, :])
    dk = tl.zeros((TILE, D), tl.float32)
    for start in range(0, T, TILE):
        places = (head * T + start + tl.arange(0, TILE)[:, None]) * D + d[None, :]
        q = tl.load(q_ptr + places)
        s = tl.dot(q, tl.trans(k))
        dk += tl.dot(tl.trans(s), q)
        dq = tl.dot(s, k)
        if MISTAKE:
            tl.store(dq_ptr + places, tl.load(dq_ptr + places) + dq)
        else:
            tl.atomic_add(dq_ptr + places, dq, sem="relaxed")
    tl.store(dk_ptr + (head * T + keys[:, None]) * D + d[None, :], dk)


def _flash_gradient(device, mistake):
    q, k = integers(2, 48, 16, low=-1, high=2, seed=1), integers(2, 48, 16, low=-1, high=2, seed=2)
    dq, dk = torch.zeros(2, 2, 48, 16, device=device)
    flash_gradient_kernel[(2, 3)](q.to(device), k.to(device), dq, dk, T=48, D=16, TILE=16, MISTAKE=mistake)
    s = q @ k.mT
    return [Check(dq, s @ k), Check(dk, s.mT @ q)]


@healthy("gradients of attention by blocks of keys: those of queries by atomics")
def gradient_of_queries_by_atomics(device):
    return _flash_gradient(device, False)


@racy("dq_ptr", "read/write,write/write", "gradients of queries are loaded, added to and stored by every block of keys")
def gradient_of_queries_by_stores(device):
    _flash_gradient(device, True)
