"""Ops whose kernels race, and their healthy neighbours, verified in a process of their own.

python tests/ttir/verified_ops.py [cuda NAME ...]    # a line of JSON an op; without arguments all of them, without a GPU
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl

import retrograd as rg


@triton.jit
def scale_backward_kernel(x_ptr, w_ptr, dy_ptr, dx_ptr, dw_ptr, N, HOW: tl.constexpr, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < N
    dy = tl.load(dy_ptr + row * N + cols, mask, other=0.0)
    tl.store(dx_ptr + row * N + cols, dy * tl.load(w_ptr + cols, mask, other=0.0), mask)
    dw = dy * tl.load(x_ptr + row * N + cols, mask, other=0.0)
    if HOW == "atomic":
        tl.atomic_add(dw_ptr + cols, dw, mask)
    elif HOW == "store":
        tl.store(dw_ptr + cols, tl.load(dw_ptr + cols, mask, other=0.0) + dw, mask)
    elif HOW == "wait":
        while tl.atomic_add(dw_ptr, 0.0) == 0.0:
            pass
    else:
        tl.store(dw_ptr + row * N + cols, dw, mask)


def scale(how: str) -> Any:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            x, w = (t.contiguous() for t in ctx.saved_tensors)
            rows = len(x) if how == "partial" else 1
            dx, dw = torch.empty_like(x), torch.zeros(rows, len(w), dtype=w.dtype, device=w.device)
            if x.numel():
                block = triton.next_power_of_2(len(w))
                scale_backward_kernel[(len(x),)](x, w, dy.contiguous(), dx, dw, len(w), HOW=how, BLOCK=block)
            return dx, dw.sum(0)

    return Scale.apply


@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, M, N, K, FACTOR: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    rows, cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        a_mask, b_mask = (rows[:, None] < M) & (inner[None] < K), (inner[:, None] < K) & (cols[None] < N)
        a = tl.load(a_ptr + rows[:, None] * K + inner[None], a_mask, other=0.0)
        b = tl.load(b_ptr + inner[:, None] * N + cols[None], b_mask, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    tl.store(c_ptr + rows[:, None] * N + cols[None], total * FACTOR, (rows[:, None] < M) & (cols[None] < N))


def multiply(a, b, precision, factor=1.0):
    a, b = a.contiguous(), b.contiguous()
    c = a.new_empty(len(a), b.shape[1])
    if c.numel():
        grid = (triton.cdiv(c.shape[0], 16), triton.cdiv(c.shape[1], 16))
        with torch.cuda.device_of(c):  # does nothing to tensors on the CPU
            product_kernel[grid](a, b, c, *c.shape, a.shape[1], FACTOR=factor, PRECISION=precision, BLOCK=16)
    return c


def product(factor: float, precision: str, kept: torch.dtype = torch.float32) -> Any:
    """A product of matrices; its first gradient is `factor` times the right one, of a grad_out cut to `kept`."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return multiply(a, b, precision)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dc):
            a, b = ctx.saved_tensors
            return multiply(dc.to(kept).float(), b.mT, precision, factor), multiply(a.mT, dc, precision)

    return Product.apply


def mixture(s: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Rows of v by causal softmax: the first has one share, on which nothing depends."""
    later = torch.ones(len(s), len(s), dtype=torch.bool, device=s.device).triu(1)
    return s.masked_fill(later, -torch.inf).softmax(-1) @ v


def mixed(factor: float) -> Any:
    """`mixture` as flash attention has it: what cancels is do v, in tf32, and do o, in float32."""

    class Mixture(torch.autograd.Function):
        @staticmethod
        def forward(ctx, s, v):
            p = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
            ctx.save_for_backward(p, v, out := multiply(p, v, "tf32"))
            return out

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, do):
            p, v, out = ctx.saved_tensors
            total = factor * (do * out).sum(-1, keepdim=True)
            return p * (multiply(do, v.mT, "tf32") - total), multiply(p.mT, do, "tf32")

    return Mixture.apply


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Asks for a value, so that no runs of it can be made at once."""
    if not q.detach().sum().isfinite():
        raise ValueError("numbers are wanted")
    return mixture(q @ k.mT, v)


def attended(factor: float) -> Any:
    """`attention` by products in tf32, of which do v, and do o, are two."""
    mix = mixed(factor)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return mix(multiply(q, k.mT, "tf32"), v)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, do):
            q, k, v = ctx.saved_tensors
            with torch.enable_grad():
                s, v = multiply(q, k.mT, "tf32").requires_grad_(), v.detach().requires_grad_()
                ds, dv = torch.autograd.grad(mix(s, v), (s, v), do)
            return multiply(ds, k, "tf32"), multiply(ds.mT, q, "tf32"), dv

    return Attention.apply


