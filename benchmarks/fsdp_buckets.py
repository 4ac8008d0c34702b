"""Step time of a sharded model with buckets, beside FSDP2's own reductions, in one run that resolves 1 %.

    torchrun --nproc-per-node 2 benchmarks/fsdp_buckets.py --model transformer --pin --seconds 90
    torchrun --nproc-per-node 2 benchmarks/fsdp_buckets.py --model small --pin --sizes 5 25 100
    torchrun --nproc-per-node 2 benchmarks/fsdp_buckets.py --model llama --pin --seconds 20        (needs transformers)
    torchrun --nproc-per-node 2 benchmarks/fsdp_buckets.py --model tiny --device cpu --seconds 10     (tries the script)

Every step of a variant stands between two of FSDP2's, on the same model, optimiser and data; `FSDP2 again` is FSDP2
itself in a variant's place and says what the run resolves. How steps are paired and timed: interleaved.py. One step is
forward, backward and a fused AdamW.

Two tables for each number of tokens. The first has steps as training runs them, one after the other. In the second each
step starts on an idle device, which shows where its time goes: what the host needs to issue it; by how much more than
FSDP2's for each group; how long FSDP2's functions that reduce gradients, and what stands in their place, keep the host
for each group; how long the device is busy, with NCCL's kernels, which wait there for the other rank, and without. A
host that is far ahead of its device waits for it to take more, so its own time is that of few tokens.

Before anything is timed, gradients of every variant are compared with FSDP2's bit by bit at the same parameters, with
flash attention and torch's deterministic algorithms, without which its backward adds in any order (--bits as-is leaves
both off). Bucket sizes that make the same buckets are one variant.

Models: `transformer`, 18 layers of width 2048, 1.0 B parameters in bfloat16, one group a layer (100 MB), at 16384
tokens a rank, where the device is the limit, and at 512, where the host is; `small`, 200 groups of 1 MB. Real blocks,
of transformers: `llama`, Llama 3.2 1B, attention and MLP of a layer a group each (21 and 101 MB), norms and embeddings
the root's; `moe`, 12 layers of Qwen3 MoE, 32 experts of which a token takes 4, 0.8 B parameters, attention (10 MB) and
experts (101 MB) of a layer a group each. `tiny`, `tiny-llama`, `tiny-moe` try the script. All reduce in bfloat16, as
parameters are, or with --reduce-dtype float32 in that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from interleaved import Interleaver, Rounds, busy_ms, interval, pin, timed_calls
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from retrograd.compat.fsdp2 import names, param_groups
from retrograd.fsdp import bucket_gradients

TOKENS = {"transformer": (16384, 512), "small": (2048,), "llama": (8192, 512), "moe": (8192, 512)}
SIZES = {"llama": (25.0, 250.0), "moe": (25.0, 250.0)}  # MB
VOCABULARY = {"transformer": 32000, "small": 1000, "llama": 128256, "moe": 32000}
TINY_TOKENS, TINY_SIZES, TINY_VOCABULARY = (16,), (0.001, 0.004, 25.0), 64
LONGEST = 2048  # tokens of a sequence
BASE, AGAIN = "FSDP2", "FSDP2 again"
BEGAN = time.perf_counter()  # torch is imported
WARM, LOOKED_AT = 3, 9  # steps of each variant before rounds, and under a timer or the profiler


class Layer(nn.Module):
    """A transformer's layer, pre-norm, causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Chain(nn.Module):
    """Token embedding, parts, head; a part is what one group holds."""

    def __init__(self, parts: list[nn.Module], width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for part in self.parts:
            x = part(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class Small(nn.Module):
    """A residual layer of width * width parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(x))


class OfTransformers(nn.Module):
    """A causal language model of transformers; parts are its attentions and what comes after them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_config(config)
        self.parts = tuple(part for layer in self.model.model.layers for part in (layer.self_attn, layer.mlp))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


def of_transformers(name: str) -> nn.Module:
    from transformers import LlamaConfig, Qwen3MoeConfig

    if name.startswith("tiny-"):
        shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
        shape |= dict(num_key_value_heads=2, head_dim=8, vocab_size=TINY_VOCABULARY)
    elif name == "llama":
        shape = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32)
        shape |= dict(num_key_value_heads=8, head_dim=64, vocab_size=VOCABULARY[name], rope_theta=500000.0)
    else:
        shape = dict(hidden_size=2048, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=4)
        shape |= dict(head_dim=64, vocab_size=VOCABULARY[name])
    if name.endswith("llama"):
        return OfTransformers(LlamaConfig(**shape, tie_word_embeddings=True))
    experts = dict(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=256, decoder_sparse_step=1)
    return OfTransformers(Qwen3MoeConfig(**shape, **experts))


def build(name: str) -> nn.Module:
    """Small layers are 724 wide: 1 MB in bfloat16."""
    if name.endswith(("llama", "moe")):
        return of_transformers(name)
    if name == "transformer":
        return Chain([Layer(2048, 16) for _ in range(18)], 2048, VOCABULARY[name])
    if name == "small":
        return Chain([Small(724) for _ in range(200)], 724, VOCABULARY[name])
    return Chain([Small(32) for _ in range(8)], 32, TINY_VOCABULARY)


def shard(model: nn.Module, device: str, reduce_dtype: torch.dtype) -> nn.Module:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for part in model.parts:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


class Variants:
    """FSDP2 and buckets of several kinds on one model, one of them at a time.

    Args:
        model: sharded, and run backward by `backward` while a plan is made.
        names: `25` for a bucket's size in MB, `ordered 25` for reductions in rank order.

    Attributes:
        handles: by name, None for FSDP2; sizes that make the same buckets are one variant, `5 = 25`.
    """

    def __init__(self, model: nn.Module, names: list[str], backward: Callable[[], None]) -> None:
        self.handles: dict[str, Any] = dict.fromkeys((BASE, AGAIN))
        self._now: Any = None
        seen: dict[Any, str] = {}
        for name in names:
            kind, _, size = name.rpartition(" ")
            handle = bucket_gradients(model, bucket_mb=float(size), reduce=kind or "native")
            backward()
            model.zero_grad()
            handle.pause()
            twin = seen.get((kind, handle.plan.buckets))
            label = seen[kind, handle.plan.buckets] = name if twin is None else f"{twin} = {size}"
            self.handles[label] = handle if twin is None else self.handles.pop(twin)

    def switch(self, name: str) -> None:
        handle = self.handles[name]
        if handle is self._now:
            return
        if self._now is not None:
            self._now.pause()
        if handle is not None:
            handle.resume()
        self._now = handle


@contextmanager
def repeatable(on: bool) -> Iterator[None]:
    """The same bits from the same backward, also of flash attention."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(on)
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]) if on else nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def differing(model: nn.Module, tokens: torch.Tensor, variants: Variants) -> dict[str, int]:
    """Elements of gradients whose bits differ from FSDP2's, over all ranks; of FSDP2 itself too."""

    def gradients(name: str) -> list[torch.Tensor]:
        variants.switch(name)
        model(tokens).backward()
        found = [param.grad.to_local().clone() for param in model.parameters()]
        model.zero_grad()
        return found

    want, counts = gradients(BASE), {}
    for name in variants.handles:
        count = sum((a != b).sum() for a, b in zip(want, gradients(name), strict=True))
        dist.all_reduce(count)
        counts[name] = int(count)
    return counts


def reducing(model: nn.Module) -> list[tuple[Any, str]]:
    """Functions of FSDP2 in which gradients are reduced, and those that buckets put in their place."""
    states = param_groups.states_of(model)
    hooks = (names.BACKWARD_BEGINS, names.BACKWARD_ENDS, names.FORWARD_BEGINS)
    group = names.module("_fsdp_param_group").FSDPParamGroup
    return [(group, "post_backward"), *((state, name) for state in states for name in hooks)]


def look_at(
    model: nn.Module, step: Callable[[], None], variants: Variants, device: str, profile: bool
) -> dict[str, Any]:
    """Of each variant: peak memory, the host's time in reductions, the device's busy time."""
    found: dict[str, Any] = {}
    for name, handle in variants.handles.items():
        variants.switch(name)
        for _ in range(WARM):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        marks = [0.0]
        with timed_calls(reducing(model)) as spent:
            for _ in range(LOOKED_AT):
                step()
                marks.append(spent[0])
        reducing_ms = 1e3 * statistics.median(after - before for before, after in pairwise(marks))
        row = found[name] = {"reducing_ms": reducing_ms, "peak_mb": None, "busy_ms": None}
        row["buckets"] = len(handle.plan.buckets) if handle else None
        row["sequences"] = len(handle.sequences) if handle else None
        if device == "cuda":
            torch.cuda.synchronize()
            row["peak_mb"] = torch.cuda.max_memory_allocated() / 2**20
            row["busy_ms"] = busy_ms(step, LOOKED_AT) if profile else None
    return found


def measure(model: nn.Module, tokens: torch.Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """Everything about one number of tokens."""
    fused = {"fused": True} if args.device == "cuda" else {}
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, **fused)

    def step() -> None:
        model(tokens).backward()
        optimiser.step()
        optimiser.zero_grad()

    variants = Variants(model, args.variants, lambda: model(tokens).backward())
    progress("plans of buckets made")
    with repeatable(args.bits == "repeatable"):
        bits = {} if args.bits == "off" else differing(model, tokens, variants)
    progress("gradients compared")
    looks = look_at(model, step, variants, args.device, not args.brief)
    progress("every variant looked at")
    names = [name for name in variants.handles if name != BASE]
    rounds = Interleaver(step, variants.switch, BASE, names, args.device)
    free = rounds.run(0.6 * args.seconds, apart=False)
    apart = rounds.run(0.4 * args.seconds, apart=True)
    for handle in filter(None, variants.handles.values()):
        handle.remove()
    return {"bits": bits, "looks": looks, "free": free, "apart": apart, "groups": len(model.parts) + 1}


def progress(what: str) -> None:
    """Says on stderr how far rank 0 is, as a run that a limit ends has no table."""
    if dist.get_rank() == 0:
        print(f"{time.perf_counter() - BEGAN:.0f} s: {what}", file=sys.stderr, flush=True)


def cell(values: list[float], digits: int, unit: float = 1.0) -> str:
    """Median and its 95 % interval."""
    middle, low, high = (f"{unit * value:.{digits}f}" for value in interval(values))
    return f"{middle} ({low} to {high})"


def table(head: list[str], rows: list[list[Any]]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows])


