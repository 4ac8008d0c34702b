"""liger-kernel 0.8.5, losses: cross entropy, divergences, and both after a projection. The formulas are ours."""

from __future__ import annotations

from typing import Any

import torch
from liger import LIGER
from specs import SINGLE, apply, log_softmax, softmax
from torch import Tensor

import retrograd as rg

_add = LIGER.add
_OPS = "liger_kernel.ops"

# Losses. Cross entropy writes its gradient over the logits, so that it gets copies of them.

_LOGITS, _LABELS = rg.tensor("M", "V"), rg.tensor("M", dtype="int64", high="V")
_SOME_IGNORED = rg.tensor("M", dtype="int64", low=-1, high="V")
_VOCABULARY = dict(M=(1, 33), V=(2, 300))


def _cross_entropy(
    x: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    smoothing: float = 0.0,
    z: float = 0.0,
    cap: float | None = None,
    reduction: str = "mean",
    ignored: int = -100,
) -> Tensor:
    x = x if cap is None else cap * torch.tanh(x / cap)
    kept = target != ignored
    lse = x.logsumexp(-1)
    logp = x - lse[:, None]
    index = target.clamp(min=0)
    each = -logp.gather(1, index[:, None])[:, 0]
    of_class = torch.ones_like(x[0]) if weight is None else weight
    loss = (1 - smoothing) * each * of_class[index] - smoothing / x.shape[-1] * (logp * of_class).sum(-1) + z * lse**2
    loss = torch.where(kept, loss, 0)
    if reduction == "mean":
        return loss.sum() / (of_class[index] * kept).sum()
    return loss.sum() if reduction == "sum" else loss


def _liger_cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    smoothing: float = 0.0,
    z: float = 0.0,
    cap: float | None = None,
    reduction: str = "mean",
    ignored: int = -100,
) -> Tensor:
    function = apply(_OPS, "LigerCrossEntropyFunction")
    return function(x.clone(), target, weight, ignored, z, smoothing, reduction, cap)[0]


_CROSS_ENTROPY: dict[str, dict[str, Any]] = {
    "": {},
    "_sum": dict(reduction="sum"),
    "_none": dict(reduction="none"),
    "_smoothing": dict(smoothing=0.1),
    "_z_loss": dict(z=1e-2),
    "_softcap": dict(cap=5.0),
    "_ignored": dict(reduction="sum", ignored=-1),
    "_all": dict(smoothing=0.2, z=1e-3, cap=10.0, reduction="sum", ignored=-1),
}
for _suffix, _options in _CROSS_ENTROPY.items():
    _add(
        f"liger_cross_entropy{_suffix}",
        lambda x, target, options=_options: _liger_cross_entropy(x, target, **options),
        lambda x, target, options=_options: _cross_entropy(x, target, **options),
        dict(x=_LOGITS, target=_SOME_IGNORED if "ignored" in _options else _LABELS),
        sizes=_VOCABULARY,
    )
_add(
    "liger_cross_entropy_weight",
    _liger_cross_entropy,
    lambda x, target, weight: _cross_entropy(x, target, weight=weight).to(x.dtype),
    dict(x=_LOGITS, target=_LABELS, weight=rg.tensor("V", low=0.5, high=2.0, dtype="float32", grad=False)),
    sizes=_VOCABULARY,
)

_HIDDEN, _HEAD = rg.tensor("M", "H"), rg.tensor("V", "H", scale=0.2)
_LINEAR_SIZES = dict(M=(1, 33), V=(2, 100), H=(1, 48))


def _liger_linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    smoothing: float = 0.0,
    z: float = 0.0,
    cap: float | None = None,
    reduction: str = "mean",
    ignored: int = -100,
) -> Tensor:
    function = apply(_OPS, "LigerFusedLinearCrossEntropyFunction")
    return function(x, w, target, bias, None, ignored, z, smoothing, reduction, cap)[0]


for _suffix, _options in (
    ("", {}),
    ("_smoothing", dict(smoothing=0.1, z=1e-3)),
    ("_softcap", dict(cap=5.0, reduction="sum")),
):
    _add(
        f"liger_fused_linear_cross_entropy{_suffix}",
        lambda x, w, target, options=_options: _liger_linear_cross_entropy(x, w, target, **options),
        lambda x, w, target, options=_options: _cross_entropy(x @ w.t(), target, **options).float(),
        dict(x=_HIDDEN, w=_HEAD, target=_LABELS),
        sizes=_LINEAR_SIZES,
    )
_add(
    "liger_fused_linear_cross_entropy_bias",
    _liger_linear_cross_entropy,
    lambda x, w, target, bias: _cross_entropy(x @ w.t() + bias, target).float(),
    dict(x=_HIDDEN, w=_HEAD, target=_LABELS, bias=rg.tensor("V")),
    sizes=_LINEAR_SIZES,
)


def _jsd(x: Tensor, y: Tensor, *, beta: float) -> Tensor:
    """Of logarithms x = log Q (student) and y = log P (teacher), over the number of rows."""
    p, q = y.exp(), x.exp()
    if beta == 0:
        loss = p * (y - x)
    elif beta == 1:
        loss = q * (x - y)
    else:
        m = (beta * p + (1 - beta) * q).log()
        loss = beta * p * (y - m) + (1 - beta) * q * (x - m)
    return loss.sum() / x.shape[0]


