"""Specs of ops of mgmalek/efficient_cross_entropy, RobertCsordas/moe_layer, l1351868270/ld_triton.

Needs no package beyond torch and triton (ld_triton's convolution imports pytest).
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from repositories import MATRIX, ROW, ROWS
from repositories_routing import within
from repositories_third import THIRD, cycle
from specs import SINGLE, apply, of, rms, softmax
from torch import Tensor

import retrograd as rg

MGMALEK, SIGMA, LD, *_ = THIRD.values()

# mgmalek/efficient_cross_entropy: modules.py. Formula: cross_entropy(x @ w.T, labels); README: a projection and the
# cross entropy in one, by chunks of tokens (n_loop_iters divides their number, asserted).

_fused = within(
    {"mgmalek": "mgmalek/efficient_cross_entropy"}, apply("mgmalek.modules", "FusedCrossEntropyLossFunction")
)


def _ignoring(labels: Tensor) -> Tensor:
    """Every third label is ignored, but for the first."""
    index = torch.arange(len(labels), device=labels.device)
    return labels.masked_fill(index % 3 == 1, -100)


def _projected(x: Tensor, w: Tensor, labels: Tensor, *, reduction: str) -> Tensor:
    return F.cross_entropy(x @ w.T, _ignoring(labels), reduction=reduction)


# expected (both): values and first gradients right, of all layouts (strides of labels are used, logits are its own).
# True bugs: (1) the backward scales its saved gradients in place (modules.py:187, `grad_in_feat *= grad_output`), so a
# second backward of the same graph raises RuntimeError (saved tensors modified) or scales twice; (2) where only one of
# x and w requires a gradient, the other name is unbound and the backward raises UnboundLocalError. bfloat16: logits are
# rounded to bfloat16 before the loss, and the gradient of w is added up over the chunks in bfloat16: precision,
# perhaps.
for _reduction, _loops in (("mean", 1), ("sum", 2)):
    MGMALEK.add(
        f"mgmalek_linear_cross_entropy_{_reduction}",
        lambda x, w, labels, r=_reduction, n=_loops: _fused(x, w, _ignoring(labels), n, -100, r),
        partial(_projected, reduction=_reduction),
        dict(
            x=rg.tensor("2*M", "K"),
            w=rg.tensor("N", "K", scale=0.3),
            labels=rg.tensor("2*M", dtype="int64", low=0, high="N"),
        ),
        sizes=dict(M=[8, 1, 20], K=[16, 1, 33], N=[50, 2, 130]),
    )

# RobertCsordas/moe_layer: triton_src/moe_layer/cvmm.py. Formula (its README and the sigma-MoE paper): rows times the
# matrix that was chosen for each, y[t] = x[t] @ keys[sel[t]]; with weights, summed over the choices of a token.

_SIGMA = {"sigma_moe": "RobertCsordas/moe_layer/triton_src/moe_layer"}


def _cvmm(x: Tensor, chosen: Tensor, keys: Tensor) -> Tensor:
    return within(_SIGMA, of("sigma_moe.cvmm", "cvmm"))(x, chosen, keys)


def _cvmm_many(x: Tensor, chosen: Tensor, keys: Tensor, weights: Tensor | None = None) -> Tensor:
    selected = within(_SIGMA, of("sigma_moe.cvmm", "cvmm_prepare_sel2"))(chosen, weights)
    return within(_SIGMA, of("sigma_moe.cvmm", "cvmm"))(x, selected, keys)


def _each(x: Tensor, chosen: Tensor, keys: Tensor) -> Tensor:
    return torch.einsum("tk,tckn->tcn", x, keys[chosen])


_EXPERTS = dict(
    x=rg.tensor("T", "K"), chosen=rg.tensor("T", 2, dtype="int64", low=0, high="E"), keys=rg.tensor("E", "K", "N")
)
_CVMM = dict(T=[20, 1, 40], K=[24, 1, 70], N=[17, 1, 64], E=[4, 1, 6])
# expected (all three): float32 right (dots with allow_tf32=False), of all layouts: strides of everything are used, and
# sums by atomics are reset by the tuner; their order is not fixed (more than one block of tokens only). bfloat16, true
# bugs: operands and results go through float16 (cvmm.py:116 and 128: `if not float32: a.to(tl.float16)`; the weights'
# gradient likewise, `accumulator.to(tl.float16)`), so that numbers beyond 65504 become inf and those below 6e-8 zero;
# tl.atomic_add of bfloat16 into the gradient of keys may be refused by a device before sm_90.
SIGMA.add(
    "sigmamoe_cvmm",
    _cvmm,
    lambda x, chosen, keys: torch.einsum("tk,tkn->tn", x, keys[chosen]),
    _EXPERTS | dict(chosen=rg.tensor("T", dtype="int64", low=0, high="E")),
    sizes=_CVMM,
)
SIGMA.add("sigmamoe_cvmm_each", _cvmm_many, _each, _EXPERTS, sizes=_CVMM)
SIGMA.add(
    "sigmamoe_cvmm_weighed",
    _cvmm_many,
    lambda x, chosen, keys, weights: (_each(x, chosen, keys) * weights[..., None]).sum(1),
    _EXPERTS | dict(weights=rg.tensor("T", 2)),
    sizes=_CVMM,
)

# l1351868270/ld_triton: ld_triton/ops, as torch's functions of the same names. streamk_linear.py cannot be imported by
# any Python (`import triton.profiler as import triton.profiler as proton`, line 5), so it has no spec.


def _ld(module: str, name: str) -> Any:
    return apply(f"ld_triton.ops.{module}", name)


def _single(loss: Tensor) -> Tensor:
    """In float32, as theirs is for every dtype (torch.zeros(n_rows, device=device)); float64 stays."""
    return loss.float() if loss.dtype == torch.bfloat16 else loss


# expected: contiguous right. Layouts, true bug: of input and target only the stride of rows is used, a transposed one
# is read wrongly and beyond its end (triton_mse.py:19). bfloat16: squares are rounded and added up in bfloat16
# (line 24): precision, the more the longer the row.
LD.add(
    "ldtriton_mse",
    _ld("mse.triton_mse", "_triton_mse"),
    lambda x, target: _single((x - target).square().mean()),
    dict(x=MATRIX, target=MATRIX),
    sizes=ROWS,
)
# expected: right where contiguous; no `loads`, what is masked is cut off. Races: grid (rows, BLOCK_SIZE) has BLOCK_SIZE
# programs write the same row, all the same numbers: harmless. Layouts, true bugs: x of other strides is read as if
# contiguous; grad_out expanded by .sum().backward() is read beyond its end and wrongly (triton_flip.py:10, 45).
LD.add(
    "ldtriton_flip",
    lambda x: _ld("flip.triton_flip", "_triton_flip")(x, -1),
    lambda x: x.flip(-1),
    dict(x=rg.tensor("L", "M", "N")),
    sizes=dict(L=(1, 3), M=(1, 4), N=[5, 8, 3, 33]),
)
# expected: contiguous right. True bugs: layouts, x of other strides is read as if contiguous (triton_max.py:18);
# extremes, a row of -inf alone gives finfo.min, and an index of the padding where N is no power of two, for which the
# backward raises IndexError; a NaN may be lost. In bfloat16 the gradient is made in float32 and cast: fine.
LD.add(
    "ldtriton_max",
    lambda x: _ld("max.triton_max", "_triton_max")(x, -1, False)[0],
    lambda x: x.amax(-1),
    dict(x=MATRIX),
    sizes=ROWS,
)
# expected: contiguous right, -inf included. Layouts, true bugs: strides of columns are ignored, of x as of grad_out: an
# expanded one (.sum().backward()) is read beyond its end (triton_softmax.py:37, 58). bfloat16: the sum of the backward
# is in bfloat16 (line 62): precision, perhaps; the forward computes in float32, as tl.max promotes.
LD.add("ldtriton_softmax", _ld("softmax.triton_softmax", "_triton_softmax"), softmax, dict(x=MATRIX), sizes=ROWS)
# expected: contiguous right. Layouts, true bugs: as softmax, for x, grad_out and the weight. bfloat16: the sums of
# squares, of the backward and of the weight's gradient are in bfloat16 (triton_rms_norm.py:24, 51, 76), and 1/rms is
# kept in bfloat16: precision; extremes: squares overflow as in float32.
LD.add(
    "ldtriton_rms_norm",
    lambda x, weight: _ld("rms_norm.triton_rms_norm", "_triton_rms_norm")(x, weight, 1e-6, False),
    rms,
    dict(x=MATRIX, weight=ROW),
    sizes=ROWS,
)
# expected: float16 right where contiguous. float32, true bug: the result of every product is rounded to float16
# (triton_linear.py:89, `accumulator.to(tl.float16)`): wrong by 5e-4, inf beyond 65504; and dots in tf32. bfloat16: the
# same overflow. Bias, true bug of layouts: its gradient reads grad_out by the stride of rows alone (line 108), so an
# expanded one (.sum().backward()) is read beyond its end. Where x needs no gradient the backward raises AttributeError
# (line 183, None.view): true bug.
LD.add(
    "ldtriton_linear",
    _ld("linear.triton_linear", "_triton_linear"),
    F.linear,
    dict(x=rg.tensor("M", "K"), w=rg.tensor("N", "K"), b=rg.tensor("N")),
    sizes=dict(M=[20, 1, 33], K=[24, 1, 70], N=[17, 1, 40]),
    dtypes=("float32", "bfloat16", "float16"),
)
# expected: numbers right in float16. Bounds, true bug: the forward does not mask channels (triton_conv2d.py:65,
# mask_input lacks c < C), so that where C*R*S is no multiple of 64 the last image is read beyond its end, and others
# read the next image, times a weight of 0 (NaN if that is inf). float32, true bug: results rounded to float16, in all
# three gradients too (99, 276, 439, 506). Layouts, true bugs: nothing is made contiguous, no stride is used, and an
# expanded grad_out is read beyond its end. Programs of the wrapped last tile write the same numbers twice: harmless.
LD.add(
    "ldtriton_conv2d",
    lambda x, w, b: _ld("convolution.triton_conv2d", "_triton_conv2d_func")(x, w, b, (2, 1), (1, 2), (1, 2)),
    lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    dict(x=rg.tensor("B", "C", "H", "W"), w=rg.tensor("D", "C", 3, 2), b=rg.tensor("D")),
    sizes=dict(B=(1, 3), C=[5, 1, 12], D=[7, 1, 33], H=(3, 8), W=(3, 8)),
    dtypes=("float32", "float16"),
)


def _sites(points: int, height: int, width: int, device: torch.device) -> Tensor:
    """So many different places of two images: [N, 3] of image, row and column."""
    flat = cycle(points, 2 * height * width, device)
    return torch.stack([flat // (height * width), flat // width % height, flat % width], -1).int()


def _submanifold(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Weights [K, R, S, C]; out at a site: the sum of weights over what sites lie around it, dilated by (1, 2)."""
    sites = _sites(len(x), 5, 6, x.device).long()
    grid = torch.full((2, 5 + 2, 6 + 4), -1, device=x.device)
    image, row, column = sites.unbind(-1)
    grid[image, row + 1, column + 2] = torch.arange(len(x), device=x.device)
    out = b.expand(len(x), -1)
    rows = F.pad(x, (0, 0, 1, 0))  # row 0 for places without a site
    for r in range(3):
        for s in range(3):
            found = grid[image, row + r, column + 2 * s]
            out = out + rows[found + 1] @ w[:, r, s].T
    return out


def _submconv(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    function = import_module("ld_triton.ops.spconv.triton_submconv2d").triton_submconv2d
    return function(x, _sites(len(x), 5, 6, x.device), 5, 6, 2, w, b, (1, 1), (0, 0), (1, 2))[0]


# expected: right, of all layouts (Triton only finds the pairs; sums are torch's), if tl.atomic_cas in a loop, `or` of
# blocks and uint32 arithmetic are known; lanes beyond the last site load without `other`, but store nothing. Slots are
# probed one by one: which lane gets which slot is not fixed, what is found is.
LD.add(
    "ldtriton_submconv2d",
    _submconv,
    _submanifold,
    dict(x=rg.tensor("P", "C"), w=rg.tensor("D", 3, 3, "C"), b=rg.tensor("D")),
    sizes=dict(P=[20, 1, 45], C=[5, 1, 8], D=[7, 1, 4]),
    dtypes=SINGLE,
)
