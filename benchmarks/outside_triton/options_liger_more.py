"""Options of liger-kernel 0.8.5: cross entropy, divergences, attention, experts. The formulas are ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from options_liger import LIGER_OPTIONS, OPTIONS, called, on_meta, sparsemax
from specs import SINGLE, apply, causal, log_softmax, of, softmax
from torch import Tensor
from torch.nn import functional as F

import retrograd as rg

__all__ = ["LIGER_OPTIONS", "OPTIONS"]

_add = OPTIONS.add
_OPS = "liger_kernel.ops"


def with_a_label(labels: Tensor) -> Tensor:
    """Labels of which the first counts."""
    return torch.cat([labels[:1].clamp(min=0), labels[1:]])


# Cross entropy writes its gradient over the logits, so that it gets copies of them.

_LABELS = rg.tensor("M", dtype="int64", low=-1, high="V")
_CLASSES = rg.tensor("V", low=0.5, high=2.0, dtype="float32", grad=False)
_LOGITS, _VOCABULARY = rg.tensor("M", "V"), dict(M=(1, 33), V=(2, 300))


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    smoothing: float = 0.0,
    z: float = 0.0,
    cap: float | None = None,
    reduction: str = "mean",
) -> tuple[Tensor, Tensor]:
    """The loss with z * lse^2 in it, and that alone; -1 is ignored. The mean of the latter knows of no weights."""
    x = x if cap is None else cap * torch.tanh(x / cap)
    kept, index, lse = target != -1, target.clamp(min=0), x.logsumexp(-1)
    logp = x - lse[:, None]
    of_class = torch.ones_like(x[0]) if weight is None else weight
    loss = -(1 - smoothing) * logp.gather(1, index[:, None])[:, 0] * of_class[index]
    loss = torch.where(kept, loss - smoothing / x.shape[-1] * (logp * of_class).sum(-1), 0)
    of_z = torch.where(kept, z * lse**2, 0)
    if reduction == "mean":
        of_z = of_z.sum() / kept.sum()
        return loss.sum() / (of_class[index] * kept).sum() + of_z, of_z
    return (loss + of_z, of_z) if reduction == "none" else ((loss + of_z).sum(), of_z.sum())


def _liger_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, *, reduction: str = "mean", asked: int = 1, **options: Any
) -> Any:
    z, smoothing, cap = (options.get(key, default) for key, default in (("z", 0.0), ("smoothing", 0.0), ("cap", None)))
    function = apply(_OPS, "LigerCrossEntropyFunction")
    return function(x.clone(), target, weight, -1, z, smoothing, reduction, cap, asked > 1)[:asked]


_EVERYTHING = dict(smoothing=0.1, z=1e-2, cap=5.0)
for _reduction in ("mean", "none"):
    # expected: finding (layouts: transposed logits come back as their gradient; mean: state; none: second order)
    _add(
        f"liger_cross_entropy_weight_and_everything_{_reduction}",
        lambda x, target, w, r=_reduction: _liger_cross_entropy(x, with_a_label(target), w, reduction=r, **_EVERYTHING)[
            0
        ],
        lambda x, target, w, r=_reduction: cross_entropy(x, with_a_label(target), w, reduction=r, **_EVERYTHING)[0].to(
            x.dtype
        ),
        dict(x=_LOGITS, target=_LABELS, w=_CLASSES),
        sizes=_VOCABULARY,
    )
# expected: finding (z_loss is for logging: an output that requires a gradient, and what comes back for it is dropped)
_add(
    "liger_cross_entropy_z_loss_returned",
    lambda x, target: _liger_cross_entropy(x, target, reduction="sum", z=1e-2, asked=2),
    lambda x, target: cross_entropy(x, target, reduction="sum", z=1e-2),
    dict(x=_LOGITS, target=_LABELS),
    sizes=_VOCABULARY,
)


def _with_accuracy(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    right = x.argmax(-1) == target
    return cross_entropy(x, target, smoothing=0.1)[0], (right.sum() / (target != -1).sum()).float()


def _liger_with_accuracy(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    options = dict(ignore_index=-1, label_smoothing=0.1, return_token_accuracy=True)
    module = on_meta("cross_entropy", "LigerCrossEntropyLoss", **options)
    result = module(x.clone(), target)
    return result.loss, result.token_accuracy.detach()


# expected: finding (layouts, state, as of every mean of cross entropy)
_add(
    "liger_cross_entropy_module_accuracy",
    lambda x, target: _liger_with_accuracy(x, with_a_label(target)),
    lambda x, target: _with_accuracy(x, with_a_label(target)),
    dict(x=_LOGITS, target=_LABELS),
    sizes=_VOCABULARY,
)

# Cross entropy after a projection.


def _liger_linear(x: Tensor, w: Tensor, target: Tensor, bias: Tensor | None, weight: Tensor | None, **more: Any) -> Any:
    names = dict(smoothing="label_smoothing", z="lse_square_scale", cap="softcap")
    options = {names.get(key, key): value for key, value in more.items()}
    module = on_meta(
        "fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss", weight, ignore_index=-1, **options
    )
    return module(w, x, target, bias)


_HIDDEN, _HEAD, _BIAS = rg.tensor("M", "H"), rg.tensor("V", "H", scale=0.2), rg.tensor("V")
_LINEAR_SIZES = dict(M=(1, 33), V=(2, 100), H=(1, 48))
# expected: proved (none computes gradients in the backward; with a bias a second order raises)
_add(
    "liger_fused_linear_cross_entropy_none_bias",
    lambda x, w, target, bias: _liger_linear(x, w, target, bias, None, reduction="none", smoothing=0.1, cap=8.0),
    lambda x, w, target, bias: cross_entropy(x @ w.t() + bias, target, reduction="none", smoothing=0.1, cap=8.0)[
        0
    ].float(),
    dict(x=_HIDDEN, w=_HEAD, target=_LABELS, bias=_BIAS),
    sizes=_LINEAR_SIZES,
)
# expected: finding (second order: the gradient is taken for one that does not depend on inputs)
_add(
    "liger_fused_linear_cross_entropy_none_weight",
    lambda x, w, target, of_class: _liger_linear(x, w, target, None, of_class, reduction="none", z=1e-3),
    lambda x, w, target, of_class: cross_entropy(x @ w.t(), target, of_class, reduction="none", z=1e-3)[0].float(),
    dict(x=_HIDDEN, w=_HEAD, target=_LABELS, of_class=_CLASSES),
    sizes=_LINEAR_SIZES,
)


def _scaled_by_token(x: Tensor, w: Tensor, target: Tensor, bias: Tensor) -> Tensor:
    logits = x @ w.t() + bias
    chosen = softmax(logits).gather(1, target.clamp(min=0)[:, None])[:, 0].detach()
    return (chosen * cross_entropy(logits, target, reduction="none")[0]).sum().float() / (target != -1).sum()


# expected: finding (contract: frozen hidden states leave weight and bias without a gradient; state: multiplied twice)
_add(
    "liger_fused_linear_cross_entropy_token_scaling",
    lambda x, w, target, bias: _liger_linear(x, w, with_a_label(target), bias, None, use_token_scaling=True),
    lambda x, w, target, bias: _scaled_by_token(x, w, with_a_label(target), bias),
    dict(x=_HIDDEN, w=_HEAD, target=_LABELS, bias=_BIAS),
    sizes=_LINEAR_SIZES,
    surrogate=True,
)
# expected: finding (contract, state, as above)
_add(
    "liger_fused_linear_cross_entropy_accum_dtype",
    lambda x, w, target, bias, of_class: _liger_linear(
        x, w, with_a_label(target), bias, of_class, smoothing=0.1, accum_dtype=torch.float32
    ),
    lambda x, w, target, bias, of_class: cross_entropy(x @ w.t() + bias, with_a_label(target), of_class, smoothing=0.1)[
        0
    ].float(),
    dict(x=_HIDDEN, w=_HEAD, target=_LABELS, bias=_BIAS, of_class=_CLASSES),
    sizes=_LINEAR_SIZES,
)


def _with_entropy(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logp = log_softmax(x @ w.t() / 0.7)
    kept = target != -1
    nll = -logp.gather(1, target.clamp(min=0)[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    return torch.where(kept, nll, 0).float(), torch.where(kept, entropy, 0)


# expected: proved (without a GPU of the right kind it is torch, in chunks)
_add(
    "liger_fused_linear_scaled_cross_entropy_entropy",
    lambda x, w, target: apply(
        f"{_OPS}.fused_linear_scaled_cross_entropy", "LigerFusedLinearScaledCrossEntropyFunction"
    )(x, w, target, 0.7, -1, 1, True),
    _with_entropy,
    dict(x=_HIDDEN, w=_HEAD, target=_LABELS),
    sizes=_LINEAR_SIZES,
    dtypes=SINGLE,
)


# Divergences.


def _jsd(x: Tensor, y: Tensor, labels: Tensor, beta: float) -> Tensor:
    """Of logarithms x = log Q (student) and y = log P (teacher), over the number of rows that count."""
    kept, p, q = (labels != -1)[:, None], y.exp(), x.exp()
    if beta == 0:
        loss = p * (y - x)
    else:
        m = (beta * p + (1 - beta) * q).log()
        loss = beta * p * (y - m) + (1 - beta) * q * (x - m)
    return (kept * loss).sum() / kept.sum()


_CONSTANT = rg.tensor("M", "V", grad=False)
for _beta, _name in ((0.0, "forward"), (0.9, "0.9")):
    # expected: forward: proved (its gradient by logarithms is constant); 0.9: finding (second order)
    _add(
        f"liger_jsd_module_labels_{_name}",
        lambda x, y, labels, beta=_beta: on_meta("jsd", "LigerJSD", beta, -1)(
            log_softmax(x), log_softmax(y), with_a_label(labels)
        ),
        lambda x, y, labels, beta=_beta: _jsd(log_softmax(x), log_softmax(y), with_a_label(labels), beta),
        dict(x=_LOGITS, y=_CONSTANT, labels=_LABELS),
        sizes=_VOCABULARY,
    )


def _tvd(p: Tensor, q: Tensor, labels: Tensor, reduction: str) -> Tensor:
    kept = (labels != -1)[:, None]
    loss = torch.where(kept, 0.5 * (p - q).abs(), 0).float()
    return loss if reduction == "none" else loss.sum() / (kept.sum() * p.shape[1])


for _reduction in ("none", "mean"):
    # expected: proved
    _add(
        f"liger_tvd_module_labels_{_reduction}",
        lambda p, q, labels, r=_reduction: on_meta("tvd", "LigerTVDLoss", r, -1)(p, q, with_a_label(labels)),
        lambda p, q, labels, r=_reduction: _tvd(p, q, with_a_label(labels), r),
        dict(p=_LOGITS, q=_CONSTANT, labels=_LABELS),
        sizes=_VOCABULARY,
    )
# expected: proved
_add(
    "liger_kl_div_module_log_target_mean",
    lambda x, t: on_meta("kl_div", "LigerKLDIVLoss", reduction="mean", log_target=True)(log_softmax(x), log_softmax(t)),
    lambda x, t: (log_softmax(t).exp() * (log_softmax(t) - log_softmax(x))).mean().float(),
    dict(x=_LOGITS, t=_CONSTANT),
    sizes=_VOCABULARY,
)
# expected: proved
_add(
    "liger_kl_div_eps_sum",
    lambda x, t: apply(_OPS, "LigerKLDivLossFunction")(log_softmax(x), softmax(t), "sum", False, 1e-2),
    lambda x, t: (softmax(t) * (softmax(t).clamp(min=1e-2).log() - log_softmax(x))).sum().float(),
    dict(x=_LOGITS, t=_CONSTANT),
    sizes=_VOCABULARY,
    dtypes=SINGLE,
)
_TEACHER = dict(tx=rg.tensor("M", "H", grad=False), tw=rg.tensor("V", "H", scale=0.2, grad=False))
# expected: finding (layouts: kept in zeros_like of a transposed x, scaled by a kernel that steps by 1; state)
_add(
    "liger_fused_linear_jsd_module_labels",
    lambda x, w, tx, tw, labels: on_meta("fused_linear_jsd", "LigerFusedLinearJSD", 0.1, -1, 2.0)(
        x, w, tx, tw, with_a_label(labels)
    ),
    lambda x, w, tx, tw, labels: _jsd(
        log_softmax(x @ w.t() / 2), log_softmax(tx @ tw.t() / 2), with_a_label(labels), 0.1
    ).float(),
    dict(x=_HIDDEN, w=_HEAD, **_TEACHER, labels=_LABELS),
    sizes=_LINEAR_SIZES,
)


def _linear_kl(x: Tensor, w: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    kept = (labels != -1)[:, None]
    loss = kept * softmax(t) * (log_softmax(t) - log_softmax(x @ w.t() / 2))
    return loss.sum().float() / (kept.sum() * t.shape[1])


# expected: finding (layouts, state, as above)
_add(
    "liger_fused_linear_kl_div_labels_mean",
    lambda x, w, t, labels: apply(_OPS, "LigerFusedLinearKLDivFunction")(
        x, w, softmax(t), with_a_label(labels), "mean", -1, 2.0
    ),
    lambda x, w, t, labels: _linear_kl(x, w, t, with_a_label(labels)),
    dict(x=_HIDDEN, w=_HEAD, t=_CONSTANT, labels=_LABELS),
    sizes=_LINEAR_SIZES,
    dtypes=SINGLE,
)

# Attention, connections, embedding, experts.


def _liger_multi_token(scores: Tensor, w: Tensor, b: Tensor | None, **options: Any) -> Tensor:
    shape = (scores.shape[1], w.shape[0], w.shape[-1])
    module = on_meta("multi_token_attention", "LigerMultiTokenAttention", *shape, bias=b is not None, **options)
    return called(module, dict(weight=w) if b is None else dict(weight=w, bias=b), scores)


_SCORES = rg.tensor("B", "2*C", "T", "T")
_SCORE_SIZES = dict(B=(1, 2), C=(1, 2), O=(1, 2), T=(1, 24))
# expected: finding (an even T: the transposed convolution of the backward is told no output_padding, and raises)
_add(
    "liger_multi_token_attention_strided",
    lambda scores, w, b: _liger_multi_token(scores, w, b, stride=2, padding=1),
    lambda scores, w, b: F.conv2d(softmax(causal(scores)), w, b, stride=2, padding=1).tril(),
    dict(scores=_SCORES, w=rg.tensor("O", "2*C", 3, 3), b=rg.tensor("O")),
    sizes=_SCORE_SIZES,
    dtypes=SINGLE,
)
# expected: proved
_add(
    "liger_multi_token_attention_grouped",
    lambda scores, w: _liger_multi_token(scores, w, None, padding=2, dilation=2, groups=2),
    lambda scores, w: F.conv2d(softmax(causal(scores)), w, padding=2, dilation=2, groups=2).tril(),
    dict(scores=_SCORES, w=rg.tensor("2*O", "C", 3, 3)),
    sizes=_SCORE_SIZES,
    dtypes=SINGLE,
)
# expected: finding (extremes: NaN becomes 0 in sparsemax)
_add(
    "liger_multi_token_attention_sparse",
    lambda scores, w, b: _liger_multi_token(scores, w, b, padding=1, sparse=True),
    lambda scores, w, b: F.conv2d(sparsemax(causal(scores)), w, b, padding=1).tril(),
    dict(scores=_SCORES, w=rg.tensor("O", "2*C", 3, 3), b=rg.tensor("O")),
    sizes=_SCORE_SIZES,
    dtypes=SINGLE,
)


def _mhc_coefficients(x: Tensor, phi: Tensor, b: Tensor, pre: Tensor, post: Tensor, res: Tensor) -> tuple[Tensor, ...]:
    """Three rounds of Sinkhorn, the first by a softmax of rows."""
    streams, flat = x.shape[1], x.flatten(1)
    mix = (flat @ phi) * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + 1e-6)
    of_pre, of_post, of_res = mix.split([streams, streams, streams**2], -1)
    by_pre, by_post, by_res = b.split([streams, streams, streams**2])
    mat = softmax((of_res * res + by_res).unflatten(-1, (streams, streams))) + 1e-3
    mat = mat / (mat.sum(-2, keepdim=True) + 1e-3)
    for _ in range(2):
        mat = mat / (mat.sum(-1, keepdim=True) + 1e-3)
        mat = mat / (mat.sum(-2, keepdim=True) + 1e-3)
    h_pre, h_post = torch.sigmoid(of_pre * pre + by_pre) + 0.1, 2 * torch.sigmoid(of_post * post + by_post)
    return h_pre.float(), h_post.float(), mat.float()


_ALPHA = rg.tensor(dtype="float32")
# expected: proved
_add(
    "liger_mhc_coeffs",
    lambda *args: of("liger_kernel.transformers.functional", "liger_mhc_coeffs")(
        *args, allow_fp32=True, tmax=3, pre_eps=0.1, sinkhorn_eps=1e-3
    ),
    _mhc_coefficients,
    dict(
        x=rg.tensor("M", "S", "C"),
        phi=rg.tensor("S*C", "S*S+2*S", scale=0.3),
        b=rg.tensor("S*S+2*S", dtype="float32"),
        pre=_ALPHA,
        post=_ALPHA,
        res=_ALPHA,
    ),
    sizes=dict(M=(1, 20), S=[2, 4], C=(1, 70)),
)
# expected: proved (atomic sums of rows that occur again)
_add(
    "liger_embedding_module_padding",
    lambda w, index: called(
        on_meta("experimental.embedding", "LigerEmbedding", *w.shape, padding_idx=0), dict(weight=w), index
    ),
    lambda w, index: w[index] * (index != 0)[..., None],
    dict(w=rg.tensor("V", "D"), index=rg.tensor("B", "T", dtype="int64", high="V")),
    sizes=dict(V=(1, 4), D=(1, 70), B=(1, 3), T=(1, 20)),
)


def _experts(x: Tensor, up: Tensor, down: Tensor, index: Tensor, share: Tensor) -> Tensor:
    gate, linear = (up[index] @ x[..., None, :, None])[..., 0].chunk(2, -1)
    hidden = gate * torch.sigmoid(gate) * linear
    return (share[..., None] * (down[index] @ hidden[..., None])[..., 0]).sum(-2)


def _liger_experts(x: Tensor, up: Tensor, down: Tensor, index: Tensor, share: Tensor) -> Tensor:
    experts, hidden, inner = down.shape
    config = SimpleNamespace(num_experts=experts, moe_intermediate_size=inner, hidden_size=hidden, hidden_act="silu")
    module = on_meta("swiglu", "LigerExperts", config)
    return called(module, dict(gate_up_proj=up, down_proj=down), x, index, share)


# expected: proved
_add(
    "liger_experts_module_three_of",
    _liger_experts,
    _experts,
    dict(
        x=rg.tensor("B", "T", "H"),
        up=rg.tensor("E", "2*I", "H", scale=0.3),
        down=rg.tensor("E", "H", "I", scale=0.3),
        index=rg.tensor("B", "T", 3, dtype="int64", high="E"),
        share=rg.tensor("B", "T", 3),
    ),
    sizes=dict(B=(1, 2), T=(1, 10), H=[16, 32], E=(1, 4), I=32),
    dtypes=SINGLE,
)
