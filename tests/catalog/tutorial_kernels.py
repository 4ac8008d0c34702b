"""Kernels that ask Triton and torch for their GPU while they are imported, as those of Triton's tutorials do."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()
PROPERTIES = triton.runtime.driver.active.utils.get_device_properties(DEVICE.index)
HOPPER = torch.cuda.get_device_capability()[0] >= 9


def tiles() -> list[triton.Config]:
    """Configurations for the GPU that Triton's driver names."""
    cuda = triton.runtime.driver.active.get_current_target().backend == "cuda"
    return [triton.Config(dict(TM=16, TN=tn, TK=16), num_warps=2 if cuda else 4) for tn in ((16, 32) if HOPPER else ())]


@triton.jit
def softmax_kernel(out_ptr, x_ptr, rows, columns, BLOCK: tl.constexpr):
    j = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * columns + j, mask=j < columns, other=float("-inf"))
        powers = tl.exp(x - tl.max(x, axis=0))
        tl.store(out_ptr + row * columns + j, powers / tl.sum(powers, axis=0), mask=j < columns)


def softmax(x: torch.Tensor) -> torch.Tensor:
    assert x.device == DEVICE
    x = x.contiguous()
    rows, columns = x.shape
    out = torch.empty(x.shape, device=DEVICE)
    if x.numel():
        programs = min(PROPERTIES["multiprocessor_count"], rows)
        softmax_kernel[(programs,)](out, x, rows, columns, BLOCK=triton.next_power_of_2(columns))
    return out


def softmax_ref(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, dim=-1)


@triton.autotune(configs=tiles(), key=["M", "N", "K"])
@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr):
    i = tl.program_id(0) * TM + tl.arange(0, TM)[:, None]
    j = tl.program_id(1) * TN + tl.arange(0, TN)
    total = tl.zeros((TM, TN), tl.float32)
    for start in range(0, K, TK):
        k = start + tl.arange(0, TK)
        a = tl.load(a_ptr + i * K + k, mask=(i < M) & (k < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + j, mask=(k[:, None] < K) & (j < N), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(c_ptr + i * N + j, total, mask=(i < M) & (j < N))


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    assert all(t.is_cuda for t in (a, b))
    assert a.shape[1] == b.shape[0]
    a, b = a.contiguous(), b.contiguous()
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, device=a.device)
    if c.numel():
        matmul_kernel[lambda meta: (triton.cdiv(m, meta["TM"]), triton.cdiv(n, meta["TN"]))](a, b, c, m, n, k)
    return c


def matmul_ref(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@triton.jit
def normalized(x_ptr, at, inside, N, eps):
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    centered = tl.where(inside, x - tl.sum(x, axis=0) / N, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centered * centered, axis=0) / N + eps)
    return centered * scale, scale


@triton.jit
def layer_norm_kernel(y_ptr, x_ptr, w_ptr, b_ptr, N, eps, BLOCK: tl.constexpr):
    j = tl.arange(0, BLOCK)
    at, inside = tl.program_id(0) * N + j, j < N
    x_hat, _ = normalized(x_ptr, at, inside, N, eps)
    w, b = tl.load(w_ptr + j, mask=inside, other=0.0), tl.load(b_ptr + j, mask=inside, other=0.0)
    tl.store(y_ptr + at, x_hat * w + b, mask=inside)


@triton.jit
def layer_norm_backward_kernel(dx_ptr, dw_ptr, db_ptr, g_ptr, x_ptr, w_ptr, lock_ptr, N, eps, BLOCK: tl.constexpr):
    j = tl.arange(0, BLOCK)
    at, inside = tl.program_id(0) * N + j, j < N
    x_hat, scale = normalized(x_ptr, at, inside, N, eps)
    g, w = tl.load(g_ptr + at, mask=inside, other=0.0), tl.load(w_ptr + j, mask=inside, other=0.0)
    gw = g * w
    part = tl.sum(gw * x_hat, axis=0) / N
    tl.store(dx_ptr + at, (gw - part * x_hat - tl.sum(gw, axis=0) / N) * scale, mask=inside)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:  # one program at a time adds its row
        pass
    tl.store(dw_ptr + j, tl.load(dw_ptr + j, mask=inside) + g * x_hat, mask=inside)
    tl.store(db_ptr + j, tl.load(db_ptr + j, mask=inside) + g, mask=inside)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x, n = x.contiguous(), x.shape[-1]
        y = torch.empty_like(x)
        if x.numel():
            layer_norm_kernel[(x.numel() // n,)](
                y, x, w.contiguous(), b.contiguous(), n, eps, BLOCK=triton.next_power_of_2(n)
            )
        ctx.save_for_backward(x, w)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        n, g, w = x.shape[-1], g.contiguous(), w.contiguous()
        dx, dw, db = torch.empty_like(x), torch.zeros_like(w), torch.zeros_like(w)
        if x.numel():
            lock = torch.zeros(1, dtype=torch.int32, device=DEVICE)
            block = triton.next_power_of_2(n)
            layer_norm_backward_kernel[(x.numel() // n,)](dx, dw, db, g, x, w, lock, n, ctx.eps, BLOCK=block)
        return dx, dw, db, None


def layer_norm(x, w, b, eps=1e-5):
    return LayerNorm.apply(x, w, b, eps)


def layer_norm_ref(x, w, b, eps=1e-5):
    return torch.nn.functional.layer_norm(x, w.shape, w, b, eps)
