"""Specs of torchmetrics.functional: pairwise distances, and metrics that serve as losses."""

from __future__ import annotations

import torch
import torchmetrics.functional as F
import torchmetrics.functional.audio as audio
import torchmetrics.functional.image as image
from describe import add, alone

from retrograd import tensor as t

PAIRS = dict(x=t("M", "N"), y=t("K", "N"))
SIZES = dict(M=(1, 30), K=(1, 30), N=(1, 50))
add("torchmetrics.functional.pairwise_euclidean_distance", F.pairwise_euclidean_distance,
    lambda x, y: (x[:, None] - y[None]).norm(dim=-1), PAIRS, sizes=SIZES)  # fmt: skip
add("torchmetrics.functional.pairwise_cosine_similarity", F.pairwise_cosine_similarity,
    lambda x, y: torch.nn.functional.cosine_similarity(x[:, None], y[None], -1), PAIRS, sizes=SIZES)  # fmt: skip
add(
    "torchmetrics.functional.pairwise_linear_similarity",
    F.pairwise_linear_similarity,
    lambda x, y: x @ y.mT,
    PAIRS,
    sizes=SIZES,
)
add("torchmetrics.functional.pairwise_manhattan_distance", F.pairwise_manhattan_distance,
    lambda x, y: (x[:, None] - y[None]).abs().sum(-1), PAIRS, sizes=SIZES)  # fmt: skip
add("torchmetrics.functional.pairwise_minkowski_distance", lambda x, y: F.pairwise_minkowski_distance(x, y, exponent=3),
    lambda x, y: ((x[:, None] - y[None]).abs() ** 3).sum(-1) ** (1 / 3), PAIRS, sizes=SIZES)  # fmt: skip

SERIES = dict(x=t("M", "N"), y=t("M", "N"))
EPS = torch.finfo(torch.float32).eps  # the library's depends on the dtype, which in float64 is another function
LONG = dict(M=(1, 20), N=(4, 60))
add("torchmetrics.functional.signal_noise_ratio", F.signal_noise_ratio,
    lambda x, y: 10 * ((y.square().sum(-1) + EPS) / ((y - x).square().sum(-1) + EPS)).log10(), SERIES, sizes=LONG)  # fmt: skip


def si_sdr(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    target = ((x * y).sum(-1, keepdim=True) + EPS) / (y.square().sum(-1, keepdim=True) + EPS) * y
    return 10 * ((target.square().sum(-1) + EPS) / ((target - x).square().sum(-1) + EPS)).log10()


add(
    "torchmetrics.functional.scale_invariant_signal_distortion_ratio",
    F.scale_invariant_signal_distortion_ratio,
    si_sdr,
    SERIES,
    sizes=LONG,
)
alone("torchmetrics.functional.signal_distortion_ratio",
      lambda x, y: audio.signal_distortion_ratio(x, y, filter_length=4), SERIES, sizes=dict(M=(1, 5), N=(20, 60)))  # fmt: skip
FLAT = dict(x=t("N"), y=t("N"))
add(
    "torchmetrics.functional.mean_squared_error",
    F.mean_squared_error,
    lambda x, y: (x - y).square().mean(),
    FLAT,
    sizes=dict(N=(1, 300)),
)
add(
    "torchmetrics.functional.log_cosh_error",
    F.log_cosh_error,
    lambda x, y: (x - y).cosh().log().mean(),
    FLAT,
    sizes=dict(N=(1, 300)),
)
for name in ("pearson_corrcoef", "concordance_corrcoef", "r2_score", "explained_variance", "relative_squared_error"):
    alone(f"torchmetrics.functional.{name}", getattr(F, name), FLAT, sizes=dict(N=(5, 300)))
alone("torchmetrics.functional.cosine_similarity", F.cosine_similarity, SERIES, sizes=LONG)
POSITIVE = dict(x=t("N", low=0.3, high=3.0), y=t("N", low=0.3, high=3.0))
for power in (0.0, 1.0, 1.5, 2.0):
    alone(f"torchmetrics.functional.tweedie_deviance_score.{power:g}", lambda x, y, p=power: F.tweedie_deviance_score(x, y, p), POSITIVE,
          sizes=dict(N=(1, 300)))  # fmt: skip
alone("torchmetrics.functional.mean_squared_log_error", F.mean_squared_log_error, POSITIVE, sizes=dict(N=(1, 300)))
alone(
    "torchmetrics.functional.kl_divergence",
    lambda x, y: F.kl_divergence(x.softmax(-1), y.softmax(-1)),
    SERIES,
    sizes=LONG,
)
IMAGES = dict(x=t(2, 3, 12, 12, low=0.1, high=0.9), y=t(2, 3, 12, 12, low=0.1, high=0.9))
for name, fn in (
    (
        "structural_similarity_index_measure",
        lambda x, y: image.structural_similarity_index_measure(x, y, sigma=0.8, data_range=1.0),
    ),
    ("universal_image_quality_index", lambda x, y: image.universal_image_quality_index(x, y, (5, 5), (1.0, 1.0))),
    ("peak_signal_noise_ratio", lambda x, y: image.peak_signal_noise_ratio(x, y, data_range=1.0)),
    ("spectral_angle_mapper", image.spectral_angle_mapper),
    ("error_relative_global_dimensionless_synthesis", image.error_relative_global_dimensionless_synthesis),
    ("total_variation", lambda x, y: image.total_variation(x + y)),
):
    alone(f"torchmetrics.functional.{name}", fn, IMAGES)
alone("torchmetrics.functional.image_gradients", image.image_gradients, dict(x=IMAGES["x"]))
