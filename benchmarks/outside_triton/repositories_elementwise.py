"""Specs of ops of three of thirteen further repositories: see repositories_routing.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from repositories import CLONES, LABELS, MATRIX, ROW, ROWS, bare
from repositories_routing import SECOND, within
from specs import SINGLE, apart, apply, of, rms, softmax
from torch import Tensor

import retrograd as rg

*_, FOLD, MDY, XOPES = list(SECOND.values())[:8]
CUBE = rg.tensor("M", "L", "N")
CUBES = dict(M=(1, 6), L=(1, 6), N=(2, 100))


# aqlaboratory/openfold-3: openfold3/core/kernels/triton/fused_softmax.py, from FastFold. [B, S, heads, N, N].

_FOLD = {
    name: f"aqlaboratory/openfold-3/{name.replace('.', '/')}"
    for name in ("openfold3", "openfold3.core", "openfold3.core.kernels", "openfold3.core.kernels.triton")
}
_fold_softmax = within(_FOLD, apply("openfold3.core.kernels.triton.fused_softmax", "FusedSoftmaxFunc"))
_LOGITS = rg.tensor("B", "S", "H", "N", "N")
_SQUARES = dict(B=[2, 1], S=[3, 1], H=[2, 1], N=[5, 1, 64, 130])
# expected: right, of all layouts (copied)
FOLD.add("openfold3_softmax", _fold_softmax, softmax, dict(x=_LOGITS), sizes=_SQUARES)
# expected: right at B=1. True bug (or a limit that is nowhere stated) at B=2: the bias is read at row modulo
# heads * N, that is of the first of the batch for all of them, while its gradient is one per batch: values and all
# gradients wrong.
FOLD.add(
    "openfold3_softmax_masked_biased",
    lambda x, mask, bias: _fold_softmax(x, mask.to(x.dtype), bias),
    lambda x, mask, bias: softmax((x + bias).masked_fill(~mask, -1e20)),
    dict(x=_LOGITS, mask=rg.tensor("B", "S", 1, 1, "N", dtype="bool"), bias=rg.tensor("B", 1, "H", "N", "N")),
    sizes=_SQUARES,
)

# mdy666/mdy_triton: mdy_triton/core and triton_kernels. Its __init__ imports a name that does not exist
# (fast_cross_entropy_loss), so nobody can import the package: true bug, and the submodules are entered without it.

_MDY = {
    "mdy_triton": "mdy666/mdy_triton/mdy_triton",
    "mdy_triton.core": "mdy666/mdy_triton/mdy_triton/core",
    "mdy_kernels": "mdy666/mdy_triton/triton_kernels",
}


def _mdy(module: str, name: str) -> Callable[..., Any]:
    return within(_MDY, apply(module, name))


def ignored(x: Tensor, labels: Tensor, losses: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Labels of 0 count nothing."""
    return losses(x, labels.masked_fill(labels == 0, -100))


