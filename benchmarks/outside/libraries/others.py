"""Specs of small libraries: torchdiffeq, geotorch, pytorch-msssim, MONAI's losses, piq and timm."""

from __future__ import annotations

import copy

import geotorch
import monai.losses as monai
import piq
import pytorch_msssim
import timm.layers as timm
import timm.loss as timm_loss
import torch
import torchdiffeq
from describe import alone, module
from timm.layers import activations_me, grn

from retrograd import tensor as t


def decay(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return torchdiffeq.odeint(lambda _, y: torch.tanh(y @ a), x, torch.linspace(0, 1, 3, dtype=x.dtype), method="rk4")


def decay_adjoint(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    times = torch.linspace(0, 1, 3, dtype=x.dtype)
    return torchdiffeq.odeint_adjoint(lambda _, y: torch.tanh(y @ a), x, times, method="rk4", adjoint_params=(a,))


STATE = dict(x=t("N", 3), a=t(3, 3, scale=0.3))
alone("torchdiffeq.odeint.rk4", decay, STATE, sizes=dict(N=(1, 9)))
alone("torchdiffeq.odeint.midpoint",
      lambda x, a: torchdiffeq.odeint(lambda _, y: torch.tanh(y @ a), x, torch.linspace(0, 1, 3, dtype=x.dtype), method="midpoint"),
      STATE, sizes=dict(N=(1, 9)))  # fmt: skip
alone("torchdiffeq.odeint_adjoint.rk4", decay_adjoint, STATE, sizes=dict(N=(1, 9)))


def constrained(constrain, *shape):
    """The map from free numbers to the manifold."""
    layer = torch.nn.Module()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer.register_parameter("weight", torch.nn.Parameter(torch.randn(*shape)))
        constrain(layer, "weight")
    inner = layer.parametrizations.weight
    by_dtype = {torch.float32: inner}

    def call(x):
        if x.dtype not in by_dtype:
            by_dtype[x.dtype] = copy.deepcopy(inner).to(x.dtype)
        return by_dtype[x.dtype][0](x)

    return call


for name, constrain, shape in (
    ("skew", geotorch.skew, (4, 4)), ("symmetric", geotorch.symmetric, (4, 4)), ("sphere", geotorch.sphere, (6,)),
    ("orthogonal", geotorch.orthogonal, (4, 4)),
):  # fmt: skip
    alone(f"geotorch.{name}", constrained(constrain, *shape), dict(x=t(*shape)))

IMAGES = dict(x=t(2, 3, 24, 24, low=0.05, high=0.95), y=t(2, 3, 24, 24, low=0.05, high=0.95))
alone("pytorch_msssim.ssim", lambda x, y: pytorch_msssim.ssim(x, y, data_range=1.0, win_size=5), IMAGES)
for name, fn in (
    ("gmsd", piq.gmsd), ("total_variation", lambda x, y: piq.total_variation(x + y)),
    ("haarpsi", piq.haarpsi), ("mdsi", piq.mdsi), ("ssim", lambda x, y: piq.ssim(x, y, 5)),
    ("psnr", piq.psnr),
):  # fmt: skip
    alone(f"piq.{name}", fn, IMAGES)

LOGITS = dict(x=t(2, 3, 5, 4), y=t(2, 3, 5, 4, dtype="bool"))
for name, loss in (
    ("DiceLoss", monai.DiceLoss(sigmoid=True)), ("DiceLoss.squared", monai.DiceLoss(softmax=True, squared_pred=True)),
    ("DiceFocalLoss", monai.DiceFocalLoss(sigmoid=True)), ("TverskyLoss", monai.TverskyLoss(softmax=True)),
    ("GeneralizedDiceLoss", monai.GeneralizedDiceLoss(softmax=True)), ("FocalLoss", monai.FocalLoss(gamma=1.5)),
    ("FocalLoss.softmax", monai.FocalLoss(use_softmax=True)),
    ("AsymmetricUnifiedFocalLoss", lambda x, y: monai.AsymmetricUnifiedFocalLoss()(x[:, :2].sigmoid(), y[:, :2])),
):  # fmt: skip
    alone(f"monai.losses.{name}", lambda x, y, f=loss: f(x, y.to(x.dtype)), LOGITS)
VOLUMES = dict(x=t(2, 1, 8, 7, 6, low=0.0, high=1.0), y=t(2, 1, 8, 7, 6, low=0.0, high=1.0))
alone("monai.losses.LocalNormalizedCrossCorrelationLoss", monai.LocalNormalizedCrossCorrelationLoss(), VOLUMES)
alone("monai.losses.GlobalMutualInformationLoss", monai.GlobalMutualInformationLoss(num_bins=6), VOLUMES)
alone("monai.losses.BendingEnergyLoss", monai.BendingEnergyLoss(), dict(x=t(2, 3, 6, 6, 6)))
alone("monai.losses.BarlowTwinsLoss", monai.BarlowTwinsLoss(0.1), dict(x=t(6, 4), y=t(6, 4)))
alone("monai.losses.ContrastiveLoss", monai.ContrastiveLoss(), dict(x=t(6, 4), y=t(6, 4)))

CLASSES = dict(x=t("N", 6), y=t("N", dtype="int64", high=6))
MANY = dict(x=t("N", 6), y=t("N", 6, dtype="bool"))
alone(
    "timm.loss.AsymmetricLossMultiLabel",
    lambda x, y: timm_loss.AsymmetricLossMultiLabel()(x, y.to(x.dtype)),
    MANY,
    sizes=dict(N=(1, 60)),
)
alone(
    "timm.loss.AsymmetricLossSingleLabel",
    lambda x, y: timm_loss.AsymmetricLossSingleLabel()(x, y),
    CLASSES,
    sizes=dict(N=(1, 60)),
)
alone("timm.loss.LabelSmoothingCrossEntropy", timm_loss.LabelSmoothingCrossEntropy(), CLASSES, sizes=dict(N=(1, 60)))
alone("timm.loss.JsdCrossEntropy", timm_loss.JsdCrossEntropy(), dict(x=t(9, 6), y=t(9, dtype="int64", high=6)))
for name, make in dict(
    LayerNorm2d=lambda: timm.LayerNorm2d(6), RmsNorm2d=lambda: timm.RmsNorm2d(6), GroupNorm1=lambda: timm.GroupNorm1(6),
    SqueezeExcite=lambda: timm.SqueezeExcite(6, rd_channels=2), EcaModule=lambda: timm.EcaModule(6),
    GlobalResponseNorm=lambda: grn.GlobalResponseNorm(6, channels_last=False), BlurPool2d=lambda: timm.BlurPool2d(6),
    FilterResponseNormTlu2d=lambda: timm.FilterResponseNormTlu2d(6), EvoNorm2dS0=lambda: timm.EvoNorm2dS0(6, groups=2),
    SplitBatchNormAct2d=lambda: timm.BatchNormAct2d(6).eval(), GemPool=lambda: timm.SelectAdaptivePool2d(pool_type="avgmax", flatten=True),
).items():  # fmt: skip
    module(f"timm.layers.{name}", make, dict(x=t("B", 6, 6, 4)), sizes=dict(B=(1, 5)))
for name in ("HardSwishMe", "HardSigmoidMe", "MishMe", "HardMishMe", "SwishMe"):
    alone(f"timm.layers.{name}", getattr(activations_me, name)(), dict(x=t("M", "N")))
