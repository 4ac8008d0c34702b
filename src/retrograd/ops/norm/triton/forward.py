"""Forward kernels of RMSNorm: a tile of whole rows per program, or rows walked in column blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from retrograd import config
from retrograd.ops._triton.launch import num_sms, on_device_of
from retrograd.ops.norm.plan import ForwardPlan, plan_forward


def rms_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    *,
    store_rstd: bool = True,
    store_s: bool = True,
    plan: ForwardPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Launch the forward and return (y, s, rstd).

    Args:
        x: [M, N] float32, float16 or bfloat16; rows at any distance, 0 included.
        weight: [N] or None.
        bias: [N] or None.
        residual: [M, N] in the dtype of x, or None.
        eps: added to the mean square; a run-time argument of the kernel.
        store_rstd: Whether rstd is written.
        store_s: Whether s = x + residual is written (only with a residual).
        plan: Launch plan; None asks `plan_forward`.

    Returns:
        y [M, N] in the dtype of x; s likewise or None; rstd [M] float32 or None.

    Raises:
        RuntimeError: x is on the CPU and kernels are not interpreted.

    Numerics: float32 inside, correctly rounded square root; s is rounded to the dtype of x before it is used.
    """
    rows, columns = x.shape
    guard = on_device_of(x)
    x, residual = unit_last_stride(x), unit_last_stride(residual)
    weight, bias = unit_last_stride(weight), unit_last_stride(bias)
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)  # [M, N]
    s = torch.empty_like(y) if residual is not None and store_s else None  # [M, N]
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device) if store_rstd else None  # [M]
    if y.numel() == 0:
        return y, s, rstd
    if plan is None:
        plan = plan_forward(rows, columns, x.element_size(), num_sms(x.device), config.interpreting())
    kernel = rms_norm_fwd_kernel_looped if plan.looped else rms_norm_fwd_kernel
    with guard:
        kernel[(plan.programs,)](
            x,
            residual,
            weight,
            bias,
            y,
            s,
            rstd,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            rows,
            columns,
            eps,
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            STORE_S=s is not None,
            STORE_RSTD=rstd is not None,
            BLOCK_M=plan.block_m,
            BLOCK_N=plan.block_n,
            num_warps=plan.num_warps,
        )
    return y, s, rstd


def unit_last_stride(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """`tensor`, copied only if neighbours in its last dimension are not neighbours in memory."""
    if tensor is None or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


@triton.jit(do_not_specialize=["M"])
def rms_norm_fwd_kernel(
    x_ptr,  # [M, N]
    residual_ptr,  # [M, N] or None
    weight_ptr,  # [N] or None
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N] contiguous
    s_ptr,  # [M, N] contiguous, or None
    rstd_ptr,  # [M] float32, or None
    x_stride,
    residual_stride,
    M,
    N,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STORE_S: tl.constexpr,
    STORE_RSTD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program normalises rows [BLOCK_M] whole: BLOCK_N >= N."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    cols = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    row_mask = rows < M
    col_mask = cols < N
    mask = row_mask[:, None] & col_mask[None, :]
    rows64 = rows.to(tl.int64)[:, None]
    out_offsets = rows64 * N + cols[None, :]

    s = tl.load(x_ptr + rows64 * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + rows64 * residual_stride + cols[None, :], mask=mask, other=0.0)
        # The backward sees s as stored, so the forward has to normalise the stored value.
        s = (s + residual.to(tl.float32)).to(y_ptr.dtype.element_ty).to(tl.float32)
        if STORE_S:
            tl.store(s_ptr + out_offsets, s.to(s_ptr.dtype.element_ty), mask=mask)

    # rsqrt is approximate on NVIDIA and flushes subnormal mean squares to 0; the rounded root does neither.
    mean_square = tl.sum(s * s, axis=1) / N + eps  # [BLOCK_M]
    # Rows beyond M are zeros: with eps=0 they would divide by zero.
    rstd = 1.0 / tl.sqrt_rn(tl.where(row_mask, mean_square, 1.0))  # [BLOCK_M]
    if STORE_RSTD:
        tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    y = s * rstd[:, None]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)  # [BLOCK_N]
        y = y * weight[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)  # [BLOCK_N]
        y = y + bias[None, :]
    tl.store(y_ptr + out_offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def rms_norm_fwd_kernel_looped(
    x_ptr,  # [M, N]
    residual_ptr,  # [M, N] or None
    weight_ptr,  # [N] or None
    bias_ptr,  # [N] or None
    y_ptr,  # [M, N] contiguous
    s_ptr,  # [M, N] contiguous, or None
    rstd_ptr,  # [M] float32, or None
    x_stride,
    residual_stride,
    M,
    N,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STORE_S: tl.constexpr,
    STORE_RSTD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program walks the columns of rows [BLOCK_M] twice: mean square, then y."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_mask = rows < M
    rows64 = rows.to(tl.int64)[:, None]

    squares = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        mask = row_mask[:, None] & (cols < N)[None, :]
        s = tl.load(x_ptr + rows64 * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + rows64 * residual_stride + cols[None, :], mask=mask, other=0.0)
            s = (s + residual.to(tl.float32)).to(y_ptr.dtype.element_ty).to(tl.float32)
        squares += s * s
    mean_square = tl.sum(squares, axis=1) / N + eps  # [BLOCK_M]
    # Rows beyond M are zeros: with eps=0 they would divide by zero.
    rstd = 1.0 / tl.sqrt_rn(tl.where(row_mask, mean_square, 1.0))  # [BLOCK_M]
    if STORE_RSTD:
        tl.store(rstd_ptr + rows, rstd, mask=row_mask)

    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        col_mask = cols < N
        mask = row_mask[:, None] & col_mask[None, :]
        out_offsets = rows64 * N + cols[None, :]
        s = tl.load(x_ptr + rows64 * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + rows64 * residual_stride + cols[None, :], mask=mask, other=0.0)
            s = (s + residual.to(tl.float32)).to(y_ptr.dtype.element_ty).to(tl.float32)
            if STORE_S:
                tl.store(s_ptr + out_offsets, s.to(s_ptr.dtype.element_ty), mask=mask)
        y = s * rstd[:, None]
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)  # [BLOCK_N]
            y = y * weight[None, :]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)  # [BLOCK_N]
            y = y + bias[None, :]
        tl.store(y_ptr + out_offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
