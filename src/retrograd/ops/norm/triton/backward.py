"""Backward kernels of RMSNorm.

Up to `plan.BACKWARD_TILE_LIMIT` columns one persistent kernel computes grad_x and sums grad_weight and grad_bias
in registers; wider rows use one kernel for grad_x and one for the sums. Either way the sums land in a float32
buffer [parts, N], which a small kernel adds up in a fixed order and casts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from retrograd import config
from retrograd.ops._triton.launch import num_sms, on_device_of
from retrograd.ops.norm.plan import BackwardPlan, ceil_div, plan_backward
from retrograd.ops.norm.triton.forward import unit_last_stride


def rms_norm_bwd(
    grad_out: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_s: torch.Tensor | None = None,
    *,
    need_grad_x: bool = True,
    weight_dtype: torch.dtype | None = None,
    bias_dtype: torch.dtype | None = None,
    deterministic: bool = True,
    plan: BackwardPlan | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Launch the backward and return (grad_x, grad_weight, grad_bias).

    With h = s * rstd and g = grad_out * weight: grad_x = rstd * (g - h * mean(g * h)) + grad_s, and the others
    are sums of grad_out * h and of grad_out over the rows.

    Args:
        grad_out: [M, N]; rows at any distance, 0 included.
        s: [M, N], what the forward normalised.
        weight: [N] or None; only used for grad_x.
        rstd: [M] float32 of the forward.
        grad_s: [M, N] gradient of s from elsewhere, added to grad_x; or None.
        need_grad_x: Whether grad_x is computed.
        weight_dtype: dtype of grad_weight; None skips it and everything it costs.
        bias_dtype: dtype of grad_bias; None skips it.
        deterministic: Partial sums in a fixed order rather than atomic additions.
        plan: Launch plan; None asks `plan_backward`.

    Returns:
        grad_x [M, N] in the dtype of s, grad_weight [N], grad_bias [N]; None for what was not asked for.

    Raises:
        RuntimeError: s is on the CPU and kernels are not interpreted.

    Numerics: float32 inside; deterministic=True gives equal bits on GPUs with equally many multiprocessors.
    """
    rows, columns = s.shape
    guard = on_device_of(s)
    grad_x = torch.empty((rows, columns), dtype=s.dtype, device=s.device) if need_grad_x else None  # [M, N]
    need_dw, need_db = weight_dtype is not None, bias_dtype is not None
    if rows == 0 or columns == 0:
        zeros = [
            None if dtype is None else torch.zeros(columns, dtype=dtype, device=s.device)
            for dtype in (weight_dtype, bias_dtype)
        ]
        return grad_x, zeros[0], zeros[1]
    s, grad_out, grad_s = unit_last_stride(s), unit_last_stride(grad_out), unit_last_stride(grad_s)
    weight = unit_last_stride(weight)
    if plan is None:
        plan = plan_backward(rows, columns, s.element_size(), num_sms(s.device), deterministic, config.interpreting())
    atomic = plan.parts == 0
    weight_parts = allocate_parts(plan, s) if need_dw else None  # [parts, N] float32
    bias_parts = allocate_parts(plan, s) if need_db else None  # [parts, N] float32
    strides = {
        "s_stride": s.stride(0),
        "grad_out_stride": grad_out.stride(0),
    }
    sums = {"NEED_DW": need_dw, "NEED_DB": need_db, "ATOMIC": atomic}
    with guard:
        if not plan.looped:
            rms_norm_bwd_kernel[(plan.programs,)](
                grad_out,
                s,
                weight,
                rstd,
                grad_s,
                grad_x,
                weight_parts,
                bias_parts,
                **strides,
                grad_s_stride=0 if grad_s is None else grad_s.stride(0),
                M=rows,
                N=columns,
                HAS_WEIGHT=weight is not None,
                HAS_GRAD_S=grad_s is not None,
                NEED_DX=need_grad_x,
                **sums,
                BLOCK_M=plan.block_m,
                BLOCK_N=plan.block_n,
                STAGES=plan.num_stages,
                num_warps=plan.num_warps,
            )
        else:
            if need_grad_x:
                rms_norm_bwd_kernel_dx_looped[(plan.programs,)](
                    grad_out,
                    s,
                    weight,
                    rstd,
                    grad_s,
                    grad_x,
                    **strides,
                    grad_s_stride=0 if grad_s is None else grad_s.stride(0),
                    M=rows,
                    N=columns,
                    HAS_WEIGHT=weight is not None,
                    HAS_GRAD_S=grad_s is not None,
                    BLOCK_M=plan.block_m,
                    BLOCK_N=plan.block_n,
                    num_warps=plan.num_warps,
                )
            if need_dw or need_db:
                rms_norm_bwd_kernel_dw_columns[(ceil_div(columns, plan.dw_block_n), plan.row_groups)](
                    grad_out,
                    s,
                    rstd,
                    weight_parts,
                    bias_parts,
                    **strides,
                    M=rows,
                    N=columns,
                    **sums,
                    BLOCK_M=plan.dw_block_m,
                    BLOCK_N=plan.dw_block_n,
                    num_warps=4,
                )
        if atomic:
            grad_weight = None if weight_parts is None else weight_parts[0].to(weight_dtype)
            grad_bias = None if bias_parts is None else bias_parts[0].to(bias_dtype)
            return grad_x, grad_weight, grad_bias
        grad_weight = torch.empty(columns, dtype=weight_dtype, device=s.device) if need_dw else None  # [N]
        grad_bias = torch.empty(columns, dtype=bias_dtype, device=s.device) if need_db else None  # [N]
        if need_dw or need_db:
            rms_norm_bwd_kernel_finalize[(ceil_div(columns, plan.finalize_block_n),)](
                weight_parts,
                bias_parts,
                grad_weight,
                grad_bias,
                plan.parts,
                columns,
                NEED_DW=need_dw,
                NEED_DB=need_db,
                BLOCK_P=plan.finalize_block_p,
                BLOCK_N=plan.finalize_block_n,
                num_warps=4,
            )
    return grad_x, grad_weight, grad_bias