_mdy_losses = _mdy("mdy_triton.core.cross_entyopy_loss", "_FastCrossEntropyLoss")
# expected: right; logits and labels that are not contiguous raise AssertionError (a check, without a message). The
# stride of grad_out is used, so an expanded one is right.
MDY.add(
    "mdy_cross_entropy",
    lambda x, labels: ignored(x, labels, lambda x, labels: _mdy_losses(x, labels, False)),
    lambda x, labels: ignored(x, labels, lambda x, labels: F.cross_entropy(x, labels, reduction="none").float()),
    dict(x=MATRIX, labels=LABELS),
    sizes=dict(M=(1, 20), N=[100, 2, 5000]),
    layouts="contiguous",
)
# expected: true bug at N > 128: the backward makes blocks of at most 128 columns and has no loop over them, so the
# gradients of later columns are never written (uninitialised memory: dx, residual and w). Right up to 128 for
# contiguous inputs. Layouts, true bugs: the residual, grad_out of both outputs and w's partial sums are addressed by
# the row stride of x; expanded grad_out reads outside.
MDY.add(
    "mdy_add_rms_norm",
    lambda x, r, w: _mdy("mdy_triton.core.fused_add_norm", "_TritronFusedAddRMSNorm")(x, r, w, 1e-6),
    lambda x, r, w: (rms(x + r, w), x + r),
    dict(x=MATRIX, r=MATRIX, w=ROW),
    sizes=dict(M=[20, 1, 150], N=[200, 2, 64]),
)
# expected: right for contiguous x and grad_out. Layouts, true bugs: the output is laid out as x is but written by row
# stride; grad_out is addressed by the row stride of x (expanded: reads outside); cut out rows make its partial sums
# of w be written outside (they have that row stride too).
MDY.add(
    "mdy_rms_norm",
    lambda x, w: _mdy("mdy_triton.core.rmsnorm", "_TritronRMSNorm")(x, w, 1e-6),
    rms,
    dict(x=CUBE, w=ROW),
    sizes=CUBES,
)
# expected: right for contiguous ones (up and gate must be, it says); true bug: grad_out is taken for contiguous, so an
# expanded one (.sum().backward()) is read beyond its end
MDY.add(
    "mdy_up_gate_silu",
    _mdy("mdy_triton.core.fused_silu", "_FusedSiLU_Unsloth"),
    lambda up, gate: F.silu(gate) * up,
    dict(up=CUBE, gate=CUBE),
    sizes=CUBES,
    layouts="contiguous",
)
# expected: right for contiguous x. Layouts, true bugs: outputs are addressed at half the row stride of x (cut out rows
# are written outside), the column stride is passed but not used (transposed matrix is wrong), grad_out as above.
MDY.add(
    "mdy_gate_up_silu",
    lambda x: _mdy("mdy_triton.core.fused_silu", "_FusedSiLUNoSplit")(x, "gate-up"),
    lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    dict(x=rg.tensor("M", "2*N")),
    sizes=ROWS,
)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]


_mdy_rope = _mdy("mdy_triton.core.fused_apply_rope", "_FusedApplyRope")
# expected: right: q and k are written over by design, and so is grad_out, hence the copies. Layouts: it asserts that
# q and k are views of [B, L, H, D]; of grad_out the last stride is taken for 1.
MDY.add(
    "mdy_rope",
    apart(lambda q, k, cos, sin: _mdy_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin), 0, 1),
    lambda q, k, cos, sin: (_turned(q.transpose(1, 2), cos, sin), _turned(k.transpose(1, 2), cos, sin)),
    dict(
        q=rg.tensor("B", "L", "Q", "2*D"),
        k=rg.tensor("B", "L", "K", "2*D"),
        cos=rg.tensor("B", "L", "2*D", grad=False),
        sin=rg.tensor("B", "L", "2*D", grad=False),
    ),
    sizes=dict(B=(1, 3), L=[1, 33, 70], Q=[1, 6], K=[1, 2, 3], D=[16, 12, 1]),
    layouts="contiguous",
)


def _dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return torch.tanh(alpha * x) * gamma + beta


# expected (both): right (libdevice tanh, if that is known); x or grad_out that is not contiguous raises
# AssertionError, so .sum().backward() does
for _version in ("dyt", "dyt2"):
    MDY.add(
        f"mdy_{_version}",
        _mdy(f"mdy_kernels.dyt.{_version}", "_DYT"),
        _dyt,
        dict(x=CUBE, alpha=rg.tensor(1), gamma=ROW, beta=ROW),
        sizes=CUBES | dict(N=[100, 1, 16, 1100]),
        layouts="contiguous",
    )


def _causal_conv(x: Tensor, w: Tensor, b: Tensor, *, act: bool) -> Tensor:
    y = F.conv1d(F.pad(x, (w.shape[1] - 1, 0)), w[:, None], b, groups=len(w))
    return F.silu(y) if act else y


# expected (both): right for contiguous ones; strides are used, of x too. With silu dz has the layout of x but is
# addressed by the strides of grad_out, and grad_out by those of dz: wrong where the two differ, and reads outside for
# an expanded one (true bugs, layouts). Without, right of all layouts but for bias. Parameters called num_warps and
# num_stages may not compile in a newer Triton. Partial sums of w and b are kept in bfloat16.
for _act in (True, False):
    MDY.add(
        f"mdy_causal_conv1d{'_silu' if _act else ''}",
        lambda x, w, b, act=_act: _mdy("mdy_kernels.causal_conv1d.triton_causal_conv1d", "_TritonCausalConv1dFunction")(
            x, w, b, "silu" if act else None
        ),
        partial(_causal_conv, act=_act),
        dict(x=rg.tensor("B", "D", "L"), w=rg.tensor("D", "K"), b=rg.tensor("D")),
        sizes=dict(B=(1, 2), D=[5, 1, 130, 16], L=[1, 3, 140, 64], K=[4, 2, 3]),
    )

