"""Specs of kornia: colours, filters, geometry, losses, morphology and responses of features."""

from __future__ import annotations

import kornia.color as color
import kornia.enhance as enhance
import kornia.feature as feature
import kornia.filters as filters
import kornia.geometry as geometry
import kornia.losses as losses
import kornia.morphology as morphology
import torch
from describe import add, alone

from retrograd import tensor as t

RGB = dict(x=t("B", 3, 6, 5, low=0.05, high=0.95))
FEW = dict(sizes=dict(B=(1, 4)))
for name in ("rgb_to_hsv", "rgb_to_lab", "rgb_to_luv", "rgb_to_xyz", "rgb_to_hls", "rgb_to_linear_rgb",
             "linear_rgb_to_rgb", "rgb_to_ycbcr", "sepia", "hsv_to_rgb", "hls_to_rgb", "rgb_to_grayscale"):  # fmt: skip
    alone(f"kornia.color.{name}", getattr(color, name), RGB, **FEW)
alone("kornia.color.lab_to_rgb", lambda x: color.lab_to_rgb(x * torch.tensor([60.0, 30.0, 30.0], dtype=x.dtype).view(3, 1, 1) + 20),
      RGB, **FEW)  # fmt: skip
alone("kornia.color.luv_to_rgb", lambda x: color.luv_to_rgb(x * torch.tensor([60.0, 30.0, 30.0], dtype=x.dtype).view(3, 1, 1) + 20),
      RGB, **FEW)  # fmt: skip

PLAIN = dict(x=t("B", 2, 9, 8))
for name, fn in (
    ("gaussian_blur2d", lambda x: filters.gaussian_blur2d(x, (3, 5), (0.8, 1.2))),
    ("box_blur", lambda x: filters.box_blur(x, (3, 5))),
    ("median_blur", lambda x: filters.median_blur(x, (3, 3))),
    ("sobel", filters.sobel),
    ("spatial_gradient", filters.spatial_gradient),
    ("spatial_gradient.second", lambda x: filters.spatial_gradient(x, "diff", 2)),
    ("laplacian", lambda x: filters.laplacian(x, 3)),
    ("bilateral_blur", lambda x: filters.bilateral_blur(x, 3, 0.4, (1.0, 1.0))),
    ("unsharp_mask", lambda x: filters.unsharp_mask(x, (3, 3), (1.0, 1.0))),
    ("motion_blur", lambda x: filters.motion_blur(x, 3, 30.0, 0.5)),
    ("guided_blur", lambda x: filters.guided_blur(x, x, 3, 0.1)),
    ("blur_pool2d", lambda x: filters.blur_pool2d(x, 3)),
    ("max_blur_pool2d", lambda x: filters.max_blur_pool2d(x, 3)),
):
    alone(f"kornia.filters.{name}", fn, PLAIN, **FEW)
alone("kornia.filters.gaussian_blur2d.sigma", lambda x, s: filters.gaussian_blur2d(x, 5, s),
      dict(x=t(2, 2, 9, 8), s=t(2, 2, low=0.6, high=2.0)))  # fmt: skip
alone("kornia.filters.joint_bilateral_blur", lambda x, g: filters.joint_bilateral_blur(x, g, 3, 0.4, (1.0, 1.0)),
      dict(x=t(2, 2, 7, 6), g=t(2, 2, 7, 6)))  # fmt: skip

