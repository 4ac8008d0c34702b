"""References of state spaces, linear attention and filters: a loop over time each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from retrograd.check.spec import tensor

SIZES = dict(B=(1, 3), L=(1, 30), D=(1, 6))


def decayed(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
    """Linear attention whose state decays by sigmoid(gate) before each step."""
    state, out = key.new_zeros(key.shape[0], key.shape[-1], value.shape[-1]), []
    for t in range(key.shape[1]):
        state = state * torch.sigmoid(gate[:, t, None, None]) + key[:, t, :, None] * value[:, t, None]
        out.append((query[:, t, None] @ state)[:, 0])
    return torch.stack(out, 1)


DECAYED = {name: tensor("B", "L", "D") for name in ("query", "key", "value")} | dict(gate=tensor("B", "L"))


def retention(query: Tensor, key: Tensor, value: Tensor, gamma: float) -> Tensor:
    far = torch.arange(query.shape[1])[:, None] - torch.arange(query.shape[1])
    decay = torch.where(far >= 0, gamma ** far.clamp_min(0).to(query.dtype), 0)
    return (query @ key.mT * decay) @ value


RETENTION = {name: tensor("B", "L", "D") for name in ("query", "key", "value")}


def selective(x: Tensor, step: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """h[t] = exp(-softplus(step[t])) h[t-1] + x[t]: all states, and the last."""
    state, out = first, []
    for t in range(x.shape[1]):
        state = torch.exp(-F.softplus(step[:, t])) * state + x[:, t]
        out.append(state)
    return torch.stack(out, 1), state


SELECTIVE = dict(x=tensor("B", "L", "D"), step=tensor("B", "L", "D"), first=tensor("B", "D"))


def min_gru(gate: Tensor, x: Tensor, first: Tensor) -> Tensor:
    """h[t] = (1 - z) h[t-1] + z g(x[t]) of positive numbers."""
    z, state, out = torch.sigmoid(gate), first, []
    new = torch.where(x >= 0, x.clamp_min(0) + 0.5, torch.sigmoid(x.clamp_max(0)))
    for t in range(x.shape[1]):
        state = (1 - z[:, t]) * state + z[:, t] * new[:, t]
        out.append(state)
    return torch.stack(out, 1)


MIN_GRU = dict(gate=tensor("B", "L"), x=tensor("B", "L"), first=tensor("B", low=0, high=2))


def running_product(x: Tensor) -> Tensor:
    out, total = [], torch.ones_like(x[:, 0])
    for t in range(x.shape[1]):
        total = total * x[:, t]
        out.append(total)
    return torch.stack(out, 1)


def biquad(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """y[t] = b[0] x[t] + b[1] x[t-1] + b[2] x[t-2] - a[0] y[t-1] - a[1] y[t-2]."""
    zero, out = torch.zeros_like(x[:, 0]), []
    past = [zero, zero, zero, zero]  # x[t-1], x[t-2], y[t-1], y[t-2]
    for t in range(x.shape[1]):
        y = b[0] * x[:, t] + b[1] * past[0] + b[2] * past[1] - a[0] * past[2] - a[1] * past[3]
        past = [x[:, t], past[0], y, past[2]]
        out.append(y)
    return torch.stack(out, 1)


BIQUAD = dict(x=tensor("B", "L"), a=tensor(2, low=-0.4, high=0.4), b=tensor(3))


def smoothed(x: Tensor, rate: Tensor) -> Tensor:
    """y[t] = r y[t-1] + (1 - r) x[t], r = sigmoid(rate) for each channel."""
    r, state, out = torch.sigmoid(rate), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = r * state + (1 - r) * x[:, t]
        out.append(state)
    return torch.stack(out, 1)


SMOOTHED = dict(x=tensor("B", "L", "D"), rate=tensor("D"))


def wkv(key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    """RWKV's mean of values, weighed by exp(key) that decays: by a softmax over the past."""
    far = torch.arange(key.shape[1])[:, None] - torch.arange(key.shape[1])
    s = key[:, None] - F.softplus(decay) * far[..., None]  # [B, L, L, D]
    p = torch.softmax(s.masked_fill((far < 0)[..., None], float("-inf")), 2)
    return (p * value[:, None]).sum(2)


WKV = dict(key=tensor("B", "L", "D"), value=tensor("B", "L", "D"), decay=tensor("D"))


def packed_sum(x: Tensor, start: Tensor) -> Tensor:
    """A running sum over packed sequences; `start` says where one begins."""
    out, total = [], torch.zeros_like(x[0])
    for t in range(len(x)):
        total = torch.where(start[t], 0, total) + x[t]
        out.append(total)
    return torch.stack(out)


PACKED = dict(x=tensor("L", "D"), start=tensor("L", dtype="bool"))


def cell(x: Tensor, weight: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.tanh(x[:, t] + state @ weight)
        out.append(state)
    return torch.stack(out, 1)


CELL = dict(x=tensor("B", "L", "D"), weight=tensor("D", "D", scale=0.5))


def cell_gradient(dy: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    carry, dx = torch.zeros_like(dy[:, 0]), []
    before = F.pad(y, (0, 0, 1, 0))[:, :-1]
    for t in reversed(range(dy.shape[1])):
        ds = (dy[:, t] + carry) * (1 - y[:, t].square())
        carry = ds @ weight.mT
        dx.append(ds)
    d = torch.stack(dx[::-1], 1)
    return d, torch.einsum("bld,ble->de", before, d)
