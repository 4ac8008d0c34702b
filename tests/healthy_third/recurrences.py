"""Scans and recurrent cells, right: doubling, chunks, log space, transitions, cells with backwards of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Call, Entries, function
from torch import Tensor

from retrograd.check.spec import tensor

RIGHT = Entries()
add = RIGHT.healthy

# A product with zeros spreads NaN: promised for finite values alone.
add("suffix_sum_by_matrix", lambda x: x @ torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype).tril(),
    lambda x: x.flip(-1).cumsum(-1).flip(-1), dict(x=tensor("M", "N")), extremes=(), sizes=dict(N=(1, 64)))  # fmt: skip


def recurrence(gate: Tensor, x: Tensor) -> Tensor:
    """h[t] = a h[t-1] + x[t], a = sigmoid(gate[t]), along the last axis."""
    a, state, out = torch.sigmoid(gate), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[-1]):
        state = a[:, t] * state + x[:, t]
        out.append(state)
    return torch.stack(out, -1)


def doubling(gate: Tensor, x: Tensor) -> Tensor:
    """Hillis and Steele: log2(L) steps."""
    a, step = torch.sigmoid(gate), 1
    while step < x.shape[-1]:
        x = x + a * F.pad(x[:, :-step], (step, 0))
        a = a * F.pad(a[:, :-step], (step, 0))
        step *= 2
    return x


def chunked(gate: Tensor, x: Tensor) -> Tensor:
    """Chunks of eight: within each by a matrix of decays, between them a carry."""
    carry, out = torch.zeros_like(x[:, :1]), []
    for log_a, part in zip(F.logsigmoid(gate).split(8, -1), x.split(8, -1), strict=True):
        total = log_a.cumsum(-1)
        decay = torch.exp((total[:, :, None] - total[:, None]).masked_fill(
            ~torch.ones(part.shape[-1], part.shape[-1], dtype=torch.bool).tril(), float("-inf")))  # fmt: skip
        state = (decay @ part[..., None])[..., 0] + torch.exp(total) * carry
        carry = state[:, -1:]
        out.append(state)
    return torch.cat(out, -1)


SCAN = dict(gate=tensor("B", "L"), x=tensor("B", "L"))
SCAN_SIZES = dict(B=(1, 3), L=(1, 40))
add("scan_by_doubling", doubling, recurrence, SCAN, sizes=SCAN_SIZES)
add("scan_in_chunks", chunked, recurrence, SCAN, sizes=SCAN_SIZES)


def in_log_space(gate: Tensor, x: Tensor) -> Tensor:
    """Positive values: the scan as a logcumsumexp of shares (Heinsen)."""
    total = F.logsigmoid(gate).cumsum(-1)
    return torch.exp(total + torch.logcumsumexp(torch.log(x) - total, -1))


add("scan_in_log_space", in_log_space, recurrence, dict(gate=tensor("B", "L"), x=tensor("B", "L", low=0.1, high=2.0)),
    sizes=SCAN_SIZES)  # fmt: skip


def delta_rule(key: Tensor, value: Tensor, beta: Tensor) -> Tensor:
    key, rate = F.normalize(key, dim=-1), torch.sigmoid(beta)
    state, out = key.new_zeros(key.shape[0], key.shape[-1], value.shape[-1]), []
    for t in range(key.shape[1]):
        k, v = key[:, t, :, None], value[:, t, None, :]
        state = state + rate[:, t, None, None] * k @ (v - k.mT @ state)
        out.append((k.mT @ state)[:, 0])
    return torch.stack(out, 1)


def delta_by_solve(key: Tensor, value: Tensor, beta: Tensor) -> Tensor:
    """All steps at once: a triangular system for what each step writes (the WY form)."""
    key, rate = F.normalize(key, dim=-1), torch.sigmoid(beta)[..., None]
    gram = key @ key.mT
    eye = torch.eye(key.shape[1], dtype=key.dtype)
    written = torch.linalg.solve_triangular(eye + rate * gram.tril(-1), rate * value, upper=False)
    return gram.tril() @ written


add("delta_rule_by_solve", delta_by_solve, delta_rule,
    dict(key=tensor("B", "L", "K"), value=tensor("B", "L", "V"), beta=tensor("B", "L")),
    sizes=dict(B=(1, 2), L=(1, 10), K=(2, 6), V=(1, 6)))  # fmt: skip


def selective(x: Tensor, step: Tensor, log_a: Tensor, skip: Tensor) -> Tensor:
    rate, state, out = F.softplus(step), torch.zeros_like(x[:, 0, :, None]), []
    for t in range(x.shape[1]):
        state = torch.exp(-rate[:, t, :, None] * log_a.exp()) * state + (rate[:, t] * x[:, t])[..., None]
        out.append(state.sum(-1) + skip * x[:, t])
    return torch.stack(out, 1)


# The skip is a number: a 0-d tensor with a gradient.
add("selective_scan_scalar_skip", selective, selective,
    dict(x=tensor("B", "L", "N"), step=tensor("B", "L", "N"), log_a=tensor("N", 4), skip=tensor()),
    sizes=dict(B=(1, 2), L=(1, 8), N=(1, 6)))  # fmt: skip


def log_sums(x: Tensor) -> Tensor:
    out = [x[..., 0]]
    for t in range(1, x.shape[-1]):
        out.append(torch.logaddexp(out[-1], x[..., t]))
    return torch.stack(out, -1)


add("logcumsumexp_step_by_step", log_sums, lambda x: torch.logcumsumexp(x, -1), dict(x=tensor("M", "N")),
    sizes=dict(N=(1, 16)))  # fmt: skip


def running_max(x: Tensor) -> tuple[Tensor, Tensor]:
    values, index = torch.cummax(x, -1)
    return values, index


def running_max_gathered(x: Tensor) -> tuple[Tensor, Tensor]:
    index = torch.cummax(x.detach(), -1)[1]
    return x.gather(-1, index), index


add("cummax_with_places", running_max_gathered, running_max, dict(x=tensor("M", "N")), sizes=dict(N=(1, 64)))


def lstm(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    gates = torch.einsum("bn,gnm->gbm", x, weight) + bias[:, None]
    new = torch.sigmoid(gates[1]) * state + torch.sigmoid(gates[0]) * torch.tanh(gates[2])
    return torch.sigmoid(gates[3]) * torch.tanh(new), new


def lstm_backward(dy: Any, y: Any, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    (d_h, d_c), new = dy, y[1]
    gates = torch.einsum("bn,gnm->gbm", x, weight) + bias[:, None]
    i, f, g, o = torch.sigmoid(gates[0]), torch.sigmoid(gates[1]), torch.tanh(gates[2]), torch.sigmoid(gates[3])
    d_c = d_c + d_h * o * (1 - new.tanh() ** 2)
    d_gates = torch.stack([
        d_c * g * i * (1 - i), d_c * state * f * (1 - f), d_c * i * (1 - g * g), d_h * new.tanh() * o * (1 - o),
    ])  # fmt: skip
    return (
        torch.einsum("gbm,gnm->bn", d_gates, weight),
        d_c * f,
        torch.einsum("bn,gbm->gnm", x, d_gates),
        d_gates.sum(1),
    )


add("lstm_cell", function(lstm, lstm_backward), lstm,
    dict(x=tensor("B", "N"), state=tensor("B", "N"), weight=tensor(4, "N", "N"), bias=tensor(4, "N")),
    sizes=dict(B=(1, 6), N=(1, 8)))  # fmt: skip


class ForgetMult(torch.autograd.Function):
    """Keeps what it needs as saved tensors and differentiates by differentiable operators: right at every order."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, x: Tensor) -> Tensor:
        y = recurrence(f, x)
        ctx.save_for_backward(f, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        f, y = ctx.saved_tensors
        a = torch.sigmoid(f)
        shifted = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], 1)
        carry, out = torch.zeros_like(dy[:, 0]), []
        for t in reversed(range(dy.shape[1])):
            carry = shifted[:, t] * carry + dy[:, t]
            out.append(carry)
        adjoint = torch.stack(out[::-1], 1)
        return adjoint * F.pad(y[:, :-1], (1, 0)) * a * (1 - a), adjoint


add("forget_mult_twice", lambda f, x: ForgetMult.apply(f, x), recurrence, SCAN, sizes=dict(B=(1, 3), L=(1, 12)),
    double_backward="right", proof=Call(order=2, bound=1e-4))  # fmt: skip

HEALTHY = RIGHT.ops