# Doraemonzzz/xopes: xopes/ops. Its `contiguous` decorator copies inputs and grad_out. Its constants ask a GPU for its
# number of multiprocessors at import, so they are given here, with its own values.


def _xopes(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        bare(
            "xopes.utils.constant",
            CLONES / "Doraemonzzz/xopes/xopes/utils",
            ACT_SET={"relu", "sigmoid", "silu", "none", "softmax"},
            HEAD_DIM=128,
            MIN_BLOCK=16,
            SM_COUNT=132,
            THRESHOLD_DICT={},
            XOPES_DEBUG=False,
            XOPES_DTYPE="tf32",
        )
        bare("xopes.ops", CLONES / "Doraemonzzz/xopes/xopes/ops")
        return of(f"xopes.ops.{module}", name)(*args, **kwargs)

    return call


def _mirrored(x: Tensor, y: Tensor) -> Tensor:
    y = rms(y, None, 1e-5)
    return x - 2 * (x * y).mean(-1, keepdim=True) * y


# expected (both): right, of all layouts. With one y for all rows its partial gradients are kept in bfloat16.
XOPES.add(
    "xopes_householder", _xopes("householder.householder_triton", "householder_triton"), _mirrored,
    dict(x=CUBE, y=CUBE), sizes=CUBES,
)  # fmt: skip
XOPES.add(
    "xopes_householder_shared", _xopes("householder.householder_triton", "householder_triton"), _mirrored,
    dict(x=CUBE, y=ROW), sizes=CUBES,
)  # fmt: skip


def _scanned(x: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.cat([start, x], -1).logcumsumexp(-1)[..., 1:]
    return y, y[..., -1:]


# expected: right at ordinary values. Extremes, true bug: gradients go by exp(min - o) and exp(x - min), of which the
# first is 0 and the second inf (0 * inf: NaN) where x spreads over more than about 88. In bfloat16 the outputs saved
# for the backward are rounded, so gradients are off by some per cent.
XOPES.add(
    "xopes_logcumsumexp",
    lambda x, start: _xopes("logcumsumexp.lcse_recurrence_triton", "lcse_recurrence_triton")(x, -1, start),
    _scanned,
    dict(x=CUBE, start=rg.tensor("M", "L", 1)),
    sizes=CUBES | dict(N=[30, 1, 7]),
)
# expected: right; in bfloat16 the gradient is off as that of xopes_logcumsumexp
XOPES.add(
    "xopes_logsumexp",
    lambda x: _xopes("logsumexp.lse_recurrence_triton", "lse_recurrence_triton")(x, 1),
    lambda x: x.logsumexp(1),
    dict(x=CUBE),
    sizes=CUBES | dict(L=[5, 1, 1100]),
)
# expected: right, also of a middle dimension and of all layouts
XOPES.add(
    "xopes_softmax",
    lambda x: _xopes("act._act_triton.softmax_triton", "softmax_triton")(x, 1),
    lambda x: softmax(x.movedim(1, -1)).movedim(-1, 1),
    dict(x=CUBE),
    sizes=CUBES,
)
# expected: true bug at N=20000 in float32: one block of at most 16384 elements (64 KiB) and no loop, nor a check, so
# the rest is never written (uninitialised); right for fewer
XOPES.add(
    "xopes_cumsum",
    lambda x: _xopes("cumsum.cumsum.cumsum_triton", "cumsum_triton")(x, -1, True),
    lambda x: x.flip(-1).cumsum(-1).flip(-1),
    dict(x=rg.tensor("M", "N")),
    sizes=dict(M=(1, 5), N=[200, 1, 64, 20000]),
    dtypes=SINGLE,
)


def _cuts(steps: int, device: torch.device) -> Tensor:
    """Where four sequences begin and end, of ever larger length, or empty where there are few steps."""
    return torch.arange(5, device=device) ** 2 * steps // 16


def _cut_sums(x: Tensor) -> Tensor:
    ends = _cuts(x.shape[-1], x.device).tolist()
    return torch.cat([x[..., a:b].cumsum(-1) for a, b in pairwise(ends)], -1)


# expected: right where no sequence is empty; else (N below 16) true bug in the backward: reversed, an empty sequence
# masks nothing, so its program writes a whole block over its neighbours (a race with theirs), and beyond the end
# (bounds)
XOPES.add(
    "xopes_cumsum_varlen",
    lambda x: _xopes("cumsum.cumsum.cumsum_triton", "cumsum_triton")(x, -1, False, _cuts(x.shape[-1], x.device)),
    _cut_sums,
    dict(x=rg.tensor("M", "N")),
    sizes=dict(M=(1, 5), N=[200, 16, 7, 50]),
)


def _normalized(x: Tensor, w: Tensor, b: Tensor, gate: Tensor, *, groups: int) -> Tensor:
    x = x.unflatten(-1, (groups, -1))
    size = x.shape[-1]
    x = rms(x - x.mean(-1, keepdim=True), None, 1e-6).flatten(-2)
    return (2.0 / size**0.5 * x * w + b) * torch.sigmoid(gate)


# expected: values and first gradients right in float32. State, true bug: with a gate after a bias the backward writes
# grad_out times the gate over grad_out, which is the caller's own where it is contiguous (x and gate get their
# gradients of it before); a second backward with the same one is wrong.
XOPES.add(
    "xopes_normalize_gated",
    lambda x, w, b, gate: _xopes("normalize.normalize.normalize_triton", "normalize_triton")(
        x, w, b, None, gate, gate_pos="post", c=2.0, use_mean=True, num_groups=2
    ),
    partial(_normalized, groups=2),
    dict(x=rg.tensor("M", "2*N"), w=rg.tensor("2*N"), b=rg.tensor("2*N"), gate=rg.tensor("M", "2*N")),
    sizes=dict(M=(1, 20), N=[50, 2, 64]),
)
# expected: right, of all layouts
XOPES.add(
    "xopes_normalize_residual",
    lambda x, w, r: _xopes("normalize.normalize.normalize_triton", "normalize_triton")(x, w, None, r, c=3.0),
    lambda x, w, r: (3.0 / x.shape[-1] ** 0.5 * rms(x + r, w), x + r),
    dict(x=CUBE, w=ROW, r=CUBE),
    sizes=CUBES,
)
# expected: right for contiguous grad_out. Layouts, true bug: its backward lacks the decorator: an expanded grad_out
# (.sum().backward()) is read beyond its end, a transposed one is wrong.
XOPES.add(
    "xopes_divide",
    lambda x, y: _xopes("element_wise_binary_op.ewbo_triton", "ewbo_triton")(x, y, "div"),
    lambda x, y: x / y[..., None],
    dict(x=CUBE, y=rg.tensor("M", "L", low=0.5, high=2.0)),
    sizes=CUBES,
)
# expected: right, of all layouts; float32 by TF32 on a GPU (the default of tl.dot)
XOPES.add(
    "xopes_gate_linear_silu",
    lambda a, b, w, bias, r: _xopes("gate_linear.gate_linear_triton", "gate_linear_triton")(a, b, w, bias, r, "silu"),
    lambda a, b, w, bias, r: F.silu(a) * b @ w.mT + bias + r,
    dict(a=CUBE, b=CUBE, w=rg.tensor("K", "N"), bias=rg.tensor("K"), r=rg.tensor("M", "L", "K")),
    sizes=CUBES | dict(K=[40, 1, 130]),
)
# expected: right, of all layouts (backward in torch); TF32 as above
XOPES.add(
    "xopes_linear_attention_gated",
    _xopes("flao.non_causal.flao_non_causal_triton", "flao_non_causal_triton"),
    lambda q, k, v, g: q @ (k.mT @ v) * g,
    dict(
        q=rg.tensor("B", "H", "N", "D"),
        k=rg.tensor("B", "H", "M", "D"),
        v=rg.tensor("B", "H", "M", "E"),
        g=rg.tensor("B", "H", "N", "E"),
    ),
    sizes=dict(B=[2, 1], H=[2, 1], N=[33, 1, 64], M=[20, 1, 130], D=[16, 40, 130], E=[16, 40]),
)
