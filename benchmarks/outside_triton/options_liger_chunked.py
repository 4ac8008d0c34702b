"""Options of liger-kernel 0.8.5: preference, distillation and policy losses after a projection. The formulas are ours.

What the chunked ones keep in the forward is multiplied by grad_out in the backward, in torch, which can be
differentiated, as if it did not depend on the inputs: a second order that is silently wrong, of each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from options_liger_more import LIGER_OPTIONS, OPTIONS, cross_entropy
from specs import log_softmax, of
from torch import Tensor
from torch.nn.functional import logsigmoid

import retrograd as rg

__all__ = ["LIGER_OPTIONS"]

_add = OPTIONS.add
_CHUNKED: dict[str, Callable[..., Any]] = {
    name: partial(of("liger_kernel.chunked_loss", f"LigerFusedLinear{name}Loss"), compiled=False)
    for name in ("DPO", "ORPO", "CPO", "SimPO", "KTO", "JSD", "CosineSimilarity", "GRPO")
}

# Of pairs: the first half is preferred.


def _labelled(target: Tensor) -> Tensor:
    """Labels of which the first of each row counts."""
    return torch.cat([target[:, :1].clamp(min=0), target[:, 1:]], 1)


def _of_sequences(logits: Tensor, target: Tensor, mean: bool) -> Tensor:
    kept = target != -1
    each = log_softmax(logits).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    total = (each * kept).sum(-1)
    return total / kept.sum(-1) if mean else total


def _likelihood(logits: Tensor, target: Tensor) -> Tensor:
    """The mean negative one of the preferred half."""
    half = len(target) // 2
    return cross_entropy(logits[:half].flatten(0, 1), target[:half].flatten())[0]


def _robust(d: Tensor, b: float = 0.1) -> Tensor:
    return (-(1 - b) * logsigmoid(d) + b * logsigmoid(-d)) / (1 - 2 * b)


def _dpo(
    x: Tensor, w: Tensor, target: Tensor, bias: Tensor, rx: Tensor, rw: Tensor, *, kind: str, mean: bool, nll: float
) -> Tensor:
    logits = x @ w.t() + bias
    ratio = _of_sequences(logits, target, mean) - _of_sequences(rx @ rw.t(), target, mean)
    chosen, rejected = ratio.chunk(2)
    d = 0.1 * (chosen - rejected)
    gate = torch.sigmoid(d / 0.05)
    loss = dict(
        sigmoid=-logsigmoid(d),
        robust=_robust(d),
        discopop=-logsigmoid(d) * (1 - gate) + (-d).exp() * gate,
    )[kind].mean()
    return (loss + nll * _likelihood(logits, target) if nll else loss).float()


_X, _HEAD, _BIAS = rg.tensor("2*B", "T", "H"), rg.tensor("V", "H", scale=0.3), rg.tensor("V")
_TARGET = rg.tensor("2*B", "T", dtype="int64", low=-1, high="V")
_FROZEN_HEAD = rg.tensor("V", "H", scale=0.3, grad=False)
_SIZES = dict(B=(1, 5), T=(1, 9), H=(1, 24), V=(2, 50))
_PAIRS = dict(x=_X, w=_HEAD, target=_TARGET, bias=_BIAS)
_DPO: tuple[tuple[str, bool, float, dict[str, Any]], ...] = (
    ("sigmoid", False, 0.5, dict(compute_nll_loss=True, alpha=0.5)),
    ("robust", True, 0.0, dict(label_smoothing=0.1, average_log_prob=True, chunk_size=2)),
    ("discopop", True, 0.0, dict(average_log_prob=True)),
)
for _kind, _mean, _nll, _options in _DPO:
    # expected: finding (second order)
    _add(
        f"liger_chunked_dpo_{_kind}",
        lambda x, w, target, bias, rx, rw, kind=_kind, options=_options: _CHUNKED["DPO"](
            ignore_index=-1, loss_type=kind, **options
        )(w, x, _labelled(target), bias, rx, rw)[0],
        lambda x, w, target, bias, rx, rw, kind=_kind, mean=_mean, nll=_nll: _dpo(
            x, w, _labelled(target), bias, rx, rw, kind=kind, mean=mean, nll=nll
        ),
        dict(**_PAIRS, rx=rg.tensor("2*B", "T", "H", grad=False), rw=_FROZEN_HEAD),
        sizes=_SIZES,
    )


def _orpo(x: Tensor, w: Tensor, target: Tensor, bias: Tensor) -> Tensor:
    logits = x @ w.t() + bias
    logp = _of_sequences(logits, target, True)
    chosen, rejected = (logp - torch.log1p(-logp.exp())).chunk(2)
    return (_likelihood(logits, target) - 0.1 * logsigmoid(chosen - rejected).mean()).float()


def _contrast(
    x: Tensor, w: Tensor, target: Tensor, bias: Tensor, *, beta: float, margin: float, mean: bool, nll: float
) -> Tensor:
    logits = x @ w.t() + bias
    chosen, rejected = _of_sequences(logits, target, mean).chunk(2)
    d = beta * (chosen - rejected) - margin
    loss = (-0.9 * logsigmoid(d) - 0.1 * logsigmoid(-d)).mean()
    return (loss + nll * _likelihood(logits, target) if nll else loss).float()


_PREFERENCES: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    "ORPO": (dict(beta=0.1), _orpo),
    "CPO": (dict(label_smoothing=0.1, alpha=0.7), partial(_contrast, beta=0.1, margin=0, mean=False, nll=0.7)),
    "SimPO": (
        dict(label_smoothing=0.1, beta=2.0, gamma=0.5, compute_nll_loss=False, chunk_size=2),
        partial(_contrast, beta=2.0, margin=0.5, mean=True, nll=0.0),
    ),
}
for _name, (_options, _formula) in _PREFERENCES.items():
    # expected: finding (second order)
    _add(
        f"liger_chunked_{_name.lower()}",
        lambda x, w, target, bias, name=_name, options=_options: _CHUNKED[name](ignore_index=-1, **options)(
            w, x, _labelled(target), bias
        )[0],
        lambda x, w, target, bias, formula=_formula: formula(x, w, _labelled(target), bias),
        _PAIRS,
        sizes=_SIZES,
    )


def _kto(
    x: Tensor, w: Tensor, target: Tensor, bias: Tensor, good: Tensor, rx: Tensor, rw: Tensor, kl: Tensor
) -> Tensor:
    ratio = _of_sequences(x @ w.t() + bias, target, False) - _of_sequences(rx @ rw.t(), target, False)
    return (1 - torch.sigmoid(0.1 * (ratio - kl) * torch.where(good, 1, -1))).mean().float()


_ROWS = rg.tensor("B", "T", "H")
_KTO = dict(
    x=_ROWS,
    w=_HEAD,
    target=rg.tensor("B", "T", dtype="int64", low=-1, high="V"),
    bias=_BIAS,
    good=rg.tensor("B", dtype="bool"),
    rx=rg.tensor("B", "T", "H", grad=False),
    rw=_FROZEN_HEAD,
)
for _name, _dim in (("", 1), ("_kl_of_each", "B")):
    # expected: finding (second order; _kl_of_each: kl of (batch_size,), as documented, is not cut into chunks: each
    # row is compared with the kl of all)
    _add(
        f"liger_chunked_kto{_name}",
        lambda x, w, target, bias, good, rx, rw, kl: _CHUNKED["KTO"](ignore_index=-1, use_ref_model=True)(
            x, w, target, bias, good, rx, rw, kl=kl
        )[0],
        _kto,
        _KTO | dict(kl=rg.tensor(_dim, grad=False, dtype="float32")),
        sizes=_SIZES,
    )

# Of a teacher.


def _jsd(x: Tensor, y: Tensor) -> Tensor:
    p, q = log_softmax(y), log_softmax(x)
    m = (0.3 * p.exp() + 0.7 * q.exp()).log()
    return (0.3 * p.exp() * (p - m) + 0.7 * q.exp() * (q - m)).sum(-1)


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    return 0.3 * (1 - (x * y).sum(-1) / (x.pow(2).sum(-1) * y.pow(2).sum(-1)).sqrt())


def _distilled(
    x: Tensor, w: Tensor, tx: Tensor, tw: Tensor, target: Tensor, bias: Tensor, *, soft: Callable[..., Tensor]
) -> Tensor:
    target = torch.cat([target[:1].clamp(min=0), target[1:]])
    logits, kept = x @ w.t() + bias, target != -1
    divergence = torch.where(kept, soft(logits / 2, tx @ tw.t() / 2), 0).sum() / kept.sum()
    return (0.2 * cross_entropy(logits, target)[0] + 0.8 * divergence).float()


def _liger_distilled(name: str, x: Tensor, w: Tensor, tx: Tensor, tw: Tensor, target: Tensor, bias: Tensor) -> Tensor:
    target = torch.cat([target[:1].clamp(min=0), target[1:]])
    options = dict(weight_hard_loss=0.2, weight_soft_loss=0.8, beta=0.3, temperature=2.0, chunk_size=8)
    return _CHUNKED[name](ignore_index=-1, **options)(x, w, tx, tw, target, bias)


for _name, _soft in (("JSD", _jsd), ("CosineSimilarity", _cosine)):
    # expected: finding (second order)
    _add(
        f"liger_chunked_{_name.lower()}_distillation",
        partial(_liger_distilled, _name),
        partial(_distilled, soft=_soft),
        dict(
            x=rg.tensor("M", "H"),
            w=_HEAD,
            tx=rg.tensor("M", "G", grad=False),
            tw=rg.tensor("V", "G", scale=0.3, grad=False),
            target=rg.tensor("M", dtype="int64", low=-1, high="V"),
            bias=_BIAS,
        ),
        sizes=dict(M=(1, 33), H=(1, 24), G=(1, 24), V=(2, 50)),
    )

# Of policies.


def _policy(
    logp: Tensor,
    mask: Tensor,
    advantage: Tensor,
    ref: Tensor,
    old: Tensor,
    *,
    kind: str = "dapo",
    sequence: bool = False,
    delta: float | None = None,
    beta: float = 0.04,
    high: float = 0.2,
    corrected: bool = False,
) -> Tensor:
    """GRPO and its kin, of logarithms of [B, T] steps."""
    mask, a, steps = mask.to(logp.dtype), advantage[:, None], mask.sum(-1).clamp(min=1)
    log_ratio = ((logp - old) * mask).sum(-1, keepdim=True) / steps[:, None] if sequence else logp - old
    ratio = log_ratio.exp()
    if kind == "sapo":
        heat = torch.where(a > 0, 1.0, 1.05)
        loss = -a * 4 / heat * torch.sigmoid(heat * (ratio - 1))
    elif kind == "cispo":
        loss = -ratio.clamp(max=high).detach() * a * logp
    else:
        most = ratio if delta is None else ratio.clamp(max=delta)
        loss = -torch.minimum(most * a, ratio.clamp(0.8, 1 + high) * a)
    divergence = (ref - logp).exp() - (ref - logp) - 1
    loss = mask * (loss + beta * divergence * (ratio if corrected else 1))
    if kind in ("sapo", "grpo"):
        return (loss.sum(-1) / steps).mean().float()
    return (loss.sum() / mask.sum().clamp(min=1)).float()


_LOGP = rg.tensor("B", "T", low=-5.0, high=-1.0, grad=False, dtype="float32")
_STEPS = dict(
    ids=rg.tensor("B", "T", dtype="int64", high="V"),
    mask=rg.tensor("B", "T", dtype="int64", low=0, high=2),
    advantage=rg.tensor("B", grad=False, dtype="float32"),
    ref=_LOGP,
    old=_LOGP,
)


def _chosen(logits: Tensor, ids: Tensor) -> Tensor:
    return log_softmax(logits).gather(-1, ids[..., None])[..., 0]


_POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dapo_delta": (dict(delta=1.5), dict(delta=1.5)),
    "sequence_corrected": (
        dict(loss_type="grpo", importance_sampling_level="sequence", use_bias_correction_kl=True, chunk_size=2),
        dict(kind="grpo", sequence=True, corrected=True),
    ),
    "sapo": (dict(loss_type="sapo", beta=0.0), dict(kind="sapo", beta=0.0)),
}
for _name, (_options, _formula) in _POLICIES.items():
    # expected: finding (second order)
    _add(
        f"liger_chunked_grpo_{_name}",
        lambda x, w, bias, ids, mask, advantage, ref, old, options=_options: _CHUNKED["GRPO"](
            temperature=0.9, **options
        )(x, w, ids, mask, advantage, bias, ref_per_token_logps=ref, old_per_token_logps=old)[0],
        lambda x, w, bias, ids, mask, advantage, ref, old, formula=_formula: _policy(
            _chosen((x @ w.t() + bias) / 0.9, ids), mask, advantage, ref, old, **formula
        ),
        dict(x=_ROWS, w=_HEAD, bias=_BIAS, **_STEPS),
        sizes=_SIZES,
    )
_KERNELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dapo_delta": (dict(delta=1.5), dict(delta=1.5, high=0.4)),
    "sequence_corrected": (
        dict(loss_type="grpo", importance_sampling_level="sequence", use_bias_correction_kl=True),
        dict(kind="grpo", sequence=True, corrected=True, high=0.4),
    ),
    "sapo": (dict(loss_type="sapo", beta=0.0), dict(kind="sapo", beta=0.0)),
    "cispo": (dict(loss_type="cispo", eps_high=5.0), dict(kind="cispo", high=5.0)),
}
_LOGITS = rg.tensor("B", "T+1", "V")


def _liger_policy(
    logits: Tensor, ids: Tensor, mask: Tensor, advantage: Tensor, ref: Tensor, old: Tensor, **options: Any
) -> Tensor:
    function = of("liger_kernel.transformers.grpo_loss", "triton_grpo_loss")
    return function(logits, old, ref, ids, advantage, mask, reduce=True, **options)[0]


for _name, (_options, _formula) in _KERNELS.items():
    # expected: finding (layouts: raises for logits, logarithms and masks with gaps, as documented; advantages with
    # gaps are misread)
    _add(
        f"liger_grpo_loss_{_name}",
        partial(_liger_policy, inplace=False, **_options),
        lambda logits, ids, mask, advantage, ref, old, formula=_formula: _policy(
            _chosen(logits[:, :-1] / 0.9, ids), mask, advantage, ref, old, **formula
        ),
        dict(logits=_LOGITS, **_STEPS),
        sizes=dict(B=(1, 3), T=(1, 12), V=[8, 50]),
        surrogate=_name == "cispo",
    )
# expected: finding (inplace by default: the backward writes the gradient over the caller's logits; and layouts)
_add(
    "liger_grpo_loss_in_place",
    partial(_liger_policy, loss_type="grpo"),
    lambda logits, ids, mask, advantage, ref, old: _policy(
        _chosen(logits[:, :-1] / 0.9, ids), mask, advantage, ref, old, kind="grpo", high=0.4
    ),
    dict(logits=_LOGITS, **_STEPS),
    sizes=dict(B=(1, 3), T=(1, 12), V=[8, 50]),
)
