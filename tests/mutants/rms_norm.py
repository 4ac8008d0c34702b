"""RMSNorm ops that are broken on purpose; a checker must find the bug in every one of them.

No kernel is needed: each op emulates what a broken kernel would return. Ids starting with RX are our own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograd.check.spec import OpSpec, op, tensor

BLOCK_ROWS = 4
LANES = 8
# Where a row offset "overflows". A real kernel wraps at 2**31 elements, which no CPU test can afford.
INT_LIMIT = 4096


def padded(n: int) -> int:
    """The block size a Triton kernel would take for rows of `n`."""
    return 1 << max(n - 1, 0).bit_length()


def read_with_strides(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """What a kernel sees that reads `t` with strides that are not its own.

    A place outside of the storage reads as zero: that memory is somebody else's and must not be touched.
    """
    size = t.untyped_storage().nbytes() // t.element_size()
    place = torch.full(t.shape, t.storage_offset(), dtype=torch.int64, device=t.device)
    for axis, stride in enumerate(strides):
        steps = torch.arange(t.shape[axis], device=t.device) * stride
        place += steps.reshape([-1] + [1] * (t.ndim - axis - 1))
    if not t.numel() or not size:
        return torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    memory = t.as_strided((size,), (1,), 0)
    return torch.where(place < size, memory[place.clamp(max=size - 1)], 0)


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass
class Backward:
    """What a backward formula works with: rows of shape (M, N), and the parts of the right answer."""

    grad_out: Tensor
    input: Tensor
    weight: Tensor
    rstd: Tensor
    eps: float
    needs: tuple[bool, ...]

    def rows(self, t: Tensor) -> Tensor:
        n = self.input.shape[-1]
        return t.reshape(math.prod(self.input.shape[:-1]), n)

    @cached_property
    def x(self) -> Tensor:
        return self.rows(self.input)

    @cached_property
    def dy(self) -> Tensor:
        return self.rows(self.grad_out)

    @property
    def xhat(self) -> Tensor:
        return self.x * self.rstd

    @property
    def g(self) -> Tensor:
        return self.dy * self.weight

    @property
    def mean_square(self) -> Tensor:
        return self.x.square().mean(-1, keepdim=True)

    def dx(self, g: Tensor | None = None, rstd: Tensor | None = None, c: Any = None, sign: int = 1) -> Tensor:
        """The right dx, unless a wrong part is handed in; `c` is the row's mean of g * xhat."""
        g = self.g if g is None else g
        rstd = self.rstd if rstd is None else rstd
        xhat = self.x * rstd
        c = (g * xhat).mean(-1, keepdim=True) if c is None else c
        return rstd * (g - sign * xhat * c)

    def dw(self, rows: slice | Tensor = slice(None), rstd: Tensor | None = None) -> Tensor:
        terms = self.dy * self.x * (self.rstd if rstd is None else rstd)
        return terms[rows].sum(0)

    def both(self, rstd: Tensor) -> tuple[Tensor, Tensor]:
        return self.dx(rstd=rstd), self.dw(rstd=rstd)


Formula = Callable[[Backward], tuple[Tensor | None, Tensor | None]]


def right(b: Backward) -> tuple[Tensor, Tensor]:
    return b.dx(), b.dw()


def rms_rstd(rows: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)


def make_rms_norm(
    backward: Formula = right,
    *,
    statistic: Callable[[Tensor, float], Tensor] = rms_rstd,
    offset: float = 0.0,
    checked: bool = True,
) -> Callable[..., Tensor]:
    """An RMSNorm with the given backward formula (and statistic of the forward).

    `offset` is added to the weight in the forward; `checked` False keeps tensors out of save_for_backward.
    """

    class RMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
            rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
            rstd = statistic(rows, eps)
            if checked:
                ctx.save_for_backward(x, weight, rstd)
            else:
                ctx.kept = (x, weight, rstd)
            ctx.eps = eps
            return (rows * rstd * (weight + offset)).reshape(x.shape)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
            x, weight, rstd = ctx.saved_tensors if checked else ctx.kept
            dx, dw = backward(Backward(grad_out, x, weight, rstd, ctx.eps, ctx.needs_input_grad))
            dx = dx if dx is None else dx.reshape(x.shape)
            return dx if ctx.needs_input_grad[0] else None, dw if ctx.needs_input_grad[1] else None, None

    def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return RMSNorm.apply(x, weight, eps)

    return rms_norm


