"""NaN and Inf in training programs as users write them, and healthy programs with intended infinities: what is told.

    python benchmarks/nan_programs.py [engine]        all, in one process and, where it says so, on two gloo ranks
    python benchmarks/nan_programs.py [engine] NAME ...

Needs transformers and lightning. Written before any of them had run: operators, lines, words of the reason, rank and step
are what a person who knows the cause would say. Of two ranks rank 1 errs. The line that must be named ends in `#!`; of a
library's line its text is given. Changed since: two programs that raised or had no optimizer's step; the line of a Dataset
in place of its loader's; the forward's line of a gradient that is accumulated as well; the phase of silence is healthy,
and so is an empty row's evidence behind where if masked_fill made it: its mask is added now.
Results: benchmarks/results/nan-programs.md.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import json
import linecache
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.tensor
import torch.distributed.tensor.parallel
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

BAD_STEP, STEPS, WIDTH = 1, 3, 8


@dataclass(frozen=True)
class Job:
    """One rank of a way to run: single, ddp, fsdp or ranks (two without a wrapper)."""

    way: str = "single"
    rank: int = 0
    errs: bool = True

    def bad(self, step: int) -> bool:
        return self.errs and step == BAD_STEP

    def wrap(self, model: nn.Module, **options: Any) -> Any:
        if self.way == "ddp":
            return DistributedDataParallel(model, **options)
        if self.way == "fsdp":
            for child in model.children():
                if any(True for _ in child.parameters()):
                    fully_shard(child, **options)
            return fully_shard(model, **options)
        return model


@dataclass(frozen=True)
class Expected:
    program: Callable[[Job], None]
    operators: str  # any of these
    reason: str  # a regular expression
    ways: tuple[str, ...] = ("single",)
    within: tuple[Any, ...] = ()  # where the marked line is, if not in the program
    text: str = ""  # what the line of a library says
    step: int = BAD_STEP
    rank: int = 1  # of two
    places: frozenset[str] = field(default_factory=frozenset)


CAUSES: dict[str, Expected] = {}
HEALTHY: dict[str, tuple[Callable[[Job], None], tuple[str, ...]]] = {}


def cause(operators: str, reason: str, *ways: str, **options: Any) -> Callable[[Callable[[Job], None]], Any]:
    def register(program: Callable[[Job], None]) -> Any:
        places = set()
        for source in options.get("within", (program,)):
            lines, first = inspect.getsourcelines(source)
            file = Path(inspect.getsourcefile(inspect.unwrap(source)) or "").name
            places |= {f"{file}:{first + at}" for at, t in enumerate(lines) if t.rstrip().endswith("#!")}
        assert bool(places) != bool(options.get("text")), program.__name__
        CAUSES[program.__name__] = Expected(
            program, operators, reason, ways or ("single",), **options, places=frozenset(places)
        )
        return program

    return register


def healthy(*ways: str) -> Callable[[Callable[[Job], None]], Any]:
    def register(program: Callable[[Job], None]) -> Any:
        HEALTHY[program.__name__] = (program, ("single", *ways))
        return program

    return register


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))


def batch(job: Job, step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4, WIDTH)), generator=torch.Generator().manual_seed(10 * step + job.rank))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def fit(
    job: Job, model: Any, loss_of: Callable[[torch.Tensor, bool, int], torch.Tensor], optimizer: Any = None
) -> None:
    """Three steps; `loss_of` is given the output, whether it is to err, and the step."""
    optimizer = optimizer or sgd(model)
    for step in range(STEPS):
        loss = loss_of(model(batch(job, step)), job.bad(step), step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def llama(**options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=options.get("attention", "eager"))


def tokens(job: Job, step: int, length: int = 8) -> torch.Tensor:
    return torch.randint(2, 64, (2, length), generator=torch.Generator().manual_seed(10 * step + job.rank))


# ---- averages, schedules, optimizers, clipping, scaling ----


class Average:
    """Exponential moving average with the correction of Adam."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [torch.zeros_like(p) for p in model.parameters()]
        self.count = 0

    def update(self, model: nn.Module) -> None:
        self.count += 1
        for mine, new in zip(self.shadow, model.parameters(), strict=True):
            mine.mul_(0.9).add_(new.detach(), alpha=0.1)

    def corrected(self) -> list[torch.Tensor]:
        return [mine / (1 - 0.9**self.count) for mine in self.shadow]  #!


