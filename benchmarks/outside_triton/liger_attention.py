"""liger-kernel 0.8.5: attention, residual mixing, embedding, experts. The formulas are ours."""

from __future__ import annotations

import torch
from liger_losses import LIGER
from specs import SINGLE, apply, causal, rms, softmax
from torch import Tensor
from torch.nn import functional as F

import retrograd as rg

_add = LIGER.add
_OPS = "liger_kernel.ops"
_Q = rg.tensor("B", "H", "T", "D")


def _attn_res(v: Tensor, query: Tensor, norm: Tensor, eps: float) -> Tensor:
    scores = (rms(v, norm, eps) * query).sum(-1)
    return (softmax(scores.movedim(0, -1)).movedim(-1, 0)[..., None] * v).sum(0)


_add(
    "liger_attn_res",
    lambda v, query, norm, eps: apply(_OPS, "LigerAttnResFunction")(v, query, norm, eps),
    _attn_res,
    dict(v=rg.tensor("L", "B", "T", "D"), query=rg.tensor("D", scale=0.3), norm=rg.tensor("D")),
    params=dict(eps=[1e-6, 1e-2]),
    sizes=dict(L=(1, 8), B=(1, 3), T=(1, 9), D=(1, 80)),
)


def _multi_token(scores: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mixed = F.conv2d(softmax(causal(scores)), w, b, padding=1)
    return mixed.tril()


_add(
    "liger_multi_token_attention",
    lambda scores, w, b: apply(_OPS, "LigerMultiTokenAttentionFunction")(scores, w, b, 1, 1),
    _multi_token,
    dict(scores=rg.tensor("B", "C", "T", "T"), w=rg.tensor("O", "C", 3, 3), b=rg.tensor("O")),
    sizes=dict(B=(1, 2), C=(1, 3), O=(1, 3), T=(1, 24)),
    dtypes=SINGLE,
)


def _neighbourhood(q: Tensor, k: Tensor, v: Tensor, *, window: int, dilation: int) -> Tensor:
    t = torch.arange(q.shape[2], device=q.device)
    apart_by = t[None, :] - t[:, None]
    near = (apart_by.abs() <= window // 2 * dilation) & (apart_by % dilation == 0)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return softmax(scores.masked_fill(~near, -torch.inf)) @ v


_add(
    "liger_fused_neighborhood_attention",
    lambda q, k, v, window, dilation: apply(_OPS, "LigerFusedNeighborhoodAttentionFunction")(q, k, v, window, dilation),
    _neighbourhood,
    dict(q=_Q, k=_Q, v=_Q),
    params=dict(window=[3, 5], dilation=[1, 2]),
    sizes=dict(B=(1, 2), H=(1, 2), T=(1, 40), D=[8, 16, 32]),
    dtypes=SINGLE,
)
_add(
    "liger_mhc_pre",
    lambda x, h: apply(_OPS, "LigerMHCPreFunction")(x, h),
    lambda x, h: (h[..., None] * x).sum(-2),
    dict(x=rg.tensor("M", "S", "C"), h=rg.tensor("M", "S", dtype="float32")),
    sizes=dict(M=(1, 20), S=[2, 4], C=(1, 70)),
    dtypes=SINGLE,
)
_add(
    "liger_mhc_post_res",
    lambda x, f, post, res: apply(_OPS, "LigerMHCPostResFunction")(x, f, post, res),
    lambda x, f, post, res: res @ x + post[..., None] * f[..., None, :],
    dict(x=rg.tensor("M", "S", "C"), f=rg.tensor("M", "C"), post=rg.tensor("M", "S"), res=rg.tensor("M", "S", "S")),
    sizes=dict(M=(1, 20), S=[2, 4], C=(1, 70)),
    dtypes=SINGLE,
)
_add(
    "liger_embedding",
    lambda w, index: apply(_OPS, "LigerEmbeddingFunction")(w, index),
    lambda w, index: w[index],
    dict(w=rg.tensor("V", "D"), index=rg.tensor("B", "T", dtype="int64", high="V")),
    sizes=dict(V=(1, 20), D=(1, 70), B=(1, 3), T=(1, 20)),
)


def _experts(x: Tensor, up: Tensor, down: Tensor, index: Tensor, share: Tensor) -> Tensor:
    gate, linear = (up[index] @ x[:, None, :, None])[..., 0].chunk(2, -1)
    hidden = gate * torch.sigmoid(gate) * linear
    return (share[..., None] * (down[index] @ hidden[..., None])[..., 0]).sum(1)


_add(
    "liger_fused_moe",
    lambda x, up, down, index, share: apply(_OPS, "LigerFusedMoEFunction")(x, up, down, index.int(), share),
    _experts,
    dict(
        x=rg.tensor("T", "H"),
        up=rg.tensor("E", "J", "H", scale=0.3),
        down=rg.tensor("E", "H", "I", scale=0.3),
        index=rg.tensor("T", 2, dtype="int64", high="E"),
        share=rg.tensor("T", 2),
    ),
    sizes=dict(T=(1, 20), H=[16, 32], E=(1, 4), J=64, I=32),
    dtypes=SINGLE,
)