def as_training(found: dict[str, Any]) -> str:
    rows, free = [], found["free"]
    for name in [name for name in found["looks"] if name != BASE]:
        ratios, look = torch.tensor(free.ratio[name], dtype=torch.float64), found["looks"][name]
        low, high = ratios.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
        peak = "-" if look["peak_mb"] is None else f"{look['peak_mb']:.0f}"
        rows.append(
            [name, look["buckets"] or found["groups"], f"{interval(free.step_ms[name])[0]:.2f}"]
            + [cell(free.ratio[name], 4), f"{low:.3f} to {high:.3f}", peak, found["bits"].get(name, "-")]
        )
    head = ["variant", "reductions", "ms a step", "ratio to FSDP2 (95 %)", "9 of 10 ratios", "peak, MB"]
    return table([*head, "elements that differ"], rows)


def where_time_goes(found: dict[str, Any]) -> str:
    rows, apart, groups = [], found["apart"], found["groups"]
    for name in [name for name in found["looks"] if name != BASE]:
        look = found["looks"][name]
        busy = [f"{ms:.2f}" for ms in look["busy_ms"]] if look["busy_ms"] else ["-", "-"]
        rows.append(
            [name, f"{interval(apart.step_ms[name])[0]:.2f}", cell(apart.ratio[name], 4)]
            + [f"{interval(apart.host_ms[name])[0]:.2f}", cell(apart.host_more_ms[name], 1, 1e3 / groups)]
            + [f"{1e3 * look['reducing_ms'] / groups:.1f}", *busy]
        )
    head = ["variant", "ms a step", "ratio to FSDP2 (95 %)", "host, ms", "host beside FSDP2, us a group (95 %)"]
    return table([*head, "reducing, us a group", "device busy, ms", "without NCCL, ms"], rows)


