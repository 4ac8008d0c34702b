"""Specs of ops of seven packages that nobody had run here, as they came: trifast, flashrnn, ring-attention-pytorch, ...

Formulas are our own.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from specs import SINGLE, causal, of, registries, softmax
from torch import Tensor

import retrograd as rg

UNSEEN = registries(
    {
        "trifast": "trifast==0.1.13",
        "sparsify": "eai-sparsify==1.3.3",
        "sinkhorn": "flash-sinkhorn==0.4.1",
        "maxsim": "flash-maxsim==0.3.0",
        "flashrnn": "flashrnn==1.0.8",
        "jvp": "jvp-flash-attention==0.14.0",
        "ring": "ring-attention-pytorch==0.5.20",
    }
)
TRIFAST, SPARSIFY, SINKHORN, MAXSIM, FLASHRNN, JVP, RING = UNSEEN.values()
_HALF, _BRAIN = ("float16",), ("bfloat16",)


def _triangle(q: Tensor, k: Tensor, v: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """Attention of each row i of [B, H, i, j, D] with one bias [B, H, j, k] for all rows."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5 + b[:, :, None]
    return scores.masked_fill(mask[:, None, :, None], torch.finfo(scores.dtype).min).softmax(-1) @ v


_PAIRS = rg.tensor("B", "H", "N", "N", "D")
TRIFAST.add(
    "trifast_triangle_attention",
    of("trifast.torch", "triangle_attention"),
    _triangle,
    dict(q=_PAIRS, k=_PAIRS, v=_PAIRS, b=rg.tensor("B", "H", "N", "N"), mask=rg.tensor("B", "N", "N", dtype="bool")),
    sizes=dict(B=[2, 1], H=[2, 1], N=[17, 32, 16], D=[16, 32]),
)


_HEADS = rg.tensor("B", "H", "T", "D")
_QKV = dict(q=_HEADS, k=_HEADS, v=_HEADS)
SPARSIFY.add(
    "sparsify_embedding_bag",
    of("sparsify.xformers", "xformers_embedding_bag"),
    lambda indices, weight, scales: (weight[indices] * scales[..., None]).sum(1),
    dict(
        indices=rg.tensor("B", "K", dtype="int64", low=0, high="R"),
        weight=rg.tensor("R", "D"),
        scales=rg.tensor("B", "K"),
    ),
    sizes=dict(R=[8, 64, 32], D=[17, 64]),
)


def _transport(x: Tensor, y: Tensor) -> Tensor:
    """Value of the primal problem with entropy 1 and even weights, at potentials that have converged."""
    cost = (x[:, None] - y).square().sum(-1)
    f = torch.zeros_like(x[:, 0])
    for _ in range(60):
        g = -(f[:, None] - cost).logsumexp(0) + torch.tensor(float(len(x))).log()
        f = -(g - cost).logsumexp(1) + torch.tensor(float(len(y))).log()
    g = -(f[:, None] - cost).logsumexp(0) + torch.tensor(float(len(x))).log()
    shares = (f[:, None] + g - cost).exp()
    return (shares * cost + shares * shares.log() - shares + 1).mean()


SINKHORN.add(
    "sinkhorn_transport",
    lambda x, y: import_module("flash_sinkhorn").SamplesLoss(
        "sinkhorn", allow_tf32=False, backend="alternating", use_epsilon_scaling=False, eps=1.0, n_iters=60
    )(x, y),
    _transport,
    dict(x=rg.tensor("N", "D", low=-1.0, high=1.0), y=rg.tensor("M", "D", low=-1.0, high=1.0)),
    sizes=dict(N=[16, 9], M=[12, 20], D=[3, 2]),
    dtypes=SINGLE,
)
SINKHORN.add(
    "sinkhorn_c_transform",
    lambda x, y, psi: of("flash_sinkhorn", "c_transform_cost")(x, y, psi, allow_tf32=False),
    lambda x, y, psi: ((x[:, None] - y).square().sum(-1) - psi).amin(1).mean() + psi.mean(),
    dict(x=rg.tensor("N", "D"), y=rg.tensor("M", "D", grad=False), psi=rg.tensor("M")),
    sizes=dict(N=[32, 1, 50], M=[40, 1, 17], D=[3, 2, 16]),
    dtypes=SINGLE,
)


def _batched(q: Tensor, d: Tensor) -> Tensor:
    os.environ["FLASH_BWD_PATH"] = "auto"
    return import_module("flash_maxsim").flash_maxsim_batched_train(q, d, True)


def _chamfer(p: Tensor, q: Tensor) -> Tensor:
    apart = (p[:, None] - q).square().sum(-1)
    return (apart.amin(1).mean() + apart.amin(0).mean()).float()


MAXSIM.add(
    "maxsim_batched",
    _batched,
    lambda q, d: (q[:, None] @ d[None].mT).amax(-1).sum(-1).float(),
    dict(q=rg.tensor("Q", "L", "K"), d=rg.tensor("B", "M", "K")),
    sizes=dict(Q=[3, 1, 2], L=[8, 5, 32], B=[4, 1, 3], M=[24, 7, 40], K=[64, 16, 32]),
    dtypes=_BRAIN,
)
MAXSIM.add(
    "maxsim_chamfer_invgrid",
    of("flash_maxsim.flash_chamfer_invgrid", "flash_chamfer_invgrid_train"),
    _chamfer,
    dict(p=rg.tensor("N", "D"), q=rg.tensor("M", "D")),
    sizes=dict(N=[32, 1, 50], M=[40, 1, 17], D=[3, 2, 16]),
    dtypes=_BRAIN,
)


