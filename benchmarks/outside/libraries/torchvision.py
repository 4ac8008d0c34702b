"""Specs of torchvision: ops, losses and differentiable transforms."""

from __future__ import annotations

import torch
import torchvision.ops as ops
import torchvision.transforms.v2.functional as transforms
from describe import add, alone, module
from torch.nn import functional as F

from retrograd import tensor as t

SMALL = dict(N=(1, 40), M=(1, 40))


def corners(xy: torch.Tensor, wh: torch.Tensor) -> torch.Tensor:
    return torch.cat([xy, xy + wh], -1)


def boxes(*names: str) -> dict[str, object]:
    """Places and sizes of boxes, from which `corners` makes valid ones."""
    out = {}
    for name in names:
        out |= {f"xy{name}": t(name, 2, low=0.0, high=8.0), f"wh{name}": t(name, 2, low=0.5, high=6.0)}
    return out


def iou(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """IoU, union and the enclosing box's sides of pairs that broadcast."""
    overlap = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - overlap
    hull = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    return overlap / union, union, hull


def giou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    ratio, union, hull = iou(a, b)
    return ratio - (hull.prod(-1) - union) / hull.prod(-1)


def pairs(fn):
    return lambda xyN, whN, xyM, whM: fn(corners(xyN, whN), corners(xyM, whM))


def own_pairs(fn):
    return lambda xyN, whN, xyM, whM: fn(corners(xyN, whN)[:, None], corners(xyM, whM)[None])


add("torchvision.ops.box_iou", pairs(ops.box_iou), own_pairs(lambda a, b: iou(a, b)[0]), boxes("N", "M"), sizes=SMALL)
add(
    "torchvision.ops.generalized_box_iou", pairs(ops.generalized_box_iou), own_pairs(giou), boxes("N", "M"), sizes=SMALL
)
alone("torchvision.ops.distance_box_iou", pairs(ops.distance_box_iou), boxes("N", "M"), sizes=SMALL)
alone("torchvision.ops.complete_box_iou", pairs(ops.complete_box_iou), boxes("N", "M"), sizes=SMALL)
add(
    "torchvision.ops.box_area",
    lambda xyN, whN: ops.box_area(corners(xyN, whN)),
    lambda xyN, whN: whN.prod(-1),
    boxes("N"),
)
alone(
    "torchvision.ops.clip_boxes_to_image",
    lambda x: ops.clip_boxes_to_image(x, (4, 5)),
    dict(x=t("N", 4, low=-2.0, high=8.0)),
)
add("torchvision.ops.box_convert", lambda x: ops.box_convert(x, "cxcywh", "xyxy"),
    lambda x: torch.cat([x[:, :2] - x[:, 2:] / 2, x[:, :2] + x[:, 2:] / 2], 1), dict(x=t("N", 4)))  # fmt: skip

PAIRED = dict(xyN=t("N", 2, low=0.0, high=8.0), whN=t("N", 2, low=0.5, high=6.0),
              xyM=t("N", 2, low=0.0, high=8.0), whM=t("N", 2, low=0.5, high=6.0))  # fmt: skip
for reduction in ("none", "sum", "mean"):
    add(f"torchvision.ops.generalized_box_iou_loss.{reduction}",
        pairs(lambda a, b, r=reduction: ops.generalized_box_iou_loss(a, b, reduction=r)),
        pairs(lambda a, b, r=reduction: getattr(1 - giou(a, b), r)() if r != "none" else 1 - giou(a, b)),
        PAIRED, sizes=dict(N=(1, 300)))  # fmt: skip
alone("torchvision.ops.distance_box_iou_loss", pairs(ops.distance_box_iou_loss), PAIRED, sizes=dict(N=(1, 300)))
alone("torchvision.ops.complete_box_iou_loss", pairs(ops.complete_box_iou_loss), PAIRED, sizes=dict(N=(1, 300)))


def focal(x: torch.Tensor, target: torch.Tensor, alpha: float, gamma: float) -> torch.Tensor:
    sign = 2 * target - 1
    share = alpha * target + (1 - alpha) * (1 - target)
    return share * torch.sigmoid(-sign * x) ** gamma * -F.logsigmoid(sign * x)


add("torchvision.ops.sigmoid_focal_loss", lambda x, y, alpha, gamma: ops.sigmoid_focal_loss(x, y.to(x.dtype), alpha, gamma),
    lambda x, y, alpha, gamma: focal(x, y.to(x.dtype), alpha, gamma),
    dict(x=t("M", "N"), y=t("M", "N", dtype="bool")), params=dict(alpha=[0.25, 0.75], gamma=[2.0, 1.0]))  # fmt: skip

# Boxes within the image; places of samples are where the kinks lie, and depend on the boxes alone, which have no gradient.
REGIONS = torch.tensor([[0.0, 1.2, 0.7, 6.1, 5.3], [1.0, 0.3, 2.1, 4.4, 7.6], [0.0, 3.1, 3.3, 7.2, 6.4]])
IMAGE = dict(x=t(2, "C", 9, 8))
for name, fn, inputs in (
    ("roi_align", lambda x, **k: ops.roi_align(x, REGIONS.to(x.dtype), (3, 2), 0.9, 2, **k), IMAGE),
    ("roi_pool", lambda x: ops.roi_pool(x, REGIONS.to(x.dtype), (3, 2), 0.9), IMAGE),
    ("ps_roi_align", lambda x: ops.ps_roi_align(x, REGIONS.to(x.dtype), (3, 2), 0.9, 2), dict(x=t(2, 12, 9, 8))),
    ("ps_roi_pool", lambda x: ops.ps_roi_pool(x, REGIONS.to(x.dtype), (3, 2), 0.9), dict(x=t(2, 12, 9, 8))),
):
    options = dict(params=dict(aligned=[False, True])) if name == "roi_align" else {}
    alone(f"torchvision.ops.{name}", fn, inputs, **options)

DEFORM = dict(x=t("B", 4, 7, 6), offset=t("B", 18, 7, 6, low=-1.5, high=1.5), w=t(6, 4, 3, 3), b=t(6))
alone("torchvision.ops.deform_conv2d", lambda x, offset, w, b: ops.deform_conv2d(x, offset, w, b, padding=1), DEFORM,
      sizes=dict(B=(1, 3)))  # fmt: skip
alone("torchvision.ops.deform_conv2d.mask",
      lambda x, offset, mask, w: ops.deform_conv2d(x, offset, w, padding=1, mask=mask),
      dict(x=DEFORM["x"], offset=DEFORM["offset"], mask=t("B", 9, 7, 6, low=0.0, high=1.0), w=DEFORM["w"]),
      sizes=dict(B=(1, 3)))  # fmt: skip
alone("torchvision.ops.deform_conv2d.any_offset",
      lambda x, offset, w, b: ops.deform_conv2d(x, offset, w, b, padding=1),
      {**DEFORM, "offset": t("B", 18, 7, 6)}, sizes=dict(B=(1, 3)))  # fmt: skip
alone("torchvision.ops.deform_conv2d.groups",
      lambda x, offset, w: ops.deform_conv2d(x, offset, w, stride=2, padding=1, dilation=2),
      dict(x=t(2, 4, 9, 8), offset=t(2, 36, 4, 3, low=-1.5, high=1.5), w=t(6, 2, 3, 3)))  # fmt: skip

module("torchvision.ops.FrozenBatchNorm2d", lambda: ops.FrozenBatchNorm2d(5), dict(x=t("B", 5, 4, 3)))
module(
    "torchvision.ops.SqueezeExcitation",
    lambda: ops.SqueezeExcitation(6, 3),
    dict(x=t("B", 6, 4, 3)),
    sizes=dict(B=(1, 9)),
)
module("torchvision.ops.MLP", lambda: ops.MLP(6, [5, 4], norm_layer=torch.nn.LayerNorm), dict(x=t("M", 6)))
module("torchvision.ops.Conv2dNormActivation", lambda: ops.Conv2dNormActivation(3, 4, activation_layer=torch.nn.SiLU).eval(),
       dict(x=t("B", 3, 6, 5)), sizes=dict(B=(1, 5)))  # fmt: skip

PICTURE = dict(x=t("B", 3, 9, 8, low=0.05, high=0.95))
FEW = dict(sizes=dict(B=(1, 4)))
for name, fn in (
    ("rgb_to_grayscale", transforms.rgb_to_grayscale),
    ("adjust_brightness", lambda x: transforms.adjust_brightness(x, 0.7)),
    ("adjust_contrast", lambda x: transforms.adjust_contrast(x, 0.7)),
    ("adjust_saturation", lambda x: transforms.adjust_saturation(x, 0.7)),
    ("adjust_hue", lambda x: transforms.adjust_hue(x, 0.1)),
    ("adjust_gamma", lambda x: transforms.adjust_gamma(x, 1.7)),
    ("adjust_sharpness", lambda x: transforms.adjust_sharpness(x, 0.5)),
    ("gaussian_blur", lambda x: transforms.gaussian_blur(x, [3, 5], [0.7, 1.1])),
    ("normalize", lambda x: transforms.normalize(x, [0.4, 0.5, 0.6], [0.2, 0.3, 0.4])),
    ("resize.antialias", lambda x: transforms.resize(x, [5, 6], antialias=True)),
    ("rotate", lambda x: transforms.rotate(x, 23.0, transforms.InterpolationMode.BILINEAR)),
    ("perspective", lambda x: transforms.perspective(
        x, [[0, 0], [7, 0], [7, 8], [0, 8]], [[1, 0], [7, 1], [6, 8], [0, 7]],
        transforms.InterpolationMode.BILINEAR)),
    ("solarize", lambda x: transforms.solarize(x, 0.5)),
    ("erase", lambda x: transforms.erase(x, 1, 2, 3, 4, torch.zeros(3, 3, 4, dtype=x.dtype))),
):  # fmt: skip
    alone(f"torchvision.transforms.{name}", fn, PICTURE, **FEW)
alone("torchvision.transforms.elastic",
      lambda x, d: transforms.elastic(x, d, transforms.InterpolationMode.BILINEAR),
      dict(x=PICTURE["x"], d=t(1, 9, 8, 2, low=-0.1, high=0.1)), **FEW)  # fmt: skip
