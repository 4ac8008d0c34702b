"""Forty causes of NaN and Inf, planted in a small network in step 1: `nan_causes.py WAY` runs them, the verdicts are JSON.

WAY is single, or ddp or fsdp of two forked gloo ranks, of which rank 1 errs; both where it is the optimizer's option.

A cause is a function of the network's output [4, 8] that returns a loss, or a change of data, optimizer or scaler. The
line that must be named ends in `#!`; `CAUSES` says operators and words of the reason.
"""

from __future__ import annotations

import datetime
import inspect
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer does, else in each rank that is forked
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

BAD_STEP = 1


@dataclass(frozen=True)
class Cause:
    make: Callable[..., torch.Tensor]
    operators: str  # any of these
    reason: str  # a regular expression
    line: int = 0
    file: str = ""
    options: dict[str, Any] = field(default_factory=dict)


CAUSES: dict[str, Cause] = {}


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    """Fused where it can be: DTensor of torch 2.13 knows no fused SGD."""
    own = list(parameters)
    return torch.optim.SGD(own, lr=0.01, fused=not any(hasattr(p, "placements") for p in own))


def cause(operators: str, reason: str, **options: Any) -> Callable[[Callable[..., torch.Tensor]], Any]:
    """Register a function; the line ending in #! is that of the cause."""

    def register(make: Callable[..., torch.Tensor]) -> Any:
        lines, first = inspect.getsourcelines(options.get("within", make))
        marked = [first + at for at, text in enumerate(lines) if text.rstrip().endswith("#!")]
        where = (marked[0], inspect.getfile(make)) if marked else (STEP_LINE, __file__)
        CAUSES[make.__name__] = Cause(make, operators, reason, where[0], Path(where[1]).name, options)
        return make

    return register


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def train(name: str, model: nn.Module, planted: bool, record: Callable[[], Any]) -> Any:
    """Three steps under a recorder, which is returned; the cause is in step 1."""
    planned = CAUSES[name]
    optimizer = planned.options.get("optimizer", lambda p: torch.optim.SGD(p, lr=0.01))(model.parameters())
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=2.0 ** planned.options["scale"]) if "scale" in planned.options else None
    )
    with record() as recorder:
        for step in range(3):
            bad = planted and (step == BAD_STEP or "zero" in planned.options)
            x = torch.linspace(-1, 1, 32).reshape(4, 8)
            with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
                h = model(x).float()
            loss = planned.make(h) if bad else h.square().mean()
            if bad and "lr" in planned.options:
                optimizer.param_groups[0]["lr"] = planned.options["lr"]
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    return recorder


STEP_LINE = next(
    inspect.getsourcelines(train)[1] + at
    for at, text in enumerate(inspect.getsource(train).splitlines())
    if text.strip() == "optimizer.step()"
)

# The page's fourteen, in other words.


@cause("log", r"log\(0\) is -inf")
def log_of_zero(h):
    return (h * 0).log().sum()  #!


@cause("log", "numbers below 0")
def log_of_negative(h):
    return (-h.abs() - 1).log().sum()  #!


@cause("div", "division by zero.*derivative of sqrt")
def root_at_zero(h):
    return (h - h.detach()).sqrt().sum()  #!


@cause("div", "division by zero")
def division_by_zero(h):
    return (h / (h.detach() * 0)).sum()  #!


@cause("div", "0/0")
def zero_by_zero(h):
    return ((h * 0) / (h.detach() * 0)).sum()  #!


@cause("exp", "exp overflows float32")
def exponential(h):
    return (h * 0 + 100).exp().sum()  #!


@cause("_softmax", "-inf only")
def attention_masked_whole(h):
    scores = (h @ h.T).masked_fill(torch.ones(4, 4, dtype=torch.bool), -math.inf)
    return (scores.softmax(-1) @ h).sum()  #!


@cause("native_layer_norm", "eps|0 times inf|constant|variance")
def layer_norm_without_eps(h):
    return F.layer_norm(h * 0 + 1, (8,), eps=0.0).sum()  #!


@cause("var var_mean std", "one element")
def variance_of_one(h):
    return h[:, :1].var(dim=1).sum()  #!


