"""Runs of a small transformer that differ in one thing, and traces made by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd import trace
from retrograd.trace import Op, Stats, Trace

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow, self.drop = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Dropout(0.1)
        self.extra: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(self.out(torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v))
        h = nn.functional.gelu(self.wide(x))
        if self.extra is not None:
            h = self.extra(h)  # the extra line
        return x + self.narrow(h)


class Pooled(nn.Module):
    """Adds tokens to a few places, as graph networks and sparse attention do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        where = torch.arange(x.shape[1]) % 3
        return x.new_zeros(x.shape[0], 3, x.shape[2]).index_add(1, where, x)  # the pooling line


def model(blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, WIDTH), *[Block() for _ in range(blocks)], Pooled(), nn.Linear(WIDTH, 32))


def run(
    change: Callable[[nn.Sequential], object] = lambda net: None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    training: bool = True,
    level: str = "full",
    steps: int = 2,
    fused: bool = False,
    under: TorchDispatchMode | None = None,
) -> Trace:
    """Steps of the transformer, recorded; `change` is made to it first, `under` stands between recorder and kernels."""
    net = model().to(dtype).train(training)
    tokens = torch.arange(24).view(3, 8)
    change(net)
    parameters = net.parameters()
    optimizer = (
        torch.optim.AdamW(parameters, 1e-3, fused=True) if fused else torch.optim.SGD(parameters, 0.1, foreach=False)
    )
    # Modes under a recorder are part of what is compared here; the tape sees operators beside them.
    recorder = trace.record(net, level=level, engine="python")
    torch.manual_seed(seed)
    with under or nullcontext(), recorder:
        for _ in range(steps):
            loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), torch.arange(9))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return recorder.trace


class Instead(TorchDispatchMode):
    """Computes operators in another way: `which` numbers those of this name that are, None all."""

    def __init__(self, name: str, compute: Callable[..., Any], which: int | None = None) -> None:
        super().__init__()
        self._name, self._compute, self._which, self._seen = name, compute, which, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == self._name:
            self._seen += 1
            if self._which in (None, self._seen - 1):
                return self._compute(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def ten_bits(x: torch.Tensor) -> torch.Tensor:
    """Rounded as TF32 rounds the factors of a product: 10 bits behind the leading one."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def elsewhere(found: Trace, device: str = "cuda:0") -> Trace:
    """The same run as if on another device."""
    ops = [replace(op, inputs=_moved(op.inputs, device), outputs=_moved(op.outputs, device)) for op in found.ops]
    return Trace(ops, found.level, found.rank, dict(found.meta))


def _moved(tensors: tuple[Stats, ...], device: str) -> tuple[Stats, ...]:
    return tuple(replace(t, device=device) for t in tensors)


# By hand.


def value(number: int, held: int = 0, shape: tuple[int, ...] = (4, 4), dtype: str = "float32", **more: Any) -> Stats:
    """Tensor `number`; what it holds is told by `held`."""
    return Stats(number, shape, dtype, "cpu", digest=held, **{"low": -1.0, "high": 1.0 + held, "rms": 0.5, **more})


def op(index: int, name: str, inputs: list[Stats], outputs: list[Stats], **more: Any) -> Op:
    """An operator of step 0, forward."""
    known = dict(step=0, phase="forward", module="", node="", place=f"m.py:{index}", code="", arguments="")
    return Op(index=index, name=name, inputs=tuple(inputs), outputs=tuple(outputs), **{**known, **more})


def chain(*names: str, step: int = 0) -> Trace:
    """Operators that each take what the one before made; their values follow from the names alone."""
    ops, held = [], hash(())
    for k, name in enumerate(names):
        before = value(k, held)
        held = sum(ord(c) * (31**j % 1009) for j, c in enumerate(name)) + 7 * held % 10007
        ops.append(op(k, name, [before], [value(k + 1, held)], step=step, place=""))
    return Trace(ops, "full")
