"""A training job for torchrun: what goes wrong in it is its first argument; with `buckets` behind it gradients share some."""

import os
import signal
import sys
import threading
import time

CASE, BUCKETS = sys.argv[1], "buckets" in sys.argv[2:]
if CASE == "die":
    # torchrun ends the other rank as soon as it sees that one has died. Here that one is to find out by itself, however
    # busy the machine is; the recorder, which comes with torch, leaves alone what a program has set.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x, order):
        return self.head(sum(self.blocks[i](x) for i in order))


def watchdog():
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "retrograd.fsdp.watchdog")
    return thread._target.__self__


def hurry(dog, last):
    """Let the time be up soon, but only from the next collective on: no step before may count as a stall."""
    while dog.last == last:
        time.sleep(0.05)
    dog.seconds = 4


dist.init_process_group("gloo")
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = CASE == "flag" and rank == 1
model = Net()
for block in model.blocks:
    fully_shard(block, reshard_after_forward=False)
fully_shard(model)
if BUCKETS:
    import retrograd.fsdp

    retrograd.fsdp.bucket_gradients(model, bucket_mb=0.001 if CASE == "plan" and rank == 1 else 0.003)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    wrong = step == 2 and rank == 1
    for block in model.blocks:
        block.unshard()
    order = (2, 1, 0) if wrong and CASE == "swap" else (0, 1) if wrong and CASE == "skip" else (0, 1, 2)
    x = torch.full((2, 16), 1.0 + rank, requires_grad=True)
    loss = model(x, order).sum()
    if step == 2 and CASE == "hang":
        dog = watchdog()
        if wrong:
            dog.seconds, dog.end = 1, lambda: None  # it says where this rank is, and leaves the end to the other
            time.sleep(600)
        threading.Thread(target=hurry, args=(dog, dog.last), daemon=True).start()
    if wrong and CASE == "raise":
        raise ValueError("bad batch")
    if step == 2 and CASE == "die":
        if wrong:
            store.wait(["in backward"])  # the other has all it needs of this rank up to there
            os._exit(7)
        store.set("in backward", "")
    if wrong and CASE == "nan":
        loss = loss * float("nan")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