def allocate_parts(plan: BackwardPlan, like: torch.Tensor) -> torch.Tensor:
    """The float32 buffer of sums over rows: [parts, N] to be overwritten, or [1, N] zeros for atomic additions."""
    columns = like.shape[1]
    if plan.parts == 0:
        return torch.zeros((1, columns), dtype=torch.float32, device=like.device)
    return torch.empty((plan.parts, columns), dtype=torch.float32, device=like.device)


@triton.jit(do_not_specialize=["M"])
def rms_norm_bwd_kernel(
    grad_out_ptr,  # [M, N]
    s_ptr,  # [M, N]
    weight_ptr,  # [N] or None
    rstd_ptr,  # [M] float32
    grad_s_ptr,  # [M, N] or None
    grad_x_ptr,  # [M, N] contiguous, or None
    weight_parts_ptr,  # [P, N] float32 ([1, N] if ATOMIC), or None
    bias_parts_ptr,  # likewise
    s_stride,
    grad_out_stride,
    grad_s_stride,
    M,
    N,
    HAS_WEIGHT: tl.constexpr,
    HAS_GRAD_S: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    ATOMIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program p of P takes the row tiles p, p + P, ...: grad_x of each, and its own sums for the vectors."""
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    col_mask = cols < N
    if NEED_DX and HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)  # [BLOCK_N]
    if NEED_DW:
        weight_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if NEED_DB:
        bias_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)

    for tile in tl.range(pid, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        row_mask = rows < M
        mask = row_mask[:, None] & col_mask[None, :]
        rows64 = rows.to(tl.int64)[:, None]
        g = tl.load(grad_out_ptr + rows64 * grad_out_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + rows64 * s_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)  # [BLOCK_M]
        h = s * rstd[:, None]
        if NEED_DB:
            bias_sum += g
        if NEED_DW:
            weight_sum += g * h
        if NEED_DX:
            if HAS_WEIGHT:
                g = g * weight[None, :]
            projection = tl.sum(g * h, axis=1) / N  # [BLOCK_M]
            ds = rstd[:, None] * (g - h * projection[:, None])
            if HAS_GRAD_S:
                ds += tl.load(grad_s_ptr + rows64 * grad_s_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            tl.store(grad_x_ptr + rows64 * N + cols[None, :], ds.to(grad_x_ptr.dtype.element_ty), mask=mask)

    if NEED_DW:
        weight_part = tl.sum(weight_sum, axis=0)  # [BLOCK_N]
        if ATOMIC:
            tl.atomic_add(weight_parts_ptr + cols, weight_part, mask=col_mask, sem="relaxed")
        else:
            tl.store(weight_parts_ptr + pid.to(tl.int64) * N + cols, weight_part, mask=col_mask)
    if NEED_DB:
        bias_part = tl.sum(bias_sum, axis=0)  # [BLOCK_N]
        if ATOMIC:
            tl.atomic_add(bias_parts_ptr + cols, bias_part, mask=col_mask, sem="relaxed")
        else:
            tl.store(bias_parts_ptr + pid.to(tl.int64) * N + cols, bias_part, mask=col_mask)


@triton.jit(do_not_specialize=["M"])
def rms_norm_bwd_kernel_dx_looped(
    grad_out_ptr,  # [M, N]
    s_ptr,  # [M, N]
    weight_ptr,  # [N] or None
    rstd_ptr,  # [M] float32
    grad_s_ptr,  # [M, N] or None
    grad_x_ptr,  # [M, N] contiguous
    s_stride,
    grad_out_stride,
    grad_s_stride,
    M,
    N,
    HAS_WEIGHT: tl.constexpr,
    HAS_GRAD_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """grad_x of rows [BLOCK_M] in two walks over the columns: the projection, then the result."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_mask = rows < M
    rows64 = rows.to(tl.int64)[:, None]
    rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)  # [BLOCK_M]

    products = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        col_mask = cols < N
        mask = row_mask[:, None] & col_mask[None, :]
        g = tl.load(grad_out_ptr + rows64 * grad_out_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + rows64 * s_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g = g * tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
        products += g * (s * rstd[:, None])
    projection = tl.sum(products, axis=1) / N  # [BLOCK_M]

    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        col_mask = cols < N
        mask = row_mask[:, None] & col_mask[None, :]
        g = tl.load(grad_out_ptr + rows64 * grad_out_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        s = tl.load(s_ptr + rows64 * s_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g = g * tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
        ds = rstd[:, None] * (g - (s * rstd[:, None]) * projection[:, None])
        if HAS_GRAD_S:
            ds += tl.load(grad_s_ptr + rows64 * grad_s_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + rows64 * N + cols[None, :], ds.to(grad_x_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def rms_norm_bwd_kernel_dw_columns(
    grad_out_ptr,  # [M, N]
    s_ptr,  # [M, N]
    rstd_ptr,  # [M] float32
    weight_parts_ptr,  # [P, N] float32 ([1, N] if ATOMIC), or None
    bias_parts_ptr,  # likewise
    s_stride,
    grad_out_stride,
    M,
    N,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    ATOMIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (c, p) of (column blocks, P) sums column block c over the row tiles p, p + P, ..."""
    group = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    col_mask = cols < N
    weight_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    bias_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for tile in tl.range(group, tl.cdiv(M, BLOCK_M), tl.num_programs(1)):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        row_mask = rows < M
        mask = row_mask[:, None] & col_mask[None, :]
        rows64 = rows.to(tl.int64)[:, None]
        g = tl.load(grad_out_ptr + rows64 * grad_out_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if NEED_DB:
            bias_sum += g
        if NEED_DW:
            s = tl.load(s_ptr + rows64 * s_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)  # [BLOCK_M]
            weight_sum += g * (s * rstd[:, None])

    if NEED_DW:
        weight_part = tl.sum(weight_sum, axis=0)  # [BLOCK_N]
        if ATOMIC:
            tl.atomic_add(weight_parts_ptr + cols, weight_part, mask=col_mask, sem="relaxed")
        else:
            tl.store(weight_parts_ptr + group.to(tl.int64) * N + cols, weight_part, mask=col_mask)
    if NEED_DB:
        bias_part = tl.sum(bias_sum, axis=0)  # [BLOCK_N]
        if ATOMIC:
            tl.atomic_add(bias_parts_ptr + cols, bias_part, mask=col_mask, sem="relaxed")
        else:
            tl.store(bias_parts_ptr + group.to(tl.int64) * N + cols, bias_part, mask=col_mask)


@triton.jit(do_not_specialize=["P"])
def rms_norm_bwd_kernel_finalize(
    weight_parts_ptr,  # [P, N] float32, or None
    bias_parts_ptr,  # likewise
    grad_weight_ptr,  # [N] or None
    grad_bias_ptr,  # [N] or None
    P,
    N,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the parts of BLOCK_N columns, BLOCK_P rows at a time in ascending order, and cast."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    col_mask = cols < N
    weight_sum = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    bias_sum = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        parts = start + tl.arange(0, BLOCK_P)  # [BLOCK_P]
        mask = (parts < P)[:, None] & col_mask[None, :]
        offsets = parts.to(tl.int64)[:, None] * N + cols[None, :]
        if NEED_DW:
            weight_sum += tl.load(weight_parts_ptr + offsets, mask=mask, other=0.0)
        if NEED_DB:
            bias_sum += tl.load(bias_parts_ptr + offsets, mask=mask, other=0.0)
    if NEED_DW:
        grad_weight = tl.sum(weight_sum, axis=0)  # [BLOCK_N]
        tl.store(grad_weight_ptr + cols, grad_weight.to(grad_weight_ptr.dtype.element_ty), mask=col_mask)
    if NEED_DB:
        grad_bias = tl.sum(bias_sum, axis=0)  # [BLOCK_N]
        tl.store(grad_bias_ptr + cols, grad_bias.to(grad_bias_ptr.dtype.element_ty), mask=col_mask)
