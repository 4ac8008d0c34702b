"""Specs of entmax: sparse alternatives to softmax, and their losses."""

from __future__ import annotations

import entmax
import torch
from describe import add, alone

from retrograd import tensor as t


def sparsemax(x: torch.Tensor) -> torch.Tensor:
    """The projection onto the simplex, by sorting."""
    ordered = x.sort(-1, descending=True).values
    ranks = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    count = (1 + ranks * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
    threshold = (ordered.cumsum(-1).gather(-1, count - 1) - 1) / count
    return (x - threshold).clamp(min=0)


def entmax15(x: torch.Tensor) -> torch.Tensor:
    """1.5-entmax, by sorting."""
    ordered = (x / 2).sort(-1, descending=True).values
    ranks = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    mean, square = ordered.cumsum(-1) / ranks, (ordered**2).cumsum(-1) / ranks
    delta = ((1 - ranks * (square - mean**2)) / ranks).clamp(min=0)
    threshold = mean - delta.sqrt()
    count = (threshold <= ordered).sum(-1, keepdim=True)
    m, s = mean.gather(-1, count - 1), square.gather(-1, count - 1)
    return (x / 2 - (m - ((1 - count * (s - m**2)) / count).sqrt())).clamp(min=0) ** 2


ROWS = dict(x=t("M", "N"))
SIZES = dict(N=(1, 300))
LOSS = dict(x=t("M", 7), y=t("M", dtype="int64", high=7))


def fenchel(p: torch.Tensor, x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
    """The Fenchel-Young loss of a map and its entropy; the gradient of p does not count."""
    p = p.detach()
    entropy = (1 - (p**alpha).sum(-1)) / (alpha * (alpha - 1))
    return entropy + (p * x).sum(-1) - x.gather(-1, y[:, None])[:, 0]


add("entmax.sparsemax", lambda x: entmax.sparsemax(x, -1), sparsemax, ROWS, sizes=SIZES)
add("entmax.entmax15", lambda x: entmax.entmax15(x, -1), entmax15, ROWS, sizes=SIZES)
add("entmax.sparsemax.k", lambda x: entmax.sparsemax(x, -1, 5), sparsemax, ROWS, sizes=SIZES)
add("entmax.entmax15.k", lambda x: entmax.entmax15(x, -1, 5), entmax15, ROWS, sizes=SIZES)
add("entmax.sparsemax_bisect", lambda x: entmax.sparsemax_bisect(x), sparsemax, ROWS, sizes=SIZES)
add("entmax.entmax_bisect.15", lambda x: entmax.entmax_bisect(x, 1.5), entmax15, ROWS, sizes=SIZES)
alone("entmax.entmax_bisect.alpha", lambda x, a: entmax.entmax_bisect(x, a), dict(x=t("M", "N"), a=t("M", 1, low=1.3, high=1.8)),
      sizes=SIZES)  # fmt: skip
alone("entmax.normmax_bisect", lambda x: entmax.normmax_bisect(x, 2.0), ROWS, sizes=SIZES)
alone("entmax.budget_bisect", lambda x: entmax.budget_bisect(x, 2), ROWS, sizes=dict(N=(4, 300)))
add(
    "entmax.sparsemax_loss",
    lambda x, y: entmax.sparsemax_loss(x, y),
    lambda x, y: fenchel(sparsemax(x), x, y, 2.0),
    LOSS,
)
add("entmax.entmax15_loss", lambda x, y: entmax.entmax15_loss(x, y), lambda x, y: fenchel(entmax15(x), x, y, 1.5), LOSS)
add("entmax.entmax_bisect_loss", lambda x, y: entmax.entmax_bisect_loss(x, y, 1.5),
    lambda x, y: fenchel(entmax15(x), x, y, 1.5), LOSS)  # fmt: skip
add("entmax.sparsemax_bisect_loss", lambda x, y: entmax.sparsemax_bisect_loss(x, y),
    lambda x, y: fenchel(sparsemax(x), x, y, 2.0), LOSS)  # fmt: skip
