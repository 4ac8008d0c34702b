"""Programs with a difference planted in each, written after the reader and before it saw a log of them.

python tests/trace/debug_mode/later_programs.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from write_logs import WRONG, Block, _data, log, write


def _words() -> torch.Tensor:
    return torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(3))


class Attention(nn.Module):
    def __init__(self, causal: bool = True, swapped: bool = False, scale: float | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.causal, self.swapped, self.scale = causal, swapped, scale

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.swapped:
            q, k = k, q
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        return self.out(y.transpose(1, 2).flatten(2))


def _steps(model: nn.Module, data, optimizer=None, steps: int = 2, clip: float = 0.0, zero: bool = True) -> None:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 0.01, foreach=False)
    for _ in range(steps):
        model(data).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if zero:
            optimizer.zero_grad()


def not_causal(fault: bool) -> None:
    _steps(Attention(causal=not fault), _words())


def swapped(fault: bool) -> None:
    _steps(Attention(causal=False, swapped=fault), _words())


def another_scale(fault: bool) -> None:
    _steps(Attention(scale=0.5 if fault else 0.25), _words())


def clipped(fault: bool) -> None:
    _steps(nn.Sequential(Block(), Block()), _data(), clip=0.01 if fault else 0.0)


def not_zeroed(fault: bool) -> None:
    _steps(nn.Sequential(Block(), Block()), _data(), zero=not fault)


def another_batch(fault: bool) -> None:
    _steps(nn.Sequential(Block(), Block()), _data() + (1e-3 if fault else 0.0))


def weight_decay(fault: bool) -> None:
    model = nn.Sequential(Block(), Block())
    _steps(model, _data(), torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1 if fault else 0.0, foreach=False))


def fused(fault: bool) -> None:
    model = nn.Sequential(Block(), Block())
    _steps(model, _data(), torch.optim.AdamW(model.parameters(), 0.02 if fault else 0.01, fused=True))


def frozen_statistics(fault: bool) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model[1].train(not fault)
    _steps(model, _data().view(1, 1, 8, 8))


def no_residual(fault: bool) -> None:
    class Model(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.down(functional.gelu(self.up(self.norm(x))))
            return y if fault else x + y

    _steps(nn.Sequential(Model(), Block()), _data())


def detached(fault: bool) -> None:
    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self[0](x)
            return self[1](y.detach() if fault else y)

    model = Model(Block(), Block())
    _steps(model, _data())


def checkpointed(fault: bool) -> None:
    """Healthy: the forward is computed again."""

    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(self[0], x, use_reentrant=False) if fault else self[0](x)
            return self[1](y)

    _steps(Model(Block(), Block()), _data())


def logged_more(fault: bool) -> None:
    """Healthy: what only looks at the values."""
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    for _ in range(2):
        loss = model(_data()).square().mean()
        loss.backward()
        if fault:
            torch.stack([p.grad.norm() for p in model.parameters()]).max()
        optimizer.step()
        optimizer.zero_grad()


def healthy(fault: bool) -> None:
    _steps(nn.Sequential(Attention(), Block()), _words())


def eps(fault: bool) -> None:
    model = nn.Sequential(Block(), Block())
    model[1].norm.eps = 1e-3 if fault else 1e-5
    _steps(model, _data())


def rolled(fault: bool) -> None:
    """The same elements in another order: their norm is the same."""
    with torch.no_grad():
        y = nn.Linear(16, 16)(_data())
        y = torch.flip(y, (-1,)) if fault else torch.roll(y, 1, -1)
        nn.Linear(16, 4)(y).sum()


def microbatches(fault: bool) -> None:
    """Two halves are accumulated where the other run takes the batch at once."""
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    for part in _data().chunk(2 if fault else 1):
        model(part).square().mean().backward()
    optimizer.step()


LATER = {
    not_causal: {}, swapped: dict(record_ids=True), another_scale: dict(record_stack_trace=True), clipped: dict(inputs=False),
    not_zeroed: dict(record_ids=True, inputs=False), another_batch: {}, weight_decay: {}, fused: {}, frozen_statistics: {},
    no_residual: dict(hashes="hash_tensor"), detached: dict(hashes=["norm", "hash_tensor"]), checkpointed: {},
    logged_more: {}, healthy: dict(record_ids=True), eps: dict(inputs=False), rolled: {}, microbatches: {},
}  # fmt: skip


def main() -> None:
    for program, how in LATER.items():
        for fault in (False, True):
            write(f"{program.__name__}.{WRONG if fault else 'right'}", log(program, fault, **how))


if __name__ == "__main__":
    main()