_LOGP = rg.tensor("M", "V")
_CONSTANT = rg.tensor("M", "V", grad=False)
for _beta in (0.0, 0.1, 0.5, 1.0):
    _add(
        f"liger_jsd_{_beta}",
        lambda x, y, beta=_beta: apply(_OPS, "LigerJSDFunction")(log_softmax(x), log_softmax(y), None, beta),
        lambda x, y, beta=_beta: _jsd(log_softmax(x), log_softmax(y), beta=beta),
        dict(x=_LOGP, y=_CONSTANT),
        sizes=_VOCABULARY,
    )


def _jsd_of_labelled(x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    kept = (labels != -1)[:, None]
    p, q = y.exp(), x.exp()
    m = (0.5 * p + 0.5 * q).log()
    return (kept * (0.5 * p * (y - m) + 0.5 * q * (x - m))).sum() / kept.sum()


def _with_a_label(labels: Tensor) -> Tensor:
    return torch.cat([labels[:1].clamp(min=0), labels[1:]])  # at least one row counts


_add(
    "liger_jsd_labels",
    lambda x, y, labels: apply(_OPS, "LigerJSDFunction")(
        log_softmax(x), log_softmax(y), _with_a_label(labels), 0.5, -1
    ),
    lambda x, y, labels: _jsd_of_labelled(log_softmax(x), log_softmax(y), _with_a_label(labels)),
    dict(x=_LOGP, y=_CONSTANT, labels=_SOME_IGNORED),
    sizes=_VOCABULARY,
)


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() / dict(sum=1, mean=loss.numel(), batchmean=loss.shape[0])[reduction]


for _reduction in ("batchmean", "mean", "sum", "none"):
    _add(
        f"liger_kl_div_{_reduction}",
        lambda x, t, reduction=_reduction: apply(_OPS, "LigerKLDivLossFunction")(
            log_softmax(x), softmax(t), reduction, False
        ),
        lambda x, t, reduction=_reduction: _reduced(softmax(t) * (log_softmax(t) - log_softmax(x)), reduction).float(),
        dict(x=_LOGP, t=_CONSTANT),
        sizes=_VOCABULARY,
        dtypes=SINGLE,
    )
_add(
    "liger_kl_div_log_target",
    lambda x, t: apply(_OPS, "LigerKLDivLossFunction")(log_softmax(x), log_softmax(t), "batchmean", True),
    lambda x, t: _reduced(softmax(t) * (log_softmax(t) - log_softmax(x)), "batchmean").float(),
    dict(x=_LOGP, t=_CONSTANT),
    sizes=_VOCABULARY,
    dtypes=SINGLE,
)
for _reduction in ("batchmean", "mean", "none"):
    _add(
        f"liger_tvd_{_reduction}",
        lambda p, q, reduction=_reduction: apply(_OPS, "LigerTVDLossFunction")(p, q, None, reduction),
        lambda p, q, reduction=_reduction: _reduced(0.5 * (p - q).abs(), reduction).float(),
        dict(p=_LOGP, q=_CONSTANT),
        sizes=_VOCABULARY,
        dtypes=SINGLE,
    )


def _ce_tvd(student: Tensor, teacher: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    each = -log_softmax(student).gather(1, target[:, None])[:, 0]
    return each.float(), (0.5 * (softmax(student) - softmax(teacher)).abs().sum(-1)).float()


_add(
    "liger_fused_ce_tvd",
    lambda s, t, target: apply(_OPS, "LigerFusedCETVDFunction")(s, t, target),
    _ce_tvd,
    dict(s=_LOGITS, t=_CONSTANT, target=_LABELS),
    sizes=_VOCABULARY,
)


def _linear_jsd(x: Tensor, w: Tensor, tx: Tensor, tw: Tensor, *, temperature: float) -> Tensor:
    return _jsd(log_softmax(x @ w.t() / temperature), log_softmax(tx @ tw.t() / temperature), beta=0.5)


_add(
    "liger_fused_linear_jsd",
    lambda x, w, tx, tw, temperature: apply(_OPS, "LigerFusedLinearJSDFunction")(
        x, w, tx, tw, None, 0.5, -100, temperature
    ),
    _linear_jsd,
    dict(x=_HIDDEN, w=_HEAD, tx=rg.tensor("M", "H", grad=False), tw=rg.tensor("V", "H", scale=0.2, grad=False)),
    params=dict(temperature=[1.0, 2.0]),
    sizes=_LINEAR_SIZES,
    dtypes=SINGLE,
)
_add(
    "liger_fused_linear_kl_div",
    lambda x, w, t, temperature: apply(_OPS, "LigerFusedLinearKLDivFunction")(
        x, w, softmax(t), None, "batchmean", -100, temperature
    ),
    lambda x, w, t, temperature: _reduced(
        softmax(t) * (log_softmax(t) - log_softmax(x @ w.t() / temperature)), "batchmean"
    ).float(),
    dict(x=_HIDDEN, w=_HEAD, t=_CONSTANT),
    params=dict(temperature=[1.0, 2.0]),
    sizes=_LINEAR_SIZES,
    dtypes=SINGLE,
)