def linear_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Scores divided by the size of their sum, which a norm behind it makes a constant; some operators lie between."""
    scores = (q[None, None] @ k.mT[None, None] * q.shape[-1] ** -0.5).neg().mul(1.5).neg()
    return (scores @ v / scores.sum(-1, keepdim=True).abs().detach())[0, 0]


def linearly_attended(factor: float) -> Any:
    """`linear_attention` by products in tf32 with the sum of all keys, and with the sum of keys times values."""

    class LinearAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v, size := multiply(q, k.sum(0, keepdim=True).mT, "tf32").abs())
            return multiply(q, multiply(k.mT, v, "tf32"), "tf32") / size

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, do):
            q, k, v, size = ctx.saved_tensors
            do = do / size
            ds = multiply(do, v.mT, "tf32")
            dv = multiply(multiply(k, q.mT, "tf32"), do, "tf32")
            return multiply(ds, factor * k, "tf32"), multiply(ds.mT, q, "tf32"), dv

    return LinearAttention.apply


def attention_by_element(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`attention` whose scores are no product of matrices by name, beside one that is."""
    return mixture((q[:, None] * k).sum(-1), v)


def product_and_square(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = a @ b
    return y, y.square()


def two_outputs(dropped: bool) -> Any:
    """`product_and_square` in tf32; where `dropped`, the square counts only where the product does not."""

    class TwoOutputs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            y = multiply(a, b, "tf32")
            ctx.save_for_backward(a, b, y)
            return y, y.square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy, dz):
            a, b, y = ctx.saved_tensors
            total = dy if dropped and dy.any() else dy + 2 * y * dz
            return multiply(total, b.mT, "tf32"), multiply(a.mT, total, "tf32")

    return TwoOutputs.apply


@triton.jit
def double_kernel(x_ptr, y_ptr, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None]
    mask = (row < M) & (col < N)
    tl.store(y_ptr + row * N + col, 2.0 * tl.load(x_ptr + row * N + col, mask), mask)


