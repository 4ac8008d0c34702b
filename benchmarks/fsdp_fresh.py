"""Fresh faults and healthy programs, of models of other libraries on two gloo ranks: who is named, and what is stopped.

    python benchmarks/fsdp_fresh.py > fresh.md            all; needs transformers, accelerate, lightning and timm; the tables
                                                          stand at the end of benchmarks/results/fsdp-faults.md
    python benchmarks/fsdp_fresh.py skipped_layer ...     some, with what each rank printed

Written before any of them had run, and kept as they were. Of a fault rank 1 (or rank 0, where it says so) errs in step 2
of 5. It is told if a rank's words name the rank, the module or collective, and the line; of a healthy program nothing
may be said and no rank may be stopped.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fsdp"))

import faults
import recipes

STEPS, WRONG = 5, 2
LENGTH, VOCABULARY = 8, 64
Program = Callable[[int, bool], None]


def images(rank: int, size: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(rank))


def tokens(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(2, VOCABULARY, (2, LENGTH), generator=generator)


def vit() -> nn.Module:
    import timm

    torch.manual_seed(0)
    shape = dict(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=4, drop_path_rate=0.5)
    return timm.create_model("vit_tiny_patch16_224", **shape)


def resnet() -> nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model("resnet10t", num_classes=4)


def causal(kind: str) -> nn.Module:
    import transformers

    shape = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCABULARY
    )
    shape |= dict(num_key_value_heads=4, max_position_embeddings=32)
    if kind == "Qwen3Moe":
        shape |= dict(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, output_router_logits=True, head_dim=8
        )
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**shape)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    shape = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCABULARY)
    return T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))


def sharded(model: nn.Module, blocks: Any, **options: Any) -> nn.Module:
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def end_of_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


# Faults


def skipped_layer(rank: int, wrong: bool) -> None:
    """Qwen3 MoE, FSDP2: rank 1 leaves decoder layer 1 out, as LayerDrop with a generator of its own."""
    model = causal("Qwen3Moe")
    sharded(model, model.model.layers)
    optimizer, layers = optimizer_of(model), list(model.model.layers)
    for step in range(STEPS):
        out = wrong and rank == 1 and step == WRONG
        model.model.config.num_hidden_layers = 2 if out else 3
        model.model.layers = nn.ModuleList(layers[:1] + layers[2:] if out else layers)
        loss_of(model, tokens(rank, step)).backward()
        end_of_step(optimizer)


def frozen_block(rank: int, wrong: bool) -> None:
    """timm ViT, DDP: rank 1 freezes a block for a step, so its buckets are never full."""
    model = DistributedDataParallel(vit())
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        model.module.blocks[1].requires_grad_(not (wrong and rank == 1 and step == WRONG))
        model(images(rank)).square().sum().backward()
        end_of_step(optimizer)


def batch_norm_of_rank_0(rank: int, wrong: bool) -> None:
    """timm ResNet, DDP: rank 0 alone averages the statistics of its norms (timm.utils.distribute_bn)."""
    from timm.utils import distribute_bn

    model = DistributedDataParallel(resnet())
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        model(images(rank)).square().sum().backward()
        end_of_step(optimizer)
        if step == WRONG and (rank == 0 or not wrong):
            distribute_bn(model, 2, reduce=True)


def encoder_twice(rank: int, wrong: bool) -> None:
    """T5, FSDP2: rank 1 runs the encoder once more, to look at its output."""
    model = t5()
    sharded(model, [*model.encoder.block, *model.decoder.block])
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        loss = loss_of(model, tokens(rank, step))
        if wrong and rank == 1 and step == WRONG:
            with torch.no_grad():
                model.encoder(input_ids=tokens(rank))
        loss.backward()
        end_of_step(optimizer)


def micro_batch_less(rank: int, wrong: bool) -> None:
    """Llama, FSDP2 with three micro-batches: rank 1 has one less, and does not know it."""
    model = causal("Llama")
    sharded(model, model.model.layers)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        count = 2 if wrong and rank == 1 and step == WRONG else 3
        for number in range(count):
            model.set_requires_gradient_sync(number == count - 1)
            loss_of(model, tokens(rank, 10 * step + number)).backward()
        end_of_step(optimizer)


def pipeline_of_other_size(rank: int, wrong: bool) -> None:
    """timm ViT in two stages, GPipe: rank 1 cuts its targets into two micro-batches where rank 0 has four."""
    run, optimizer = stages(rank, 2 if wrong and rank == 1 else 4)
    for _ in range(STEPS):
        stage_step(run, rank)
        end_of_step(optimizer)


class Contiguous(nn.Module):
    """As gloo wants a message; patches are a transposed image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous()