@cause("mean", "no elements")
def mean_of_nothing(h):
    return h[:0].mean()  #!


@cause("nll_loss_forward", "every target is the ignored")
def all_targets_ignored(h):
    return F.cross_entropy(h, torch.full((4,), -100))  #!


@cause("_to_copy", "cast to float16")
def cast_to_half(h):
    return (h * 0 + 1e6).half().float().sum()  #!


@cause("mm", "overflow.*65504")
def product_in_half(h):
    wide = (h * 0 + 300).half()
    return (wide @ wide.T).float().sum()  #!


@cause("pow", "negative numbers to the power")
def root_of_negative(h):
    return ((-h.abs() - 1) ** 0.5).sum()  #!


# Attention and masks.


@cause("sub", "inf - inf")
def normalised_scores_masked_whole(h):
    scores = (h @ h.T).masked_fill(torch.ones(4, 4, dtype=torch.bool), -math.inf)
    return (scores - scores.amax(-1, keepdim=True)).exp().sum()  #!


@cause("mul", "0 times inf")
def mask_by_product(h):
    keep = torch.ones(4, 8).tril()
    return (h * (keep * -math.inf)).sum()  #!


@cause("div", "0/0|division by zero")
def branch_not_taken(h):
    z = h * 0
    return torch.where(z > 0, z.log(), z).sum()  #!


@cause("log", r"log\(0\) is -inf")
def entropy(h):
    p = torch.relu(h - 100)
    return (p * p.log()).sum()  #!


@cause("div", "0/0")
def cosine_of_zero(h):
    z = h * 0
    return ((z * z).sum(-1) / (z.norm(dim=-1) * z.norm(dim=-1))).sum()  #!


@cause("rsqrt", r"rsqrt\(0\)")
def norm_without_eps(h):
    z = h * 0
    return (z * z.square().mean(-1, keepdim=True).rsqrt()).sum()  #!


@cause("reciprocal", r"reciprocal\(0\)")
def inverse_length(h):
    return (h * 0).reciprocal().sum()  #!


# Ranges.


@cause("acos", "acos outside")
def angle(h):
    return (h.abs() + 2).acos().sum()  #!


@cause("log1p", r"log1p\(-1\) is -inf")
def log_of_one_more(h):
    return (h * 0 - 1).log1p().sum()  #!


@cause("atanh", "atanh")
def inverse_tanh(h):
    return (h * 0 + 1).atanh().sum()  #!


@cause("remainder fmod", "0|zero")
def phase(h):
    return (h % (h.detach() * 0)).sum()  #!


@cause("pow mul", "0 to the power|derivative of pow")
def fractional_power_at_zero(h):
    return ((h - h.detach()) ** 0.5).sum()  #!


@cause("cumprod", "overflow")
def running_product(h):
    return (h * 0 + 1e20).cumprod(1).sum()  #!


@cause("pow", "overflow.*bfloat16")
def square_in_bfloat16(h):
    return (h * 0 + 1e20).bfloat16().square().float().sum()  #!


@cause("sum", "overflow.*65504")
def sum_in_half(h):
    return (h * 0 + 60000).half().sum().float()  #!


@cause("mm addmm linear", "overflow.*65504")
def layer_under_autocast(h):
    with torch.autocast("cpu", torch.float16):
        return (F.linear(h * 0 + 300, torch.full((8, 8), 300.0))).float().sum()  #!


@cause("mul", "infinite in float32|overflow")
def loss_scaled_too_far(h):
    return h.square().mean() * 1e30 * 1e30  #!


# Indices and data.


@cause("embedding index_select index gather", "no recorded operator made|already had", outside=True)
def row_of_padding(h):
    table = torch.frombuffer(bytearray(b"\0\0\xc0\x7f" * 80), dtype=torch.float32).reshape(10, 8)
    return (h * F.embedding(torch.tensor([0, 1, 2, 9]), table)).sum()  #!


@cause("add sub mul", "no recorded operator made|already had", outside=True)
def nan_in_the_batch(h):
    batch = torch.frombuffer(bytearray(b"\0\0\x80\x3f" * 31 + b"\0\0\xc0\x7f"), dtype=torch.float32).reshape(4, 8)
    return (h + batch).sum()  #!