def reference(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def zero_centred_reference(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return reference(x, 1 + weight, eps)


def mutant(name: str, backward: Formula = right, ref: Callable[..., Tensor] = reference, **options: Any) -> OpSpec:
    return op(
        make_rms_norm(backward, **options),
        ref,
        dict(x=tensor("M...", "N"), weight=tensor("N")),
        params=dict(eps=[1e-6, 1e-2]),
        name=name,
    )


# dx forgets the weight (karpathy/llm.c#763).
R01 = mutant("R01", lambda b: (b.dx(g=b.dy), b.dw()))

# The weight enters the variance term twice (NVIDIA/Megatron-LM#6859).
R02 = mutant("R02", lambda b: (b.dx(c=(b.g * b.weight * b.xhat).mean(-1, keepdim=True)), b.dw()))

# The second term of dx is missing (a common slip).
R03 = mutant("R03", lambda b: (b.rstd * b.g, b.dw()))

# The row mean is divided by the padded block instead of N (class of missing tail masks).
R04 = mutant("R04", lambda b: (b.dx(c=(b.g * b.xhat).sum(-1, keepdim=True) / padded(b.x.shape[-1])), b.dw()))

# The backward recomputes rstd and leaves eps out (topic of ROCm/FlyDSL#795).
R05 = mutant("R05", lambda b: b.both(torch.rsqrt(b.mean_square)))


def _first_eps_wins() -> Formula:
    compiled: dict[tuple[int, torch.dtype], float] = {}

    def backward(b: Backward) -> tuple[Tensor, Tensor]:
        # As a kernel cache does whose key has the block and the dtype but not eps, a compile-time constant.
        eps = compiled.setdefault((padded(b.x.shape[-1]), b.x.dtype), b.eps)
        return b.both(torch.rsqrt(b.mean_square + eps))

    return backward


# The first eps wins, as the key of the kernel cache lacks it (topic of ROCm/FlyDSL#795).
R06 = mutant("R06", _first_eps_wins())

# dw is None though the weight asks for a gradient (unslothai/unsloth#4533).
R07 = mutant("R07", lambda b: (b.dx(), None))


def _whole_blocks(rows: int) -> slice:
    return slice(0, rows // BLOCK_ROWS * BLOCK_ROWS)


# The dw buffer has floor(M / B) blocks but the grid ceil(M / B): the last one is lost (BobMcDear/attorch#18).
R08 = mutant("R08", lambda b: (b.dx(), b.dw(_whole_blocks(len(b.x)))))


def _unwritten_partial(b: Backward) -> tuple[Tensor, Tensor]:
    blocks = -(-len(b.x) // BLOCK_ROWS)
    partial = torch.empty(blocks + 1, b.x.shape[-1], dtype=b.x.dtype, device=b.x.device)
    for i in range(blocks):
        partial[i] = b.dw(slice(i * BLOCK_ROWS, (i + 1) * BLOCK_ROWS))
    return b.dx(), partial.sum(0)


# The buffer of partial sums is torch.empty and one of its rows is never written (flagos-ai/FlagGems#1084).
R09 = mutant("R09", _unwritten_partial)


def _reading(strides_of: Callable[[Backward], tuple[int, ...]]) -> Formula:
    def backward(b: Backward) -> tuple[Tensor, Tensor]:
        b.grad_out = read_with_strides(b.grad_out, strides_of(b))
        return right(b)

    return backward


# grad_out is read with the strides of x (flagos-ai/FlagGems#1084, pytorch/pytorch#194719).
R10 = mutant("R10", _reading(lambda b: b.input.stride()))


def _over_grad_out(b: Backward) -> tuple[Tensor, Tensor]:
    dx, dw = right(b)
    if 0 in b.grad_out.stride():  # torch refuses to write there, so nothing is to be emulated
        return dx, dw
    # .data, as a kernel that writes to memory does not bump the version counter either.
    b.grad_out.data.copy_(dx.reshape(b.grad_out.shape))
    return b.grad_out, dw


# dx is written over grad_out, which is not the kernel's to change (unslothai/unsloth#4550).
R11 = mutant("R11", _over_grad_out)

# dw adds up terms that were rounded to 16 bits (class of low-precision accumulation).
R12 = mutant("R12", lambda b: (b.dx(), (b.dy * b.xhat).bfloat16().to(b.x.dtype).sum(0)))

# The variance is stored where the backward expects rstd (flagos-ai/FlagGems#5771).
R14 = mutant("R14", lambda b: b.both(b.mean_square + b.eps))

# The weight is zero-centred, 1 + w, and the backward forgets the 1 (NVIDIA/Megatron-LM#6859).
R16 = mutant("R16", right, zero_centred_reference, offset=1.0)


def _kept_buffer() -> Formula:
    # Never cleared: a second verification in the same process must see stale sums from its first call on.
    buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def backward(b: Backward) -> tuple[Tensor, Tensor]:
        key = (b.x.shape[-1], b.x.dtype)
        buffers[key] = b.dw() + buffers.get(key, 0)
        return b.dx(), buffers[key].clone()

    return backward


# The dw buffer is not reset between two calls (triton-lang/triton#4217).
R17 = mutant("R17", _kept_buffer())


def _overflow(b: Backward) -> tuple[Tensor, Tensor]:
    flat = b.dy.reshape(-1)
    b.dy = flat[torch.arange(flat.numel(), device=flat.device) % INT_LIMIT].reshape(b.x.shape)
    return right(b)


# Offsets into grad_out overflow, here at 2**12 elements (fla-org/flash-linear-attention#1082, scaled down).
R18 = mutant("R18", _overflow)

# The second term of dx has the wrong sign (a common slip).
R20 = mutant("R20", lambda b: (b.dx(sign=-1), b.dw()))

# NaN is flushed to zero in the backward, so a broken step looks fine (class of InternLM/lmdeploy#1780).
R27 = mutant("R27", lambda b: (b.dx().nan_to_num(), b.dw().nan_to_num()))

# rstd is stored in bfloat16 for the backward (class of lost precision).
R28 = mutant("R28", lambda b: b.both(b.rstd.bfloat16().to(b.x.dtype)))

# Tensors are kept as attributes of ctx, so an in-place change goes unnoticed (linkedin/Liger-Kernel#272).
R30 = mutant("R30", checked=False)

# Every row takes the rstd of its neighbour (deepspeedai/DeepSpeed#692).
R32 = mutant("R32", lambda b: b.both(b.rstd.roll(1, 0)))


def _tail_lanes(b: Backward) -> tuple[Tensor, Tensor]:
    n = b.x.shape[-1]
    return b.dx(c=(b.g * b.xhat)[:, : n // LANES * LANES].sum(-1, keepdim=True) / n), b.dw()


# The mean of g * xhat loses the lanes after the last full vector (facebookresearch/xformers#785).
R33 = mutant("R33", _tail_lanes)


def _bf16_accumulator(b: Backward) -> tuple[Tensor, Tensor]:
    total = torch.zeros(b.x.shape[-1], dtype=torch.bfloat16, device=b.x.device)
    for row in b.dy * b.xhat:
        total += row.bfloat16()
    return b.dx(), total.to(b.x.dtype)


# dw is added up row by row in a bfloat16 accumulator (class of low-precision accumulation).
R34 = mutant("R34", _bf16_accumulator)


def _race(b: Backward) -> tuple[Tensor, Tensor]:
    # Python's generator, and not seeded here: torch.manual_seed in a test must not hide the race.
    if len(b.x) and random.random() < 0.05:
        lost = random.randrange(len(b.x))
        return b.dx(), b.dw(torch.arange(len(b.x), device=b.x.device) != lost)
    return right(b)


# FLAKY: a race loses one row of dw in 5 % of the calls (linkedin/Liger-Kernel#182).
R35 = mutant("R35", _race)

# grad_out is taken for contiguous, whatever its strides (own; class of ROCm/TransformerEngine#623).
RX01 = mutant("RX01", _reading(lambda b: contiguous_strides(b.grad_out.shape)))


def _forward_first_eps() -> Callable[[Tensor, float], Tensor]:
    compiled: dict[tuple[int, torch.dtype], float] = {}
    return lambda rows, eps: rms_rstd(rows, compiled.setdefault((padded(rows.shape[-1]), rows.dtype), eps))


# The first eps wins in the forward, and its rstd is handed on to the backward (own).
RX02 = mutant("RX02", statistic=_forward_first_eps())


def _one_row(b: Backward) -> tuple[Tensor, Tensor]:
    dw = (b.dy * b.xhat).squeeze()
    return b.dx(), dw.sum(0).expand(b.x.shape[-1]).clone() if b.x.shape[0] == 1 and dw.ndim else b.dw()


# With a batch of one row, squeeze drops the axis and dw is summed over the wrong one (own; squeeze class).
RX03 = mutant("RX03", _one_row)

# dw leaves in bfloat16; autograd casts it back without a word, and the digits are gone (own).
RX04 = mutant("RX04", lambda b: (b.dx(), b.dw().bfloat16()))

# dw has shape (N, 1) instead of (N,), which autograd refuses with an error (own).
RX05 = mutant("RX05", lambda b: (b.dx(), b.dw()[:, None]))

# dx is None as soon as the weight is frozen (own; needs_input_grad read wrongly).
RX06 = mutant("RX06", lambda b: (b.dx() if b.needs[1] else None, b.dw()))

# dw is only made if x asks for a gradient too (own; needs_input_grad read wrongly).
RX07 = mutant("RX07", lambda b: (b.dx(), b.dw() if b.needs[0] else None))


def _long_rows(b: Backward) -> tuple[Tensor, Tensor]:
    dx, dw = right(b)
    dx[:, 256:] = 0
    return dx, dw


# Rows longer than the largest block keep zeros in dx after it (own; no loop over column blocks).
RX08 = mutant("RX08", _long_rows)

# The backward recomputes rstd with eps outside of the root (own).
RX09 = mutant("RX09", lambda b: b.both(1 / (b.mean_square.sqrt() + b.eps)))

# dw is the mean over rows instead of their sum (own).
RX10 = mutant("RX10", lambda b: (b.dx(), b.dw() / max(len(b.x), 1)))


def _spoils_saved(b: Backward) -> tuple[Tensor, Tensor]:
    dx, dw = right(b)
    b.input.data.mul_(b.rstd.reshape(*b.input.shape[:-1], 1))
    return dx, dw


# The backward normalises the saved x in place: the user's tensor changes, a second backward is wrong (own).
RX11 = mutant("RX11", _spoils_saved)


def _first_batch(b: Backward) -> tuple[Tensor, Tensor]:
    rows = math.prod(b.input.shape[-2:-1]) if b.input.ndim > 2 else len(b.x)
    return b.dx(), b.dw(slice(0, rows))


# With more than two axes, dw only has the rows of the first batch entry (own).
RX12 = mutant("RX12", _first_batch)

# HARD: xhat is recovered as y / weight, which is NaN where a weight is exactly zero (own).
RX13 = mutant("RX13", lambda b: (b.dx(), (b.dy * (b.xhat * b.weight) / b.weight).sum(0)))

MUTANTS = {name: spec for name, spec in list(globals().items()) if isinstance(spec, OpSpec)}
