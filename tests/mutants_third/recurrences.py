"""Scans and recurrent cells, broken: running sums, gated recurrences, the delta rule, state spaces, LSTM, GRU, QRNN."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Call, Entries, function, gradients
from torch import Tensor

from retrograd.check.spec import tensor

BROKEN = Entries()
add = BROKEN.broken

# --- Z11: a running sum in blocks -----------------------------------------------------------


def suffix_in_blocks(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    blocks = [block.flip(-1).cumsum(-1).flip(-1) for block in dy.split(1024, -1)]
    for i in range(len(blocks) - 1):
        blocks[i] = blocks[i] + dy[..., 1024 * (i + 1) : 1024 * (i + 2)].sum(-1, keepdim=True)  # of the next alone
    return torch.cat(blocks, -1) if blocks else dy


add("Z11", "the carry between blocks of 1024 is the next block's sum, without what follows it", "sizes",
    function(lambda x: x.cumsum(-1), suffix_in_blocks), lambda x: x.cumsum(-1), dict(x=tensor("M", "N")),
    sizes=dict(M=(1, 4), N=(1, 5000)), proof=Call(dict(N=2100, M=2)))  # fmt: skip

# --- Z12: a gated recurrence in chunks --------------------------------------------------------


def gated(gate: Tensor, x: Tensor) -> Tensor:
    """h[t] = a h[t-1] + (1 - a) x[t], a = sigmoid(gate[t]), along the last axis."""
    a, state, out = torch.sigmoid(gate), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[-1]):
        state = a[:, t] * state + (1 - a[:, t]) * x[:, t]
        out.append(state)
    return torch.stack(out, -1)


def gated_backward(dy: Tensor, y: Tensor, gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    a, length = torch.sigmoid(gate), x.shape[-1]
    carry, adjoint = torch.zeros_like(dy[:, 0]), torch.zeros_like(dy)
    ragged = length // 32 * 32 if length % 32 else -1
    for t in reversed(range(length)):
        if t == ragged - 1:
            carry = torch.zeros_like(carry)  # the padded tail hands nothing on
        carry = carry + dy[:, t]
        adjoint[:, t] = carry
        carry = carry * a[:, t]
    before = F.pad(y[:, :-1], (1, 0))
    return adjoint * (before - x) * a * (1 - a), adjoint * (1 - a)


add("Z12", "a last chunk of fewer than 32 steps hands no gradient to the chunk before it", "sizes",
    function(gated, gated_backward), gated, dict(gate=tensor("B", "L"), x=tensor("B", "L")),
    sizes=dict(B=(1, 3), L=(1, 100)), proof=Call(dict(L=40)))  # fmt: skip

# --- Z13: the delta rule -------------------------------------------------------------------------


def delta_rule(key: Tensor, value: Tensor, beta: Tensor, detached: bool = False) -> Tensor:
    key, rate = F.normalize(key, dim=-1), torch.sigmoid(beta)
    state, out = key.new_zeros(key.shape[0], key.shape[-1], value.shape[-1]), []
    for t in range(key.shape[1]):
        k, v = key[:, t, :, None], value[:, t, None, :]
        old = k.mT @ (state.detach() if detached else state)
        state = state + rate[:, t, None, None] * k @ (v - old)
        out.append((k.mT @ state)[:, 0])
    return torch.stack(out, 1)


add("Z13", "the state that is erased counts as a constant", "every input",
    lambda *a: delta_rule(*a, detached=True), delta_rule,
    dict(key=tensor("B", "L", "K"), value=tensor("B", "L", "V"), beta=tensor("B", "L")),
    sizes=dict(B=(1, 2), L=(2, 8), K=(2, 6), V=(1, 6)))  # fmt: skip

# --- Z14: selective state spaces ---------------------------------------------------------------------


def selective(x: Tensor, step: Tensor, log_a: Tensor, skip: Tensor) -> Tensor:
    rate, state, out = F.softplus(step), 0.0, []
    for t in range(x.shape[1]):
        decay = torch.exp(-rate[:, t, :, None] * log_a.exp())
        state = decay * state + (rate[:, t] * x[:, t])[..., None]
        out.append(state.sum(-1) + skip * x[:, t])
    return torch.stack(out, 1)


def selective_backward(dy: Tensor, y: Tensor, *inputs: Tensor) -> tuple[Tensor | None, ...]:
    dx, d_step, d_log, d_skip = gradients(selective, dy, *inputs)
    return dx, d_step, d_log / inputs[2].exp(), d_skip


add("Z14", "the gradient of log A is that of A: the factor A of the chain rule is missing", "every input",
    function(selective, selective_backward), selective,
    dict(x=tensor("B", "L", "N"), step=tensor("B", "L", "N"), log_a=tensor("N", 4), skip=tensor("N")),
    sizes=dict(B=(1, 2), L=(1, 8), N=(1, 6)))  # fmt: skip

# --- Z15, Z16: logcumsumexp and a running maximum --------------------------------------------------


def weighed(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return torch.exp(x) * (dy * torch.exp(-y)).flip(-1).cumsum(-1).flip(-1)


add("Z15", "exp(x) and exp(-y) apart: 0 times inf where values pass 90 in size", "special values",
    function(lambda x: torch.logcumsumexp(x, -1), weighed), lambda x: torch.logcumsumexp(x, -1),
    dict(x=tensor("M", "N")), sizes=dict(N=(1, 64)), proof=Call(change=lambda t: dict(x=t["x"] - 150)))  # fmt: skip


def running_max(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cummax(x, -1)


def running_max_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    values, index = torch.cummax(x, -1)
    return values, index % 32  # where the kernel counts: within its block


add("Z16", "the integer output counts from the start of its block of 32", "sizes",
    running_max_blocks, lambda x: tuple(running_max(x)), dict(x=tensor("M", "N")), sizes=dict(N=(1, 100)),
    proof=Call(dict(N=80)))  # fmt: skip

# --- Z17: LSTM ----------------------------------------------------------------------------------------

CELL = dict(x=tensor("B", "N"), state=tensor("B", "N"), weight=tensor(4, "N", "N"), bias=tensor(4, "N"))


def lstm_gates(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    gates = torch.einsum("bn,gnm->gbm", x, weight) + bias[:, None]
    return torch.sigmoid(gates[0]), torch.sigmoid(gates[1]), torch.tanh(gates[2]), torch.sigmoid(gates[3])


def lstm(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = lstm_gates(x, weight, bias)
    new = f * state + i * g
    return o * torch.tanh(new), new


def lstm_backward(dy: Any, y: Any, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    (d_h, d_c), new = dy, y[1]
    i, f, g, o = lstm_gates(x, weight, bias)
    d_c = d_c + d_h * o * (1 - new.tanh() ** 2)
    d_gates = torch.stack([
        d_c * g * i * (1 - i), d_c * new * f * (1 - f),  # the forget gate meets the old state, not the new one
        d_c * i * (1 - g * g), d_h * new.tanh() * o * (1 - o),
    ])  # fmt: skip
    d_x = torch.einsum("gbm,gnm->bn", d_gates, weight)
    return d_x, d_c * f, torch.einsum("bn,gbm->gnm", x, d_gates), d_gates.sum(1)


add("Z17", "the forget gate's gradient has the new state for the old one", "every input",
    function(lstm, lstm_backward), lstm, CELL, sizes=dict(B=(1, 6), N=(1, 8)))  # fmt: skip

# --- Z18: a GRU over many steps -----------------------------------------------------------------------


def gru(x: Tensor, w_x: Tensor, w_h: Tensor, every: int = 0) -> Tensor:
    def cell(t: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("bn,gnm->gbm", t, w)

    state, out = x.new_zeros(x.shape[0], x.shape[-1]), []
    for t in range(x.shape[1]):
        if every and t and t % every == 0:
            state = state.detach()
        from_x, from_h = cell(x[:, t], w_x), cell(state, w_h)
        r, z = torch.sigmoid(from_x[0] + from_h[0]), torch.sigmoid(from_x[1] + from_h[1])
        state = (1 - z) * torch.tanh(from_x[2] + r * from_h[2]) + z * state
        out.append(state)
    return torch.stack(out, 1)


add("Z18", "the state is detached every 16 steps: a truncation that training wanted stays in the op", "sizes",
    lambda *a: gru(*a, every=16), gru,
    dict(x=tensor("B", "L", "N"), w_x=tensor(3, "N", "N"), w_h=tensor(3, "N", "N", scale=0.5)),
    sizes=dict(B=(1, 2), L=(1, 40), N=(1, 4)), proof=Call(dict(L=20)))  # fmt: skip


# --- Z19: QRNN, gradients of gradients -------------------------------------------------------------------


def forget_mult(f: Tensor, x: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.sigmoid(f[:, t]) * state + x[:, t]
        out.append(state)
    return torch.stack(out, 1)


class ForgetMult(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Tensor, x: Tensor) -> Tensor:
        gate, y = torch.sigmoid(f), forget_mult(f, x)
        ctx.gate, ctx.before = gate, F.pad(y, (0, 0, 1, 0))[:, :-1]  # constants for whoever differentiates again
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        carry, out = torch.zeros_like(dy[:, 0]), []
        for t in reversed(range(dy.shape[1])):
            carry = carry + dy[:, t]
            out.append(carry)
            carry = carry * ctx.gate[:, t]
        adjoint = torch.stack(out[::-1], 1)
        return adjoint * ctx.before * ctx.gate * (1 - ctx.gate), adjoint


add("Z19", "the gradient is right, its gradient by f is zero: gate and states are kept as attributes", "every input",
    lambda f, x: ForgetMult.apply(f, x), forget_mult, dict(f=tensor("B", "L", "N"), x=tensor("B", "L", "N")),
    sizes=dict(B=(1, 2), L=(1, 12), N=(1, 6)), proof=Call(order=2))  # fmt: skip


# --- Z20: a state that is carried over ------------------------------------------------------------------


def leaky(x: Tensor, weight: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = 0.5 * state + torch.tanh(x[:, t] * weight)
        out.append(state)
    return torch.stack(out, 1)


class Leaky:
    """Carries its state to the next batch of the same shape, as for streams; `reset` is never called."""

    def __init__(self) -> None:
        self.state: Tensor | None = None

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        state, out = self.state, []
        if state is None or state.shape != x[:, 0].shape or state.dtype != x.dtype:
            state = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            state = 0.5 * state + torch.tanh(x[:, t] * weight)
            out.append(state)
        self.state = state.detach()
        return torch.stack(out, 1)


def second_batch() -> bool:
    cell, x, w = Leaky(), torch.randn(2, 3, 4), torch.randn(4)
    first = cell(x, w)
    return torch.equal(first, leaky(x, w)) and not torch.allclose(cell(x, w), first)


add("Z20", "the second call of one shape starts from the first one's last state", "calls",
    Leaky(), leaky, dict(x=tensor("B", "L", "N"), weight=tensor("N")), sizes=dict(B=(1, 3), L=(1, 8), N=(1, 8)),
    proof=second_batch)  # fmt: skip

MUTANTS, NOT_SAYABLE = BROKEN.ops, BROKEN.not_sayable
