"""Thirty causes of NaN and Inf and ten healthy steps, written after those of nan_unseen.py were mended.

    python benchmarks/nan_last.py single               one process; ddp and fsdp: two gloo ranks, of which rank 1 errs

Operators, lines and words of the reason were written before any of them had run, and are kept but for
F.batch_norm with eps=0, which torch refuses. Results: docs/trace.md.
"""

from __future__ import annotations

import json
import math
import sys

import nan_fresh  # finds tests/trace
import torch
from nan_fresh import cause, nan_causes
from torch import nn
from torch.nn import functional as F

from retrograd.trace import provenance, record

nan_causes.CAUSES.clear()  # those of nan_fresh


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clamp(min=0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y.pow(-0.5)  #!


# Losses.


@cause("pow", "0 to the power", within=Gate.backward)
def own_backward_with_a_power(h):
    return Gate.apply(h.detach() * 0 + h * 0).sum()


@cause("log10", r"log10\(0\)")
def signal_to_noise_of_silence(h):
    return -10 * torch.log10((h * 0).square().sum())  #!


@cause("div", "0/0")
def cosine_of_two_zero_vectors(h):
    a, b = h * 0, torch.zeros(4, 8)
    return ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).sum()  #!


@cause("div", "0/0|division by zero")
def inverse_frequency_of_a_class_that_is_missing(h):
    counts = torch.bincount(torch.tensor([0, 1, 1, 3]), minlength=8).float()
    weights = 1e3 * torch.ones(8) / counts  #!
    return F.cross_entropy(h, torch.tensor([0, 1, 1, 2]), weight=weights)


@cause("sqrt", "negative")
def variance_as_a_difference_of_moments(h):
    x = h * 0 + 1000.1
    return (x.square().mean(1) - x.mean(1).square() - 1).sqrt().sum()  #!


@cause("exp", "exp overflows float32")
def importance_ratio(h):
    new, old = h * 0, h.detach() * 0 - 100
    return torch.exp(new - old).mean()  #!


@cause("log", r"log\(0\)")
def likelihood_of_an_impossible_action(h):
    p = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0]) + h * 0
    return -p[torch.arange(4), torch.tensor([0, 0, 0, 3])].log().mean()  #!


@cause("div", "0/0")
def advantages_that_are_all_equal(h):
    advantage = torch.ones(4)
    return (h.sum(1) * (advantage - advantage.mean()) / advantage.std()).mean()  #!


@cause("div", "division by zero|0/0")
def contrast_without_negatives(h):
    mask = torch.eye(4)
    similarity = (h @ h.T).exp() * mask
    return (similarity.sum() / (similarity * (1 - mask)).sum()).log()  #!


@cause("nll_loss2d_forward nll_loss_forward", "ignored")
def picture_without_labels(h):
    return F.cross_entropy(h.reshape(1, 8, 2, 2), torch.full((1, 2, 2), 255), ignore_index=255)  #!


@cause("log", r"log\(0\)")
def zero_weight_on_an_infinite_term(h):
    term = (h.detach() * 0).log().neg()  #!
    return (0.0 * term).sum() + h.sum()


@cause("linalg_vector_norm", "overflow")
def regularisation_that_overflows(h):
    return (h * 1e25).norm()  #!


@cause("mul", "overflow")
def reward_scaled_by_a_huge_number(h):
    return ((h.detach() * 0 + 1e30) * 1e20 * h).sum()  #!


# Layers.


@cause("_safe_softmax _softmax softmax", "masked")
def scores_added_to_a_mask_of_a_whole_row(h):
    mask = torch.zeros(4, 4)
    mask[2] = -torch.inf
    return (h @ h.T + mask).softmax(-1).sum()  #!


@cause("reciprocal div", "reciprocal|division by zero")
def inverse_of_a_learned_scale(h):
    scale = nn.Parameter(torch.zeros(8))
    return (h * (1 / scale)).sum()  #!


@cause("rsqrt", r"rsqrt\(0\)")
def root_mean_square_norm_without_eps(h):
    return (h * torch.rsqrt((h * 0).square().mean(1, keepdim=True))).sum()  #!


@cause("native_layer_norm", "eps = 0")
def layer_norm_of_equal_numbers(h):
    return F.layer_norm(h * 0 + 2, (8,), eps=0.0).square().sum()  #!


@cause("div", "0/0")
def features_standardised_by_hand(h):
    x = h * 0 + 2
    return ((x - x.mean(0)) / x.std(0)).square().sum()  #!


@cause("_to_copy to", "overflow.*65504")
def logits_cast_to_half(h):
    return (h * 1e6).to(torch.float16).float().softmax(-1).sum()  #!


@cause("add", "overflow.*65504")
def residual_stream_in_half(h):
    x = (h * 0 + 40000).half()
    return (x + x).float().sum()  #!


