"""Fifty-one healthy programs with zeros, infinities or NaN that do no harm: how many are accused?

    python benchmarks/nan_healthy.py [engine] [NAME ...]

Losses and layers at the edges of their domains, masks, searches, and each optimizer of torch with gradients that are zero
or missing. Each is run without a recording first: losses and parameters must be finite, else it is not healthy. Written
before `trace nan` had seen any. Results: benchmarks/results/nan-loops.md.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import nan_programs
import torch
from nan_programs import CAUSES, HEALTHY, STEPS, WIDTH, Job, batch, healthy, net
from torch import nn
from torch.nn import functional as F

CAUSES.clear()
HEALTHY.clear()
Loss = Callable[[torch.Tensor], torch.Tensor]


def steps(job: Job, loss_of: Loss, optimizer_of: Any = None, model: Any = None) -> None:
    """Three steps, of which losses and parameters stay finite."""
    model = net() if model is None else model
    optimizer = (optimizer_of or (lambda p: torch.optim.AdamW(p, 1e-3)))(model.parameters())
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss_of(model(batch(job, step)))
            value.backward()
            job.seen.append(value.detach())
            return value

        optimizer.step(closure)
        job.seen += [p.detach().clone() for p in model.parameters()]


class Watched(Job):
    """Keeps what must be finite."""

    seen: list[torch.Tensor] = []  # noqa: RUF012 (of the process)


def loss(function: Loss) -> Loss:
    def program(job: Any) -> None:
        steps(Watched(job.way, job.rank, job.errs), function)

    program.__name__, program.__doc__ = function.__name__, function.__doc__
    healthy()(program)
    return function


# ---- losses and layers at an edge that torch knows ----


@loss
def normalised_zeros(h):
    return F.normalize(h * 0, dim=-1).sum() + h.square().mean()


@loss
def norm_of_zeros(h):
    return (h * 0).norm(dim=-1).sum() + torch.linalg.vector_norm(h * 0) + h.square().mean()


@loss
def cosine_of_zeros(h):
    return F.cosine_similarity(h * 0, h, dim=-1).mean() + h.square().mean()


@loss
def distances_to_oneself(h):
    return torch.cdist(h, h).mean()


@loss
def triplets_of_equal_points(h):
    return F.triplet_margin_loss(h, h, h + 1)


@loss
def product_with_a_zero(h):
    x = torch.cat([h[:, :3], h[:, :1] * 0], -1)
    return x.prod(-1).sum() + x.cumprod(-1).sum()


@loss
def sinc_at_zero(h):
    return torch.sinc(h * 0).sum() + torch.sinc(h).mean()


@loss
def divergence_from_targets_with_zeros(h):
    aim = torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0, 0]).expand(4, 8)
    return F.kl_div(h.log_softmax(-1), aim, reduction="batchmean")


@loss
def sure_logits(h):
    aim = torch.tensor([[1.0, 0.0] * 4])
    return F.binary_cross_entropy_with_logits(h * 1000, aim.expand(4, 8)) + F.softplus(h * 1000).mean()


@loss
def sure_probabilities(h):
    """binary_cross_entropy bounds its logarithms at -100, and the sigmoid's derivative is 0."""
    return F.binary_cross_entropy((h * 1000).sigmoid(), torch.ones(4, 8)) + h.square().mean()


@loss
def entropy_of_forbidden_actions(h):
    policy = torch.distributions.Categorical(logits=h.masked_fill(torch.arange(8) < 3, -torch.inf))
    return -policy.entropy().mean()


@loss
def labels_of_which_some_are_ignored(h):
    return F.cross_entropy(h, torch.tensor([1, -100, 2, -100]), label_smoothing=0.1)


@loss
def huge_scores(h):
    return (h * 1e30).softmax(-1).square().sum() + h.square().mean()


@loss
def deviation_of_one_number(h):
    return h[:, :1].std(-1, correction=0).sum() + h.square().mean()


@loss
def gumbel_noise(h):
    torch.manual_seed(0)
    return F.gumbel_softmax(h, hard=True).square().sum() + h.square().mean()


@loss
def hyperbolic_tangent_that_is_saturated(h):
    return (torch.tanh(h * 1e4) ** 2).mean() + torch.log1p(h.square()).mean()


@loss
def square_root_of_a_sum_with_eps(h):
    return torch.sqrt((h * 0).square().sum(-1) + 1e-8).sum() + h.square().mean()


@loss
def division_that_is_bounded_before(h):
    count = torch.tensor([0.0, 1, 2, 0])
    return (h.sum(-1) / count.clamp(min=1)).mean()


# ---- what the program leaves out by itself ----


@loss
def mean_of_nothing_replaced(h):
    empty = h[:0].detach().mean()
    return h.square().mean() + torch.nan_to_num(empty)


@loss
def ratio_that_is_replaced(h):
    count = torch.tensor([0.0, 1, 2, 0])
    mean = torch.tensor([0.0, 2, 3, 0]) / count
    mean[mean.isnan()] = 0
    return (h.mean(-1) - mean).square().mean()


@loss
def logarithm_that_is_bounded(h):
    """-inf of a target without a gradient, bounded."""
    power = torch.tensor([0.0, 0.5, 1.0, 2.0])
    return (h.mean(-1) - power.log().clamp(min=-11.5)).square().mean()


