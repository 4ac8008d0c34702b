"""How far the error that `retrograd trace diff` carries through a trace is from the true one.

    python benchmarks/trace_bounds.py

Two steps of a transformer of three blocks in float32 and in bfloat16, every value kept. For each result the estimated
error over the true one, in rms; what is exact on both sides is left out.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from retrograd import trace
from retrograd.trace import Trace
from retrograd.trace.diffing.matching import match
from retrograd.trace.diffing.verdicts import PairJudge


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.one(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v)
        return x + self.down(nn.functional.gelu(self.up(self.two(x))))


class Keep(TorchDispatchMode):
    """Copies of the first result of each operator, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[str, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) else out
        if isinstance(first, torch.Tensor):
            with _disable_current_modes():  # the recorder must not see the copies
                self.kept.append((str(func), first.detach().double().clone()))
        return out


def recorded(dtype: torch.dtype) -> tuple[Trace, list[torch.Tensor]]:
    """A run, and the first result of each of its operators."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), *[Block() for _ in range(3)], nn.Linear(32, 50)).to(dtype)
    tokens, keep, recorder = torch.randint(50, (4, 16)), Keep(), trace.record(model, level="full")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    with recorder, keep:  # above it, since the recorder has operators of its own
        for _ in range(2):
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    ops = [op for op in recorder.trace.ops if op.outputs]
    kept = iter(keep.kept)
    # The recorder leaves some operators out (profiling, scalars read): those kept are found by their names.
    values = [next(value for name, value in kept if name == op.name) for op in ops]
    return Trace(ops, "full"), values


def main() -> None:
    """Prints quantiles by phase."""
    (a, exact), (b, coarse) = recorded(torch.float32), recorded(torch.bfloat16)
    judge, ratios, worst = PairJudge(bitwise=False), defaultdict(list), 0.0
    for found in map(judge.judge, match(a.ops, b.ops)):
        one, other = found.pair.a, found.pair.b
        worst = max(worst, found.excess)
        if one is None or other is None or not one.outputs[0].rms:
            continue
        x, y = (values[ops.index(op)] for values, ops, op in ((exact, a.ops, one), (coarse, b.ops, other)))
        true = float((x - y).square().mean().sqrt()) if x.shape == y.shape else 0.0
        if true:
            ratios[one.phase].append(judge._errors[one.outputs[0].tensor] / true)
    for phase, found in ratios.items():
        low, *_, high = statistics.quantiles(found, n=20)
        spread = (
            f"{min(found):.2g} least, {low:.2g} to {high:.2g} for nine in ten, {statistics.median(found):.2g} median"
        )
        print(f"{phase:9} {len(found):4} results: estimated over true error {spread}")
    print(f"largest difference of least, greatest or rms: {worst:.2g} of what is allowed")


if __name__ == "__main__":
    main()
