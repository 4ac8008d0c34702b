"""Specs of ops of pytorch/FBGEMM (jagged ops of sll/triton), NVIDIA/TransformerEngine, NVIDIA/Megatron-LM.

Needs packaging beyond torch and triton. Roots and compiled parts are left out, only submodules are entered.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from repositories import CLONES, bare
from repositories_routing import within
from repositories_third import THIRD
from specs import SINGLE, apart, apply, softmax
from torch import Tensor

import retrograd as rg

FBGEMM, TE, MEGATRON = (THIRD[name] for name in ("fbgemm", "te", "megatron"))

# pytorch/FBGEMM: fbgemm_gpu/fbgemm_gpu/sll/triton. Sequences of different lengths one after another ("jagged"), told
# by offsets; formulas from the docstrings: each op is that of the padded tensor, sequence by sequence.

_SLL = {
    name: f"pytorch/FBGEMM/fbgemm_gpu/{name.replace('.', '/')}"
    for name in ("fbgemm_gpu", "fbgemm_gpu.sll", "fbgemm_gpu.sll.triton")
}


def _sll(module: str, name: str) -> Any:
    return within(_SLL, apply(f"fbgemm_gpu.sll.triton.triton_{module}", name))


def _offsets(pairs: int, n: int, device: torch.device) -> Tensor:
    """Of pairs of sequences, N // 2 and 2 N - N // 2 long (0 and 2 at N = 1)."""
    lengths = torch.tensor([n // 2, 2 * n - n // 2] * pairs, device=device)
    return F.pad(lengths.cumsum(0), (1, 0))


def _squares(pairs: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Offsets of square matrices of N and N + 2 rows, in turn, one after another; and of their rows."""
    rows = torch.tensor([n, n + 2] * pairs, device=device)
    return F.pad((rows * rows).cumsum(0), (1, 0)), F.pad(rows.cumsum(0), (1, 0))


def _parts(x: Tensor, offsets: Tensor) -> list[Tensor]:
    return list(x.split(offsets.diff().tolist()))


def _matrices(x: Tensor, pairs: int, n: int) -> list[Tensor]:
    parts = _parts(x, _squares(pairs, n, x.device)[0])
    return [part.unflatten(0, (n + 2 * (i % 2),) * 2) for i, part in enumerate(parts)]


def _jagged_softmax(x: Tensor, pairs: int, n: int, *, most: bool) -> Tensor:
    """Over each sequence; rows beyond the longest that is allowed (N, if `most`) are 0."""
    limit = n if most else 2 * n
    parts = [part[:limit].softmax(0) for part in _parts(x, _offsets(pairs, n, x.device))]
    whole = [len(part) for part in _parts(x, _offsets(pairs, n, x.device))]
    return torch.cat([F.pad(y, (0, 0, 0, w - len(y))) for y, w in zip(parts, whole, strict=True)])


_JAGGED = dict(P=(1, 3), N=[9, 1, 40], H=[3, 1, 17])
_COUNTS = dict(pairs=rg.size("P"), n=rg.size("N"))
# expected (both): float32 right, of all layouts (strides of x and grad_out are used); empty sequences return early.
# bfloat16: the sum of the backward is in bfloat16 (triton_jagged_softmax.py:132): precision, perhaps.
for _most in (False, True):
    FBGEMM.add(
        f"fbgemm_jagged_softmax{'_cut' if _most else ''}",
        lambda x, pairs, n, most=_most: _sll("jagged_softmax", "JaggedSoftmax")(
            x, _offsets(pairs, n, x.device), n if most else 2 * n
        ),
        partial(_jagged_softmax, most=_most),
        dict(x=rg.tensor("2*P*N", "H")) | _COUNTS,
        sizes=_JAGGED,
    )
_SQUARED = "P*(N*N+(N+2)*(N+2))"
# expected (both): as fbgemm_jagged_softmax; a runtime `transpose` picks the branch
for _transpose in (True, False):
    FBGEMM.add(
        f"fbgemm_jagged2_softmax_{'rows' if _transpose else 'columns'}",
        lambda x, pairs, n, t=_transpose: _sll("jagged_softmax", "Jagged2Softmax")(
            x, *(_squares(pairs, n, x.device)[i] for i in (0, 1, 1)), n + 2, n + 2, t
        ),
        lambda x, pairs, n, t=_transpose: torch.cat(
            [part.softmax(0 if t else 1).flatten() for part in _matrices(x, pairs, n)]
        ),
        dict(x=rg.tensor(_SQUARED)) | _COUNTS,
        sizes=dict(P=(1, 2), N=[5, 1, 14]),
    )
# expected: proved, in both dtypes and all layouts (masked lanes are not stored)
FBGEMM.add(
    "fbgemm_jagged2_to_padded",
    lambda x, pairs, n: _sll("jagged2_to_padded_dense", "Jagged2ToPaddedDense")(
        x.contiguous(), _squares(pairs, n, x.device)[0], n + 2, 0.5
    ),
    lambda x, pairs, n: torch.stack(
        [F.pad(part, (0, n + 2 - len(part)) * 2, value=0.5) for part in _matrices(x, pairs, n)]
    ),
    dict(x=rg.tensor(_SQUARED)) | _COUNTS,
    sizes=dict(P=(1, 2), N=[5, 1, 33]),
)
# expected: contiguous right; y gets no gradient, without a word (a limit: it is a mask; so grad=False here). Layouts,
# true bugs: x and grad_out are walked through by 1, whatever their stride (mul_jagged_out.py:41, stride_a only finds
# the sequence): an expanded grad_out (.sum().backward()) is read beyond its end; y of more than 32 columns advances by
# BLOCK_N instead of BLOCK_N * stride_bn (line 64), so that a transposed one is wrong there.
FBGEMM.add(
    "fbgemm_jagged_dense_mul",
    lambda x, y, pairs, n: _sll("jagged_dense_elementwise_mul_jagged_out", "JaggedDenseElementwiseMul")(
        x, y, _squares(pairs, n, x.device)[1].diff(), _squares(pairs, n, x.device)[0], n + 2
    ),
    lambda x, y, pairs, n: torch.cat(
        [(part * y[: len(part), : len(part)]).flatten() for part in _matrices(x, pairs, n)]
    ),
    dict(x=rg.tensor(_SQUARED), y=rg.tensor("N+2", "N+2", grad=False)) | _COUNTS,
    sizes=dict(P=(1, 2), N=[5, 1, 33]),
)
_BMM = dict(P=(1, 2), N=[9, 1, 20], D=[12, 1, 40], T=[7, 1, 33])
# expected (both): proved, in both dtypes and all layouts: strides are used, masks have other=0, dots are ieee
FBGEMM.add(
    "fbgemm_jagged_dense_bmm",
    lambda x, y, pairs, n: _sll("jagged_bmm", "JaggedDenseBmm")(x, y, _offsets(pairs, n, x.device), 2 * n, False),
    lambda x, y, pairs, n: torch.cat([part @ y[i] for i, part in enumerate(_parts(x, _offsets(pairs, n, x.device)))]),
    dict(x=rg.tensor("2*P*N", "D"), y=rg.tensor("2*P", "D", "T")) | _COUNTS,
    sizes=_BMM,
)
FBGEMM.add(
    "fbgemm_jagged_jagged_bmm",
    lambda x, y, pairs, n: _sll("jagged_bmm", "JaggedJaggedBmm")(x, y, _offsets(pairs, n, x.device), 2 * n, False),
    lambda x, y, pairs, n: torch.stack(
        [a.T @ b for a, b in zip(*(_parts(z, _offsets(pairs, n, x.device)) for z in (x, y)), strict=True)]
    ),
    dict(x=rg.tensor("2*P*N", "D"), y=rg.tensor("2*P*N", "T")) | _COUNTS,
    sizes=_BMM,
)


def _jagged_attention(q: Tensor, k: Tensor, v: Tensor, pairs: int, n: int) -> Tensor:
    """softmax(q k^T) v / max_seq_len, by sequence; [H, sum of lengths, D], as its tests have it (no 1/sqrt(D))."""
    sizes = _offsets(pairs, n, q.device).diff().tolist()
    rows = [softmax(a @ b.mT) @ c / (2 * n) for a, b, c in zip(*(z.split(sizes, 1) for z in (q, k, v)), strict=True)]
    return torch.cat(rows, 1)


# expected: float32 numbers right where contiguous (layouts are the caller's: jagged_flash makes them contiguous).
# `loads` where D is no power of two from 16 on: o, do, q, k, v and do again are loaded without `other` and enter sums
# and dots (triton_multi_head_jagged_flash_attention.py:258, and all of the part that makes dq). Extremes, true bug: the
# maximum is taken before columns beyond the sequence are masked (line 98), where qk is 0, so that rows whose scores all
# lie below about -100 give 0/0 = NaN at lengths that are no multiple of 32. bfloat16, true bug of precision: lse is
# kept in the dtype of q (line 182), and probabilities of the backward are exp(qk - lse): off by 2^-9 of lse.
FBGEMM.add(
    "fbgemm_jagged_flash_attention",
    lambda q, k, v, pairs, n: _sll("multi_head_jagged_flash_attention", "MultiHeadJaggedFlashAttention")(
        q.contiguous(), k.contiguous(), v.contiguous(), _offsets(pairs, n, q.device), 2 * n, False
    ),
    _jagged_attention,
    {name: rg.tensor("H", "2*P*N", "D", scale=0.5) for name in "qkv"} | _COUNTS,
    sizes=dict(P=(1, 2), N=[9, 1, 24], H=[2, 1], D=[12, 16, 32]),
)

# NVIDIA/TransformerEngine: transformer_engine/pytorch/cross_entropy.py and triton/mhc.py (manifold hyper-connections).

_TE = {
    name: f"NVIDIA/TransformerEngine/{name.replace('.', '/')}"
    for name in (
        "transformer_engine",
        "transformer_engine.common",
        "transformer_engine.common.triton",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.triton",
        "transformer_engine.pytorch.cpp_extensions",
    )
}


def _te(module: str, name: str) -> Any:
    def call(*args: Any) -> Any:
        within(_TE, bool)()
        bare(
            "transformer_engine.pytorch.cpp_extensions.gemm", CLONES / "none", general_gemm=None
        )  # compiled; not called
        return apply(f"transformer_engine.pytorch.{module}", name)(*args)

    return call


def _ignoring(labels: Tensor) -> Tensor:
    """Every third one is ignored, but for the first."""
    index = torch.arange(labels.numel(), device=labels.device).view(labels.shape)
    return labels.masked_fill(index % 3 == 1, -100)


def _smoothed(x: Tensor, labels: Tensor, *, smoothing: float, mean: bool) -> Tensor:
    """(1 - s) H(q, p) + s H(u, p), u the uniform distribution (arXiv 1512.00567, section 7); of its own in float32."""
    labels, x = _ignoring(labels), x.float() if x.dtype == torch.bfloat16 else x
    losses = F.cross_entropy(x.flatten(0, 1), labels.flatten(), label_smoothing=smoothing, reduction="none")
    return (losses.sum() / (labels >= 0).sum())[None] if mean else losses.view(labels.shape)


# expected (both): values and first gradients right. True bug: the backward multiplies the saved gradient in place, in a
# kernel that autograd does not see (pytorch/triton/cross_entropy.py:288), so that a second backward of the same graph
# (retain_graph) is scaled twice, unless grad_out is 1. Layouts, true bug: x counts as contiguous if its last two
# strides do (line 52): one cut out along the sequence has a batch stride of its own, and all but its first batch are
# read from elsewhere; labels likewise (line 54). Others are copied: right. The count by atomics is exact.
for _name, _smoothing, _mean in (("smoothed", 0.1, False), ("mean", 0.0, True)):
    TE.add(
        f"te_cross_entropy_{_name}",
        lambda x, labels, s=_smoothing, m=_mean: _te("cross_entropy", "CrossEntropyFunction")(
            x, _ignoring(labels), s, m, None, -100, False
        ),
        partial(_smoothed, smoothing=_smoothing, mean=_mean),
        dict(x=rg.tensor("B", "T", "N"), labels=rg.tensor("B", "T", dtype="int64", low=0, high="N")),
        sizes=dict(B=(1, 3), T=(1, 6), N=[50, 2, 300]),
    )


def _sinkhorn(x: Tensor) -> Tensor:
    """Five times rows and columns to a sum of 1, in logarithms, as the docstring of mHCSinkhornOp."""
    f, g = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
    for _ in range(5):
        f = -(x + g[..., None, :]).logsumexp(-1)
        g = -(x + f[..., :, None]).logsumexp(-2)
    return (f[..., :, None] + x + g[..., None, :]).exp()


# expected (both): right in both dtypes (computed in float32) and all layouts (copied). With `recompute` the backward
# stores its history and loads it again within one program without a barrier: a race, if another thread loads it.
for _recompute in (True, False):
    TE.add(
        f"te_mhc_sinkhorn{'_recompute' if _recompute else ''}",
        lambda x, r=_recompute: _te("triton.mhc", "mHCSinkhornOp")(x, 4, r, 5),
        _sinkhorn,
        dict(x=rg.tensor("S", "B", 4, 4)),
        sizes=dict(S=(1, 9), B=[2, 1, 3]),
    )


def _scaled(h: Tensor, alpha: Tensor, beta: Tensor, ms: Tensor) -> Tensor:
    """Eq. 16-18 of the mHC paper at n = 4: alpha h / sqrt(ms) + beta, sigmoid of 4, 2 sigmoid of 4, 16 as they are."""
    pieces = zip((4, 8, 24), h[:, :24].split((4, 4, 16), -1), beta[0].split((4, 4, 16)), alpha, strict=True)
    eps = torch.finfo(torch.float32).eps
    pre, post, res = (a * x * torch.rsqrt(ms + eps)[:, None] + b for _, x, b, a in pieces)
    return torch.cat([pre.sigmoid(), 2 * post.sigmoid(), res, torch.zeros_like(h[:, 24:])], -1)


# expected: right but for layouts: alpha is not made contiguous (mhc.py of pytorch/triton, forward of mHCScaleFusedOp:
# H, beta and ms are) while its stride is taken for 1: one of another stride is read wrongly, a true bug. Sums by
# atomics, reset by the tuner; one block of 128 rows at these sizes but for M = 200.
TE.add(
    "te_mhc_scale",
    lambda h, alpha, beta, ms: _te("triton.mhc", "mHCScaleFusedOp")(h, alpha, beta, ms, 4),
    _scaled,
    dict(h=rg.tensor("M", 32), alpha=rg.tensor(3), beta=rg.tensor(1, 24), ms=rg.tensor("M", low=0.5, high=2.0)),
    sizes=dict(M=[9, 1, 200]),
)
# expected: proved: all is made contiguous, masks have other=0. Dots of one row and 4 columns by batch (ieee) may be
# undecided if such a shape is not known.
TE.add(
    "te_mhc_aggregate",
    lambda x, h: _te("triton.mhc", "mHCAggregateOp")(x, h, 4, False, None),
    lambda x, h: torch.einsum("sbcn,sbn->sbc", x, h),
    dict(x=rg.tensor("S", "B", "C", 4), h=rg.tensor("S", "B", 4)),
    sizes=dict(S=(1, 5), B=[2, 1], C=[24, 1, 70]),
)

# NVIDIA/Megatron-LM: megatron/core/fusions. Of megatron.core.utils only null_decorator is asked for.

_MEGATRON = {
    name: f"NVIDIA/Megatron-LM/{name.replace('.', '/')}"
    for name in ("megatron", "megatron.core", "megatron.core.fusions")
}


def _megatron(module: str, name: str) -> Any:
    def call(*args: Any) -> Any:
        within(_MEGATRON, bool)()
        bare("megatron.core.utils", CLONES / "none", null_decorator=lambda function=None, **_: function)
        return apply(f"megatron.core.fusions.{module}", name)(*args)

    return call


def _experts(probs: Tensor, experts: int) -> Tensor:
    """Different ones of each token; those of other ranks are -1."""
    tokens = torch.arange(len(probs), device=probs.device)[:, None]
    chosen = (5 * tokens + torch.arange(probs.shape[1], device=probs.device)) % (experts + 2)
    return chosen.masked_fill(chosen >= experts, -1)


def _multihot(probs: Tensor, experts: int) -> Tensor:
    """probs[t, e] is that of the choice of e, or 0 (docstring)."""
    chosen = _experts(probs, experts)
    return (F.one_hot(chosen.clamp_min(0), experts) * (probs * (chosen >= 0))[..., None]).sum(1)


# expected: contiguous right, in both dtypes; stores are ordered by barriers. Layouts, true bug: probs (and indices) of
# other strides are read as if contiguous (fused_indices_converter.py:89); grad_out is copied.
MEGATRON.add(
    "megatron_indices_to_multihot",
    lambda probs, experts: _megatron("fused_indices_converter", "IndicesToMultihot")(
        _experts(probs, experts), probs, experts
    )[1],
    _multihot,
    dict(probs=rg.tensor("T", "K"), experts=rg.size("E")),
    sizes=dict(T=(1, 9), K=[2, 1, 3], E=[6, 3, 8]),
)


def _turned(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of the last 8 numbers, which lie pair by pair and come out half by half (docstring, DeepSeek's MLA)."""
    left, right = q[..., -8::2], q[..., -7::2]
    (cos_l, cos_r), (sin_l, sin_r) = (t[: len(q)].chunk(2, -1) for t in (cos, sin))
    return torch.cat([q[..., :-8], left * cos_l - right * sin_l, right * cos_r + left * sin_r], -1)


# expected: right with the tuner's first block (BLOCK_H = 1). True bugs: (1) bounds and race: rows of a block beyond the
# last head are masked as if every block began at head 0 (fused_mla_yarn_rope_apply.py:142 and 238), so that with
# BLOCK_H = 2 and 3 heads, which the tuner may choose, the last block turns the first head of the next token once more,
# and of the last token what lies beyond the end; (2) the backward turns grad_out in place where it is contiguous
# (line 368): mutation of grad_out. q itself is overwritten by design, here a copy of it; other layouts: q.view raises
# RuntimeError where sequence and batch cannot be one (no check says so).
MEGATRON.add(
    "megatron_mla_rope",
    apart(
        lambda q, cos, sin: _megatron("fused_mla_yarn_rope_apply", "_FusedMLARoPEInplace")(
            q, cos, sin, q.shape[-1] - 8, 8, None, 0, 1, False, False, False, None
        ),
        0,
    ),
    _turned,
    dict(
        q=rg.tensor("T", "B", "H", "N+8"),
        cos=rg.tensor("T+2", 1, 1, 8, grad=False),
        sin=rg.tensor("T+2", 1, 1, 8, grad=False),
    ),
    sizes=dict(T=(1, 6), B=(1, 3), H=[3, 1, 4], N=[5, 1, 16]),
    dtypes=SINGLE,
)
