"""The bucket repair, on a fake of torch_xla 2.9's FSDP that keeps its bookkeeping and drops devices and sharding.

The fake follows xla_fully_sharded_data_parallel.py: a bucket for each module, flushed when full or when the counter of
hooks is 0 inside a hook; every forward sets the counter to 0 and adds 1 for each hook it registers; a hook stays until the
end of backward; the root queues the end of backward in its pre-backward hook. One rank: reducing is the identity.
"""

from __future__ import annotations

import functools

import pytest
import torch

from retrograd.compat.torch_xla import left_in_buckets
from retrograd.errors import UsageError
from retrograd.fsdp.xla import flush_before_end_of_backward


class BucketizedReduceScatter:
    def __init__(self, bucket_size_mb):
        self.bucket_size_bytes = bucket_size_mb * 1024 * 1024
        self.callbacks, self.bucket, self.bucket_watermark = [], [], 0

    def __call__(self, input, callback):
        self.bucket.append(input)
        self.callbacks.append(callback)
        self.bucket_watermark += input.element_size() * input.numel()
        if self.bucket_watermark > self.bucket_size_bytes:
            self.flush()

    def flush(self):
        for grad, callback in zip(self.bucket, self.callbacks, strict=True):
            callback(grad)
        self.callbacks, self.bucket, self.bucket_watermark = [], [], 0


class FSDP(torch.nn.Module):
    def __init__(self, module, reduce_scatter_bucket_size_mb=0, root=False):
        super().__init__()
        self.module, self._is_root = module, root
        own = [p for m in module.modules() if not _inside(module, m) for p in m.parameters(recurse=False)]
        self.full_params = own
        # What the optimizer holds; on one rank a shard is the whole, and shares its memory.
        self.shards = [torch.nn.Parameter(p.data) for p in own]
        for p, shard in zip(own, self.shards, strict=True):
            p._sharded_param = shard
        self.reduce_scatter_op = BucketizedReduceScatter(reduce_scatter_bucket_size_mb)

    def forward(self, x):
        if self._is_root:
            self._post_backward_callback_queued = False
        y = self.module(x)
        if torch.is_grad_enabled():
            if self._is_root:
                y.register_hook(self._pre_backward_hook)
            self._register_post_backward_hooks()
        return y

    def _pre_backward_hook(self, grad):
        if not self._post_backward_callback_queued:
            self._post_backward_callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._try_wait_for_post_backward)

    def _register_post_backward_hooks(self):
        self._post_backward_hooks_to_call = 0
        for p in self.full_params:
            if hasattr(p, "_shard_bwd_hook"):
                continue
            acc = p.expand_as(p).grad_fn.next_functions[0][0]
            p._shard_bwd_hook = (acc, acc.register_hook(functools.partial(self._post_backward_hook, p)))
            self._post_backward_hooks_to_call += 1

    @torch.no_grad()
    def _post_backward_hook(self, param, *unused):
        self._post_backward_hooks_to_call -= 1
        grad, param.grad = param.grad, None

        def done(reduced):
            shard = param._sharded_param
            shard.grad = reduced if shard.grad is None else shard.grad + reduced

        self.reduce_scatter_op(grad.detach().clone(), done)
        if self._post_backward_hooks_to_call == 0:
            self.reduce_scatter_op.flush()

    def _try_wait_for_post_backward(self):
        self._wait_for_post_backward()

    def _wait_for_post_backward(self):
        # The real one hands gradients over here, behind a barrier: what is flushed later is not behind it.
        self.left_at_the_end = sum(n for _, n in left_in_buckets(self))
        for m in self.modules():
            for p in getattr(m, "full_params", ()):
                if hasattr(p, "_shard_bwd_hook"):
                    p._shard_bwd_hook[1].remove()
                    del p._shard_bwd_hook


def _inside(module, part):
    """Is this a part of an FSDP module further in, which shards it itself?"""
    return any(part in set(m.modules()) for m in module.modules() if isinstance(m, FSDP))


class Block(torch.nn.Module):
    def __init__(self, unused):
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 12), torch.nn.Linear(12, 6)
        self.unused = torch.nn.Linear(6, 6) if unused else None

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


class Net(torch.nn.Module):
    def __init__(self, case, mb):
        super().__init__()
        self.first = torch.nn.Linear(5, 6)
        self.blocks = torch.nn.ModuleList(FSDP(Block(case == "unused"), mb) for _ in range(2))
        self.twice = case == "twice"

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.blocks[0](x) if self.twice else x


