"""Recipes of docs/fsdp-recipes.md on two gloo ranks, healthy and with a usual mistake: `recipes.py RECIPE[:wrong] ...`.

Run by the machinery of faults.py, under `record_collectives()`; prints ends as JSON. In step 1 rank 1 does the mistake,
or rank 0 what all ranks have to do.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time

import faults
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

STEPS, WIDTH = 3, 8


def layers(count=2):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)))


def batch(rank):
    return torch.full((4, WIDTH), 1.0 + rank)


def loop(wrong, rank):
    """A loop as torchtitan's: FSDP2, checkpointed blocks, micro-batches, clipping; rank 0 alone logs the norm of a sharded weight."""
    from torch.utils.checkpoint import checkpoint

    model = layers()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(STEPS):
        for _ in range(2):
            checkpoint(model, batch(rank), use_reentrant=False).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if rank == 0 or not wrong or step != 1:
            model[0][0].weight.full_tensor().norm()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def trainer(wrong, rank):
    """transformers.Trainer, which wraps in DDP by accelerate; a callback of rank 0 alone averages the loss."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = layers()

        def forward(self, x, labels):
            y = self.body(x)
            return {"loss": (y - labels).square().mean(), "logits": y}

    class Average(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            if rank == 0 or not wrong or state.global_step != 2:
                dist.all_reduce(torch.ones(1))

    data = [{"x": torch.full((WIDTH,), float(k)), "labels": torch.zeros(WIDTH)} for k in range(32)]
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=2, report_to=[], save_strategy="no",
            disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        Trainer(Model(), options, train_dataset=data, callbacks=[Average()]).train()


def lightning(wrong, rank):
    """lightning.Trainer with DDP; rank 0 alone logs with sync_dist."""
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.body = layers()

        def training_step(self, x, number):
            loss = self.body(x).square().mean()
            if rank == 0 or not wrong or number != 1:
                self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.DataLoader(torch.ones(32, WIDTH), batch_size=2)
    pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=STEPS, logger=False, barebones=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=True,
    ).fit(Module(), data)  # fmt: skip


def zero(wrong, rank):
    """ZeroRedundancyOptimizer beside DDP; rank 1 skips an update, as where a loss that is not finite is looked at alone."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    for step in range(STEPS):
        model(batch(rank)).square().sum().backward()
        if not (wrong and rank == 1 and step == 1):
            optimizer.step()
        optimizer.zero_grad()


def pipeline(wrong, rank):
    """Stages of torch.distributed.pipelining under 1F1B; the data of rank 1, which has the targets, ends early."""
    from torch.distributed import pipelining

    stage = pipelining.PipelineStage(layers()[rank], rank, 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda y, target: (y - target).square().mean())
    optimizer = torch.optim.SGD(stage.submod.parameters(), 0.1)
    for step in range(STEPS):
        if wrong and rank == 1 and step == 1:
            raise StopIteration("the loader of the targets is empty")
        schedule.step(*([batch(0)] if rank == 0 else []), **({"target": batch(1)} if rank else {}))
        optimizer.step()
        optimizer.zero_grad()


RECIPES = {"loop": loop, "trainer": trainer, "lightning": lightning, "zero": zero, "pipeline": pipeline}
LIBRARIES = dict.fromkeys(RECIPES) | {"trainer": "transformers.trainer", "lightning": "lightning"}


def train(case, rank, folder):
    recipe, _, wrong = case.partition(":")
    (folder / "fault").write_text(repr(time.monotonic()))
    RECIPES[recipe](bool(wrong), rank)


def environment(rank):
    """As torchrun sets it; the process group is there already."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "recipes",
    }  # fmt: skip


def job(case, rank, folder, record, begun=faults.job):
    environment(rank)
    os.dup2(2, 1)  # libraries print
    begun(case, rank, folder, record)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for library in {LIBRARIES[case.partition(":")[0]] for case in sys.argv[1:]} - {None}:
        importlib.import_module(library)  # once, before ranks are forked: it takes seconds
    faults.train, faults.job = train, job
    sys.stdout.write(json.dumps({case: faults.run(case, record=True) for case in sys.argv[1:]}))