@cause("index gather", "no recorded operator made|already had", outside=True)
def gather_of_a_bad_index(h):
    weights = torch.frombuffer(bytearray(b"\0\0\x80\x3f" * 7 + b"\0\0\x80\x7f"), dtype=torch.float32)
    return (h * weights[torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])]).sum()  #!


@cause("mse_loss sub", "no recorded operator made|already had", outside=True)
def nan_in_the_target(h):
    target = torch.frombuffer(bytearray(b"\0\0\xc0\x7f" * 32), dtype=torch.float32).reshape(4, 8)
    return F.mse_loss(h, target)  #!


# Optimizers, schedulers, loss scaling.


@cause("add _foreach_add", "infinite|inf", lr=math.inf)
def infinite_learning_rate(h):
    return h.square().mean()


@cause("_fused_sgd add", "learning rate|inf", lr=math.inf, optimizer=_sgd)
def infinite_learning_rate_fused(h):
    return h.square().mean()


@cause("addcdiv _foreach_addcdiv", "0/0", optimizer=lambda p: torch.optim.Adam(p, lr=0.01, eps=0.0), zero=True)
def adam_without_eps(h):
    return (h * 0).sum()


@cause("_fused_adam", "eps|0/0", optimizer=lambda p: torch.optim.Adam(p, lr=0.01, eps=0.0, fused=True), zero=True)
def fused_adam_without_eps(h):
    return (h * 0).sum()


@cause("log", r"log\(0\) is -inf", scale=30)
def real_one_beside_loss_scaling(h):
    return (h * 0).log().sum()  #!


def _wrapped(way: str) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if way == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.body)
        return fully_shard(model)
    return model


def _traces(way: str, folder: Path, rank: int) -> None:
    from retrograd.trace import record

    for name, planned in CAUSES.items():
        planted = way == "single" or rank == 1 or "zero" in planned.options
        train(name, _wrapped(way), planted, lambda name=name: record(out=folder / f"{name}.trace", engine="python"))


def _rank(way: str, folder: Path, rank: int) -> None:
    store, timeout = dist.FileStore(str(folder / "store"), 2), datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    _traces(way, folder, rank)
    dist.destroy_process_group()


def run(way: str) -> dict[str, dict[str, Any]]:
    """The verdict of each cause in one way, and whether operator, line, reason and rank are right."""
    from retrograd.trace import load
    from retrograd.trace.diffing.identity import base_name
    from retrograd.trace.rank_provenance import rank_provenance

    answers: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if way == "single":
            _traces(way, folder, 0)
        else:
            _fork(way, folder)
        for cause_name, planned in CAUSES.items():
            verdict = rank_provenance([load(path) for path in sorted(folder.glob(f"{cause_name}.*trace"))])
            op = verdict.op
            right = {
                "operator": op is not None and base_name(op.name) in planned.operators.split(),
                "line": op is not None
                and any(
                    place.endswith(f"{planned.file}:{planned.line}") for place in (op.place, op.inside.split(": ")[0])
                ),
                "reason": bool(re.search(planned.reason, verdict.reason)),
                "rank": verdict.rank == (0 if way == "single" or "zero" in planned.options else 1),
                "step": op is not None and op.step == (0 if "zero" in planned.options else BAD_STEP),
            }
            told = {} if op is None else {"op": op.name, "place": op.place, "step": op.step, "node": op.node}
            answers[cause_name] = {"right": right, **told, "reason": verdict.reason, "rank": verdict.rank}
    return answers


def _fork(way: str, folder: Path) -> None:
    children = []
    for rank in (0, 1):
        if not (child := os.fork()):
            try:
                _rank(way, folder, rank)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        children.append(child)
    if codes := [code for child in children if (code := os.waitpid(child, 0)[1])]:
        raise RuntimeError(f"ranks ended with {codes}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "poison" in sys.argv:
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty gives with NaN
    sys.stdout.write(json.dumps(run(sys.argv[1]), indent=1))
