"""Forty causes of NaN and Inf written after those of nan_fresh.py were mended.

    python benchmarks/nan_unseen.py single             one process; ddp and fsdp: two gloo ranks, of which rank 1 errs

Operators, lines and words of the reason were written before any of them had run. Results: docs/trace.md.
"""

from __future__ import annotations

import math

import nan_fresh  # finds tests/trace
import torch
from nan_fresh import cause, nan_causes
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

nan_causes.CAUSES.clear()  # those of nan_fresh

# A person's own functions, modules and hooks.


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        (scale,) = ctx.saved_tensors
        return gradient / scale, None  #!


class Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p):
        ctx.mark_non_differentiable(p)
        return (p * p.log()).sum()  #!

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        return gradient


class RootMeanSquare(nn.Module):
    def forward(self, x):
        return x / x.pow(2).mean(-1, keepdim=True).sqrt()


@cause("div", "division by zero", within=Scaled.backward)
def own_backward_that_divides(h):
    return Scaled.apply(h, h.detach() * 0).sum()


@cause("log", r"log\(0\)", within=Entropy.forward)
def own_forward_with_a_logarithm(h):
    return Entropy.apply(h.detach() * 0) + h.sum()


@cause("div", "0/0")
def own_norm_of_zeros(h):
    norm = RootMeanSquare()
    norm.forward = lambda x: x / x.pow(2).mean(-1, keepdim=True).sqrt()  #!
    return norm(h * 0).sum()


@cause("reciprocal div", "reciprocal|division by zero")
def hook_that_inverts_the_gradients_norm(h):
    h.register_hook(lambda gradient: gradient * (1.0 / gradient.norm()))  #!
    return (h * 0).sum()


@cause("log", r"log\(0\)")
def logarithm_in_a_checkpoint(h):
    def body(x):
        return (x * 0).log()  #!

    return checkpoint(body, h, use_reentrant=False).sum()


# Attention and positions.


@cause("mul", "overflow.*65504")
def gated_unit_in_half(h):
    x = (h * 0 + 300).half()
    return (F.silu(x) * x).float().sum()  #!


@cause("mul", "overflow.*65504")
def scores_scaled_in_half(h):
    return ((h * 0 + 3).half() * 30000.0).float().softmax(-1).sum()  #!


@cause("reciprocal div", "reciprocal|division by zero")
def rotary_base_of_zero(h):
    frequencies = 1.0 / (0.0 ** (torch.arange(0, 8) / 8))  #!
    return (h * (frequencies * torch.arange(4)[:, None]).sin()).sum()


@cause("div", "quotient|overflow|1e-39")
def temperature_that_is_subnormal(h):
    return (h / 1e-39).softmax(-1).sum()  #!


@cause("div", "0/0|division by zero")
def learned_temperature_of_zero(h):
    temperature = nn.Parameter(torch.zeros(()))
    return F.cross_entropy(h @ h.T / temperature, torch.arange(4))  #!


@cause("mul", "0 times inf")
def scores_left_out_times_a_weight_of_zero(h):
    best = h.topk(2).indices
    kept = torch.full_like(h, -torch.inf).scatter(1, best, 1.0)
    return (kept * torch.zeros(8)).sum() + h.sum()  #!


@cause("log", r"log\(0\)")
def logarithm_of_masked_probabilities(h):
    p = h.masked_fill(torch.arange(8) < 4, -torch.inf).softmax(-1)
    return p.log().mean()  #!


@cause("_log_softmax sum mul neg nll_loss_forward mean", "mask|inf")
def smoothed_labels_over_masked_classes(h):
    scores = h.masked_fill(torch.arange(8) < 4, -torch.inf)
    return F.cross_entropy(scores, torch.full((4,), 6), label_smoothing=0.1)  #!


@cause("nll_loss_forward _log_softmax", "mask|inf")
def target_that_is_masked(h):
    return F.cross_entropy(h.masked_fill(torch.arange(8) < 4, -torch.inf), torch.tensor([6, 6, 2, 6]))  #!


@cause("binary_cross_entropy_with_logits", "inf")
def logits_that_are_masked(h):
    masked = h.masked_fill(torch.arange(8) < 4, -torch.inf)
    return F.binary_cross_entropy_with_logits(masked, torch.full((4, 8), 0.5))  #!


@cause("mean sum", "mask|inf")
def mean_over_masked_scores(h):
    return h.masked_fill(torch.arange(8) < 4, -torch.inf).mean()  #!


@cause("sub", "inf - inf")
def sentinel_minus_itself(h):
    x = h * 1
    x[:, 0] = torch.inf
    return (x - x.max(-1, keepdim=True).values).exp().sum()  #!