@cause("div", "0/0", "single", "ddp", within=(Average.corrected,))
def average_that_was_reset(job: Job) -> None:
    model = job.wrap(net())
    inner = getattr(model, "module", model)
    average, optimizer = Average(inner), sgd(model)
    average.update(inner)
    for step in range(STEPS):
        if job.bad(step):
            average = Average(inner)
        teacher = average.corrected()
        x = batch(job, step)
        aim = F.linear(F.linear(x, teacher[0], teacher[1]).tanh(), teacher[2], teacher[3])
        F.mse_loss(model(x), aim).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(inner)


@cause("mul", "overflow", "single", "fsdp")
def clipping_by_the_largest_of_an_overflow(job: Job) -> None:
    model = job.wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
    for step in range(STEPS):
        h = model(batch(job, step))
        unit = 1e30 if job.bad(step) else 1.0
        loss = (h / unit * unit * unit).mean()  #!
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
        optimizer.step()
        optimizer.zero_grad()


@cause("pow rsqrt", r"0 to the power|rsqrt\(0\)|reciprocal")
def schedule_of_a_tensor_at_step_zero(job: Job) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
    for step in range(STEPS):
        count = torch.tensor(0.0 if job.bad(step) else step + 1.0)
        for group in optimizer.param_groups:
            group["lr"].copy_(0.01 * count.pow(-0.5))  #!
        model(batch(job, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@cause("reciprocal", r"reciprocal\(0\)", "single", "ddp")
def scale_of_ones_own_that_fell_to_zero(job: Job) -> None:
    model = job.wrap(net())
    optimizer, scale = sgd(model), torch.tensor(1024.0)
    for step in range(STEPS):
        if job.bad(step):
            scale.mul_(1e-30).mul_(1e-30)
        (model(batch(job, step)).square().mean() * scale).backward()
        inverse = scale.double().reciprocal().float()  #!
        torch._foreach_mul_([p.grad for p in model.parameters()], inverse)
        optimizer.step()
        optimizer.zero_grad()


@cause("div", "0/0", step=0)
def muon_without_eps(job: Job) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.01, eps=0.0)
    for step in range(STEPS):
        (model(batch(job, step)) * 0).sum().backward()
        optimizer.step()  #!
        optimizer.zero_grad()


@cause("add", "overflow.*65504", "single", "ddp")
def micro_batches_added_up_in_half(job: Job) -> None:
    model = net().half()
    model = job.wrap(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        for micro in range(2):
            last = micro == 1 or job.way == "single"
            with contextlib.nullcontext() if last else model.no_sync():
                h = model(batch(job, step).half())  #!
                (h.float().mean(0).sum() * (40000 if job.bad(step) else 1)).backward()  #!
        optimizer.step()
        optimizer.zero_grad()


@cause("_to_copy to copy", "float16", "ddp")
def gradients_compressed_to_half(job: Job) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = job.wrap(net())
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = model(batch(job, step)).sum() * (1e6 if job.bad(step) else 1)  #!
        loss.backward()  #!
        optimizer.step()
        optimizer.zero_grad()


@cause("_to_copy to copy chunk_cat _chunk_cat", "float16", "fsdp")
def gradients_reduced_in_half(job: Job) -> None:
    model = job.wrap(net(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = model(batch(job, step)).sum() * (1e6 if job.bad(step) else 1)  #!
        loss.backward()  #!
        optimizer.step()
        optimizer.zero_grad()


# ---- attention and transformers ----


@cause("add", "overflow", "single", "ddp")
def two_masks_of_the_least_number_added(job: Job) -> None:
    least = torch.finfo(torch.float32).min

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        causal = torch.full((4, 4), least).triu(1)
        padded = torch.zeros(4, 4)
        padded[:, :2] = least if bad else 0.0
        if bad:
            causal[0, :2], padded[0] = least, least
            causal[0] = least
        mask = causal + padded  #!
        return ((h @ h.T + mask).softmax(-1) @ h).square().mean()

    fit(job, job.wrap(net()), loss_of)


@cause("_softmax softmax _safe_softmax", "-inf only", "single", "ddp", text="softmax")
def row_of_a_llama_masked_whole(job: Job) -> None:
    model = job.wrap(llama())
    optimizer = sgd(model)
    for step in range(STEPS):
        mask = torch.zeros(2, 1, 8, 8).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf)
        if job.bad(step):
            mask[1, :, 3] = -torch.inf
        ids = tokens(job, step)
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@cause("mul", "overflow.*65504", text=r"self\.up_proj\(x\)")
def gated_llama_in_half(job: Job) -> None:
    model = llama().half()
    optimizer = sgd(model)
    for step in range(STEPS):
        ids = tokens(job, step)
        with torch.no_grad():
            if job.bad(step):
                model.model.layers[1].mlp.up_proj.weight.mul_(1e4)
                model.model.layers[1].mlp.gate_proj.weight.mul_(1e4)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@cause("div", "0/0", text="num_items_in_batch")
def trainer_whose_batch_has_no_label(job: Job) -> None:
    import transformers

    rows = []
    for step in range(STEPS):
        for row in tokens(job, step):
            rows.append({"input_ids": row, "labels": torch.full_like(row, -100) if job.bad(step) else row})
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder, per_device_train_batch_size=2, max_steps=STEPS, use_cpu=True, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True, train_sampling_strategy="sequential",
        )  # fmt: skip
        transformers.Trainer(llama(), options, train_dataset=rows).train()


@cause("_to_copy to", "cast to float16")
def padding_of_minus_a_billion_in_half(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        kept = torch.ones(4, 4)
        kept[2] = 0 if bad else 1
        scores = (h @ h.T).half()
        bias = ((1 - kept) * -1e9).to(scores.dtype)  #!
        return ((scores + bias).softmax(-1).float() @ h).square().mean()

    fit(job, net(), loss_of)


# ---- probabilities ----


@cause("log", r"log\(0\)", "single", "ddp")
def posterior_that_collapsed(job: Job) -> None:
    from torch.distributions import Normal, kl_divergence

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        mean, logvar = h.chunk(2, -1)
        logvar = logvar * 0 - 300 if bad else logvar
        posterior = Normal(mean, (0.5 * logvar).exp(), validate_args=False)
        return kl_divergence(posterior, Normal(torch.zeros(4, 4), torch.ones(4, 4))).mean()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("atanh", "atanh")
def action_at_the_bound_of_tanh(job: Job) -> None:
    from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        policy = TransformedDistribution(Independent(Normal(h, 1.0), 1), TanhTransform(), validate_args=False)
        action = torch.full((4, 8), 1.0 if bad else 0.5)
        return -policy.log_prob(action).mean()  #!

    fit(job, net(), loss_of)


@cause("mul", "0 times inf")
def divergence_of_masked_students(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        allowed = torch.arange(WIDTH) < (5 if bad else WIDTH)
        student = h.masked_fill(~allowed, -torch.inf).log_softmax(-1)
        teacher = batch(job, step).masked_fill(~allowed, -torch.inf).softmax(-1)
        return F.kl_div(student, teacher, reduction="batchmean")  #!

    fit(job, net(), loss_of)


@cause("sub", "inf - inf", "single", "fsdp")
def evidence_of_an_empty_row_behind_where(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        seen = torch.ones(4, 8, dtype=torch.bool)
        seen[1] = not bad
        mask = torch.zeros(4, 8).masked_fill(~seen, -torch.inf)
        evidence = (h + mask).logsumexp(-1)  #!
        return torch.where(seen.any(-1), evidence, 0.0).mean()

    fit(job, job.wrap(net()), loss_of)


class Routed(nn.Module):
    """Experts by gates that are normalised over those that have room."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.room = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        within = torch.arange(len(x))[:, None] < self.room
        gates = gates * within
        gates = gates / gates.sum(-1, keepdim=True)  #!
        return sum(gates[:, n : n + 1] * expert(x) for n, expert in enumerate(self.experts))


@cause("div", "0/0", "single", "ddp", "fsdp", within=(Routed.forward,))
def tokens_that_no_expert_has_room_for(job: Job) -> None:
    model = nn.Sequential(Routed())
    routed = model[0]
    wrapped = job.wrap(model)
    optimizer = sgd(wrapped)
    for step in range(STEPS):
        routed.room = 2 if job.bad(step) else 4
        wrapped(batch(job, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- derivatives, checkpoints, compiled parts, functional transforms, subclasses ----


class Angle(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.acos(a * b)  #!


@cause("rsqrt", r"rsqrt\(0\).*derivative of acos", "single", "ddp", within=(Angle.forward,))
def angle_of_equal_directions_recomputed(job: Job) -> None:
    angle = Angle()

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        a = h * 0 + 1 if bad else h.tanh() * 0.5
        return checkpoint(angle, a, torch.ones(4, 8), use_reentrant=True).mean()

    fit(job, job.wrap(net()), loss_of)


@cause("linalg_solve_triangular triangular_solve", "singular")
def orthogonal_basis_of_a_flat_matrix(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        q, r = torch.linalg.qr(h.T * 0 if bad else h.T)  #!
        return q.sum() + r.square().sum()

    fit(job, net(), loss_of)


@cause("log", r"log\(0\)")
def logarithm_after_a_compiled_body(job: Job) -> None:
    torch._dynamo.reset()
    model = net()
    body = torch.compile(model, backend="aot_eager")
    optimizer = sgd(model)
    for step in range(STEPS):
        h = body(batch(job, step))
        h = h * 0 if job.bad(step) else h.abs() + 1
        loss = h.log().mean()  #!
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@cause("*", "compile")
def logarithm_inside_of_a_compiled_body(job: Job) -> None:
    torch._dynamo.reset()
    model = net()

    @torch.compile(backend="aot_eager")
    def body(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return (model(x).abs() * factor).log()

    optimizer = sgd(model)
    for step in range(STEPS):
        h = body(batch(job, step), torch.tensor(0.0 if job.bad(step) else 1.0))  #!
        loss = h.square().mean()  #!
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@cause("log", r"log\(0\)", step=0)  # without an optimizer it is one step
def gradients_of_each_sample(job: Job) -> None:
    from torch.func import functional_call, grad, vmap

    model = net()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    for step in range(STEPS):
        factor = 0.0 if job.bad(step) else 1.0

        def loss_of(p: Any, x: torch.Tensor, factor: float = factor) -> torch.Tensor:
            return (functional_call(model, p, (x,)).square() * factor).log().mean()  #!

        each = vmap(grad(loss_of), in_dims=(None, 0))(parameters, batch(job, step))
        parameters = {name: p - 0.01 * each[name].mean(0) for name, p in parameters.items()}


class Quantity(torch.Tensor):
    """A tensor with a unit."""


@cause("div", "division by zero")
def speed_of_a_quantity(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        time = torch.full((4, 8), 0.0 if bad else 1.0).as_subclass(Quantity)
        speed = (h + 1e3) / time  #!
        return speed.mean().as_subclass(torch.Tensor)

    fit(job, net(), loss_of)


@cause("div", "0/0", "single", "ranks")
def rows_of_a_distributed_tensor(job: Job) -> None:
    from torch.distributed.tensor import DTensor, Shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(torch.ones(WIDTH))
    optimizer = torch.optim.SGD([weight], 0.01)
    for step in range(STEPS):
        mine = batch(job, step).abs() * weight
        mine = mine * 0 if job.bad(step) else mine
        rows = DTensor.from_local(mine, mesh, [Shard(0)])
        shares = rows / rows.sum(-1, keepdim=True)  #!
        shares.square().to_local().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- data, in place, recurrence, geometry, parametrizations, loops of libraries ----


class Measured(torch.utils.data.Dataset):
    def __init__(self, job: Job) -> None:
        self.rows = np.stack([batch(job, step, WIDTH).numpy() for step in range(2 * STEPS)])
        if job.errs:
            self.rows[2 * BAD_STEP + 1, 3] = np.nan

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[at])  #!


@cause("lift_fresh stack cat", "no recorded operator made|already had", "single", "ddp", within=(Measured.__getitem__,))
def measurement_that_is_missing(job: Job) -> None:
    model = job.wrap(net())
    optimizer = sgd(model)
    for x in torch.utils.data.DataLoader(Measured(job), batch_size=2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@cause("div", "0/0", "single", "fsdp")
def mean_by_cluster_in_place(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        cluster = torch.tensor([0, 0, 2, 2] if bad else [0, 1, 2, 2])
        sums = h.new_zeros(3, 8).index_add(0, cluster, h)
        counts = torch.bincount(cluster, minlength=3)[:, None]
        sums.div_(counts)  #!
        return sums.square().mean()

    fit(job, job.wrap(net()), loss_of)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.RNN(WIDTH, 16, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.cell(x)  #!
        return self.head(states[:, -1])


@cause("addmm mm linear add mul", "overflow", within=(Recurrent.forward,))
def recurrence_that_explodes(job: Job) -> None:
    model = Recurrent()
    optimizer = sgd(model)
    for step in range(STEPS):
        with torch.no_grad():
            if job.bad(step):
                model.cell.weight_hh_l0.abs_().mul_(1e7)
        model(batch(job, step, 4, 12, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@cause("div", "0/0")
def path_on_a_sphere_between_equal_points(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        a = torch.eye(4, 8)
        b = a if bad else torch.eye(4, 8).roll(1, 0)
        angle = torch.acos((a * b).sum(-1, keepdim=True))
        part = (torch.sin(0.3 * angle) * a + torch.sin(0.7 * angle) * b) / torch.sin(angle)  #!
        return (h * part).mean()

    fit(job, net(), loss_of)


@cause("div", "division by zero", "single", "fsdp")
def denoised_at_a_ratio_of_zero(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        kept = torch.linspace(1.0, 0.0, 5)
        at = torch.tensor([0, 1, 2, 4 if bad else 3])
        ratio = kept[at].sqrt()[:, None]
        clean = (batch(job, step) - (1 - ratio**2).sqrt() * h) / ratio  #!
        return clean.square().clamp(max=100).mean()

    fit(job, job.wrap(net()), loss_of)


class Bounded(nn.Module):
    """A discriminator's layer, of a spectral norm of one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  #!


@cause("div", "0/0", "single", "ddp", within=(Bounded.forward,))
def spectral_norm_of_a_pruned_layer(job: Job) -> None:
    model = job.wrap(Bounded(), broadcast_buffers=False) if job.way == "ddp" else Bounded()
    layer = getattr(model, "module", model).inner
    optimizer = sgd(model)
    for step in range(STEPS):
        with torch.no_grad():
            if job.bad(step):
                layer.parametrizations.weight.original.zero_()
        model(batch(job, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@cause("exp", "exp overflows float32")
def contrast_in_lightning(job: Job) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def training_step(self, x: torch.Tensor, number: int) -> torch.Tensor:
            h = F.normalize(self.body(x), dim=-1)
            near = (h @ h.T / (0.01 if job.bad(number) else 0.5)).exp()  #!
            loss = -(near.diagonal() / near.sum(-1)).log().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    data = torch.utils.data.DataLoader(torch.stack([batch(job, n, WIDTH) for n in range(4 * STEPS)]), batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, default_root_dir=folder, gradient_clip_val=1.0,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        ).fit(Module(), data)  # fmt: skip


# ---- healthy: nothing may be found ----


@healthy("ddp")
def scaler_that_finds_its_scale(job: Job) -> None:
    """fp16 autocast, an initial scale that overflows, gradients unscaled and clipped."""
    model = job.wrap(net())
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**24)
    for step in range(12):
        with torch.autocast("cpu", torch.float16):
            loss = model(batch(job, step)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@healthy()
def entropy_as_a_metric(job: Job) -> None:
    """Entropy with 0 log 0 left out by where, precision of classes that do not occur, both without gradients."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        with torch.no_grad():
            p = (h - 2).relu()
            torch.where(p > 0, p * p.log(), 0.0).sum().neg()
            hit = torch.bincount(h.argmax(-1), minlength=WIDTH).float()
            (hit / torch.bincount(h.argmax(-1), minlength=WIDTH)).nan_to_num(0.0).mean()
        return F.cross_entropy(h, torch.tensor([0, 1, 2, 3]))

    fit(job, net(), loss_of)


@healthy("fsdp")
def router_of_groups(job: Job) -> None:
    """Scores of groups that are not chosen are -inf, the best of the rest by topk, normalised gates."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        groups = h.view(4, 2, 4)
        best = groups.amax(-1).argmax(-1)
        out = torch.ones(4, 2, dtype=torch.bool).scatter(1, best[:, None], False)
        scores = groups.masked_fill(out[..., None], -torch.inf).flatten(1)
        weights, index = scores.topk(2, dim=-1)
        gates = torch.zeros_like(h).scatter(1, index, weights.softmax(-1))
        return (gates * h).sum(-1).square().mean()

    fit(job, job.wrap(net()), loss_of)


@healthy()
def attention_in_blocks(job: Job) -> None:
    """Softmax in blocks with a running maximum that begins at -inf, and a causal mask."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        highest, total, out = torch.full((4, 1), -torch.inf), torch.zeros(4, 1), torch.zeros(4, 8)
        for begin in (0, 2):
            keys = h[begin : begin + 2]
            scores = h @ keys.T
            scores = scores.masked_fill(torch.arange(begin, begin + 2) > torch.arange(4)[:, None], -torch.inf)
            new = torch.maximum(highest, scores.amax(-1, keepdim=True))
            old, p = (highest - new).exp(), (scores - new).exp()
            total, out, highest = total * old + p.sum(-1, keepdim=True), out * old + p @ keys, new
        return (out / total).square().mean()

    fit(job, net(), loss_of)


@healthy("ddp")
def norm_looked_at_by_clipping_at_infinity(job: Job) -> None:
    """clip_grad_norm_ with max_norm=inf to log the norm, a best loss and a plateau that begin at inf."""
    model = job.wrap(net())
    optimizer, best = torch.optim.AdamW(model.parameters(), 1e-3), torch.tensor(torch.inf)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for step in range(STEPS):
        loss = model(batch(job, step)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        best = torch.minimum(best, loss.detach())
        plateau.step(loss.item())


@healthy()
def alignment_that_cannot_be(job: Job) -> None:
    """CTC with zero_infinity, of a target that is too long."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        scores = h.log_softmax(-1)[:, None].expand(4, 2, 8)
        targets, lengths = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 0, 0, 0]]), torch.tensor([5, 2])
        return F.ctc_loss(scores, targets, torch.tensor([4, 4]), lengths, zero_infinity=True)

    fit(job, net(), loss_of)


@healthy()
def actions_that_are_forbidden(job: Job) -> None:
    """A policy whose forbidden logits are -inf: log probability of what was done, entropy, ratio, clipping."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        allowed = torch.arange(WIDTH) % 2 == 0
        policy = torch.distributions.Categorical(logits=h.masked_fill(~allowed, -torch.inf))
        done = torch.tensor([0, 2, 4, 6])
        ratio = (policy.log_prob(done) - policy.log_prob(done).detach()).exp()
        gain = torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()
        p = policy.probs
        return -gain - 0.01 * -(p * p.clamp(min=1e-9).log()).sum(-1).mean()

    fit(job, net(), loss_of)


@healthy("ddp")
def llama_that_samples_between_steps(job: Job) -> None:
    """Padding on the left, SDPA, and after each update a sample by top-p, whose other logits are -inf."""
    model = job.wrap(llama(attention="sdpa"))
    inner, optimizer = getattr(model, "module", model), sgd(model)
    for step in range(STEPS):
        ids = tokens(job, step)
        kept = torch.ones_like(ids)
        kept[1, :3] = 0
        labels = ids.masked_fill(kept == 0, -100)
        model(input_ids=ids, attention_mask=kept, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        inner.generate(ids[:1, :4], max_new_tokens=2, do_sample=True, top_p=0.8, top_k=5, pad_token_id=0)


@healthy()
def variance_of_a_schedule_whose_first_is_zero(job: Job) -> None:
    """The logarithm of the variances of a diffusion's steps, of which the first is 0; samples take the root of its exp."""
    kept = torch.linspace(0.99, 0.5, 5).cumprod(0)
    before = torch.cat([torch.ones(1), kept[:-1]])

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        logarithm = ((1 - before) / (1 - kept) * (1 - kept / before)).log()
        with torch.no_grad():
            h + (0.5 * logarithm[:4, None]).exp() * batch(job, step)
        return (h - batch(job, step)).square().mean()

    fit(job, net(), loss_of)


@healthy("fsdp")
def evidence_of_a_row_that_is_masked_behind_where(job: Job) -> None:
    """The NaN of an empty row's derivative is left out by that of masked_fill."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        seen = torch.ones(4, 8, dtype=torch.bool)
        seen[1] = False
        evidence = h.masked_fill(~seen, -torch.inf).logsumexp(-1)
        return torch.where(seen.any(-1), evidence, 0.0).mean()

    fit(job, job.wrap(net()), loss_of)


@healthy()
def phase_of_silence(job: Job) -> None:
    """The phase of a spectrum of zeros: torch leaves 1/0 of its derivative out."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        spectrum = torch.fft.rfft(h * 0, dim=-1)
        return torch.atan2(spectrum.imag + h[:, :5] * 0, spectrum.real).square().mean()

    fit(job, net(), loss_of)


# ---- running ----


def trace_of(name: str, way: str, folder: Path, rank: int, engine: str) -> None:
    from retrograd.trace import record

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    program = CAUSES[name].program if name in CAUSES else HEALTHY[name][0]
    errs = way == "single" or rank == 1
    with record(out=folder / f"{name}.trace", engine=engine):
        program(Job(way, rank, errs))


def rank_of(name: str, way: str, folder: Path, rank: int, engine: str) -> None:
    size = 1 if way == "single" else 2
    store = dist.FileStore(str(folder / "store"), size)
    if size == 2 or name == "rows_of_a_distributed_tensor":
        timeout = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    trace_of(name, way, folder, rank, engine)


@contextlib.contextmanager
def traces(name: str, way: str, engine: str) -> Iterator[list[Any]]:
    """The traces of a program, each rank of which is a process that is forked."""
    from retrograd.trace import load

    with tempfile.TemporaryDirectory() as text:
        folder, children = Path(text), []
        for rank in range(1 if way == "single" else 2):
            if not (child := os.fork()):
                code = 1
                try:
                    rank_of(name, way, folder, rank, engine)
                    code = 0
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                os._exit(code)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes):
            sys.stdout.write(f"{name} {way}: ended with {codes}\n")
        yield [load(path) for path in sorted(folder.glob(f"{name}.*trace"))]


def verdict_of(name: str, way: str, engine: str) -> tuple[list[str], dict[str, Any]]:
    """What of a cause is not told, and what was said."""
    from retrograd.trace.diffing.identity import base_name
    from retrograd.trace.rank_provenance import rank_provenance

    with traces(name, way, engine) as read:
        verdict = rank_provenance(read) if read else None
    op = None if verdict is None else verdict.op
    if verdict is None or op is None:
        return ["everything"], {"found": None if verdict is None else verdict.found, "notes": verdict and verdict.notes}
    planned = CAUSES[name]
    places = (op.place, op.inside.split(": ")[0])
    lines = [linecache.getline(*_split(place)) for place in places]
    right = {
        "operator": planned.operators == "*" or base_name(op.name) in planned.operators.split(),
        "line": any(place.endswith(tuple(planned.places)) for place in places if planned.places)
        or bool(planned.text and any(re.search(planned.text, line) for line in lines)),
        "reason": bool(re.search(planned.reason, verdict.reason + " " + " ".join(verdict.notes) * (planned.operators == "*"))),
        "rank": verdict.rank == (0 if way == "single" else planned.rank),
        "step": op.step == planned.step,
    }  # fmt: skip
    said = {"op": op.name, "place": op.place, "inside": op.inside, "line": lines[0].strip(), "reason": verdict.reason}
    said |= {"step": op.step, "rank": verdict.rank, "node": op.node, "notes": verdict.notes, "origin": verdict.origin}
    return [key for key, good in right.items() if not good], said


def _split(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return file, int(line) if line.isdigit() else 0


def accused(name: str, way: str, engine: str) -> str:
    from retrograd.trace.rank_provenance import rank_provenance

    with traces(name, way, engine) as read:
        verdict = rank_provenance(read)
    op = verdict.op
    return f"{verdict.found} {op and op.name} {op and op.place} {verdict.reason}" if verdict.found else ""


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    engine = arguments.pop(0) if arguments and arguments[0] in ("python", "tape", "auto") else "python"
    import lightning
    import transformers
    import transformers.models.llama.modeling_llama
    import transformers.trainer  # once, before programs are forked

    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, lightning {lightning.__version__}, {engine}"
    )
    measure(arguments or [*CAUSES, *HEALTHY], engine, bool(arguments))


def measure(names: list[str], engine: str, at_length: bool) -> None:
    """Prints of each program what was told wrongly, or all of it, and how many were right."""
    told: dict[str, list[bool]] = {}
    for name in names:
        ways = CAUSES[name].ways if name in CAUSES else HEALTHY[name][1]
        for way in ways:
            if name in HEALTHY:
                words = accused(name, way, engine)
                told.setdefault(f"healthy {way}", []).append(not words)
                print(f"{'ok' if not words else 'ACCUSED'}  {name} {way}  {words}", flush=True)
                continue
            wrong, said = verdict_of(name, way, engine)
            told.setdefault(way, []).append(not wrong)
            print(f"{'ok' if not wrong else 'WRONG ' + ', '.join(wrong)}  {name} {way}", flush=True)
            if wrong or at_length:
                print(json.dumps(said, indent=1, default=str), flush=True)
    print(", ".join(f"{way}: {sum(rights)} of {len(rights)}" for way, rights in told.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
