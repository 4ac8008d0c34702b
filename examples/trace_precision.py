"""A model with a norm that loses its digits, for `retrograd trace bisect` (docs/trace-divergence.md).

The variance is the mean of squares less the square of the mean: exact on paper, and in float32 wrong in the third digit
where the mean is a hundred times the spread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class NaiveNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        square = x.square().mean(-1, keepdim=True)
        variance = square - mean.square()
        return (x - mean) * torch.rsqrt(variance + 1e-5)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), NaiveNorm(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    nn.init.constant_(model[0].bias, 300.0)
    return model


def _step(model: nn.Module) -> None:
    """Gradients, in the dtype of the model."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model.zero_grad()
    model(x.to(next(model.parameters()).dtype)).square().mean().backward()


def step() -> tuple[Callable[[nn.Module], None], nn.Module, dict[str, torch.Tensor]]:
    """The step in float32, its model, and what its gradients are in float64."""
    exact = _model().double()
    _step(exact)
    return _step, _model(), {f"gradient of {name}": p.grad for name, p in exact.named_parameters()}
