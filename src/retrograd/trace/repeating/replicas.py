"""Copies of parameters and gradients on several ranks, compared before an update."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from retrograd.compat.torch_ddp import has_comm_hook
from retrograd.runtime.replicas import checksum, parameters_of, ranks_with_copies
from retrograd.trace.repeating.schema import ReplicaDifference

Checksums = dict[str, dict[str, str]]  # "parameters" or "gradients" -> name and ranks -> checksum
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def checksums(optimizer: torch.optim.Optimizer, roots: Iterable[Any], reduced: bool) -> Checksums:
    """Checksums of what an optimizer is about to update and other ranks hold copies of.

    Args:
        optimizer: whose parameters.
        roots: modules in which to look for DistributedDataParallel. What has a communication hook of its own is left
            out: ranks may then differ until it averages them.
        reduced: whether a backward since the last update has reduced gradients, so that they are copies too.
    """
    wrapped = _wrapped(roots)
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    sums: Checksums = {"parameters": {}, "gradients": {}}
    for number, (called, parameter) in enumerate(parameters_of(optimizer)):
        gradient = parameter.grad
        if isinstance(parameter, sharded):
            name, ranks = "", ranks_with_copies(parameter)
            alike = isinstance(gradient, sharded) and gradient.placements == parameter.placements
            local, gradient = parameter.to_local(), gradient.to_local() if alike else None
        else:
            name, ranks = wrapped.get(id(parameter), ("", ()))
            local, gradient = parameter, gradient if reduced else None
        if len(ranks) < 2:
            continue
        key = f"{name or called or f'parameter {number} {list(parameter.shape)}'}\0{','.join(map(str, ranks))}"
        for quantity, tensor in (("parameters", local), ("gradients", gradient)):
            if tensor is not None and type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.numel():
                sums[quantity][key] = checksum(tensor)
    return sums


def _wrapped(roots: Iterable[Any]) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Names and ranks of the parameters of DistributedDataParallel, by their id."""
    of: dict[int, tuple[str, tuple[int, ...]]] = {}
    for model in {id(m): m for root in roots for m in root.modules()}.values():
        if isinstance(model, torch.nn.parallel.DistributedDataParallel) and not has_comm_hook(model):
            ranks = tuple(torch.distributed.get_process_group_ranks(model.process_group))
            ignored = set(model.parameters_to_ignore)
            named = ((n, p) for n, p in model.module.named_parameters() if n not in ignored)
            of |= {id(parameter): (name, ranks) for name, parameter in named}
    return of


def compare(of: Mapping[int, Checksums], step: int) -> list[ReplicaDifference]:
    """What is not equal on ranks that hold copies of it.

    Args:
        of: the checksums of each rank.
        step: before whose update they were taken.
    """
    apart: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for quantity in ("parameters", "gradients"):
        for key in dict.fromkeys(key for sums in of.values() for key in sums[quantity]):
            name, _, group = key.partition("\0")
            values = {r: of[r][quantity][key] for r in map(int, group.split(",")) if r in of and key in of[r][quantity]}
            if len(counts := Counter(values.values())) > 1:
                (usual, times), *_ = counts.most_common()
                ranks = tuple(rank for rank, value in values.items() if value != usual or times == 1)
                apart.setdefault((quantity, ranks), []).append(name)
    return [
        ReplicaDifference("parameters" if quantity == "parameters" else "gradients", tuple(names), ranks, step)
        for (quantity, ranks), names in apart.items()
    ]