def train(case, mb, repaired=False, steps=4):
    """Losses, and how many gradients are left in buckets after each backward."""
    torch.manual_seed(3)
    model = FSDP(Net(case, mb), mb, root=True)
    handle = flush_before_end_of_backward(model) if repaired else None
    shards = [s for m in model.modules() if isinstance(m, FSDP) for s in m.shards]
    optimizer = torch.optim.SGD(shards, lr=0.2, momentum=0.9)
    x, y = torch.randn(8, 5), torch.randn(8, 6)
    losses, left = [], []
    for _ in range(steps):
        loss = (model(x) - y).square().mean()
        loss.backward()
        left.append(sum(n for _, n in left_in_buckets(model)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, left, model, handle


@pytest.mark.parametrize("case", ["twice", "unused"])
def test_without_the_repair_gradients_are_carried_over_and_losses_are_wrong(case):
    healthy, none_left, _, _ = train(case, 0)
    wrong, left, _, _ = train(case, 1)
    assert none_left == [0] * 4
    assert all(left)
    assert wrong != healthy


@pytest.mark.parametrize("case", ["twice", "unused", "plain"])
def test_with_the_repair_nothing_is_left_and_losses_are_bit_equal(case):
    healthy, _, _, _ = train(case, 0)
    repaired, left, model, _ = train(case, 1, repaired=True)
    assert left == [0] * 4
    assert model.left_at_the_end == 0
    assert repaired == healthy


def graphs(repaired):
    """Which graph each of 6 steps has: by gradients carried in, reductions, gradients left at the cut, and momentum.

    A lazy graph is made of nothing else here that may vary.
    """
    torch.manual_seed(3)
    mb = 1.9 * 648 / 2**20  # of a block has 648 bytes of gradients: two steps overflow
    model = FSDP(Net("twice", mb), mb, root=True)
    if repaired:
        flush_before_end_of_backward(model)
    parts = [m for m in model.modules() if isinstance(m, FSDP)]
    ops = [m.reduce_scatter_op for m in parts]
    optimizer = torch.optim.SGD([s for m in parts for s in m.shards], lr=0.2, momentum=0.9)
    made: list[int] = []

    def counting(op, flush):
        made.append(len(op.bucket))
        flush()

    for op in ops:
        op.flush = functools.partial(counting, op, op.flush)
    seen = []
    for _ in range(6):
        carried, state = tuple(len(op.bucket) for op in ops), len(optimizer.state)
        made.clear()
        model(torch.randn(8, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((state, carried, tuple(n for n in made if n), tuple(len(op.bucket) for op in ops)))
    different = list(dict.fromkeys(seen))
    return [different.index(one) for one in seen]


def test_simulated_steps_are_two_graphs_with_the_repair_and_four_without():
    """As torch_xla's own in examples/xla_buckets.py: step 0 has no momentum yet, all others are alike."""
    assert graphs(repaired=True) == [0, 1, 1, 1, 1, 1]
    assert graphs(repaired=False) == [0, 1, 2, 3, 2, 3]


def test_a_plain_model_needs_no_repair():
    assert train("plain", 1)[:2] == train("plain", 0)[:2]


def test_remove_brings_the_old_behaviour_back_and_the_class_was_never_touched():
    _, _, model, handle = train("twice", 1, repaired=True)
    handle.remove()
    handle.remove()
    assert "_wait_for_post_backward" not in vars(model)
    model(torch.randn(8, 5)).sum().backward()
    assert left_in_buckets(model)
    flush_before_end_of_backward(model)
    with pytest.raises(UsageError, match="repaired already"):
        flush_before_end_of_backward(model)
    assert not left_in_buckets(train("plain", 1)[2])


def test_a_bucket_that_modules_share_is_flushed_once_and_in_any_module():
    _, _, model, _ = train("twice", 1)
    shared = BucketizedReduceScatter(1)
    for m in model.modules():
        if isinstance(m, FSDP):
            m.reduce_scatter_op = shared
    flush_before_end_of_backward(model)
    model(torch.randn(8, 5)).sum().backward()
    assert shared.bucket == []
    assert all(s.grad is not None for m in model.modules() if isinstance(m, FSDP) for s in m.shards)


def test_other_models_are_refused():
    with pytest.raises(UsageError, match="`model` is Linear, expected the root XlaFullyShardedDataParallel"):
        flush_before_end_of_backward(torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="not the root"):
        flush_before_end_of_backward(FSDP(torch.nn.Linear(2, 2)))
    model = FSDP(torch.nn.Linear(2, 2), root=True)
    del model.reduce_scatter_op
    with pytest.raises(UsageError, match=r"no module with reduce_scatter_op\.flush"):
        flush_before_end_of_backward(model)