@cache
def _flashrnn_itself() -> Callable[..., Any]:
    """Its import asks where the CUDA toolkit is, which a torch without one does not know."""
    extensions = import_module("torch.utils.cpp_extension")
    extensions.CUDA_HOME = extensions.CUDA_HOME or "/usr/local/cuda"
    return import_module("flashrnn.flashrnn.flashrnn").flashrnn


def _flashrnn(kind: str, hidden: bool = False) -> Callable[..., Any]:
    def call(x: Tensor, r: Tensor, b: Tensor, states: Tensor | None = None) -> Any:
        dtype = str(x.dtype).removeprefix("torch.")
        every, last = _flashrnn_itself()(x, r, b, states=states, function=kind, backend="triton_fused", dtype=dtype)
        return every[0] if hidden else (every, last)

    return call


def _recurrence(x: Tensor, r: Tensor, b: Tensor, states: Tensor, step: Callable[..., tuple[Tensor, ...]]) -> Any:
    """States [S, B, T, N, D] and the last ones, of x [B, T, 4, N, D], r [4, N, D, from D], b [4, N, D]."""
    now, every = tuple(states[:, :, 0]), []
    for t in range(x.shape[1]):
        gates = (x[:, t] + torch.einsum("gndp,bnp->bgnd", r, now[0]) + b).unbind(1)
        now = step(*gates, *now)
        every.append(torch.stack(now))
    stacked = torch.stack(every, 2)
    return stacked, stacked[:, :, -1:]


def _lstm_step(i: Tensor, f: Tensor, z: Tensor, o: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(z)
    return torch.sigmoid(o) * torch.tanh(c), c


def _slstm_step(
    i: Tensor, f: Tensor, z: Tensor, o: Tensor, h: Tensor, c: Tensor, n: Tensor, m: Tensor
) -> tuple[Tensor, ...]:
    """Exponential gates, over the largest so far, a constant to its backward; at first (n = 0) that is the input's."""
    kept = F.logsigmoid(f) + m
    top = torch.where(n == 0, i, torch.maximum(i, kept)).detach()
    enter, stay = (i - top).exp(), (kept - top).exp()
    c, n = stay * c + enter * torch.tanh(z), stay * n + enter
    return torch.sigmoid(o) * c / n, c, n, top


def _slstm(x: Tensor, r: Tensor, b: Tensor, hidden: bool = False) -> Any:
    every, last = _recurrence(x, r, b, x.new_zeros(4, len(x), 1, *x.shape[3:]), _slstm_step)
    return every[0] if hidden else (every, last)


_GATES = dict(x=rg.tensor("B", "T", 4, "N", "D"), r=rg.tensor(4, "N", "D", "D", scale=0.2), b=rg.tensor(4, "N", "D"))
_STEPS = dict(B=[8, 3, 17], T=[6, 1], N=[2, 1], D=[32, 16])
FLASHRNN.add(
    "flashrnn_lstm",
    _flashrnn("lstm"),
    partial(_recurrence, step=_lstm_step),
    _GATES | dict(states=rg.tensor(2, "B", 1, "N", "D")),
    sizes=_STEPS,
    dtypes=SINGLE,
)
FLASHRNN.add(
    "flashrnn_slstm_hidden",
    _flashrnn("slstm", True),
    partial(_slstm, hidden=True),
    _GATES,
    sizes=_STEPS,
    dtypes=SINGLE,
)
FLASHRNN.add("flashrnn_slstm_states", _flashrnn("slstm"), _slstm, _GATES, sizes=_STEPS, dtypes=SINGLE, surrogate=True)
_MASK = rg.tensor("B", "H", "T", "T", dtype="bool")
_jvp = of("jvp_flash_attention.jvp_attention", "attention")
JVP.add(
    "jvp_attention_additive",
    lambda q, k, v, mask, bias: _jvp(q, k, v, attn_mask=torch.where(mask, bias, -100.0).to(q.dtype)),
    lambda q, k, v, mask, bias: softmax((q @ k.mT + torch.where(mask, bias, -100.0)) * q.shape[-1] ** -0.5) @ v,
    _QKV | dict(mask=_MASK, bias=rg.tensor("B", "H", "T", "T", grad=False)),
    sizes=dict(B=[2, 1], H=[2, 1, 3], T=[64, 32, 96], D=[32, 64]),
    dtypes=SINGLE,
)


@cache
def _ring() -> Callable[..., Tensor]:
    """It asks for a package called triton-nightly, which is Triton under another name."""
    found = importlib.metadata.version
    importlib.metadata.version = lambda name: found("triton" if name == "triton-nightly" else name)
    try:
        import_module("ring_attention_pytorch.triton_flash_attn")
    finally:
        importlib.metadata.version = found
    return import_module("ring_attention_pytorch.ring_flash_attention_cuda").ring_flash_attn_cuda


def _ring_attention(q: Tensor, k: Tensor, v: Tensor, *, before: bool) -> Tensor:
    """[B, T, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return (softmax(causal(scores) if before else scores) @ v).transpose(1, 2)


_LONG = rg.tensor("B", "T", "H", "D")
for name, before in (("ring_attention", False), ("ring_attention_causal", True)):
    RING.add(
        name,
        lambda q, k, v, before=before: _ring()(q, k, v, causal=before),
        partial(_ring_attention, before=before),
        dict(q=_LONG, k=_LONG, v=_LONG),
        sizes=dict(B=[2, 1], H=[2, 1, 3], T=[128, 70, 130], D=[32, 64, 48]),
        dtypes=_HALF,
    )
