"""Training steps on one rank or several, sound and with a fault in one execution, as JSON of what repeating them says.

python tests/trace/repeated_steps.py        # or by torchrun; with a fault's name as the argument: that program alone
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from unittest.mock import patch

import torch
from torch import nn

from retrograd import trace
from retrograd.core.rank_store import RankStore
from retrograd.core.schema import plain
from retrograd.errors import ExecutionsDifferError

FAULT = {"name": "", "step": -1, "rank": -1}
STEP = {"now": 0}
_calls = count()


def now() -> str:
    """The fault of this step and rank, if there is one."""
    here = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return FAULT["name"] if (FAULT["step"], FAULT["rank"]) == (STEP["now"], here) else ""


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Tanh, of which one execution or each is off in the bits of one element, or leaves memory as it was."""
    y = 2 * torch.sigmoid(2 * x) - 1
    call, fault = next(_calls), now()
    if fault == "unwritten":
        out = torch.empty_like(y)
        half = y.shape[-1] // 2
        out[..., :half] = y[..., :half]
        return out
    if fault == "varies" or (fault == "second" and call == 1) or (fault == "once" and call == 0):
        y.view(-1)[3] += (1 + call) * 2**-20
    return y


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 8), nn.ReLU(inplace=True)
    )
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for child in model:
            if any(True for _ in child.parameters()):
                fully_shard(child)
        return fully_shard(model)
    return model


def train(kind: str, steps: int = 5, closure: bool = False) -> list[str]:
    """Losses, a random number and the parameters' sum behind them, exactly."""
    global _calls
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rank, seen = torch.distributed.get_rank() if kind else 0, []
    for step in range(steps):
        STEP["now"], _calls = step, count()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))

        def forward_backward(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x)[:, :4]).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return loss

        if now() == "drift":
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1
        if closure:
            loss = optimizer.step(forward_backward)
        else:
            loss = forward_backward()
            optimizer.step()
        seen += [loss.item().hex(), torch.rand(1).item().hex()]
    whole = (getattr(p, "_local_tensor", p).double().sum().item().hex() for p in model.parameters())
    return [*seen, *whole]


@contextmanager
def watched_posts(left: set[str]) -> Iterator[None]:
    """Keep the names under which this rank has posted something that it has not taken back."""
    post, forget = RankStore.post, RankStore.forget

    def posted(self: RankStore, name: str, value: str) -> None:
        left.add(name)
        post(self, name, value)

    def taken_back(self: RankStore, name: str) -> None:
        left.remove(name)
        forget(self, name)

    with patch.object(RankStore, "post", posted), patch.object(RankStore, "forget", taken_back):
        yield


def told(kind: str, fault: str, **options: object) -> dict[str, object]:
    """What repeating every second step says, and whether the program went on as it does alone."""
    FAULT.update(name="", step=-1, rank=-1)
    alone = train(kind, closure=bool(options.get("closure")))
    FAULT.update(name=fault, step=2, rank=1 if kind else 0)
    left = set[str]()
    with watched_posts(left), trace.repeat_steps(2, ranks=bool(kind)) as repeated:
        try:
            seen, raised = train(kind, closure=bool(options.get("closure"))), ""
        except ExecutionsDifferError as error:
            seen, raised = [], str(error)
    return {"outcome": plain(repeated.outcome), "alone": seen == alone, "raised": raised, "left": len(left)}


FAULTS: dict[str, tuple[str, ...]] = {
    "": ("", "once", "second", "varies", "unwritten"),
    "ddp": ("", "once", "drift"),
    "fsdp": ("", "once"),
}


def main(register: Callable[..., object]) -> None:
    register("tanh", tanh, "CPU")
    torch.set_num_threads(1)
    kinds = ("",)
    if torch.distributed.is_torchelastic_launched():
        torch.distributed.init_process_group("gloo")
        kinds = ("ddp", "fsdp")
    if len(sys.argv) > 1:  # a program that another records
        FAULT.update(name=sys.argv[1], step=2, rank=kinds != ("",))
        sys.stdout.write(f"{' '.join(train('ddp' if kinds != ('',) else ''))}\n")
    else:
        answers = {f"{kind} {fault}".strip(): told(kind, fault) for kind in kinds for fault in FAULTS[kind]}
        if kinds == ("",):
            answers["closure"] = told("", "", closure=True)
            answers["closure once"] = told("", "once", closure=True)
        sys.stdout.write(f"{json.dumps(answers)}\n")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    LIBRARY = torch.library.Library("aten", "IMPL")  # its kernels go when it does
    main(LIBRARY.impl)
