"""Twenty ordinary causes of NaN and Inf in plain torch, and five healthy programs with intended ones: what is told.

    python benchmarks/nan_ordinary.py [engine] [NAME ...]

Schedules, fused optimizers, masks, loss scaling, half precision, bad indices, data, checkpoints. Written before any of
them had run, in the form of nan_programs.py. Results: benchmarks/results/nan-ordinary.md.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import nan_programs
import numpy as np
import torch
from nan_programs import BAD_STEP, CAUSES, HEALTHY, STEPS, WIDTH, Job, batch, cause, fit, healthy, net, sgd
from torch import nn
from torch.nn import functional as F

CAUSES.clear()
HEALTHY.clear()

# ---- schedules, optimizers, clipping, scaling ----


@cause("add _foreach_add", "learning rate.*inf", "single", "ddp")
def warmup_of_no_steps(job: Job) -> None:
    model = job.wrap(net())
    optimizer, warmup = sgd(model), np.float64(0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: np.float64(done) / warmup if job.bad(done) else 1.0
    )
    for step in range(STEPS):
        model(batch(job, step)).square().mean().backward()
        optimizer.step()  #!
        optimizer.zero_grad()
        schedule.step()


@cause("div", "division by zero|division by the number 0")
def warmup_of_a_tensor_read_by_item(job: Job) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(STEPS):
        warmup = torch.tensor(0.0 if job.bad(step) else 10.0)
        rate = 0.01 * torch.tensor(step + 1.0) / warmup  #!
        optimizer.param_groups[0]["lr"] = rate.item()
        model(batch(job, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@cause("_fused_adamw", "negative")
def second_moment_that_is_negative_fused(job: Job) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    for step in range(STEPS):
        if job.bad(step):
            for state in optimizer.state.values():
                state["exp_avg_sq"].fill_(-1.0)
        model(batch(job, step)).square().mean().backward()
        optimizer.step()  #!
        optimizer.zero_grad()


@cause("_fused_adam", "beta|bias correction")
def momentum_of_one_fused(job: Job) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01, fused=True)
    for step in range(STEPS):
        if job.bad(step):
            optimizer.param_groups[0]["betas"] = (1.0, 0.999)
        model(batch(job, step)).square().mean().backward()
        optimizer.step()  #!
        optimizer.zero_grad()


@cause("add _foreach_add", "decay", "single", "fsdp")
def decay_without_bounds(job: Job) -> None:
    model = job.wrap(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.param_groups[0]["weight_decay"] = torch.inf if job.bad(step) else 1e-4
        model(batch(job, step)).square().mean().backward()
        optimizer.step()  #!
        optimizer.zero_grad()


@cause("div _foreach_div", "0/0")
def gradients_normed_to_one_of_a_dead_network(job: Job) -> None:
    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        h = model(batch(job, step))
        (h - 100 * job.bad(step)).relu().sum().backward()
        grads = [p.grad for p in model.parameters()]
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_div_(grads, norm)  #!
        optimizer.step()
        optimizer.zero_grad()


@cause("linalg_vector_norm _foreach_norm", "overflow.*65504")
def norm_of_gradients_in_half(job: Job) -> None:
    model = nn.Linear(WIDTH, WIDTH).half()
    optimizer = sgd(model)
    for step in range(STEPS):
        h = model(torch.ones(4, WIDTH, dtype=torch.float16))
        (h.float().sum() * (10000 if job.bad(step) else 1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  #!
        optimizer.step()
        optimizer.zero_grad()


@cause("div", "division by zero.*derivative of sqrt", step=2)
def root_after_two_overflows_of_a_scaler(job: Job) -> None:
    model = net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, backoff_factor=2.0**-25)
    for step in range(4):
        with torch.autocast("cpu", torch.float16):
            h = model(batch(job, step)).float()
        loss = (h * (step != 2)).square().sum().sqrt()  #!
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


# ---- masks and precision ----


@cause("mul", "0 times inf", "single", "ddp")
def mask_times_minus_infinity(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        kept = torch.ones(4, 4).tril()
        bias = (1.0 - kept) * (-torch.inf if bad else -1e9)  #!
        return ((h @ h.T + bias).softmax(-1) @ h).square().mean()

    fit(job, job.wrap(net()), loss_of)


@cause("var", "overflow")
def variance_in_half(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        x = (h * (3000 if bad else 1)).half()
        variance = x.var(-1, keepdim=True)  #!
        return ((x - x.mean(-1, keepdim=True)) / (variance + 1e-3).sqrt()).float().square().mean()

    fit(job, net(), loss_of)


@cause("log", r"log\(0\)", "single", "fsdp")
def sure_probability_in_bfloat16(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        p = (h + (9 if bad else 0)).sigmoid().bfloat16()
        return -torch.log(1 - p).float().mean()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("log div mul", r"log\(0\)|division by zero|0/0|0 times inf", "single", "ddp")
def logarithm_behind_where(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        x = h * (h > 0) if bad else h.square() + 1
        return torch.where(x > 0, x.log(), 0.0).mean()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("pow", "0 to the power", "single", "fsdp")
def learned_exponent_of_a_zero(job: Job) -> None:
    gamma = nn.Parameter(torch.tensor(0.5))

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        x = h * (h > 0) if bad else h.abs() + 1
        return (x**gamma).mean()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("div", "division by zero.*derivative of sqrt")
def magnitude_of_silence(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        spectrum = torch.fft.rfft(h * (not bad), dim=-1)
        power = spectrum.real.square() + spectrum.imag.square()
        return (power + 1e-3 * (not bad)).sqrt().mean()  #!

    fit(job, net(), loss_of)


# ---- indices, data, checkpoints ----


@cause("gather", "inf", "single", "ddp")
def label_that_points_at_the_padding(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        padded = F.pad(h.log_softmax(-1), (0, 2), value=-torch.inf)
        labels = torch.tensor([0, 3, 9 if bad else 5, 7])
        return -padded.gather(-1, labels[:, None]).mean()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("index index_select embedding", "no recorded operator made|already had")
def index_of_minus_one(job: Job) -> None:
    stored = np.ones((5, WIDTH), dtype=np.float32)
    stored[-1] = np.nan  # a row that was never filled
    table = torch.from_numpy(stored)

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        rows = torch.tensor([0, 1, 2, -1 if bad else 3])
        return (h - table[rows]).square().mean()  #!

    fit(job, net(), loss_of)


@cause("empty add", "uninitiali[sz]ed|written|initiali[sz]ed", "single", "ddp")
def bias_that_nobody_initialised(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        torch.use_deterministic_algorithms(bad)  # memory that is new is filled with NaN
        bias = torch.empty(WIDTH) if bad else torch.zeros(WIDTH)  #!
        return (h + bias).square().mean()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("nanmean div", "0/0|no elements")
def row_of_which_all_is_missing(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        seen = batch(job, step).numpy().copy()
        seen[:, 0] = np.nan
        if bad:
            seen[2] = np.nan
        aim = torch.from_numpy(seen).nanmean(-1)  #!
        return (h.mean(-1) - aim).square().mean()

    fit(job, net(), loss_of)


@cause("smooth_l1_loss sub from_numpy", "no recorded operator made|already had", "single", "fsdp")
def label_that_is_infinite(job: Job) -> None:
    labels = np.zeros((STEPS, 4, WIDTH), dtype=np.float32)
    if job.errs:
        labels[BAD_STEP, 1, 2] = np.inf

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        return F.smooth_l1_loss(h, torch.from_numpy(labels[step]))  #!

    fit(job, job.wrap(net()), loss_of)


@cause("copy native_batch_norm _native_batch_norm_legit_no_training", "no recorded operator made|already had")
def checkpoint_whose_running_variance_is_nan(job: Job) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    optimizer = sgd(model)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt"
        for step in range(STEPS):
            if job.bad(step):
                bad = {name: value.clone() for name, value in model.state_dict().items()}
                bad["1.running_var"].numpy()[3] = np.nan
                torch.save(bad, file)
                model.load_state_dict(torch.load(file))  #!
                model[1].eval()
            model(batch(job, step)).square().mean().backward()  #!
            optimizer.step()
            optimizer.zero_grad()


# ---- healthy ----


@healthy("ddp")
def scaler_that_finds_its_scale(job: Job) -> None:
    """The first scale overflows; steps are left out until it fits."""
    model = job.wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**50, backoff_factor=2.0**-20)
    for step in range(5):
        with torch.autocast("cpu", torch.float16):
            loss = model(batch(job, step)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@healthy("ddp")
def features_that_are_missing(job: Job) -> None:
    """NaN where a feature was not measured: left out of the mean and written as 0."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        seen = batch(job, step).numpy().copy()
        seen[1:3, 4] = np.nan
        features = torch.from_numpy(seen)
        aim, mean = features.nan_to_num(0.0), features.nanmean(-1)
        return (h - aim).square().mean() + (h.mean(-1) - mean).square().mean()

    fit(job, job.wrap(net()), loss_of)