IMAGE = t(2, 2, 7, 6)
NEAR = torch.eye(3)[None].repeat(2, 1, 1)
for name, fn, inputs in (
    ("warp_affine", lambda x, d: geometry.warp_affine(x, NEAR[:, :2].to(x) + d, (6, 5)), dict(x=IMAGE, d=t(2, 2, 3, low=-0.2, high=0.2))),
    ("warp_perspective", lambda x, d: geometry.warp_perspective(x, NEAR.to(x) + d, (6, 5)),
     dict(x=IMAGE, d=t(2, 3, 3, low=-0.02, high=0.02))),
    ("rotate", lambda x, a: geometry.rotate(x, a), dict(x=IMAGE, a=t(2, low=5.0, high=40.0))),
    ("translate", lambda x, d: geometry.translate(x, d), dict(x=IMAGE, d=t(2, 2, low=0.1, high=0.9))),
    ("scale", lambda x, s: geometry.scale(x, s), dict(x=IMAGE, s=t(2, 2, low=0.6, high=1.4))),
    ("shear", lambda x, s: geometry.shear(x, s), dict(x=IMAGE, s=t(2, 2, low=0.1, high=0.4))),
    ("resize", lambda x: geometry.resize(x, (5, 9)), dict(x=IMAGE)),
    ("resize.bicubic", lambda x: geometry.resize(x, (5, 9), "bicubic", antialias=True), dict(x=IMAGE)),
    ("pyrdown", geometry.pyrdown, dict(x=IMAGE)),
    ("homography_warp", lambda x, d: geometry.homography_warp(x, NEAR.to(x) + d, (6, 5)),
     dict(x=IMAGE, d=t(2, 3, 3, low=-0.05, high=0.05))),
    ("remap", lambda x, u, v: geometry.remap(x, u, v, align_corners=True),
     dict(x=IMAGE, u=t(2, 4, 5, low=0.2, high=4.8), v=t(2, 4, 5, low=0.2, high=5.8))),
    ("elastic_transform2d", lambda x, d: geometry.elastic_transform2d(x, d, (5, 5), (2.0, 2.0), (0.3, 0.3)),
     dict(x=IMAGE, d=t(2, 2, 7, 6, low=-1.0, high=1.0))),
    ("get_perspective_transform", lambda d: geometry.get_perspective_transform(
        torch.tensor([[[0.0, 0], [1, 0], [1, 1], [0, 1]]], dtype=d.dtype).repeat(2, 1, 1),
        torch.tensor([[[0.0, 0], [1, 0], [1, 1], [0, 1]]], dtype=d.dtype) * 3 + d), dict(d=t(2, 4, 2, low=-0.3, high=0.3))),
    ("spatial_softmax2d", geometry.subpix.spatial_softmax2d, dict(x=IMAGE)),
    ("spatial_soft_argmax2d", lambda x: geometry.subpix.spatial_soft_argmax2d(x, 0.7), dict(x=IMAGE)),
    ("spatial_expectation2d", geometry.subpix.spatial_expectation2d, dict(x=t(2, 2, 7, 6, low=0.1, high=1.0))),
    ("conv_soft_argmax2d", lambda x: geometry.subpix.conv_soft_argmax2d(x, output_value=True), dict(x=IMAGE)),
    ("render_gaussian2d", lambda m, s: geometry.subpix.render_gaussian2d(m, s, (7, 6)),
     dict(m=t("N", 2, low=-0.8, high=0.8), s=t("N", 2, low=0.3, high=1.0))),
    ("axis_angle_to_rotation_matrix", geometry.axis_angle_to_rotation_matrix, dict(x=t("N", 3))),
    ("axis_angle_to_quaternion", geometry.axis_angle_to_quaternion, dict(x=t("N", 3))),
    ("quaternion_to_rotation_matrix", geometry.quaternion_to_rotation_matrix, dict(x=t("N", 4))),
    ("quaternion_to_axis_angle", geometry.quaternion_to_axis_angle, dict(x=t("N", 4))),
    ("quaternion_log_to_exp", geometry.quaternion_log_to_exp, dict(x=t("N", 3))),
    ("quaternion_exp_to_log", lambda x: geometry.quaternion_exp_to_log(geometry.normalize_quaternion(x)), dict(x=t("N", 4))),
    ("rotation_matrix_to_quaternion", lambda x: geometry.rotation_matrix_to_quaternion(
        geometry.quaternion_to_rotation_matrix(x)), dict(x=t("N", 4))),
    ("cart2pol", geometry.cart2pol, dict(x=t("N"), y=t("N"))),
    ("convert_points_from_homogeneous", geometry.convert_points_from_homogeneous, dict(x=t("N", 3, low=0.5, high=3.0))),
    ("project_points", lambda x, f: geometry.project_points(
        x, torch.diag_embed(torch.cat([f, torch.ones_like(f[:, :1])], -1))), dict(x=t("N", 3, low=0.5, high=3.0), f=t("N", 2))),
    ("transform_points", lambda m, x: geometry.transform_points(torch.eye(3, dtype=m.dtype) + m, x),
     dict(m=t("B", 3, 3, low=-0.1, high=0.1), x=t("B", 5, 2))),
    ("sampson_epipolar_distance", geometry.epipolar.sampson_epipolar_distance, dict(x=t("B", 5, 2), y=t("B", 5, 2), f=t("B", 3, 3))),
    ("symmetrical_epipolar_distance", geometry.epipolar.symmetrical_epipolar_distance,
     dict(x=t("B", 5, 2), y=t("B", 5, 2), f=t("B", 3, 3))),
    ("normalize_points", geometry.epipolar.normalize_points, dict(x=t("B", 5, 2))),
    ("point_line_distance", geometry.linalg.point_line_distance, dict(x=t("B", 2), l=t("B", 3))),
    ("euclidean_distance", geometry.linalg.euclidean_distance, dict(x=t("B", 3), y=t("B", 3))),
    ("inverse_transformation", lambda x: geometry.inverse_transformation(torch.eye(4, dtype=x.dtype) + x),
     dict(x=t("B", 4, 4, low=-0.1, high=0.1))),
):  # fmt: skip
    alone(
        f"kornia.geometry.{name}",
        fn,
        inputs,
        sizes={k: (1, 40) for k in ("B", "N") if any(k in v.dims for v in inputs.values())},
    )