@cause("mm addmm", "overflow.*65504")
def linear_in_half(h):
    return F.linear((h * 0 + 100).half(), torch.full((8, 8), 100.0).half()).float().sum()  #!


@cause("cosh sinh exp", "overflows float32")
def loss_by_log_cosh(h):
    return torch.log(torch.cosh(h * 0 + 100)).sum()  #!


@cause("exp2", "exp2 overflows")
def learned_exponent(h):
    return torch.exp2(h * 0 + 200).sum()  #!


@cause("atanh", "atanh")
def squashed_action_at_its_bound(h):
    return torch.atanh((h * 0 + 20).tanh()).sum()  #!


@cause("linalg_inv_ex _linalg_solve_ex div linalg_lu_solve linalg_solve_triangular", "singular|zero")
def triangular_system_with_a_zero(h):
    return torch.linalg.solve_triangular(torch.tril(h[:, :4] * 0), torch.ones(4, 1), upper=False).sum()  #!


@cause("polygamma digamma lgamma", "infinite")
def beta_function_at_zero(h):
    a = h * 0
    return (torch.lgamma(a) + torch.lgamma(a + 1)).sum()  #!


# Data, optimizers.


@cause("embedding index_select index", "no recorded operator made|already had")
def table_with_an_infinite_row(h):
    table = torch.frombuffer(bytearray(b"\0\0\x80\x7f" * 8 + b"\0\0\x80\x3f" * 72), dtype=torch.float32).reshape(10, 8)
    return (h * F.embedding(torch.tensor([0, 1, 2, 9]), table)).sum()  #!


@cause(
    "div _foreach_div addcdiv _foreach_addcdiv", "0/0", optimizer=lambda p: torch.optim.Adadelta(p, eps=0.0), zero=True
)
def adadelta_without_eps(h):
    return (h * 0).sum()


@cause("_foreach_add add", "infinite|inf", optimizer=lambda p: torch.optim.SGD(p, lr=0.01, foreach=True), lr=-math.inf)
def infinite_rate_of_a_schedule_downwards(h):
    return h.square().mean()


@cause("addcdiv _foreach_addcdiv", "0/0", optimizer=lambda p: torch.optim.AdamW(p, eps=0.0, foreach=True), zero=True)
def adamw_for_each_without_eps(h):
    return (h * 0).sum()


# Healthy: nothing may be found.


def _running_best(h):
    best = torch.full((4,), torch.inf)
    return torch.minimum(best, h.square().sum(1)).sum()


def _causal_mask_as_a_sum(h):
    return (h @ h.T + torch.full((4, 4), -torch.inf).triu(1)).softmax(-1).square().sum()


def _first_of_an_empty_maximum(h):
    highest = torch.tensor(-torch.inf)
    for row in h:
        highest = torch.maximum(highest, row.max())
    return highest


def _nanmean_of_missing(h):
    seen = torch.where(torch.arange(8) < 6, h, torch.nan)
    return torch.nanmean(seen)


def _masked_logsumexp(h):
    return h.masked_fill(torch.arange(8) < 3, -torch.inf).logsumexp(1).sum()


def _smallest_distance(h):
    d = torch.cdist(h, h) + torch.diag(torch.full((4,), torch.inf)).nan_to_num(0, posinf=torch.inf)
    return d.min(1).values.sum()


def _beam_scores(h):
    scores = torch.full((3, 8), -torch.inf)
    scores[0] = h[0]
    return scores.flatten().topk(4).values.sum()


def _top_k_filter(h):
    kept = h < h.topk(3).values[:, -1:]
    return h.masked_fill(kept, -torch.inf).softmax(-1).square().sum()


def _log_space_recursion(h):
    alpha = torch.full((8,), -torch.inf)
    alpha = torch.logaddexp(alpha, h[0])
    return torch.logaddexp(alpha, h[1]).sum()


def _attention_with_a_boolean_mask(h):
    x = h[None, None]
    return F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.bool).tril()).sum()


HEALTHY = (
    _running_best, _causal_mask_as_a_sum, _first_of_an_empty_maximum, _nanmean_of_missing, _masked_logsumexp,
    _smallest_distance, _beam_scores, _top_k_filter, _log_space_recursion, _attention_with_a_boolean_mask,
)  # fmt: skip


if __name__ == "__main__":
    assert len(nan_causes.CAUSES) == 30
    nan_fresh.main()
    accused = {}
    for make in HEALTHY:
        h = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
        with record(engine="python") as recorder:
            make(h).backward()
        found = provenance(recorder.trace)
        if found.found:
            accused[make.__name__] = f"{found.op.name} {found.op.place} {found.reason}"
    sys.stdout.write(json.dumps(accused, indent=1) + f"\n{len(HEALTHY) - len(accused)} of {len(HEALTHY)} healthy\n")
