"""What ranks run in the tests of buckets: small sharded models of every awkward kind, trained for some steps.

Each function runs on every rank of a gloo group and returns plain data.
"""

from __future__ import annotations

import datetime
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

WIDTH, BLOCKS, BATCH = 12, 6, 4
STEPS = 3


class Block(nn.Module):
    """A norm, two layers and a residual; 13 rows in the middle, so that shards are padded."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 13)
        self.down = nn.Linear(13, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks in a chain, used as `order` says (given per call), with an embedding and a head in the root's group."""

    def __init__(self, blocks: int = BLOCKS, save: str = "no", tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.save = save
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, order: Any = None, chain: bool = True) -> torch.Tensor:
        start = x = self.embed(tokens)
        for i in range(len(self.blocks)) if order is None else order:
            before = x if chain else start
            if self.save == "no":
                out = self.blocks[i](before)
            else:
                out = checkpoint(self.blocks[i], before, use_reentrant=self.save == "reentrant")
            x = out if chain else x + out
        return self.head(x).square().mean()


def shard(net: nn.Module, mesh: Any = None, each: Any = None, **options: Any) -> nn.Module:
    """fully_shard on every block and on the root."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for module in net.blocks if each is None else each:
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind.startswith("hsdp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return shard(Net(save="reentrant" if "reentrant" in kind else "no"), mesh)
    if kind in ("reentrant", "not reentrant", "reentrant twice"):
        return shard(Net(save=kind.removesuffix(" twice")))
    if kind == "tied":
        return shard(Net(tied=True))
    if kind == "frozen":
        net = Net()
        net.blocks[2].requires_grad_(False)
        net.blocks[4].norm.requires_grad_(False)
        return shard(net)
    if kind == "unused parameter":
        net = Net()
        net.blocks[1].spare = nn.Linear(3, 3)
        return shard(net)
    if kind == "kept":
        return shard(Net(), reshard_after_forward=False)
    if kind == "mixed":
        net = Net()
        for block in net.blocks:
            block.norm.float()
            fully_shard(block.norm, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return shard(net, mp_policy=policy)
    if kind == "accumulate apart":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return shard(Net(), mp_policy=policy)
    if kind == "two in flight":
        net = shard(Net())
        net.set_reduce_scatter_max_input_buffers(2)
        return net
    if kind == "bfloat16":
        return shard(Net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return shard(Net())


def tokens(step: int, part: int = 0) -> torch.Tensor:
    """Another batch for each step and rank."""
    seed = 1000 * step + 10 * part + dist.get_rank()
    return torch.randint(16, (BATCH, 5), generator=torch.Generator().manual_seed(seed))


def order_of(kind: str, step: int, shuffled: bool = False) -> Any:
    order = None
    if kind in ("twice", "reentrant twice"):
        order = [0, 1, 1, 2, 3, 0, 4, 5]
    elif kind == "unused":
        order = [0, 1, 2, 4, 5]
    elif kind == "random":
        shuffled = step > 0
    return random.Random(step).sample(order or range(BLOCKS), len(order or range(BLOCKS))) if shuffled else order


def backward(net: Any, kind: str, step: int, shuffled: bool = False) -> None:
    """One step's worth of backwards; `shuffled` in an order of blocks that is this step's, the same on all ranks."""
    order = order_of(kind, step, shuffled)
    if kind == "accumulate apart":
        # Some blocks then have sums in float32, others gradients in bfloat16. FSDP2 (2.13) wants each used once before.
        if not step:
            with torch.no_grad():
                net(tokens(step))
        net.set_requires_gradient_sync(False)
        net(tokens(step, 0), [0, 1, 2]).backward()
        net.set_requires_gradient_sync(True)
        net(tokens(step, 1), order).backward()
        return
    if kind.startswith("accumulate"):
        for part in range(3):
            net.set_requires_gradient_sync(part == 2)
            if kind == "accumulate kept":
                net.set_reshard_after_backward(part == 2)
            net(tokens(step, part), order).backward()
        return
    if kind.startswith("no all-reduce"):
        for part in range(2):
            net.set_requires_all_reduce(part == 1)
            net(tokens(step, part), [0, 1, 1, 0, 2, 3, 4, 5] if "twice" in kind else order).backward()
        return
    if kind == "two backwards":
        one, two = net(tokens(step, 0), order), net(tokens(step, 1), order)
        one.backward()
        two.backward()
        return
    if kind == "rank order":
        # Every rank its own order of equal blocks; parameters are there already, so that gathers do not mix.
        net.set_reshard_after_forward(False)
        for block in net.blocks:
            block.unshard()
        turn = dist.get_rank() + step
        net(tokens(step), [(i + turn) % BLOCKS if step else i for i in range(BLOCKS)], chain=False).backward()
        return
    net(tokens(step), order).backward()


def local(tensor: Any) -> list[float]:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().double().flatten().tolist()


def train(kind: str, steps: int = STEPS, buckets: dict[str, Any] | None = None, keep: bool = True) -> dict[str, Any]:
    """Train; gradients of every step and parameters at the end, and what the handle says."""
    net = build(kind.replace("no all-reduce", "hsdp"))
    handle = None
    if buckets is not None:
        from retrograd.fsdp import bucket_gradients

        handle = bucket_gradients(net, **buckets)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: dict[str, Any] = {"grads": [], "hashes": []}
    with counted() as sent, kept(net) as most:
        for step in range(steps):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                backward(net, kind, step)
            if keep:
                seen["grads"].append({n: None if p.grad is None else local(p.grad) for n, p in net.named_parameters()})
            optimiser.step()
            optimiser.zero_grad()
            if handle is not None:
                seen["hashes"].append(handle.hash())
    seen["params"] = {name: local(p) for name, p in net.named_parameters()} if keep else {}
    seen["sent"], seen["most kept"] = sent[0] / steps, most[0]
    if handle is not None:
        seen |= {"plan": handle.plan.to_json(), "report": handle.report(), "log": handle.log}
        handle.remove()
    return seen


def recorded(kind: str, buckets: dict[str, Any], still: int = 12, steps: int = 20) -> dict[str, Any]:
    """Buckets and recorder together; from step `still` on the blocks run in another random order at every step."""
    from retrograd.fsdp import bucket_gradients, record_collectives

    net = build(kind)
    handle = bucket_gradients(net, **buckets)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    hashes, problems, reductions = [], [], []
    with warnings.catch_warnings(), record_collectives(steps="manual", on_change="record") as log:
        warnings.simplefilter("ignore")
        for step in range(steps):
            backward(net, kind, step, step >= still)
            optimiser.step()
            optimiser.zero_grad()
            log.step()
            hashes.append(handle.hash())
            problems = list(log.problems) if step < still else problems
            reductions.append([c for c in log.collectives() if c.kind in ("reduce-scatter", "all-reduce")])
    handle.remove()
    return {
        "hashes": hashes, "plan": handle.plan.to_json(), "problems": problems, "recorded": [r.hash for r in log.steps],
        "reductions": reductions, "launches": handle.log[-1], "whole": log.hash(),
        "unnamed": [c.details for c in log.log().table if not c.modules],
    }  # fmt: skip


@contextmanager
def kept(net: Any) -> Iterator[list[int]]:
    """How many inputs of reductions FSDP2 and buckets kept at once, whenever buckets had made another."""
    from retrograd.compat.fsdp2 import param_groups
    from retrograd.fsdp.in_flight import InFlight

    most, root, methods = [0], param_groups.states_of(net)[0], {"add": InFlight.add, "follow": InFlight.follow}

    def after(name: str, new: int) -> None:
        def method(self: Any, *args: Any) -> None:
            methods[name](self, *args)
            most[0] = max(most[0], len(self.inputs) + param_groups.inputs_kept(root) + new)

        setattr(InFlight, name, method)

    after("add", 0)
    after("follow", 1)  # FSDP2 has not been told yet
    try:
        yield most
    finally:
        for name, method in methods.items():
            setattr(InFlight, name, method)


class counted:
    """Count reduce-scatters."""

    def __enter__(self) -> list[int]:
        self.count = [0]
        self.names = [name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)]
        self.before = {name: getattr(dist, name) for name in self.names}

        def counting(real: Any, *args: Any, **kwargs: Any) -> Any:
            self.count[0] += 1
            return real(*args, **kwargs)

        for name in self.names[:1]:
            setattr(dist, name, partial(counting, self.before[name]))
        return self.count

    def __exit__(self, *_: Any) -> None:
        for name, real in self.before.items():
            setattr(dist, name, real)


def told(kind: str, buckets: dict[str, Any], steps: int = 2) -> str:
    """How training ends: the error, as text; empty if it does not."""
    try:
        train(kind, steps, buckets)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def plan_by_rank(by_file: bool, folder: str) -> str:
    """Ranks run equal blocks in different orders in their first forward, or load different plans."""
    from retrograd.fsdp import BucketPlan, bucket_gradients

    net = build("plain")
    net.set_reshard_after_forward(False)
    for block in net.blocks:
        block.unshard()
    order: Any = range(BLOCKS) if by_file or not dist.get_rank() else reversed(range(BLOCKS))
    plan = None
    if by_file:
        handle = bucket_gradients(net, bucket_mb=0.004)
        net(tokens(0)).backward()
        groups = list(handle.plan.groups)
        handle.remove()
        net.zero_grad()
        if dist.get_rank():
            groups[1], groups[2] = groups[2], groups[1]
        plan = f"{folder}/plan{dist.get_rank()}.json"
        BucketPlan.of(groups, 2000).save(plan)
    handle = bucket_gradients(net, bucket_mb=0.004, plan=plan, timeout=20)
    try:
        net(tokens(0), order, chain=False).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def skip_by_rank(missing: str, verify_every: int = 1) -> Any:
    """One rank leaves block 3 out in the second step."""
    from retrograd.fsdp import bucket_gradients

    net = build("plain")
    net.set_reshard_after_forward(False)
    handle = bucket_gradients(net, bucket_mb=0.004, missing=missing, verify_every=verify_every, timeout=20)
    hashes = []
    for step in range(3):
        for module in (*net.blocks, net):
            module.unshard()
        order = [0, 1, 2, 4, 5] if step == 1 and dist.get_rank() else None
        try:
            net(tokens(step), order).backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        hashes.append(handle.hash())
    handle.remove()
    return hashes, {name: local(p.grad) for name, p in net.named_parameters()}


def fails_midway(reset: bool, early: bool = False) -> dict[str, Any]:
    """A backward raises in block 2; the step after it, in another order, is that of a run in which it never was."""
    from retrograd.fsdp import bucket_gradients

    seen = {}
    for fail in (True, False):
        net = build("plain")
        handle = bucket_gradients(net, bucket_mb=0.006)
        net(tokens(0)).backward()
        first = handle.hash()
        net.zero_grad()
        caught = []
        if fail:
            block = net.blocks[2]
            # Early: when the gradient of its output is known; else when some of its parameters have theirs.
            target = block if early else block.up
            hook = target.register_full_backward_pre_hook(_raise)
            try:
                net(tokens(1)).backward()
            except ZeroDivisionError as error:
                caught.append(str(error))
            hook.remove()
            net.zero_grad()
            if reset:
                net.reset_iter_state()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            net(tokens(2), order_of("random", 2)).backward()
        grads = {name: local(p.grad) for name, p in net.named_parameters()}
        words = [str(w.message) for w in warned if "exception" in str(w.message)]
        seen[fail] = {
            "grads": grads, "hash": handle.hash(), "first": first, "caught": caught, "words": words,
            "n": handle.abandoned,
        }  # fmt: skip
        handle.remove()
    return seen


def _raise(*_: Any) -> None:
    raise ZeroDivisionError("in the middle")


def order_varies(buckets: dict[str, Any]) -> str:
    """The plan expects the reverse of what happens."""
    from retrograd.fsdp import BucketPlan, bucket_gradients

    net = build("plain")
    handle = bucket_gradients(net, bucket_mb=0.004)
    net(tokens(0)).backward()
    early = [group for group in handle.plan.groups if not group.late]
    late = [group for group in handle.plan.groups if group.late]
    handle.remove()
    plan = BucketPlan.of([*reversed(early), *late], 2000)
    handle = bucket_gradients(net, plan=plan, **buckets)
    try:
        net(tokens(0)).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return handle.report()


def steps_of_orders(steps: int) -> dict[str, Any]:
    """Another random order of equal blocks at every step and on every rank; gradients against those of one process."""
    from retrograd.fsdp import bucket_gradients

    net = build("plain")
    net.set_reshard_after_forward(False)
    handle = bucket_gradients(net, bucket_mb=0.004)
    torch.manual_seed(0)
    alone = Net()
    hashes, worst = [], 0.0
    for step in range(steps):
        for module in (*net.blocks, net):
            module.unshard()
        orders = [
            random.Random(f"{step} {rank}").sample(range(BLOCKS), BLOCKS) if step else list(range(BLOCKS))
            for rank in range(dist.get_world_size())
        ]
        net(tokens(step), orders[dist.get_rank()], chain=False).backward()
        hashes.append(handle.hash())
        (alone(tokens(step), chain=False) / dist.get_world_size()).backward()
        for mine, whole in zip(net.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(whole.grad)
            worst = max(worst, float((mine.grad.full_tensor() - whole.grad).abs().max()))
        net.zero_grad()
        alone.zero_grad()
    return {"hashes": hashes, "worst": worst, "report": handle.report()}


def compiled(buckets: dict[str, Any] | None) -> dict[str, Any]:
    """Blocks compiled one by one: graph breaks, graphs and the order of reductions."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = [0]

    def backend(graph: Any, _: Any) -> Any:
        graphs[0] += 1
        return graph.forward

    torch.manual_seed(0)
    net = Net(3)
    for block in net.blocks:
        block.compile(backend=backend)
    shard(net)
    handle = None
    if buckets is not None:
        from retrograd.fsdp import bucket_gradients

        handle = bucket_gradients(net, **buckets)
    grads = []
    for step in range(4):
        net(tokens(step)).backward()
        grads.append({name: local(p.grad) for name, p in net.named_parameters()})
        net.zero_grad()
    counters = torch._dynamo.utils.counters
    seen = {"graphs": graphs[0], "breaks": sum(counters["graph_break"].values()), "grads": grads}
    if handle is not None:
        seen |= {"sequences": handle.sequences, "plan": handle.plan.describe()}
        handle.remove()
    return seen