BOTH = dict(x=t("B", 3, 5, 4), y=t("B", 3, 5, 4))
LABELS = dict(x=t("B", 3, 5, 4), y=t("B", 5, 4, dtype="int64", high=3))
BINARY = dict(x=t("B", 1, 5, 4), y=t("B", 5, 4, dtype="int64", high=2))
HEAT = dict(x=t("B", 2, 5, 4, low=0.05, high=1.0), y=t("B", 2, 5, 4, low=0.05, high=1.0))
for name, fn, plain in (
    ("charbonnier_loss", losses.charbonnier_loss, lambda x, y: ((x - y) ** 2 + 1).sqrt() - 1),
    ("cauchy_loss", losses.cauchy_loss, lambda x, y: torch.log1p((x - y) ** 2 / 2)),
    ("geman_mcclure_loss", losses.geman_mcclure_loss, lambda x, y: 2 * (x - y) ** 2 / ((x - y) ** 2 + 4)),
    ("welsch_loss", losses.welsch_loss, lambda x, y: -torch.expm1(-((x - y) ** 2) / 2)),
    ("psnr_loss", lambda x, y: losses.psnr_loss(x, y, 1.0), lambda x, y: 10 * ((x - y) ** 2).mean().log10()),
    ("total_variation", lambda x, y: losses.total_variation(x + y),
     lambda x, y: (x + y).diff(dim=-1).abs().sum((2, 3)) + (x + y).diff(dim=-2).abs().sum((2, 3))),
):  # fmt: skip
    add(f"kornia.losses.{name}", fn, plain, BOTH, **FEW)
for name, fn, inputs in (
    ("ssim_loss", lambda x, y: losses.ssim_loss(x, y, 3), BOTH),
    ("dice_loss", losses.dice_loss, LABELS),
    ("dice_loss.macro", lambda x, y: losses.dice_loss(x, y, "macro"), LABELS),
    ("tversky_loss", lambda x, y: losses.tversky_loss(x, y, 0.3, 0.7), LABELS),
    ("focal_loss", lambda x, y: losses.focal_loss(x, y, 0.4), LABELS),
    ("lovasz_hinge_loss", losses.lovasz_hinge_loss, BINARY),
    ("lovasz_softmax_loss", losses.lovasz_softmax_loss, LABELS),
    ("binary_focal_loss_with_logits", lambda x, y: losses.binary_focal_loss_with_logits(x, (y > 0).to(x.dtype)), BOTH),
    ("js_div_loss_2d", losses.js_div_loss_2d, HEAT),
    ("kl_div_loss_2d", losses.kl_div_loss_2d, HEAT),
    ("inverse_depth_smoothness_loss", lambda x, y: losses.inverse_depth_smoothness_loss(x[:, :1], y), BOTH),
):
    alone(f"kornia.losses.{name}", fn, inputs, **FEW)

GRAY = dict(x=t(2, 2, 7, 6), k=t(3, 3, low=0.0, high=0.5))
for name in ("dilation", "erosion", "opening", "closing", "gradient", "top_hat"):
    alone(f"kornia.morphology.{name}",
          lambda x, k, name=name: getattr(morphology, name)(x, torch.ones_like(k), structuring_element=k), GRAY)  # fmt: skip

for name, fn in (
    ("adjust_gamma", lambda x: enhance.adjust_gamma(x, 1.4)),
    ("adjust_hue", lambda x: enhance.adjust_hue(x, 0.2)),
    ("adjust_saturation", lambda x: enhance.adjust_saturation(x, 0.8)),
    ("adjust_sigmoid", enhance.adjust_sigmoid),
    ("adjust_log", enhance.adjust_log),
    ("sharpness", lambda x: enhance.sharpness(x, 0.5)),
    ("normalize_min_max", enhance.normalize_min_max),
    ("integral_image", enhance.integral_image),
    ("shift_rgb", lambda x: enhance.shift_rgb(x, *torch.full((3, 1), 0.02, dtype=x.dtype))),
    ("posterize", lambda x: enhance.posterize(x, 3)),
    ("solarize", lambda x: enhance.solarize(x, 0.6)),
    ("jpeg_codec_differentiable", lambda x: enhance.jpeg_codec_differentiable(x, torch.tensor([50.0], dtype=x.dtype))),
):
    alone(f"kornia.enhance.{name}", fn, RGB, **FEW)
alone("kornia.enhance.histogram",
      lambda x, b: enhance.histogram(x, torch.linspace(0, 1, 8, dtype=x.dtype), b),
      dict(x=t(2, 30, low=0.0, high=1.0), b=t(low=0.05, high=0.2)))  # fmt: skip
alone("kornia.enhance.zca_whiten", enhance.zca_whiten, dict(x=t(12, 4)))
for name in ("harris_response", "gftt_response", "hessian_response"):
    alone(f"kornia.feature.{name}", getattr(feature, name), dict(x=t("B", 1, 7, 6)), **FEW)