@healthy("fsdp")
def causal_attention_by_torch(job: Job) -> None:
    """nn.MultiheadAttention with a causal mask of -inf, whose weights are asked for, and padding that is True."""
    torch.manual_seed(0)
    layer = job.wrap(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True))
    optimizer = torch.optim.AdamW(layer.parameters(), 1e-3)
    for step in range(STEPS):
        causal = nn.Transformer.generate_square_subsequent_mask(4)
        padding = torch.zeros(2, 4).masked_fill(torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]]).bool(), -torch.inf)
        layer(batch(job, step, 2, 4, WIDTH), src_mask=causal, src_key_padding_mask=padding).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy()
def least_of_each_segment(job: Job) -> None:
    """The least of each segment by scatter_reduce from inf; a segment without members is 0."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        least = torch.full((3, WIDTH), torch.inf)
        index = torch.tensor([0, 0, 2, 2])[:, None].expand(4, WIDTH)
        least = least.scatter_reduce(0, index, h, "amin")
        return torch.where(least.isinf(), 0.0, least).square().mean()

    fit(job, net(), loss_of)


@healthy()
def logarithm_behind_where_of_a_relu(job: Job) -> None:
    """The derivative is 0/0 where a relu gave 0, and the derivative of the relu leaves that out."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        x = h.relu()
        return torch.where(x > 0, x.log(), 0.0).mean()

    fit(job, net(), loss_of)


@healthy()
def learned_exponent_of_a_relu(job: Job) -> None:
    """The derivative by the base is infinite at 0, which the relu's leaves out."""
    gamma = nn.Parameter(torch.tensor(0.5))

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        return (h.relu() ** gamma).mean()

    fit(job, net(), loss_of)


@healthy("ddp")
def memory_that_is_filled_before_it_is_read(job: Job) -> None:
    """torch.empty under deterministic algorithms is NaN until it is written: a cache that is filled row by row."""
    torch.use_deterministic_algorithms(True)

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        cache, made = torch.empty(8, WIDTH), h.new_empty(4, WIDTH)
        cache[:4], made[:] = h, h
        return cache[:4].square().mean() + made.mean()

    fit(job, job.wrap(net()), loss_of)


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    engine = arguments.pop(0) if arguments and arguments[0] in ("python", "tape", "auto") else "python"
    print(f"torch {torch.__version__}, {engine}")
    nan_programs.measure(arguments or [*CAUSES, *HEALTHY], engine, bool(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