def verdict(found: dict[str, Any]) -> str:
    """What limits a step of FSDP2, as far as the profiler says."""
    step, look = interval(found["free"].step_ms[AGAIN])[0], found["looks"][BASE]
    if look["busy_ms"] is None:
        return "No kernels were recorded: what limits a step is not told."
    both, without = (100 * ms / step for ms in look["busy_ms"])
    limit = "the device" if without > 90 else "the host" if both < 90 else "the link, a waiting rank or the host"
    return f"FSDP2's step: the device is busy {both:.0f} % of it, {without:.0f} % without NCCL; the limit is {limit}."


def show(found: dict[str, Any], tokens: int, elements: int, args: argparse.Namespace) -> None:
    where = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(
        f"\n{args.model}, {elements / 1e6:.0f} M parameters in {found['groups']} groups, {tokens} tokens a rank, "
        f"{dist.get_world_size()} ranks on {where}, torch {torch.__version__}, reduce {args.reduce_dtype}, "
        f"{'cores of their own' if args.pin else 'any cores'}\n"
    )
    print(f"As training runs, {found['free'].count} rounds:\n\n{as_training(found)}\n\n{verdict(found)}\n")
    print(f"Each step from an idle device, {found['apart'].count} rounds:\n\n{where_time_goes(found)}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(*TOKENS, "tiny", "tiny-llama", "tiny-moe"), default="transformer")
    parser.add_argument("--tokens", type=int, nargs="+", help="a rank and step; several are reported one by one")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=60, help="of rounds, for each number of tokens")
    parser.add_argument("--sizes", type=float, nargs="+", help="of buckets, in MB")
    parser.add_argument("--ordered", type=float, nargs="*", default=[25.0], help="sizes with reductions in rank order")
    parser.add_argument("--reduce-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--pin", action="store_true", help="cores of its own for each rank")
    parser.add_argument("--bits", choices=("repeatable", "as-is", "off"), default="repeatable")
    parser.add_argument("--brief", action="store_true", help="without the profiler, which takes longer than the rounds")
    parser.add_argument("--json", type=Path, help="also write every round to this file")
    args = parser.parse_args()
    args.tokens = args.tokens or list(TOKENS.get(args.model, TINY_TOKENS))
    usual = TINY_SIZES if args.model.startswith("tiny") else SIZES.get(args.model, (5.0, 25.0, 100.0))
    sizes = args.sizes or usual
    args.variants = [*(f"{size:g}" for size in sizes), *(f"ordered {size:g}" for size in args.ordered)]
    return args


def main() -> None:
    args = arguments()
    if args.pin:
        pin(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as much as it takes anyway, and repeatable
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    progress("ranks met")
    torch.manual_seed(0)
    with torch.device(args.device):
        model = build(args.model)
    progress("model built")
    elements = sum(param.numel() for param in model.parameters())
    model = shard(model, args.device, getattr(torch, args.reduce_dtype))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    told = []
    for count in args.tokens:
        length = min(count, LONGEST)
        tokens = torch.randint(
            VOCABULARY.get(args.model, TINY_VOCABULARY), (count // length, length), generator=generator
        )
        found = measure(model, tokens.to(args.device), args)
        told.append({"tokens": count, **{k: vars(v) if isinstance(v, Rounds) else v for k, v in found.items()}})
        if dist.get_rank() == 0:
            show(found, count, elements, args)
    if dist.get_rank() == 0 and args.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        args.json.write_text(json.dumps({"settings": settings, "ranks": dist.get_world_size(), "found": told}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
