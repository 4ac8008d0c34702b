"""Specs of gpytorch and linear_operator: kernels, normal tails and solves."""

from __future__ import annotations

import gpytorch
import linear_operator
import torch
from describe import add, alone, module
from gpytorch import kernels

from retrograd import tensor as t

POINTS = dict(x=t("N", 3), y=t("M", 3))
SIZES = dict(N=(1, 20), M=(1, 20))


class Covariance(torch.nn.Module):
    """The matrix of a kernel as a dense tensor."""

    def __init__(self, make):
        super().__init__()
        self.kernel = make()

    def forward(self, x, y):
        return self.kernel(x, y).to_dense()


for name, make in dict(
    RBF=lambda: kernels.RBFKernel(ard_num_dims=3), Matern12=lambda: kernels.MaternKernel(0.5),
    Matern32=lambda: kernels.MaternKernel(1.5), Matern52=lambda: kernels.MaternKernel(2.5),
    RQ=kernels.RQKernel, Periodic=kernels.PeriodicKernel, Cosine=kernels.CosineKernel, Linear=kernels.LinearKernel,
    Polynomial=lambda: kernels.PolynomialKernel(3), PiecewisePolynomial=lambda: kernels.PiecewisePolynomialKernel(q=2),
    SpectralMixture=lambda: kernels.SpectralMixtureKernel(2, ard_num_dims=3),
    Scale=lambda: kernels.ScaleKernel(kernels.RBFKernel()),
    Product=lambda: kernels.RBFKernel() * kernels.LinearKernel(), Sum=lambda: kernels.RBFKernel() + kernels.LinearKernel(),
    RBFGrad=kernels.RBFKernelGrad, SpectralDelta=lambda: kernels.SpectralDeltaKernel(3, 4),
).items():  # fmt: skip
    module(f"gpytorch.kernels.{name}Kernel", lambda make=make: Covariance(make), POINTS, sizes=SIZES)
for name, make in dict(
    Arc=lambda: kernels.ArcKernel(kernels.MaternKernel(2.5), ard_num_dims=3),
    Cylindrical=lambda: kernels.CylindricalKernel(4, kernels.MaternKernel(2.5)),
).items():  # fmt: skip
    inside = dict(x=t("N", 3, low=0.05, high=0.5), y=t("M", 3, low=0.05, high=0.5))
    module(f"gpytorch.kernels.{name}Kernel", lambda make=make: Covariance(make), inside, sizes=SIZES)

add(
    "gpytorch.functions.log_normal_cdf",
    gpytorch.functions.log_normal_cdf,
    torch.special.log_ndtr,
    dict(x=t("N", scale=3.0)),
)


def positive(x: torch.Tensor) -> torch.Tensor:
    """A well conditioned positive definite matrix."""
    return x @ x.mT / x.shape[-1] + torch.eye(x.shape[-1], dtype=x.dtype)


SQUARE = t("N", "N")
RIGHT = dict(x=SQUARE, b=t("N", "M"))
SMALL = dict(N=(1, 9), M=(1, 5))
for name, fn, plain, inputs in (
    ("solve", lambda x, b: linear_operator.solve(positive(x), b), lambda x, b: torch.linalg.solve(positive(x), b), RIGHT),
    ("inv_quad", lambda x, b: linear_operator.inv_quad(positive(x), b),
     lambda x, b: (b * torch.linalg.solve(positive(x), b)).sum(), RIGHT),
    ("inv_quad_logdet", lambda x, b: linear_operator.inv_quad_logdet(positive(x), b, logdet=True),
     lambda x, b: ((b * torch.linalg.solve(positive(x), b)).sum(), torch.logdet(positive(x))), RIGHT),
    ("root_decomposition", lambda x: linear_operator.root_decomposition(positive(x)).to_dense(), positive, dict(x=SQUARE)),
    ("add_jitter", lambda x: linear_operator.add_jitter(x, 0.1), lambda x: x + 0.1 * torch.eye(x.shape[-1], dtype=x.dtype), dict(x=SQUARE)),
    ("pivoted_cholesky", lambda x: (lambda r: r @ r.mT)(linear_operator.pivoted_cholesky(positive(x), x.shape[-1])), positive, dict(x=SQUARE)),
):  # fmt: skip
    # At large x the matrix is one that float32 cannot factor, so x is no input that may hold anything.
    add(
        f"linear_operator.{name}",
        fn,
        plain,
        inputs,
        extremes=("b",) if "b" in inputs else (),
        sizes=SMALL if "b" in inputs else dict(N=SMALL["N"]),
    )
alone(
    "linear_operator.sqrt_inv_matmul",
    lambda x, b: linear_operator.sqrt_inv_matmul(positive(x), b),
    RIGHT,
    sizes=SMALL,
    extremes=("b",),
)
alone("gpytorch.distributions.MultivariateNormal.log_prob",
      lambda x, m, y: gpytorch.distributions.MultivariateNormal(m, positive(x)).log_prob(y),
      dict(x=SQUARE, m=t("N"), y=t("N")), sizes=dict(N=(1, 9)), extremes=("m", "y"))  # fmt: skip
