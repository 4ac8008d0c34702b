"""A small training run to record and compare.

    python examples/trace_runs.py [seed=1] [sin] [weights] [bfloat16] [unseeded]

Each word changes one thing, which `retrograd trace diff` is to find (docs/trace-divergence.md).
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.gelu(self.up(self.norm(x)))
        if "sin" in sys.argv:
            h = h + 0.01 * torch.sin(h)
        return x + self.drop(self.down(h))


class Pool(nn.Module):
    """The mean of each of four groups of tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = torch.arange(x.shape[1]) % 4
        if "unseeded" in sys.argv:
            noise = int.from_bytes(os.urandom(4), "little")
            order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(noise))
            x, group = x[:, order], group[order]  # as atomics: the same numbers in another order
        return x.new_zeros(x.shape[0], 4, x.shape[2]).index_add(1, group, x)


def main() -> None:
    """Three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 32), *[Block() for _ in range(3)], Pool(), nn.Linear(32, 100))
    if "weights" in sys.argv:
        with torch.no_grad():
            model[2].down.weight[3, 5] += 1e-3
    if "bfloat16" in sys.argv:
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(100, (8, 32))
    torch.manual_seed(next((int(word[5:]) for word in sys.argv if word.startswith("seed=")), 0))
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens[:, :4].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