def compiled_autograd() -> list[str]:
    """It is refused when buckets are made, in a forward, and in a backward it is switched on for alone."""
    from retrograd.fsdp import bucket_gradients

    said = []
    net = build("plain")
    with torch._dynamo.config.patch(compiled_autograd=True):
        said.append(_error(lambda: bucket_gradients(net)))
    handle = bucket_gradients(net)
    with torch._dynamo.config.patch(compiled_autograd=True):
        said.append(_error(lambda: net(tokens(0))))
    net = build("plain")
    handle.remove()
    handle = bucket_gradients(net)
    loss = net(tokens(0))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        said.append(_error(loss.backward))
    return said


def _error(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def absent(first: bool) -> str:
    """Rank 1 leaves a step without its backward: the first, or the second, in which ranks compare each bucket."""
    from retrograd.fsdp import bucket_gradients

    net = build("kept")
    # Each its own timeout: the connections of a group that has waited in vain are gone.
    handle = bucket_gradients(net, bucket_mb=0.004, timeout=61 if first else 62, verify_every=1)
    if not first:
        net(tokens(0)).backward()
    for module in (*net.blocks, net):
        module.unshard()
    loss = net(tokens(1))
    if dist.get_rank():
        return ""
    # Only where the other rank will never come is it right to wait for a short time, on a busy machine too.
    soon = datetime.timedelta(seconds=2)
    dist.distributed_c10d._set_pg_timeout(soon, handle._agreement._group)
    return _error(loss.backward)


def fails_for_good() -> str:
    """The forward after a backward that raised, where FSDP2 cannot be reset."""
    from retrograd.fsdp import bucket_gradients

    net = build("plain")
    bucket_gradients(net)
    net.blocks[2].register_full_backward_pre_hook(_raise)
    _error(net(tokens(1)).backward)
    return _error(lambda: net(tokens(2)))


def ordered(kind: str, bucket_mb: float) -> dict[str, Any]:
    """The ordered reduction, for bits that do not depend on buckets."""
    return train(kind, 3, {"bucket_mb": bucket_mb, "reduce": "ordered"})
