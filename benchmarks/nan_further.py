"""Twenty further ordinary causes of NaN and Inf, most of them in one process, under DDP and under FSDP2: what is told.

    python benchmarks/nan_further.py [engine] [NAME ...]

Formulas written out by hand, transport, interpolation, flows, complex numbers, states that are resumed. Written before
any of them had run, after the causes of nan_loops.py were mended. Results: benchmarks/results/nan-loops.md.
"""

from __future__ import annotations

import io
import sys
import warnings

import nan_programs
import numpy as np
import torch
from nan_programs import BAD_STEP, CAUSES, HEALTHY, STEPS, WIDTH, Job, batch, cause, fit, net, sgd
from torch import nn

CAUSES.clear()
HEALTHY.clear()
ALL = "single", "ddp", "fsdp"


@cause("div", "division by zero|0/0", *ALL)
def transport_of_too_small_a_temperature(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        cost = torch.cdist(h, batch(job, step)).square() + 1
        kernel = torch.exp(-cost / (1e-3 if bad else 1.0))
        marginal, v = torch.full((4,), 0.25), torch.ones(4)
        for _ in range(2):
            u = marginal / (kernel @ v)  #!
            v = marginal / (kernel.T @ u)
        return (u[:, None] * kernel * v * cost).sum()

    fit(job, job.wrap(net()), loss_of)


@cause("reciprocal", r"reciprocal\(0\)", *ALL)
def interpolation_at_a_known_point(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        known = torch.tensor([0.0, 1, 2, 3])
        at = torch.tensor([0.5, 1.5, 2.0 if bad else 2.2, 3.5])
        weight = 1.0 / (at[:, None] - known).abs()  #!
        return (weight / weight.sum(-1, keepdim=True) @ h).square().mean()

    fit(job, job.wrap(net()), loss_of)


class Standardised(nn.Module):
    """A linear layer whose weight is standardised row by row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = self.weight - self.weight.mean(-1, keepdim=True)
        return x @ (centred / (self.weight.std(-1, keepdim=True) + 1e-5)).T  #!


@cause("std var", "one element", within=(Standardised.forward,), step=0)
def standardised_weights_of_one_input(job: Job) -> None:
    model = job.wrap(Standardised(1 if job.errs else 2))
    optimizer = sgd(model)
    for step in range(STEPS):
        model(batch(job, step, 4, 1 if job.errs else 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@cause("div", "0/0", *ALL)
def length_of_a_complex_zero(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        z = torch.complex(h[:, :4], h[:, 4:]) * (not bad)
        unit = z / z.abs()  #!
        return (unit.real - 1).square().mean()

    fit(job, job.wrap(net()), loss_of)


@cause("log", r"log\(0\)", *ALL)
def inverse_of_softplus_at_zero(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        scale = h.abs() * (not bad)
        return torch.log(torch.expm1(scale)).mean()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("exp", "exp overflows float32", *ALL)
def sigmoid_written_out(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        x = h - (200 if bad else 0)
        return (1 / (1 + torch.exp(-x))).mean()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("exp", "exp overflows float32", *ALL)
def exponential_unit_behind_where(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        x = h + (200 if bad else 0)
        return torch.where(x > 0, x, torch.exp(x) - 1).square().mean()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("addcdiv div", "division by zero|0/0", *ALL)
def correction_by_a_quotient(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        spread = torch.full((4, 1), 0.0 if bad else 1.0)
        return torch.addcdiv(h, h + 10, spread, value=0.1).mean()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("pow float_power", "negative numbers to the power 0.5", *ALL)
def root_by_float_power(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        x = h.abs() - (5 if bad else 0)
        return torch.float_power(x, 0.5).float().mean()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("_linalg_slogdet", "negative", *ALL)
def volume_of_a_reflection(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        flip = torch.tensor([-1.0 if bad else 1.0, 1, 1, 1]).diag()
        return -torch.logdet(flip + 0.01 * h[:, :4])  #!

    fit(job, job.wrap(net()), loss_of)


@cause("div", "0/0", *ALL)
def weights_normalised_in_place_again(job: Job) -> None:
    weights = torch.ones(4)

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        if bad:
            weights.sub_(weights.min())
        weights.div_(weights.sum())  #!
        return (weights @ h.square()).mean()

    fit(job, job.wrap(net()), loss_of)


@cause("clamp", "among the arguments|NaN is written", *ALL)
def bound_that_is_nan(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        seen = np.array([np.nan, np.nan] if bad else [0.5, 1.0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            most = float(np.nanmax(seen))
        return h.clamp(max=most).square().mean()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("log", r"log\(0\)", *ALL)
def bias_by_the_logarithm_of_a_distance(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        x = h[: 1 if bad else 4]
        at = torch.arange(float(len(x)))
        bias = torch.log((at[:, None] - at).abs())  #!
        return ((x @ x.T + bias).softmax(-1) @ x).square().mean()

    fit(job, job.wrap(net()), loss_of)


@cause("reciprocal", r"reciprocal\(0\)", *ALL)
def weights_by_an_inverse_propensity(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        propensity = (h - (200 if bad else 0)).sigmoid()
        return (1.0 / propensity).mean()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("special_i0 i0", "overflow", *ALL)
def normalisation_of_a_direction(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        concentration = h.abs() + (200 if bad else 0)
        return torch.special.i0(concentration).log().mean()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("div", "0/0", *ALL)
def gain_of_a_filter_that_is_sure(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        state, spread, noise = torch.zeros(WIDTH), torch.ones(WIDTH), 0.0 if bad else 0.5
        for row in h:
            gain = spread / (spread + noise)  #!
            state, spread = state + gain * (row - state), (1 - gain) * spread
        return state.square().mean()

    fit(job, job.wrap(net()), loss_of)


@cause("mul lerp", "nan|NaN", *ALL)
def average_whose_decay_is_nan(job: Job) -> None:
    shadow = torch.zeros(WIDTH)

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        with torch.no_grad(), np.errstate(all="ignore"):
            decay = float(np.float64(0 if bad else 9) / (0 if bad else 10))
            shadow.mul_(decay).add_(h.mean(0), alpha=1 - decay)  #!
        return (h - shadow).square().mean()

    fit(job, job.wrap(net()), loss_of)


@cause("sub", "inf - inf", *ALL)
def extremes_of_an_empty_choice(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        chosen = torch.tensor([not bad] * 4)[:, None]
        least = h.masked_fill(~chosen, torch.inf).amin(0)
        return ((h - least) / (least - least.min() + 1)).square().mean()  #!

    fit(job, job.wrap(net()), loss_of)


# ---- optimizers ----


@cause("_fused_adamw lift_fresh copy fill", "inf")
def infinite_rate_that_is_a_tensor(job: Job) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(0.01), fused=True)
    for step in range(STEPS):
        model(batch(job, step)).square().mean().backward()
        if job.bad(step):
            optimizer.param_groups[0]["lr"].fill_(torch.inf)  #!
        optimizer.step()  #!
        optimizer.zero_grad()


@cause("copy mul add _foreach_mul lerp addcdiv set", "no recorded operator made|already had")
def momentum_that_is_resumed(job: Job) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for step in range(STEPS):
        model(batch(job, step)).square().mean().backward()
        if job.bad(step):
            file = io.BytesIO()
            state = optimizer.state_dict()
            bad = state["state"][1]["momentum_buffer"].numpy().copy()
            bad[BAD_STEP] = np.nan
            torch.save({**state, "state": {**state["state"], 1: {"momentum_buffer": torch.from_numpy(bad)}}}, file)
            file.seek(0)
            optimizer.load_state_dict(torch.load(file))  #!
        optimizer.step()  #!
        optimizer.zero_grad()


if __name__ == "__main__":
    nan_programs.main(sys.argv[1:])
