"""Conditions of ranks, compared before the first update: what differs before anything is wrong, in a sentence.

Flags, autocast, variables, versions, sources and, of parameters that ranks hold copies of, the values. Each rank posts
its own; one reads them all.
"""

from __future__ import annotations

import json
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from retrograd.compat.torch_autograd import product_dtypes
from retrograd.core.rank_store import RankStore
from retrograd.env import run_conditions as run
from retrograd.env.run_conditions import Conditions
from retrograd.runtime.replicas import checksum, parameters_of, ranks_with_copies

_KEY, _LATER, _PARAMETERS = "conditions", "autocast", "parameters"
_MOST = 8  # differences told of each kind


class RankConditions:
    """Conditions of this rank, as its first step shows them, and those of others through the job's store."""

    def __init__(self) -> None:
        self._exchange: RankStore | None = None
        self._own: Conditions = {}
        self._told = self._told_later = False
        self._unseen = True  # whether no collective ran in a forward of the first step
        self._later = False  # whether autocast is known since the second step, in which DDP builds its buckets
        self._autocast: dict[str, set[str]] = {}
        self._products: set[str] | None = None  # dtypes of the forward's, where nothing else showed autocast
        self._thread = threading.get_ident()
        # What was reduced, as long as it lives: another tensor may lie there later.
        self._reduced: list[tuple[weakref.ref[Any], tuple[int, ...]]] = []
        self._parameters: dict[str, str] = {}

    def join(self, exchange: RankStore) -> None:
        """Post what is known before anything ran."""
        self._exchange, self._own = exchange, run.process_conditions()
        exchange.post(_KEY, json.dumps(self._own))

    def collective(self, kind: str, phase: str, tensors: list[Any], ranks: tuple[int, ...]) -> None:
        """A collective of the first two steps is about to start."""
        if phase == "forward":
            for name, dtype in run.autocast(torch).items():
                self._autocast.setdefault(name, set()).add(dtype)
        if kind == "all-reduce" and _PARAMETERS not in self._own:
            self._reduced += [(weakref.ref(tensor), ranks) for tensor in tensors]
            # Of a part of the ranks, as of the stages of a pipeline, products may differ as they should.
            everybody = len(ranks) == torch.distributed.get_world_size()
            if phase == "backward" and everybody and not self._autocast and self._products is None:
                self._products = product_dtypes(self._thread)

    def optimizer(self, optimizer: torch.optim.Optimizer, replicas: Mapping[int, tuple[str, tuple[int, ...]]]) -> None:
        """An optimizer is about to make its first step; `replicas` are parameters of DDP by id, with name and ranks."""
        sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
        living = ((tensor(), ranks) for tensor, ranks in self._reduced)
        reduced = {tensor.data_ptr(): ranks for tensor, ranks in living if tensor is not None}
        for number, (called, parameter) in enumerate(parameters_of(optimizer)):
            name, ranks = replicas.get(id(parameter), ("", ()))
            if isinstance(parameter, sharded):
                parameter, ranks = parameter.to_local(), ranks_with_copies(parameter)
            elif not ranks and parameter.grad is not None:
                ranks = reduced.get(parameter.grad.data_ptr(), ())
            if len(ranks) > 1 and type(parameter) in (torch.Tensor, torch.nn.Parameter):
                label = name or called or f"parameter {number} {list(parameter.shape)}"
                self._parameters[f"{label}\0{','.join(map(str, ranks))}"] = checksum(parameter)

    def start(self) -> None:
        """One of the first updates is about to come: post all that is known, once; autocast if it is known later."""
        if self._exchange is None or self._later:
            return
        autocast = {name: "/".join(sorted(dtypes)) for name, dtypes in self._autocast.items()}
        if _PARAMETERS in self._own:
            if autocast and self._unseen:
                self._later = True
                self._exchange.post(_LATER, json.dumps({run.FLAGS: autocast}))
            return
        self._own = run.process_conditions() | run.torch_conditions(torch) | {_PARAMETERS: self._parameters}
        self._own[run.FLAGS] |= autocast
        if self._products:  # of one that is compiled as a whole none are seen
            self._own[run.FLAGS]["dtype of matrix products, which autocast sets,"] = "/".join(sorted(self._products))
        self._unseen = not autocast and not self._products
        self._exchange.post(_KEY, json.dumps(self._own))

    def tell(self, problem: Callable[[str], None], notes: list[str]) -> None:
        """Say once what differs between ranks, as far as they have posted it: a problem, or a note where it may."""
        if self._exchange is None or (self._told and (self._told_later or not self._later)):
            return
        key, when = (_LATER, "in the second step") if self._told else (_KEY, "before the first update")
        self._told, self._told_later = True, self._told
        posted = {rank: self._exchange.look(key, rank) for rank in range(self._exchange.size)}
        problems, more = sentences({rank: json.loads(text) for rank, text in posted.items() if text is not None}, when)
        notes += more
        for text in problems:
            problem(text)


def sentences(of: Mapping[int, Conditions], when: str = "before the first update") -> tuple[list[str], list[str]]:
    """Problems and notes on ranks whose conditions are these."""
    rows = run.differences(of)
    apart = [row.text() for row in rows if not row.intended]
    apart += _parameters_apart(of)
    own = [row.text() for row in rows if row.intended]
    return _line(f"ranks differ {when}", apart), _line("each rank has its own", own)


def _line(head: str, texts: list[str]) -> list[str]:
    more = f"; and {len(texts) - _MOST} more" * (len(texts) > _MOST)
    return [f"{head}: {'; '.join(texts[:_MOST])}{more}"] * bool(texts)


def _parameters_apart(of: Mapping[int, Conditions]) -> list[str]:
    """Parameters that ranks hold copies of, or whose gradients they add up, and that are not equal."""
    apart: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for conditions in of.values() for key in conditions.get(_PARAMETERS, {})):
        name, _, group = key.partition("\0")
        values = {rank: conditions.get(_PARAMETERS, {}).get(key) for rank, conditions in of.items()}
        members = {rank: str(values[rank]) for rank in map(int, group.split(",")) if values.get(rank) is not None}
        if len(counts := Counter(members.values())) > 1:
            (usual, times), *_ = counts.most_common()
            ranks = [rank for rank, value in members.items() if value != usual or times == 1]
            apart.setdefault(run.on_ranks(ranks), []).append(name)
    return [
        f"parameters that ranks hold copies of are not equal {who}: {', '.join(names[:3])}"
        f"{f' and {len(names) - 3} more' * (len(names) > 3)}"
        for who, names in apart.items()
    ]