# Functions.


@cause("sqrt", "negative")
def distance_by_rounded_squares(h):
    x = h.detach() * 0 + 0.1
    return ((x * x).sum(1) - 0.09 + h.sum() * 0).sqrt().sum()  #!


@cause("exp", "exp overflows float32")
def width_of_a_box(h):
    return (4 * torch.exp(h * 0 + 90)).clamp(max=1000).sum()  #!


@cause("acos", "outside of -1 to 1")
def angle_between_rotations(h):
    return torch.acos((h * 0 + 3.00001 - 1) / 2).sum()  #!


@cause("acosh", "below 1")
def hyperbolic_distance(h):
    return torch.acosh(h * 0 + 0.999).sum()  #!


@cause("special_entr", "entr")
def entropy_of_a_negative_number(h):
    return torch.special.entr(h * 0 - 0.1).sum()  #!


@cause("special_ndtri", "ndtri")
def quantile_of_zero(h):
    return torch.special.ndtri(h * 0).sum()  #!


@cause("special_zeta", "zeta")
def zeta_of_one(h):
    return torch.special.zeta(h.detach() * 0 + 1, 1).sum() + h.sum()  #!


@cause("log", r"log\(0\)")
def tail_of_a_normal(h):
    return torch.special.ndtr(h * 0 - 40).log().sum()  #!


@cause("log1p", r"log1p\(-1\)")
def quantile_of_an_exponential(h):
    rate = h.exp()
    return torch.distributions.Exponential(rate, validate_args=False).icdf(torch.ones(4, 8)).sum()  #!


@cause("reciprocal", "reciprocal|0")
def complex_reciprocal_of_zero(h):
    return torch.complex(h * 0, h * 0).reciprocal().abs().sum()  #!


@cause("div", "0/0")
def correlation_of_a_constant(h):
    return torch.corrcoef(h * 0 + 1).sum()  #!


# Numbers that are too large.


@cause("cumprod", "overflow")
def running_product_that_overflows(h):
    return (h * 0 + 1e10).cumprod(-1).sum()  #!


@cause("mm", "overflow")
def product_that_overflows_float32(h):
    return ((h * 0 + 1e20) @ (h.T * 0 + 1e20)).sum()  #!


@cause("var", "overflow")
def variance_that_overflows(h):
    return (h * 1e30).var(-1).sum()  #!


@cause("linalg_vector_norm", "overflow")
def norm_that_overflows(h):
    return torch.linalg.vector_norm(h * 1e30)  #!


@cause("mse_loss", "overflow.*65504")
def squared_error_in_half(h):
    return F.mse_loss((h * 0 + 300).half(), torch.zeros(4, 8).half()).float()  #!


@cause("convolution conv2d mkldnn_convolution", "overflow.*65504")
def convolution_in_half(h):
    image = (h * 0 + 200).half()[None, None]  # [1, 1, 4, 8]
    return F.conv2d(image, torch.full((1, 1, 3, 3), 200.0).half()).float().sum()  #!


# Data and optimizers.


@cause("mean sub std var_mean", "no recorded operator made|already had")
def infinite_measurement_standardised(h):
    batch = torch.frombuffer(bytearray(b"\0\0\x80\x3f" * 31 + b"\0\0\x80\x7f"), dtype=torch.float32).reshape(4, 8)
    return (h * (batch - batch.mean()) / batch.std()).sum()  #!


@cause("div", "division by zero")
def sum_divided_by_whole_lengths(h):
    return ((h + 1e3).sum(1) / torch.tensor([3, 2, 0, 1])).sum()  #!


@cause(
    "div addcdiv _foreach_div _foreach_addcdiv", "0/0", optimizer=lambda p: torch.optim.Adamax(p, eps=0.0), zero=True
)
def adamax_without_eps(h):
    return (h * 0).sum()


@cause("div addcdiv _foreach_div _foreach_addcdiv", "0/0", optimizer=lambda p: torch.optim.NAdam(p, eps=0.0), zero=True)
def nadam_without_eps(h):
    return (h * 0).sum()


@cause(
    "add _foreach_add",
    "infinite|inf",
    optimizer=lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=math.inf),
    zero=True,
)
def infinite_weight_decay(h):
    return (h * 0).sum()


@cause("mul _foreach_mul", "infinite|inf", lr=math.inf, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
def infinite_learning_rate_of_adamw(h):
    return h.square().mean()


if __name__ == "__main__":
    assert len(nan_causes.CAUSES) == 40
    nan_fresh.main()
