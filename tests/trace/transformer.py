"""A small transformer and its training step, with places to plant mistakes; what the tests of traces record."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from retrograd import trace


class Scale(torch.autograd.Function):
    """x, with a gradient that is multiplied by `by`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.by, None  # planted in the backward


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.gain, self.by = heads, 1.0, 1.0
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(b, t, d)))
        hidden = F.gelu(self.up(self.norm2(x)))
        if self.gain != 1.0:
            hidden = torch.exp(hidden * self.gain)  # planted in the forward
        return x + self.down(Scale.apply(hidden, self.by))


class Transformer(nn.Module):
    def __init__(self, width: int = 16, depth: int = 2, words: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model: Transformer, recorded: bool = True, steps: int = 1, **options: Any) -> Any:
    """Train for some steps; the recorder, or None where nothing is recorded."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.arange(2 * 9, device=device).view(2, 9) % 32
    with trace.record(model, **options) if recorded else nullcontext() as recorder:
        for _ in range(steps):
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    return recorder


def line(text: str) -> str:
    """ "transformer.py:12" of the only line in this file that holds the text."""
    code = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, found in enumerate(code, 1) if text in found]
    return f"transformer.py:{number}"