def double(whole_blocks: bool) -> Any:
    def launch(x):
        x, y = x.contiguous(), torch.zeros_like(x, memory_format=torch.contiguous_format)
        programs = max(len(x) // 512, 1) if whole_blocks else triton.cdiv(len(x), 512)
        if x.numel():
            double_kernel[(programs,)](x, y, *x.shape, ROWS=512, COLS=triton.next_power_of_2(x.shape[1]))
        return y

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return launch(x)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(_, dy):
            return launch(dy)

    return Double.apply


@triton.jit
def last_adds_kernel(x_ptr, part_ptr, drawn_ptr, count_ptr, out_ptr, BLOCK: tl.constexpr):
    """The last program adds up, by a number that has been in memory."""
    program = tl.program_id(0)
    tl.store(part_ptr + program, tl.sum(tl.load(x_ptr + program * BLOCK + tl.arange(0, BLOCK))))
    tl.debug_barrier()
    tl.store(drawn_ptr + program, tl.atomic_add(count_ptr, 1, sem="acq_rel"))
    tl.debug_barrier()
    if tl.load(drawn_ptr + program) == tl.num_programs(0) - 1:
        total = 0.0
        for other in range(tl.num_programs(0)):
            total += tl.load(part_ptr + other)
        tl.store(out_ptr, total)


FACTORS = dict(a=rg.tensor("M", "K"), b=rg.tensor("K", "N"))
INPUTS = dict(x=rg.tensor("M", "N"), w=rg.tensor("N"))
OPS = {how: rg.op(scale(how), lambda x, w: x * w, INPUTS, name=how) for how in ("store", "atomic", "partial", "wait")}


OPS |= {
    f"product {factor} {precision}": rg.op(product(factor, precision), torch.matmul, FACTORS)
    for factor, precision in ((1.0, "tf32"), (1.03, "tf32"), (1.0, "ieee"), (1.0005, "ieee"))
}


CAST = product(1.0, "tf32", torch.bfloat16)
OPS["product cast tf32"] = rg.op(CAST, torch.matmul, FACTORS)
OPS |= {f"product {f} tf32 alone": rg.op(product(f, "tf32"), None, FACTORS) for f in (1.0, 8.0)}


def by_element(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product of matrices as a reference says it that goes step by step."""
    return (a[:, :, None] * b).sum(1)


OPS |= {
    f"product by element {factor} {precision}": rg.op(product(factor, precision), by_element, FACTORS)
    for factor, precision in ((1.0, "tf32"), (1.03, "tf32"), (1.0005, "ieee"))
}


SHARES = dict(s=rg.tensor("M", "M"), v=rg.tensor("M", "N"))
HEADS = dict(q=rg.tensor("M", "K"), k=rg.tensor("M", "K", scale=0.3), v=rg.tensor("M", "N"))
TO_ONE_KEY = dict(q=rg.tensor("M", "K"), k=rg.tensor(1, "K"), v=rg.tensor(1, "N"))
TOKENS = dict(M=[1, 2, 40], K=[16, 32], N=[16, 32])
OPS |= {f"attention {f}": rg.op(attended(f), attention, HEADS, sizes=TOKENS) for f in (1.0, 1.1)}
OPS |= {f"attention by element {f}": rg.op(attended(f), attention_by_element, HEADS, sizes=TOKENS) for f in (1.0, 1.1)}
OPS |= {
    f"linear attention {f}": rg.op(
        linearly_attended(f),
        linear_attention,
        TO_ONE_KEY,
        sizes=dict(M=[300, 2], K=[16, 32], N=[16, 32]),
        surrogate=True,
    )
    for f in (1.0, 1.03)
}
OPS |= {f"mixture {f}": rg.op(mixed(f), mixture, SHARES, sizes=dict(M=(1, 40), N=[16, 64])) for f in (1.0, 1.03)}


def decayed(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """A state that decays by a gate at each step: gradients of gates are sums over the steps after them."""
    states, state = [], torch.zeros_like(x[0])
    for step in range(len(x)):
        state = state * g[step].sigmoid() + x[step]
        states.append(state)
    return torch.stack(states)


OPS["decayed"] = rg.op(decayed, decayed, dict(x=rg.tensor("T", "N"), g=rg.tensor("T", "N")), sizes=dict(T=(2, 12)))
OPS |= {
    name: rg.op(two_outputs(name == "a dropped output"), product_and_square, FACTORS)
    for name in ("two outputs", "a dropped output")
}


# Rows are cut into blocks of 512, which no usual size is beside.
OPS |= {
    name: rg.op(double(name == "whole blocks"), lambda x: 2 * x, dict(x=rg.tensor("M", "N")), sizes=dict(N=(1, 64)))
    for name in ("whole blocks", "all blocks")
}


@triton.jit
def running_sum_kernel(x_ptr, y_ptr, T, HANDED: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    steps = first + tl.arange(0, BLOCK)
    before = 0.0
    if HANDED:
        before = tl.load(y_ptr + first - 1, first > 0, other=0.0)  # as if the program before were done
    else:
        for block in range(tl.program_id(0)):
            before += tl.sum(tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK)))
    tl.store(y_ptr + steps, before + tl.cumsum(tl.load(x_ptr + steps, steps < T, other=0.0)), steps < T)


def running_sum(handed: bool) -> Any:
    def launch(x):
        y = torch.zeros_like(x, memory_format=torch.contiguous_format)
        if len(x):
            running_sum_kernel[(triton.cdiv(len(x), 64),)](x.contiguous(), y, len(x), HANDED=handed, BLOCK=64)
        return y

    class RunningSum(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return launch(x)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(_, dy):
            return launch(dy.flip(0)).flip(0)

    return RunningSum.apply


def summed_step_by_step(x: torch.Tensor) -> torch.Tensor:
    """Sixteen operators a step: a truth of 129 steps takes more than level quick has."""
    sums, total = [], torch.zeros(())
    for value in x:
        for _ in range(8):
            total = total + value / 8
        sums.append(total)
    return torch.stack(sums)


OPS |= {
    f"a sum {how}": rg.op(
        running_sum(how == "handed on"), summed_step_by_step, dict(x=rg.tensor("T")), sizes=dict(T=(1, 300))
    )
    for how in ("handed on", "made anew")
}


def main() -> None:
    device, *names = sys.argv[1:] or ["cpu", *OPS]
    for name in names:
        report = rg.verify(OPS[name], level="quick", dtypes=["float32"], device=device)
        findings = [[finding.stage, finding.kind, finding.what] for finding in report.findings]
        races = next(stage for stage in report.stages if stage.id == "races")
        notes = [note for stage in report.stages for note in stage.notes]
        row = {"name": name, "verdict": report.verdict, "findings": findings, "power": races.power_text, "notes": notes}
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