def stages(rank: int, count: int) -> tuple[Any, torch.optim.Optimizer]:
    from torch.distributed import pipelining

    model = vit()
    first = nn.Sequential(model.patch_embed, model.blocks[0], Contiguous())
    last = nn.Sequential(model.blocks[1], model.blocks[2], model.norm)
    stage = pipelining.PipelineStage(last if rank else first, rank, 2, torch.device("cpu"))
    run = pipelining.ScheduleGPipe(stage, n_microbatches=count, loss_fn=lambda y, target: (y - target).square().mean())
    return run, optimizer_of(stage.submod)


def stage_step(run: Any, rank: int) -> None:
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    run.step(*([] if rank else [x]), **({"target": torch.zeros(8, 16, 32)} if rank else {}))


def clipped_where_large(rank: int, wrong: bool) -> None:
    """Llama, FSDP2: rank 1 finds its loss small and does not clip."""
    model = causal("Llama")
    sharded(model, model.model.layers)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        loss_of(model, tokens(rank, step)).backward()
        if not (wrong and rank == 1 and step == WRONG):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        end_of_step(optimizer)


def state_of_rank_0(rank: int, wrong: bool) -> None:
    """T5, FSDP2: rank 0 alone asks for the whole state, after the update."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = t5()
    sharded(model, [*model.encoder.block, *model.decoder.block])
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        loss_of(model, tokens(rank, step)).backward()
        end_of_step(optimizer)
        if step == WRONG and (rank == 0 or not wrong):
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def image_of_other_size(rank: int, wrong: bool) -> None:
    """timm ViT, FSDP2: rank 1 has an image of another size, which timm refuses."""
    model = vit()
    sharded(model, model.blocks)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        model(images(rank, 40 if wrong and rank == 1 and step == WRONG else 32)).square().sum().backward()
        end_of_step(optimizer)


def autocast_of_rank_1(rank: int, wrong: bool) -> None:
    """Llama, DDP: rank 1 runs under autocast, from the first step on."""
    model = DistributedDataParallel(causal("Llama"))
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=wrong and rank == 1):
            loss = loss_of(model, tokens(rank, step))
        loss.backward()
        end_of_step(optimizer)


# Of each: rank, module or collective, and line, as regular expressions over what both ranks printed.
FAULTS: dict[str, tuple[Program, tuple[str, str, str]]] = {
    "skipped_layer": (skipped_layer, (r"rank 1 departs", r"model\.layers\.1", r"fsdp_fresh\.py:\d+ \((skipped_layer|loss_of)")),
    "frozen_block": (frozen_block, (r"rank 1 (departs|is after|is at)", r"blocks\.1", r"fsdp_fresh\.py:\d+ \(frozen_block")),
    "batch_norm_of_rank_0": (
        batch_norm_of_rank_0,
        (r"rank 0 departs", r"(all-reduce|reduces) [^;]*(running_mean|an unnamed tensor)", r"(fsdp_fresh\.py:\d+ \(batch_norm|distributed\.py:\d+ \(distribute_bn)"),
    ),
    "encoder_twice": (encoder_twice, (r"rank 1 departs", r"encoder", r"fsdp_fresh\.py:\d+ \(encoder_twice")),
    "micro_batch_less": (micro_batch_less, (r"rank 1 departs", r"model\.layers|\(root\)", r"fsdp_fresh\.py:\d+ \((micro_batch_less|loss_of)")),
    "pipeline_of_other_size": (
        pipeline_of_other_size,
        (r"rank 1 (receives|is after|raised)", r"message", r"fsdp_fresh\.py:\d+ \(stage_step"),
    ),
    "clipped_where_large": (clipped_where_large, (r"rank 1 (departs|is at the end)", r"all-reduce", r"fsdp_fresh\.py:\d+ \(clipped_where_large")),
    "state_of_rank_0": (state_of_rank_0, (r"rank 0 departs", r"shared|encoder|decoder|an unnamed tensor", r"fsdp_fresh\.py:\d+ \(state_of_rank_0")),
    "image_of_other_size": (image_of_other_size, (r"rank 1 raised AssertionError", r"\(root\)|blocks", r"fsdp_fresh\.py:\d+ \(image_of_other_size")),
    "autocast_of_rank_1": (autocast_of_rank_1, (r"rank 1", r"autocast", r"ranks differ before the first update")),
}  # fmt: skip


# Healthy programs


def moe_checkpointed(rank: int, wrong: bool) -> None:
    """Qwen3 MoE, FSDP2, activations recomputed by transformers, a router's loss, clipping, a schedule."""
    from transformers import get_cosine_schedule_with_warmup

    model = causal("Qwen3Moe")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    sharded(model, model.model.layers, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = optimizer_of(model)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, STEPS)
    for step in range(STEPS):
        loss_of(model, tokens(rank, step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        end_of_step(optimizer)
        schedule.step()


def vit_with_average(rank: int, wrong: bool) -> None:
    """timm ViT, DDP: stochastic depth of each rank's own, accumulation without synchronisation, timm's moving average."""
    from timm.utils import ModelEmaV3

    model = DistributedDataParallel(vit(), find_unused_parameters=True)
    torch.manual_seed(rank)
    optimizer, average = optimizer_of(model), ModelEmaV3(model.module)
    for _ in range(STEPS):
        with model.no_sync():
            model(images(rank)).square().sum().backward()
        model(images(rank)).square().sum().backward()
        end_of_step(optimizer)
        average.update(model.module)


def t5_evaluated(rank: int, wrong: bool) -> None:
    """T5, FSDP2: every second step a validation of both ranks, whose loss is averaged."""
    model = t5()
    sharded(model, [*model.encoder.block, *model.decoder.block])
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        loss_of(model, tokens(rank, step)).backward()
        end_of_step(optimizer)
        if step % 2:
            with torch.no_grad():
                loss = loss_of(model.eval(), tokens(rank))
            dist.all_reduce(loss)
            model.train()


def vit_in_stages(rank: int, wrong: bool) -> None:
    """timm ViT in two stages, GPipe."""
    run, optimizer = stages(rank, 4)
    for _ in range(STEPS):
        stage_step(run, rank)
        end_of_step(optimizer)


def accelerated(rank: int, wrong: bool) -> None:
    """Llama by accelerate: accumulation, metrics gathered every second step."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = causal("Llama")
    data = torch.utils.data.DataLoader([tokens(n)[0] for n in range(32)], batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer_of(model), data)
    for number, batch in enumerate(data):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if number % 2:
            accelerator.gather_for_metrics(loss.detach())


def validated_by_lightning(rank: int, wrong: bool) -> None:
    """timm ResNet by Lightning: validation each epoch, synchronised logs, checkpoints, early stopping."""
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = resnet()

        def training_step(self, x: torch.Tensor, number: int) -> torch.Tensor:
            return self.body(x).square().mean()

        def validation_step(self, x: torch.Tensor, number: int) -> None:
            self.log("loss", self.body(x).square().mean(), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    data = torch.utils.data.DataLoader(torch.ones(8, 3, 32, 32), batch_size=2)
    watch = [pl.pytorch.callbacks.EarlyStopping("loss"), pl.pytorch.callbacks.ModelCheckpoint(monitor="loss")]
    with tempfile.TemporaryDirectory() as folder:
        pl.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, callbacks=watch,
            default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        ).fit(Module(), data, data)  # fmt: skip


def tensor_parallel(rank: int, wrong: bool) -> None:
    """Llama, its MLPs over both ranks by DTensor."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = causal("Llama"), dist.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        parallelize_module(layer.mlp, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(STEPS):
        loss_of(model, tokens(0, step)).backward()
        end_of_step(optimizer)


def power_sgd(rank: int, wrong: bool) -> None:
    """timm ViT, DDP with PowerSGD, which begins at its third step."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = DistributedDataParallel(vit())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3, matrix_approximation_rank=1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = optimizer_of(model)
    for _ in range(2 * STEPS):
        model(images(rank)).square().sum().backward()
        end_of_step(optimizer)


def averaged_now_and_then(rank: int, wrong: bool) -> None:
    """timm ViT without DDP: parameters are averaged every third step (local SGD)."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = vit()
    optimizer, averager = optimizer_of(model), PeriodicModelAverager(period=3, warmup_steps=2)
    for _ in range(2 * STEPS):
        model(images(rank)).square().sum().backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
        optimizer.zero_grad()


def joined(rank: int, wrong: bool) -> None:
    """timm ResNet, DDP under Join: rank 1 has two batches less, and shadows the collectives of the other."""
    model = DistributedDataParallel(resnet())
    optimizer = optimizer_of(model)
    with model.join():
        for _ in range(STEPS - 2 * rank):
            model(images(rank)).square().sum().backward()
            end_of_step(optimizer)


def compiled(rank: int, wrong: bool) -> None:
    """Llama, FSDP2, each decoder layer compiled (aot_eager)."""
    model = causal("Llama")
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    sharded(model, model.model.layers)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        loss_of(model, tokens(rank, step)).backward()
        end_of_step(optimizer)


HEALTHY: dict[str, Program] = {
    program.__name__: program
    for program in (
        moe_checkpointed, vit_with_average, t5_evaluated, vit_in_stages, accelerated, validated_by_lightning, tensor_parallel,
        power_sgd, averaged_now_and_then, joined, compiled,
    )
}  # fmt: skip


def train(case: str, rank: int, folder: Path) -> None:
    (folder / "fault").write_text(repr(time.monotonic()))
    if case in FAULTS:
        FAULTS[case][0](rank, True)
    else:
        HEALTHY[case](rank, False)


def import_libraries() -> None:
    """Once, before ranks are forked."""
    # torchvision of an index for other hardware than torch's has no operators: timm asks for names alone.
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import accelerate
    import lightning
    import timm
    import transformers
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen3_moe.modeling_qwen3_moe
    import transformers.models.t5.modeling_t5
    import transformers.trainer

    versions = ", ".join(f"{m.__name__} {m.__version__}" for m in (torch, transformers, timm, accelerate, lightning))
    print(f"{versions}; two gloo ranks\n", flush=True)


def words(ends: dict[int, dict[str, Any]]) -> str:
    """What the recorder said on any rank."""
    text = "\n".join(end["text"] for end in ends.values())
    lines = re.findall(
        r"(?:RanksDifferError: |VerificationError: |retrograd\.fsdp: |StepChangedWarning: |ranks differ ).*", text
    )
    return "\n".join(dict.fromkeys(lines))


def fault_row(case: str) -> str:
    ends = faults.run(case, record=True)
    said = words(ends)
    named = [bool(re.search(pattern, said)) for pattern in FAULTS[case][1]]
    longest = max(
        said.splitlines(),
        key=lambda line: (len(re.findall("departs|raised|autocast", line)), len(line)),
        default="nothing",
    )
    cells = [FAULTS[case][0].__doc__ or "", *("yes" if right else "**no**" for right in named)]
    cells += [f"{max(end['since'] for end in ends.values()):.1f}", longest[:400].replace("|", "\\|")]
    return f"| {' | '.join(cells)} |"


def healthy_row(case: str) -> str:
    ends = faults.run(case, record=True)
    stopped = sum(end["code"] != 0 for end in ends.values())
    cells = [HEALTHY[case].__doc__ or "", str(stopped), words(ends)[:400].replace("|", "\\|").replace("\n", " / ")]
    return f"| {' | '.join(cells)} |"


def main(cases: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    import_libraries()
    faults.train, faults.job = train, recipes.job
    for case in cases:
        ends = faults.run(case, record=True)
        for rank, end in ends.items():
            print(f"{case}, rank {rank}: exit {end['code']}\n{end['text']}", flush=True)
    if cases:
        return
    print("| fault | rank | module | line | s | |\n|" + " --- |" * 6, flush=True)
    for case in FAULTS:
        print(fault_row(case), flush=True)
    print("\n| healthy program | stopped ranks | words |\n|" + " --- |" * 3, flush=True)
    for case in HEALTHY:
        print(healthy_row(case), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
