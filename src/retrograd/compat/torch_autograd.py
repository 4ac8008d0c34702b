"""Autograd's state: which backward runs on this thread, and which node of it."""

from __future__ import annotations

import torch

from retrograd.compat.registry import Part, register


def backward_id() -> int:
    """A number of the backward pass that runs on this thread; -1 where none runs."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether this thread runs a backward pass, as when a checkpointed forward is computed again."""
    return torch._C._current_graph_task_id() != -1


def _self_test() -> str:
    """Two backward passes have two numbers, each equal in all of its hooks, and -1 stands for none."""
    ids: list[int] = []
    with torch.enable_grad():
        for _ in range(2):
            leaf = torch.ones(1, device="cpu", requires_grad=True)
            middle = leaf * 2
            leaf.register_hook(lambda _: ids.append(backward_id()))
            middle.register_hook(lambda _: ids.append(backward_id()))
            torch.autograd.grad(middle.sum(), leaf)
    if in_backward() or len(ids) != 4:
        return "a backward pass seems to run where none does, or hooks of tensors do not run"
    if -1 in ids or ids[0] != ids[1] or ids[2] != ids[3] or ids[0] == ids[2]:
        return f"two backward passes have the numbers {ids[:2]} and {ids[2:]}"
    return ""


BACKWARD = register(
    Part(
        "torch.autograd.backward",
        "torch",
        "asks which backward pass runs",
        ("torch._C._current_graph_task_id",),
        ("2.11", "2.13", "2.15"),
        "collectives are neither recorded nor put into buckets; retrograd.fsdp.shard_by_size needs no private name",
        _self_test,
        refuses=True,
    )
)
