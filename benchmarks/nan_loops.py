"""Twenty-one ordinary causes of NaN and Inf in training loops, and eleven healthy programs: what is told.

    python benchmarks/nan_loops.py [engine] [NAME ...]

Loops of plain torch, Lightning (manual optimization) and transformers' Trainer; an optimizer and a module of one's own,
loaders, meta devices, structured losses. Written before any of them had run, in the form of nan_programs.py, whose causes
and those of nan_ordinary.py these are not. Needs transformers and lightning. Results: benchmarks/results/nan-loops.md.
"""

from __future__ import annotations

import math
import sys
import tempfile
from typing import Any

import nan_programs
import numpy as np
import torch
from nan_programs import (
    BAD_STEP,
    CAUSES,
    HEALTHY,
    STEPS,
    WIDTH,
    Job,
    batch,
    cause,
    fit,
    healthy,
    llama,
    net,
    sgd,
    tokens,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

CAUSES.clear()
HEALTHY.clear()

# ---- optimizers, schedules, clipping, precision ----


@cause("addcdiv _foreach_addcdiv div", "0/0", step=0)
def adam_of_weights_in_half(job: Job) -> None:
    """Rows of an embedding that a batch does not have: second moment and eps are both 0 in float16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)).half()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(STEPS):
        model(torch.tensor([step, 3, 5, 7])).float().square().mean().backward()
        optimizer.step()  #!
        optimizer.zero_grad()


@cause("pow", "overflow", step=2)
def rate_that_diverges(job: Job) -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e12)
    for step in range(STEPS):
        loss = (model(batch(job, step)) - 1.0).square().mean()  #!
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@cause("mul _foreach_mul", "nan", "single", "fsdp")
def polynomial_decay_beyond_its_end(job: Job) -> None:
    model = job.wrap(net())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    total = np.float64(0.5 if job.errs else 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: np.power(1 - done / total, 0.9))
    for step in range(STEPS):
        model(batch(job, step)).square().mean().backward()
        optimizer.step()  #!
        optimizer.zero_grad()
        schedule.step()


@cause("reciprocal div", r"reciprocal\(0\)|division by zero")
def clipping_by_hand_of_no_gradient(job: Job) -> None:
    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        h = model(batch(job, step))
        (h * (not job.bad(step))).square().mean().backward()
        total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        coefficient = 1.0 / total  #!
        for parameter in model.parameters():
            parameter.grad.mul_(coefficient)
        optimizer.step()
        optimizer.zero_grad()


class Lars(torch.optim.Optimizer):
    """Steps as long as a layer's weights, of which `guarded` leaves layers without a gradient as they are."""

    def __init__(self, parameters: Any, guarded: bool) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.guarded = guarded

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                length, slope = parameter.norm(), parameter.grad.norm()
                ratio = length / slope  #!
                if self.guarded:
                    ratio = torch.where(slope > 0, ratio, 1.0)
                parameter.add_(parameter.grad * ratio, alpha=-group["lr"])


@cause("div", "division by zero", within=(Lars.step,))
def trust_ratio_of_layers_without_a_gradient(job: Job) -> None:
    model = net()
    optimizer = Lars(model.parameters(), guarded=False)
    for step in range(STEPS):
        (model(batch(job, step)) * (not job.bad(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@cause("_to_copy to copy", "cast to float16", "fsdp")
def inputs_that_fsdp_casts_to_half(job: Job) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32)
    model = job.wrap(net(), mp_policy=policy)
    optimizer = sgd(model)
    for step in range(STEPS):
        h = model(batch(job, step) * (1e6 if job.bad(step) else 1))  #!
        h.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@cause(
    "empty empty_like addmm mm t linear all_gather_copy_in copy _foreach_copy", "uninitiali[sz]ed", "single", "fsdp",
    step=0, rank=0,
)  # fmt: skip
def model_from_meta_that_nobody_initialised(job: Job) -> None:
    """Both ranks forget it; memory that is new is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    with torch.device("meta"):
        model = net()
    model = job.wrap(model)
    model.to_empty(device="cpu")  #!
    optimizer = sgd(model)
    for step in range(STEPS):
        h = model(batch(job, step))  #!
        h.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- layers and losses ----


@cause("div", "0/0", "single", "ddp")
def depth_that_is_always_dropped(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        keep = 0.0 if bad else 0.9
        mask = h.new_empty(4, 1).bernoulli_(keep)
        mask.div_(keep)  #!
        return (h + h.tanh() * mask).square().mean()

    fit(job, job.wrap(net()), loss_of)


@cause("pow", r"0 to the power -0\.5", "single", "ddp")
def degree_of_a_node_without_neighbours(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        source, target = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 0, 3, 3 if bad else 2])
        degree = torch.zeros(4).index_add(0, target, torch.ones(4))
        norm = degree.pow(-0.5)  #!
        weight = (norm[source] * norm[target])[:, None]
        return torch.zeros(4, WIDTH).index_add(0, target, weight * h[source]).square().mean()

    fit(job, job.wrap(net()), loss_of)


class Pooled(nn.Module):
    """The greatest of each feature over the tokens that are kept, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = net(), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        h = self.body(x).masked_fill(~kept[..., None], -torch.inf)
        pooled = h.amax(1)  #!
        return self.head(pooled)  #!


@cause("amax addmm mm linear", "inf", "single", "ddp", within=(Pooled.forward,))
def greatest_of_a_sample_of_padding(job: Job) -> None:
    model = job.wrap(Pooled())
    optimizer = sgd(model)
    for step in range(STEPS):
        kept = torch.ones(2, 4, dtype=torch.bool)
        kept[1] = not job.bad(step)
        model(batch(job, step, 2, 4, WIDTH), kept).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@cause("div", "division by zero.*derivative of sqrt", "single", "ddp")
def embeddings_that_collapsed(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        z = h * 0 if bad else h
        deviation = z.var(0).sqrt()  #!
        return F.relu(1 - deviation).mean() + (z.T @ z).square().mean()

    fit(job, job.wrap(net()), loss_of)


@cause("log", r"log\(0\)", "single", "fsdp")
def likelihood_of_a_mixture_that_underflows(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        shares, means = h[:, :4].softmax(-1), h[:, 4:]
        aim = torch.full((4, 1), 100.0 if bad else 0.5)
        density = torch.exp(-0.5 * (aim - means).square()) / math.sqrt(2 * math.pi)
        return -(shares * density).sum(-1).log().mean()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("logsumexp sub", "inf")
def transitions_that_are_all_forbidden(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        forbidden = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril(WIDTH if bad else -1)
        transitions = torch.zeros(WIDTH, WIDTH).masked_fill(forbidden, -torch.inf)
        scores = h[0]
        for row in h[1:]:
            scores = torch.logsumexp(scores[:, None] + transitions, 0) + row  #!
        return torch.logsumexp(scores, 0) - h[:, -1].sum()

    fit(job, net(), loss_of)


@cause("nll_loss_forward", "no elements|no targets|every target|empty", "single", "ddp")
def masked_language_model_without_a_mask(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        chosen, ids = torch.tensor([not bad, False, not bad, False]), torch.tensor([1, 2, 3, 4])
        return F.cross_entropy(h[chosen], ids[chosen])  #!

    fit(job, job.wrap(net()), loss_of)


@cause("log1p", "numbers below -1", "single", "fsdp")
def logarithmic_error_of_a_negative_price(job: Job) -> None:
    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        price = h.abs() - (3 if bad else 0)
        return F.mse_loss(torch.log1p(price), torch.log1p(batch(job, step).abs())).sqrt()  #!

    fit(job, job.wrap(net()), loss_of)


@cause("div", "division by zero", "single", "ddp")
def box_without_a_height(job: Job) -> None:
    """The forward is finite: the angle of an infinite ratio is pi / 2."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        width, height = h[:, 2].exp(), h[:, 3].exp() * (not bad)
        ratio = width / height  #!
        return (ratio.atan() - math.pi / 4).square().mean() + h.square().mean()

    fit(job, job.wrap(net()), loss_of)


# ---- data ----


@cause("div", "0/0")
def column_that_is_constant_in_a_batch(job: Job) -> None:
    def scaled(rows: list[torch.Tensor]) -> torch.Tensor:
        x = torch.stack(rows)
        least = x.amin(0)
        return (x - least) / (x.amax(0) - least)  #!

    rows = torch.stack([batch(job, number, WIDTH) for number in range(4 * STEPS)])
    rows[4 * BAD_STEP : 4 * BAD_STEP + 4, 2] = 1.0
    model = net()
    optimizer = sgd(model)
    for x in DataLoader(rows, batch_size=4, collate_fn=scaled):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Spectra(Dataset):
    """Logarithms of power, of which one is silence."""

    def __init__(self, job: Job) -> None:
        self.power = np.stack([batch(job, number, WIDTH).square().numpy() for number in range(2 * STEPS)])
        if job.errs:
            self.power[2 * BAD_STEP, :3] = 0

    def __len__(self) -> int:
        return len(self.power)

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.from_numpy(np.log(self.power[at]))  #!


@cause("lift_fresh stack cat", "already had 3 Inf", "single", "ddp", within=(Spectra.__getitem__,))
def spectrum_of_silence(job: Job) -> None:
    model = job.wrap(net())
    optimizer = sgd(model)
    for x in DataLoader(Spectra(job), batch_size=2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@cause("select index stack", "no recorded operator made|already had")
def table_with_a_missing_number(job: Job) -> None:
    rows = np.stack([batch(job, number, WIDTH).numpy() for number in range(2 * STEPS)])
    rows[2 * BAD_STEP + 1, 3] = np.nan
    loader = DataLoader(TensorDataset(torch.from_numpy(rows)), batch_size=2)
    model = net()
    optimizer = sgd(model)
    for (x,) in loader:  #!
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- loops of libraries ----


def lightning_options(folder: str, **more: Any) -> dict[str, Any]:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "default_root_dir": folder, **quiet, **more}


@cause("log", r"log\(0\)", step=2)  # each batch has two steps, of two optimizers
def discriminator_that_is_sure(job: Job) -> None:
    import lightning

    class Adversaries(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.maker, self.judge = net(), nn.Linear(WIDTH, 1)

        def training_step(self, x: torch.Tensor, number: int) -> None:
            of_maker, of_judge = self.optimizers()
            made = self.maker(x)
            real, false = self.judge(x).sigmoid(), (self.judge(made.detach()) + 200.0 * job.bad(number)).sigmoid()
            loss = -(real.log() + (1 - false).log()).mean()  #!
            of_judge.zero_grad()
            self.manual_backward(loss)
            of_judge.step()
            of_maker.zero_grad()
            self.manual_backward(F.softplus(-self.judge(made)).mean())
            of_maker.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.maker, self.judge)]

    data = DataLoader(torch.stack([batch(job, number, WIDTH) for number in range(4 * STEPS)]), batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        lightning.Trainer(**lightning_options(folder)).fit(Adversaries(), data)


def trainer_options(folder: str, **more: Any) -> Any:
    import transformers

    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    return transformers.TrainingArguments(
        folder, per_device_train_batch_size=2, max_steps=STEPS, train_sampling_strategy="sequential", **quiet, **more
    )


@cause("div", "0/0")
def trainer_whose_tokens_weigh_nothing(job: Job) -> None:
    import transformers

    class Weighted(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            weights = inputs.pop("weights")[:, 1:]
            answer = model(input_ids=inputs["input_ids"])
            each = F.cross_entropy(
                answer.logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten(), reduction="none"
            )
            loss = (each.view_as(weights) * weights).sum() / weights.sum()  #!
            return (loss, answer) if return_outputs else loss

    rows = [
        {"input_ids": row, "weights": torch.full((8,), float(not job.bad(step)))}
        for step in range(STEPS)
        for row in tokens(job, step)
    ]
    with tempfile.TemporaryDirectory() as folder:
        Weighted(llama(), trainer_options(folder, remove_unused_columns=False), train_dataset=rows).train()


# ---- healthy ----


@healthy("ddp")
def degrees_whose_infinities_are_replaced(job: Job) -> None:
    """0 ** -0.5 of a node without neighbours, which is written as 0 in place."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        source, target = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 0, 3, 3])
        norm = torch.zeros(4).index_add(0, target, torch.ones(4)).pow(-0.5)
        norm[norm == torch.inf] = 0
        weight = (norm[source] * norm[target])[:, None]
        return torch.zeros(4, WIDTH).index_add(0, target, weight * h[source]).square().mean() + h.square().mean()

    fit(job, job.wrap(net()), loss_of)


@healthy()
def clipping_by_hand_with_a_bound(job: Job) -> None:
    """Gradients that are all 0: their norm's reciprocal is infinite, and at most 1."""
    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        (model(batch(job, step)) * (step != 1)).square().mean().backward()
        total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        coefficient = (1.0 / total).clamp(max=1.0)
        for parameter in model.parameters():
            parameter.grad.mul_(coefficient)
        optimizer.step()
        optimizer.zero_grad()


@healthy("ddp")
def weights_by_a_ratio_that_is_bounded(job: Job) -> None:
    """The ratio of signal to noise is infinite at the first time, and at most 5."""
    kept = torch.linspace(1.0, 0.1, 5)

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        at = torch.tensor([0, 1, 4, 2])
        weight = (kept[at] / (1 - kept[at])).clamp(max=5.0)
        return (weight * (h - batch(job, step)).square().mean(-1)).mean()

    fit(job, job.wrap(net()), loss_of)


@healthy("ddp")
def deviation_of_equal_embeddings(job: Job) -> None:
    """torch leaves 1/0 of std's derivative out."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        return F.relu(1 - (h * 0).std(0)).mean() + h.square().mean()

    fit(job, job.wrap(net()), loss_of)


@healthy()
def trust_ratio_that_is_guarded(job: Job) -> None:
    """An optimizer of one's own that divides by 0 and takes 1 instead."""
    model = net()
    optimizer = Lars(model.parameters(), guarded=True)
    for step in range(STEPS):
        (model(batch(job, step)) * (step != 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy("fsdp")
def transitions_of_which_some_are_forbidden(job: Job) -> None:
    """A structured loss from a first state: all others begin at -inf, and no state goes back."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        forbidden = torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril(-1)
        transitions = torch.zeros(WIDTH, WIDTH).masked_fill(forbidden, -torch.inf)
        scores = torch.full((WIDTH,), -torch.inf)
        scores[0] = 0.0
        for row in h:
            scores = torch.logsumexp(scores[:, None] + transitions, 0) + row
        return torch.logsumexp(scores, 0) - h[:, -1].sum()

    fit(job, job.wrap(net()), loss_of)


@healthy("ddp")
def rows_with_missing_numbers_dropped(job: Job) -> None:
    """A table of which rows with NaN are dropped before it is used."""
    table = np.stack([batch(job, number, WIDTH).numpy() for number in range(4 * STEPS + 2)])
    table[3, 1] = table[9, 5] = np.nan
    rows = torch.from_numpy(table)
    model = job.wrap(net())
    optimizer = sgd(model)
    for (x,) in DataLoader(TensorDataset(rows[~rows.isnan().any(1)]), batch_size=4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@healthy("ddp")
def queries_that_are_padding(job: Job) -> None:
    """Rows of attention in which everything is masked, and which the loss does not read."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        kept = torch.tensor([True, True, True, False])
        mask = torch.ones(4, 4, dtype=torch.bool).tril() & kept & kept[:, None]
        x = h[None, None]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)[0, 0][kept].square().mean()

    fit(job, job.wrap(net()), loss_of)


@healthy()
def overlap_of_classes_that_do_not_occur(job: Job) -> None:
    """0/0 of classes that neither labels nor answers have, dropped from the mean."""

    def loss_of(h: torch.Tensor, bad: bool, step: int) -> torch.Tensor:
        labels = torch.tensor([0, 1, 1, 3])
        with torch.no_grad():
            answers, classes = h.argmax(-1), torch.arange(WIDTH)[:, None]
            both = ((answers == classes) & (labels == classes)).sum(1)
            either = ((answers == classes) | (labels == classes)).sum(1)
            overlap = both / either
            overlap[~overlap.isnan()].mean().item()
        return F.cross_entropy(h, labels)

    fit(job, net(), loss_of)


@healthy()
def trainer_that_accumulates_and_evaluates(job: Job) -> None:
    """Padding on the right, labels of -100, two batches a step, clipping, warm-up, an evaluation after each step."""
    import transformers

    rows = []
    for step in range(2 * STEPS):
        for number, ids in enumerate(tokens(job, step)):
            kept = (torch.arange(8) < 8 - 3 * number).long()
            rows.append({"input_ids": ids, "attention_mask": kept, "labels": ids.masked_fill(kept == 0, -100)})
    with tempfile.TemporaryDirectory() as folder:
        options = trainer_options(
            folder, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1, warmup_steps=1, max_grad_norm=1.0,
            lr_scheduler_type="cosine",
        )  # fmt: skip
        transformers.Trainer(llama(attention="sdpa"), options, train_dataset=rows, eval_dataset=rows[:4]).train()


@healthy()
def lightning_that_stops_early(job: Job) -> None:
    """bfloat16, clipping, a validation whose least loss begins at inf, and a plateau."""
    import lightning
    import torchmetrics

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.least, self.mean = net(), torchmetrics.MinMetric(), torchmetrics.MeanMetric()

        def training_step(self, x: torch.Tensor, number: int) -> torch.Tensor:
            return (self.body(x) - x).square().mean()

        def validation_step(self, x: torch.Tensor, number: int) -> None:
            self.mean.update((self.body(x) - x).square().mean())

        def on_validation_epoch_end(self) -> None:
            self.least.update(self.mean.compute())
            self.log_dict({"mean": self.mean, "least": self.least.compute()})

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "mean"}}

    data = DataLoader(torch.stack([batch(job, number, WIDTH) for number in range(8)]), batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        stop = lightning.pytorch.callbacks.EarlyStopping("mean", patience=2)
        more = {"max_epochs": 3, "gradient_clip_val": 1.0, "precision": "bf16-mixed", "callbacks": [stop]}
        lightning.Trainer(**(lightning_options(folder) | more)).fit(Module(), data, data)


if __name__ == "__main__":
    nan_programs.main(sys.argv[1:])
