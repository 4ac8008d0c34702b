"""Specs of e3nn: spherical harmonics, rotations, tensor products, radial bases and equivariant layers."""

from __future__ import annotations

import e3nn.nn as nn
import torch
from describe import add, alone, module
from e3nn import math, o3

from retrograd import tensor as t

VECTORS = dict(x=t("N", 3))
SIZES = dict(N=(1, 60))
for degree in (0, 1, 2, 3, 5):
    for normalize in (False, True):
        word = "unit" if normalize else "solid"
        alone(f"e3nn.o3.spherical_harmonics.{degree}.{word}",
              lambda x, degree=degree, normalize=normalize: o3.spherical_harmonics(degree, x, normalize), VECTORS, sizes=SIZES)  # fmt: skip
add("e3nn.o3.spherical_harmonics.first", lambda x: o3.spherical_harmonics(1, x, False, "norm"), lambda x: x, VECTORS, sizes=SIZES,
    algorithm_error=2.0)  # the library multiplies by sqrt(3) and divides by it  # fmt: skip
ANGLES = dict(a=t("N"), b=t("N"), c=t("N"))
for degree in (1, 2, 3):
    alone(
        f"e3nn.o3.wigner_D.{degree}", lambda a, b, c, degree=degree: o3.wigner_D(degree, a, b, c), ANGLES, sizes=SIZES
    )
alone("e3nn.o3.angles_to_matrix", o3.angles_to_matrix, ANGLES, sizes=SIZES)
alone("e3nn.o3.matrix_to_angles", lambda a, b, c: o3.matrix_to_angles(o3.angles_to_matrix(a, b, c)),
      dict(a=t("N"), b=t("N", low=0.4, high=2.7), c=t("N")), sizes=SIZES)  # fmt: skip
alone("e3nn.o3.xyz_to_angles", o3.xyz_to_angles, VECTORS, sizes=SIZES)
alone("e3nn.o3.angles_to_xyz", o3.angles_to_xyz, dict(a=t("N"), b=t("N")), sizes=SIZES)
alone("e3nn.o3.axis_angle_to_matrix", o3.axis_angle_to_matrix, dict(x=t("N", 3), a=t("N")), sizes=SIZES)
alone("e3nn.o3.quaternion_to_matrix", o3.quaternion_to_matrix, dict(x=t("N", 4)), sizes=SIZES)
alone("e3nn.o3.compose_quaternion", o3.compose_quaternion, dict(x=t("N", 4), y=t("N", 4)), sizes=SIZES)
alone("e3nn.math.soft_unit_step", math.soft_unit_step, dict(x=t("M", "N")))
alone("e3nn.math.bessel", lambda x: math.bessel(x, 4, 2.0), dict(x=t("N", low=0.1, high=1.9)), sizes=SIZES)
for basis in ("gaussian", "cosine", "smooth_finite", "fourier", "bessel"):
    for cutoff in (True, False):
        alone(f"e3nn.math.soft_one_hot_linspace.{basis}.{'cut' if cutoff else 'open'}",
              lambda x, basis=basis, cutoff=cutoff: math.soft_one_hot_linspace(x, 0.0, 2.0, 5, basis, cutoff),
              dict(x=t("N", low=0.05, high=1.95)), sizes=SIZES)  # fmt: skip

LEFT = o3.Irreps("3x0e + 2x1o + 1x2e")
RIGHT = o3.Irreps("2x0e + 1x1o")
PAIR = dict(x=t("N", LEFT.dim), y=t("N", RIGHT.dim))
for name, make in dict(
    FullyConnectedTensorProduct=lambda: o3.FullyConnectedTensorProduct(LEFT, RIGHT, "2x0e + 2x1o"),
    FullTensorProduct=lambda: o3.FullTensorProduct(LEFT, RIGHT),
).items():
    module(f"e3nn.o3.{name}", make, PAIR, sizes=SIZES)
ONE = dict(x=t("N", LEFT.dim))
for name, make in {
    "o3.Linear": lambda: o3.Linear(LEFT, "2x0e + 3x1o", biases=True),
    "o3.Norm": lambda: o3.Norm(LEFT),
    "o3.TensorSquare": lambda: o3.TensorSquare(LEFT),
    "nn.BatchNorm": lambda: nn.BatchNorm(LEFT).eval(),
    "nn.Gate": lambda: nn.Gate("1x0e", [torch.tanh], "2x0e", [torch.sigmoid], "1x1o + 1x2e"),
    "nn.Activation": lambda: nn.Activation(LEFT, [torch.nn.functional.silu, None, None]),
    "nn.NormActivation": lambda: nn.NormActivation(LEFT, torch.sigmoid, epsilon=1e-5),
}.items():
    inputs = dict(x=t("N", 11)) if name == "nn.Gate" else ONE
    module(f"e3nn.{name}", make, inputs, sizes=SIZES)
module(
    "e3nn.nn.FullyConnectedNet",
    lambda: nn.FullyConnectedNet([4, 6, 2], torch.nn.functional.silu),
    dict(x=t("N", 4)),
    sizes=SIZES,
)