@loss
def logarithms_of_targets_as_weights(h):
    """The logarithm of probabilities of which some are 0, and the softmax of it."""
    aim = torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0, 0]).log().softmax(-1)
    return -(aim * h.log_softmax(-1)).sum(-1).mean()


@loss
def missing_labels_by_a_mask(h):
    aim = torch.full((4, 8), torch.nan)
    aim[:2] = 1.0
    known = ~aim.isnan()
    return F.mse_loss(h[known], aim[known])


@loss
def missing_labels_by_where(h):
    aim = torch.full((4, 8), torch.nan)
    aim[:2] = 1.0
    return torch.where(aim.isnan(), 0.0, (h.detach() - aim).square()).sum() + h.square().mean()


@loss
def statistics_of_missing_numbers(h):
    seen = torch.where(torch.arange(8) < 6, h.detach(), torch.nan)
    spread = torch.nanquantile(seen, 0.5, -1) + seen.nansum(-1) + seen.nanmean(-1)
    return (h.mean(-1) - spread).square().mean()


@loss
def greatest_of_each_segment_taken_off(h):
    """Softmax over segments, of which one is empty."""
    index = torch.tensor([0, 0, 2, 2])
    scores = h[:, 0]
    top = torch.full((3,), -torch.inf).scatter_reduce(0, index, scores.detach(), "amax")
    p = (scores - top[index]).exp()
    return (p / torch.zeros(3).index_add(0, index, p)[index] * h[:, 1]).sum()


@loss
def pooling_with_a_border_of_infinity(h):
    x = F.pad(h[None, None], (1, 1, 1, 1), value=-torch.inf)
    return F.max_pool2d(x, 3, 1).square().mean()


@loss
def scores_of_a_sliding_window(h):
    far = (torch.arange(4)[:, None] - torch.arange(4)).abs() > 1
    bias = torch.zeros(4, 4).masked_fill_(far, float("-inf"))
    return ((h @ h.T + bias).softmax(-1) @ h).square().mean()


@loss
def slopes_added_to_a_mask(h):
    mask = torch.full((4, 4), -torch.inf).triu(1) + torch.arange(4)[None] * 0.5
    return F.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=mask[None]).square().mean()


@loss
def search_of_beams(h):
    with torch.no_grad():
        scores = torch.tensor([0.0, -torch.inf, -torch.inf])
        for row in h:
            total, at = (scores[:, None] + row.log_softmax(-1)).flatten().topk(3)
            scores = total.masked_fill(at % WIDTH == 0, -torch.inf)
        scores.max().item()
    return h.square().mean()


@loss
def sample_of_the_best(h):
    with torch.no_grad():
        kept = h / 0.7
        kept[kept < kept.topk(3).values[:, -1:]] = -float("inf")
        torch.multinomial(kept.softmax(-1), 1)
        (kept.softmax(-1) * kept.log_softmax(-1)).nansum(-1).mean().item()
    return h.square().mean()


@loss
def best_of_an_evaluation(h):
    best, worst = torch.tensor(-torch.inf), torch.tensor(torch.inf)
    with torch.no_grad():
        for row in h:
            best, worst = torch.max(best, row.mean()), torch.min(worst, row.mean())
    return h.square().mean() + 0 * (best - worst)


@loss
def interval_without_an_end(h):
    low, high = torch.tensor([-torch.inf, 0.0]), torch.tensor([0.0, torch.inf])
    return (torch.special.ndtr(high - h[:, :2]) - torch.special.ndtr(low - h[:, :2]) + 1e-6).log().mean().neg()


@loss
def quantities_that_are_bounded_by_infinity(h):
    return h.clamp(-torch.inf, torch.inf).clamp(min=torch.full((8,), -torch.inf)).square().mean()


# ---- optimizers of torch, with gradients that are zero or missing ----


class Half(nn.Module):
    """The second layer has no gradient, the first one of zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.zero, self.used, self.unused = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + 0 * self.zero(x)


def optimizer(name: str, **options: Any) -> None:
    def program(job: Any) -> None:
        make = getattr(torch.optim, name)
        steps(
            Watched(job.way, job.rank, job.errs),
            lambda h: h.square().mean(),
            lambda p: make(p, lr=1e-2, **options),
            Half(),
        )

    program.__name__ = "_".join(("optimizer", name, *options)).lower()
    healthy()(program)


for each in (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adamax",
    "ASGD",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Muon",
):
    optimizer(each)
for more in ({"amsgrad": True}, {"fused": True}, {"foreach": True}, {"fused": True, "amsgrad": True, "maximize": True}):
    optimizer("AdamW", **more)
optimizer("RMSprop", centered=True, momentum=0.9)
optimizer("LBFGS", line_search_fn="strong_wolfe")


def harmful() -> list[str]:
    """Programs whose losses or parameters are not finite."""
    rows = []
    for name, (program, _) in HEALTHY.items():
        Watched.seen.clear()
        program(Job())
        rows += [name] * (not Watched.seen or not all(t.isfinite().all() for t in Watched.seen))
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{len(HEALTHY)} programs, of which these do harm: {harmful()}")
    nan_programs.main(sys.argv[1:])
