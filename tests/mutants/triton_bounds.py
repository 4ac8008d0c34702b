"""Real Triton kernels that read or write outside their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from retrograd.check.spec import OpSpec, op, tensor


@triton.jit
def masked_kernel(x_ptr, dy_ptr, dx_ptr, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < total, other=0.0)
    dy = tl.load(dy_ptr + at, mask=at < total, other=0.0)
    tl.store(dx_ptr + at, 2 * x * dy, mask=at < total)


@triton.jit
def unmasked_load_kernel(x_ptr, dy_ptr, dx_ptr, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)  # the bug; the store has its mask, so no result ever shows it
    dy = tl.load(dy_ptr + at, mask=at < total, other=0.0)
    tl.store(dx_ptr + at, 2 * x * dy, mask=at < total)


@triton.jit
def unmasked_store_kernel(x_ptr, dy_ptr, dx_ptr, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < total, other=0.0)
    dy = tl.load(dy_ptr + at, mask=at < total, other=0.0)
    tl.store(dx_ptr + at, 2 * x * dy)  # the bug: the last block is longer than the tensor


@triton.jit
def one_too_many_kernel(x_ptr, dy_ptr, dx_ptr, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < total, other=0.0)
    dy = tl.load(dy_ptr + at, mask=at < total, other=0.0)
    tl.store(dx_ptr + at, 2 * x * dy, mask=at <= total)  # the bug: at == total is past the end


@triton.jit
def first_left_kernel(x_ptr, dy_ptr, dx_ptr, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < total, other=0.0)
    left = tl.load(x_ptr + at - 1, mask=at < total, other=0.0)  # the bug: the first element has none
    dy = tl.load(dy_ptr + at, mask=at < total, other=0.0)
    tl.store(dx_ptr + at, 2 * x * dy + tl.where(at > total, left, 0.0), mask=at < total)


@triton.jit
def far_kernel(x_ptr, dy_ptr, dx_ptr, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < total, other=0.0)
    dy = tl.load(dy_ptr + at, mask=at < total, other=0.0)
    tl.store(dx_ptr + at, 2 * x * dy, mask=at < total)
    wild = at.to(tl.int64) * (1 << 40)  # an index that has overflowed
    tl.store(dx_ptr + wild, x, mask=at > total)


def square(kernel: Any, block: int = 64) -> Callable[[torch.Tensor], torch.Tensor]:
    """x * x with a Triton backward."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            x, dy = ctx.saved_tensors[0].contiguous(), dy.contiguous()
            dx = torch.empty_like(x)
            if x.numel():
                kernel[(triton.cdiv(x.numel(), block),)](x, dy, dx, x.numel(), BLOCK=block)
            return dx

    return lambda x: Square.apply(x)


def mutant(name: str, kernel: Any, **options: Any) -> OpSpec:
    return op(square(kernel), lambda x: x * x, dict(x=tensor("M...", "N")), name=name, **options)


# A load without a mask whose surplus is thrown away (NVlabs/COAT#19, thunlp/TritonBench#12).
OB05 = mutant("OB05", unmasked_load_kernel)

# A store whose mask is one too wide: memory behind dx is overwritten (NVlabs/COAT#19: "memory corruption"). The sizes
# leave eight bytes behind dx that are nobody's, so that stages without the check harm no process.
OB06 = mutant("OB06", one_too_many_kernel, sizes=dict(N=[4, 8, 128, 48]))

# An offset of -1 that is thrown away afterwards (own; class of triton-lang/triton#10336, a wild pointer load).
OB07 = mutant("OB07", first_left_kernel)

# A store without a mask at all (NVlabs/COAT#19).
OB08 = mutant("OB08", unmasked_store_kernel)

# An index that has overflowed, far from any tensor (class of fla-org/flash-linear-attention#1082).
OB09 = mutant("OB09", far_kernel)

MUTANTS = {"OB05": OB05, "OB06": OB06, "OB07": OB07}
WILD = {"OB08": OB08, "OB09": OB09}  # these end the process where nobody holds their accesses back
HEALTHY = {"masked": mutant("masked", masked_kernel)}
