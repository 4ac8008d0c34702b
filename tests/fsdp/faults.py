"""Jobs of two gloo ranks in which rank 1 errs in step 2: `faults.py [--record] CASE ...` prints their ends as JSON.

The processes are forked after torch is imported, with what FSDP imports when it is first used (`torch._dynamo`), which
makes a case cheap: 0.5 s of a core instead of 3. Without --record nothing of retrograd runs.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # else each process imports it
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

CASES = {
    "skip": "a block is left out",
    "twice": "a block runs twice",
    "swap": "equal blocks in another order",
    "unequal": "unequal blocks in another order",
    "last": "the last of four equal experts is unused",
    "hook": "a backward hook with an all-reduce",
    "shape": "another shape",
    "dtype": "another dtype",
    "groups": "another process group of the same ranks",
    "save": "rank 0 alone gathers a checkpoint",
    "batch": "a batch less, then the end",
    "raise": "an exception",
    "exit": "sys.exit",
    "kill": "SIGKILL",
    "abort": "abort, as of C++",
    "segfault": "SIGSEGV",
    "hang": "sleeps, until the process group's timeout",
}
_ORDERS = {
    "skip": (0, 1, 3),
    "twice": (0, 1, 1, 2, 3),
    "swap": (3, 1, 2, 0),
    "unequal": (0, 2, 1, 3),
    "last": (0, 1, 2),
}
_SIGNALS = {"kill": signal.SIGKILL, "abort": signal.SIGABRT, "segfault": signal.SIGSEGV}
_GRACE = 10  # seconds for the other rank to end after the first


class Net(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, n), nn.Linear(n, 16)) for n in sizes)
        self.head = nn.Linear(16, 4)

    def forward(self, x, order):
        return self.head(sum(self.experts[i](x) for i in order))


def build(case):
    torch.manual_seed(0)
    model = Net((16, 24, 32, 16) if case == "unequal" else (16, 16, 16, 16))
    for expert in model.experts:
        fully_shard(expert, reshard_after_forward=case != "swap")
    return fully_shard(model)


def err_before_backward(case):
    if case == "raise":
        raise ValueError("bad batch")
    if case == "exit":
        sys.exit(3)
    if case in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[case])
    if case == "hang":
        time.sleep(600)


def train(case, rank, folder):
    model, group = build(case), dist.new_group([0, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        wrong = step == 2 and rank == 1
        if wrong or (step == 2 and case == "save" and rank == 0):
            (folder / "fault").write_text(repr(time.monotonic()))
        if wrong and case == "batch":
            break
        if case == "swap":
            for expert in model.experts:
                expert.unshard()
        x = torch.full((2, 16), 1.0 + rank, requires_grad=True)
        y = model(x, _ORDERS.get(case if wrong else "", (0, 1, 2, 3)))
        if wrong and case == "hook":
            y.register_hook(lambda grad: dist.all_reduce(grad.clone()))
        if case in ("shape", "dtype"):
            shape, dtype = (3 if wrong and case == "shape" else 2), torch.float64 if wrong and case == "dtype" else None
            dist.all_reduce(torch.ones(shape, dtype=dtype))
        if step == 2 and case == "groups":
            dist.all_reduce(torch.ones(2), group=group if rank else None)
        if wrong:
            err_before_backward(case)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if case == "save" and step == 2 and rank == 0:
            model.head.weight.full_tensor()


def job(case, rank, folder, record):
    # Where the process group's own time must end a case, it is short.
    timeout = datetime.timedelta(seconds=4 if case in ("hang", "groups") else 60)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    recording = contextlib.nullcontext()
    if record:
        import retrograd.fsdp

        recording = retrograd.fsdp.record_collectives()
    with recording:
        train(case, rank, folder)
    dist.destroy_process_group()


def _child(case, rank, folder, record):
    error = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(error, 2)
    code = 0
    try:
        job(case, rank, folder, record)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stderr.flush()
    os._exit(code)


def run(case, record):
    """How a case ends: of each rank exit code, text, and how many seconds after the first end and the fault it ended."""
    with tempfile.TemporaryDirectory() as name:
        folder, left, ends = Path(name), {}, {}
        for rank in (0, 1):
            if not (pid := os.fork()):
                _child(case, rank, folder, record)
            left[pid] = rank
        limit = time.monotonic() + 120
        while left:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                grace = 0 if case == "hang" else _GRACE  # who sleeps for 600 s does not end by itself
                limit = min(limit, time.monotonic() + grace)
                ends[left.pop(pid)] = os.waitstatus_to_exitcode(status), time.monotonic()
            elif time.monotonic() > limit:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        first, mark = min(at for _, at in ends.values()), folder / "fault"
        fault = float(mark.read_text()) if mark.exists() else first
        texts = {rank: (folder / f"{rank}.txt").read_text(errors="replace") for rank in ends}
        return {
            r: {"code": ends[r][0], "seconds": ends[r][1] - first, "since": ends[r][1] - fault, "text": texts[r]}
            for r in sorted(ends)
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "--record" in sys.argv:
        from retrograd.fsdp import record_collectives  # noqa: F401  before the processes are forked
    cases = [argument for argument in sys.argv[1:] if argument in CASES or argument == "healthy"]
    sys.stdout.write(json.dumps({case: run(case, "--record" in sys.argv) for case in cases}))
