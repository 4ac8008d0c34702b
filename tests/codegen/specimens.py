"""Kernels of which it is known what a compiler must have made of them, as people write them."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32


@triton.jit
def norm_fwd_kernel(x_ptr, y_ptr, weight_ptr, bias_ptr, mean_ptr, rstd_ptr, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / N
    centered = tl.where(inside, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, axis=0) / N + eps)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + cols, centered * rstd * weight + bias, mask=inside)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def norm_bwd_kernel(
    dx_ptr, dy_ptr, dw_ptr, db_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, lock_ptr, N, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of x; weight and bias gradients are added to one of GROUPS rows, under that row's lock."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * N + cols, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row)
    xhat = tl.where(inside, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
    scaled = weight * dy
    c1 = tl.sum(xhat * scaled, axis=0) / N
    c2 = tl.sum(scaled, axis=0) / N
    tl.store(dx_ptr + row * N + cols, (scaled - (xhat * c1 + c2)) * rstd, mask=inside)
    group = tl.program_id(0) % GROUPS
    while tl.atomic_cas(lock_ptr + group, 0, 1) == 1:
        pass
    seen = tl.load(lock_ptr + GROUPS + group)
    dw, db = dy * xhat, dy
    if seen == 0:
        tl.atomic_xchg(lock_ptr + GROUPS + group, 1)
    else:
        dw += tl.load(dw_ptr + group * N + cols, mask=inside, other=0.0)
        db += tl.load(db_ptr + group * N + cols, mask=inside, other=0.0)
    tl.store(dw_ptr + group * N + cols, dw, mask=inside)
    tl.store(db_ptr + group * N + cols, db, mask=inside)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr + group, 0)


@triton.jit
def ticket_kernel(x_ptr, part_ptr, count_ptr, out_ptr, N, BLOCK: tl.constexpr):
    """Sums of blocks; the program that draws the last ticket adds them up, in their order."""
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(part_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + here, mask=here < N, other=0.0), axis=0))
    ticket = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
    if ticket == tl.num_programs(0) - 1:
        total = 0.0
        for part in range(tl.num_programs(0)):
            total += tl.load(part_ptr + part)
        tl.store(out_ptr, total)


@triton.jit
def add_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + here, mask=here < N, other=0.0)
    tl.atomic_add(out_ptr + here % 1024, x, mask=here < N, sem="relaxed")


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    rows, ks = tl.arange(0, BLOCK), tl.arange(0, 32)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, 32):
        a = tl.load(a_ptr + rows[:, None] * K + (k + ks)[None, :])
        b = tl.load(b_ptr + (k + ks)[:, None] * BLOCK + rows[None, :])
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(c_ptr + rows[:, None] * BLOCK + rows[None, :], total)


@triton.jit
def exact_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols)
    tl.store(y_ptr + cols, tl.div_rn(x, tl.sqrt_rn(x)))


@triton.jit
def rough_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols)
    tl.store(y_ptr + cols, tl.exp(x) / (1.0 + tl.exp2(x)) + tl.rsqrt(x) * tl.sqrt(x) + tl.log(x) + tl.sin(x))


@triton.jit
def scale_early_kernel(x_ptr, out_ptr, factor_ptr, WAIT: tl.constexpr, BLOCK: tl.constexpr):
    """Launched while the kernel ahead of it ends, for which it waits first, too late, or never."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WAIT == "first":
        gdc_wait()
    factor = tl.load(factor_ptr)
    if WAIT == "late":
        gdc_wait()
    tl.store(out_ptr + cols, tl.load(x_ptr + cols) * factor)


@triton.jit
def spill_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols)
    tl.store(y_ptr + cols, x * tl.sum(x, axis=0))


@triton.autotune([triton.Config({"BLOCK": 1024}), triton.Config({"BLOCK": 2048}, num_warps=8)], key=["N"])
@triton.heuristics({"EVEN": lambda args: args["N"] % args["BLOCK"] == 0})
@triton.jit
def tuned_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + here) if EVEN else tl.load(x_ptr + here, mask=here < N, other=0.0)
    out_ptrs = out_ptr + here % 1024
    tl.atomic_add(out_ptrs, x, mask=here < N, sem="relaxed")


reset_kernel = triton.autotune(tuned_kernel.configs, key=["N"], reset_to_zero=["out_ptr"])(tuned_kernel.fn)


