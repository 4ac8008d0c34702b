"""Specs of ops of the last five of thirteen further repositories: see repositories_routing.py."""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from repositories import CLONES, LABELS, MATRIX, bare
from repositories_elementwise import SECOND, ignored, within
from specs import SINGLE, apply, of, softmax
from torch import Tensor

import retrograd as rg

FLEX, SPARSE, CONV, FLASH, STICK = list(SECOND.values())[8:]


# JeffreyXiang/FlexGEMM: flex_gemm/kernels/triton/grid_sample. Its op finds the neighbours with a CUDA extension; here
# they are given, and forward and backward are tied together as its op ties them. Contiguous inputs (asserted).


def _weighed() -> Any:
    root = CLONES / "JeffreyXiang/FlexGEMM/flex_gemm"
    bare("flex_gemm", root, AUTOSAVE_AUTOTUNE_CACHE=False, AUTOTUNE_CACHE_PATH=os.devnull)
    bare("flex_gemm.kernels", root / "kernels")
    bare("flex_gemm.kernels.triton", root / "kernels/triton")
    return import_module("flex_gemm.kernels.triton.grid_sample")


class _WeighedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(indices, weight)
        ctx.rows = len(x)
        return _weighed().indice_weighed_sum_fwd(x, indices, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        indices, weight = ctx.saved_tensors
        return _weighed().indice_weighed_sum_bwd_input(grad.contiguous(), indices, weight, ctx.rows), None, None


def _neighbours(indices: Tensor) -> Tensor:
    """uint32, where a neighbour that is not there, here that of number 0, is 0xffffffff."""
    return indices.masked_fill(indices == 0, 0xFFFFFFFF).to(torch.uint32)


# expected: numbers of one run right. True bug: its kernels are autotuned, over 12 configurations, and that of the
# gradient adds to grad_input by atomics without reset_to_zero: a first call for each shape adds up all the runs of the
# benchmark. Programs of the forward beyond the last row or column write the same numbers again (modulo): harmless.
FLEX.add(
    "flexgemm_weighed_sum",
    lambda x, indices, weight: _WeighedSum.apply(x, _neighbours(indices), weight),
    lambda x, indices, weight: (F.pad(x[1:], (0, 0, 1, 0))[indices] * weight[..., None]).sum(1),
    dict(
        x=rg.tensor("N", "C"),
        indices=rg.tensor("M", 8, dtype="int64", low=0, high="N"),
        weight=rg.tensor("M", 8, low=0.0, high=1.0, grad=False),
    ),
    sizes=dict(N=[20, 2, 9], M=[33, 1, 4], C=[5, 1, 70, 32]),
    dtypes=SINGLE,
    layouts="contiguous",
)

# epfml/dynamic-sparse-flash-attention: qksparse_attn.py. Heads of 64 (asserted), bfloat16 (as all its callers);
# positions of queries and keys are int32 and sorted, padded with -1 and 1e9.


def _positions(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Of queries 1, 3, ... and of keys 0, 3, ...; the last of every other head is padding."""
    (batch, heads, steps, _), keys = q.shape, k.shape[2]
    asked = (2 * torch.arange(steps, dtype=torch.int32, device=q.device) + 1).repeat(batch, heads, 1)
    found = (3 * torch.arange(keys, dtype=torch.int32, device=q.device)).repeat(batch, heads, 1)
    asked[:, 1::2, -1], found[:, 1::2, -1] = -1, 1_000_000_000
    return asked, found


_sparse_attention = within(
    {"dynsparse_models": "epfml/dynamic-sparse-flash-attention/openwebtext2-experiments/src/models"},
    apply("dynsparse_models.qksparse_attn", "_attention"),
)


def _seen_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A query that sees no key gets 0."""
    asked, found = _positions(q, k)
    seen = asked[..., None] >= found[..., None, :]
    share = softmax((0.125 * q @ k.mT).masked_fill(~seen, -1e30)).masked_fill(~seen, 0.0)
    return share @ v


# expected: right for contiguous inputs, if masked lanes are 0: `loads`, strongly, in the backward (q, k, v, grad_out
# and the saved numbers of rows beyond the end go into dots). Layouts, true bugs: the forward steps over batch and head
# by the stride of heads alone; the backward addresses grad_out, made contiguous, by the strides of q.
SPARSE.add(
    "dynsparse_qk_attention",
    lambda q, k, v: _sparse_attention(q, k, v, *_positions(q, k), 0.125),
    _seen_only,
    dict(
        q=rg.tensor("B", "H", "T", 64),
        k=rg.tensor("B", "H", "S", 64),
        v=rg.tensor("B", "H", "S", 64),
    ),
    sizes=dict(B=[2, 1], H=[2, 1], T=[100, 128, 150], S=[70, 128, 200]),
    dtypes=("bfloat16",),
)

# manzhura/conv2d-img2col-gemm: conv_gemm/baseline_operators/triton_conv2d_fp16_fn.py: products in float16 forward,
# in float32 backward, so float16 alone.

_conv = apply("conv_gemm.baseline_operators.triton_conv2d_fp16_fn", "TritonConv2dFn")
# expected: right for contiguous weights. Layouts: weights that are not contiguous (channels last) raise RuntimeError
# in view, where they are a true bug, as no check says so; x of any layout is right.
CONV.add(
    "convgemm_conv2d",
    lambda x, w, b: _conv(x, w, b, None, None, None, None, (2, 1), (1, 2), (1, 2)),
    lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    dict(x=rg.tensor("B", "C", "H", "W"), w=rg.tensor("D", "C", 3, 2), b=rg.tensor("D")),
    sizes=dict(B=(1, 3), C=[5, 1, 16], D=[7, 1, 33], H=(3, 9), W=(3, 9)),
    dtypes=("float16",),
)


def _channels(x: Tensor, other: bool) -> Tensor:
    """Every other channel is there."""
    return torch.arange(x.shape[0 if other else 1], device=x.device) % 2 == 0


# expected: right: channels that are masked out count nothing, in and out, nor do they get gradients (of the bias too)
CONV.add(
    "convgemm_conv2d_masked",
    lambda x, w, b: _conv(x, w, b, _channels(w, True), _channels(x, False), None, None, (1, 1), (1, 1), (1, 1)),
    lambda x, w, b: (
        F.conv2d(x * _channels(x, False)[:, None, None], w, b, padding=1) * _channels(w, True)[:, None, None]
    ),
    dict(x=rg.tensor("B", "C", "H", "W"), w=rg.tensor("D", "C", 3, 3), b=rg.tensor("D")),
    sizes=dict(B=(1, 3), C=[5, 1, 16], D=[7, 1, 33], H=(3, 9), W=(3, 9)),
    dtypes=("float16",),
)

# Dao-AILab/flash-attention: flash_attn/ops/triton/cross_entropy.py and layers/rotary.py; without its CUDA extension.

_FLASH = {
    name: f"Dao-AILab/flash-attention/{name.replace('.', '/')}"
    for name in ("flash_attn", "flash_attn.ops", "flash_attn.ops.triton", "flash_attn.layers")
}


def _smoothed(x: Tensor, labels: Tensor) -> Tensor:
    """Smoothing of 0.1, logits times 0.7, and 0.01 lse^2."""
    x = 0.7 * x.float() if x.dtype == torch.bfloat16 else 0.7 * x
    lse = x.logsumexp(-1)
    picked = x.gather(-1, labels.clamp_min(0)[:, None])[:, 0]
    losses = lse - 0.1 * x.mean(-1) - 0.9 * picked + 0.01 * lse * lse
    return torch.where(labels < 0, 0.0, losses)


_flash_losses = within(_FLASH, of("flash_attn.ops.triton.cross_entropy", "cross_entropy_loss"))
# expected: right, also for ignored labels and an expanded grad_out. Layouts: right but for labels, which are taken for
# contiguous. The second output carries no gradient, so it is left out.
FLASH.add(
    "flashattn_cross_entropy",
    lambda x, labels: ignored(x, labels, lambda x, y: _flash_losses(x, y, None, 0.1, 0.7, 0.01)[0]),
    lambda x, labels: ignored(x, labels, _smoothed),
    dict(x=MATRIX, labels=LABELS),
    sizes=dict(M=(1, 20), N=[100, 2, 5000]),
)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """x [B, T, H, D], of which the first numbers are turned, by position."""
    turned, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    cos, sin = (t[2 : 2 + x.shape[1], None] for t in (cos, sin))
    pair = a * cos - b * sin, a * sin + b * cos
    return torch.cat([torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest], -1)


# expected (both): right, of all layouts: strides of x, grad_out and outputs are used. cos and sin get None by design.
for _interleaved in (False, True):
    FLASH.add(
        f"flashattn_rotary{'_interleaved' if _interleaved else ''}",
        lambda x, cos, sin, i=_interleaved: within(_FLASH, of("flash_attn.layers.rotary", "apply_rotary_emb"))(
            x, cos, sin, interleaved=i, seqlen_offsets=2
        ),
        partial(_rotated, interleaved=_interleaved),
        dict(
            x=rg.tensor("B", "T", "H", "3*R"),
            cos=rg.tensor("T+2", "R", grad=False),
            sin=rg.tensor("T+2", "R", grad=False),
        ),
        sizes=dict(B=(1, 2), T=[1, 9, 20], H=[3, 1, 4], R=[12, 1, 16]),
    )

# shawntan/stickbreaking-attention: sb_attn. bfloat16, heads of 16 to 64, 50 too (as its tests).


def _stick(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of earlier keys, the latest first, each of what is left over; and the rest. [B, H, T, D]"""
    steps = q.shape[2]
    earlier = torch.ones(steps, steps, dtype=torch.bool, device=q.device).tril(-1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    left = F.logsigmoid(-scores).masked_fill(~earlier, 0.0)
    after = left.flip(-1).cumsum(-1).flip(-1) - left
    share = (F.logsigmoid(scores) + after).exp().masked_fill(~earlier, 0.0)
    return share @ v, left.sum(-1).exp()


# expected: undecided or unsupported if inline PTX (ex2.approx, lg2.approx) is not known; else right within bfloat16.
# Sums of dk and dv are guarded by spin locks, in bfloat16, without a barrier before they are released: a race where
# T > 64 (more than one block of queries), and partial sums rounded. `loads`: k and v beyond the end go into dots.
STICK.add(
    "stickbreaking_attention",
    of("stickbreaking_attention.sb_attn", "sb_attn"),
    _stick,
    {name: rg.tensor("B", "H", "T", "D") for name in "qkv"},
    sizes=dict(B=[2, 1], H=[2, 1], T=[100, 64, 33, 130], D=[16, 50, 32]),
    dtypes=("bfloat16",),
)