@triton.autotune([triton.Config({}, num_warps=w) for w in (4, 8)], key=["N"])
@triton.jit
def scale_kernel(x_ptr, N, BLOCK: tl.constexpr):
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + here, 2 * tl.load(x_ptr + here, mask=here < N), mask=here < N)


restored_kernel = triton.autotune(scale_kernel.configs, key=["N"], restore_value=["x_ptr"])(scale_kernel.fn)


def made(*shape, dtype=F32):
    """A tensor as people make it: on the GPU."""
    x = torch.empty(shape, dtype=dtype, device="cuda")
    assert x.is_cuda
    return x


def norms():
    x, weight, lines = made(64, 1024, dtype=BF16), made(1024, dtype=BF16), made(64)
    norm_fwd_kernel[(64,)](x, x, weight, weight, lines, lines, 1024, 1e-5, BLOCK=1024)
    sums = made(16, 1024)
    norm_bwd_kernel[(64,)](
        x, x, sums, sums, x, weight, lines, lines, made(32, dtype=I32), 1024, GROUPS=16, BLOCK=1024
    )  # fmt: skip


def ticket():
    ticket_kernel[(4,)](made(4096), made(4), made(1, dtype=I32), made(1), 4096, BLOCK=1024)


def adds():
    add_kernel[(4,)](made(4096), made(1024), 4096, BLOCK=1024)


def adds_bf16():
    add_kernel[(4,)](made(4096, dtype=BF16), made(1024, dtype=BF16), 4096, BLOCK=1024)


def tf32():
    dot_kernel[(1,)](made(64, 512), made(512, 64), made(64, 64), 512, PRECISION="tf32", BLOCK=64)


def ieee():
    dot_kernel[(1,)](made(64, 512), made(512, 64), made(64, 64), 512, PRECISION="ieee", BLOCK=64)


def exact():
    exact_kernel[(1,)](made(128), made(128), BLOCK=128)


def unfused():
    exact_kernel[(1,)](made(128), made(128), BLOCK=128, enable_fp_fusion=False)


def rough():
    rough_kernel[(1,)](made(128), made(128), BLOCK=128)


def early(wait, **options):
    scale_early_kernel[(4,)](made(4096), made(4096), made(1), WAIT=wait, BLOCK=1024, **options)


def waits_first():
    early("first", launch_pdl=True)


def waits_late():
    early("late", launch_pdl=True)


def never_waits():
    early("never", launch_pdl=True)


def not_early():
    early("never")


def spills():
    spill_kernel[(1,)](made(16384), made(16384), BLOCK=16384, num_warps=1)


def spills_on_amd():
    spill_kernel[(1,)](made(32768), made(32768), BLOCK=32768, num_warps=1)


def roomy():
    spill_kernel[(1,)](made(16384), made(16384), BLOCK=16384, num_warps=16)


def tuned():
    tuned_kernel[lambda meta: (triton.cdiv(4096, meta["BLOCK"]),)](made(4096), made(1024), 4096)


def tuned_reset():
    reset_kernel[lambda meta: (triton.cdiv(4096, meta["BLOCK"]),)](made(4096), made(1024), 4096)


def tuned_in_place():
    scale_kernel[(4,)](made(4096), 4096, BLOCK=1024)


def tuned_restored():
    restored_kernel[(4,)](made(4096), 4096, BLOCK=1024)


def ours():
    """An op of this library in a person's own function."""
    from retrograd.ops import rms_norm

    x = made(64, 1024).requires_grad_()
    rms_norm(x, made(1024), impl="triton").sum().backward()


def asks():
    """What launchers ask before they launch."""
    assert torch.cuda.is_available()
    properties = torch.cuda.get_device_properties("cuda")
    driver = triton.runtime.driver.active
    assert driver.utils.get_device_properties(0)["multiprocessor_count"] == properties.multi_processor_count
    x = torch.empty(4096).to("cuda").cuda()
    with torch.cuda.device(x.device):
        grid = (properties.multi_processor_count,)
        add_kernel[grid](x, torch.empty_like(x, device=driver.get_active_torch_device()), 4096, BLOCK=1024)


@tl.core.builtin
def die(_semantic=None):
    os._exit(13)


@triton.jit
def deadly_kernel(x_ptr, BLOCK: tl.constexpr):
    die()
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)


def kills():
    """A compiler that dies, beside one that does not."""
    exact()
    deadly_kernel[(1,)](made(128), BLOCK=128)


def fails():
    raise ValueError("no such weather")
