"""Owners of operators: module, optimizer, reduction of gradients, or the program's own line."""

from __future__ import annotations

from collections.abc import Sequence

from retrograd.trace.pending_op import PendingOp
from retrograd.trace.schema import BACKWARD, CALLBACK, GATHER, MODULE, OPTIMIZER, PROGRAM, REDUCTION, SCALER

_COLLECTIVES = ("c10d::", "_c10d_functional", "fsdp::")
_REDUCES = ("allreduce", "all_reduce", "reduce_scatter", "chunk_cat")
_GATHERS = ("allgather", "all_gather", "split_with_sizes_copy")


class ReducedGradients:
    """Modules whose gradients lie in a piece of memory: a bucket of DDP, the input of a reduce-scatter."""

    def __init__(self) -> None:
        self._modules: dict[int, list[str]] = {}  # by storage, in the order in which they came
        self._step = 0

    def put(self, pending: PendingOp, modules: list[str]) -> None:
        """Note whose gradients a backward has put where."""
        if pending.step != self._step:
            self._step = pending.step
            self._modules.clear()
        for storage in {value.storage for value in pending.outputs if value.storage >= 0}:
            known = self._modules.setdefault(storage, [])
            known += [module for module in modules if module not in known]

    def of(self, pending: PendingOp) -> list[str]:
        """The modules whose gradients an operator is given."""
        storages = dict.fromkeys(value.storage for value in pending.inputs)
        return list(dict.fromkeys(module for s in storages for module in self._modules.get(s, ())))


def owner(pending: PendingOp, reduced: ReducedGradients) -> str:
    """What an operator belongs to, as `Op.owner` says it; its line and module are known."""
    name, backward = pending.operator.name, pending.phase == BACKWARD
    if pending.optimizing:
        return OPTIMIZER
    if backward and any(word in name for word in _REDUCES):
        modules = reduced.of(pending)
        reduced.put(pending, modules)
        return _of(REDUCTION, modules or [pending.module])
    if name.startswith(_COLLECTIVES) and any(word in name for word in _GATHERS):
        return _of(GATHER, [pending.module])
    if backward and pending.module is not None:
        reduced.put(pending, [pending.module])
    if pending.module is not None:
        return MODULE
    if name.startswith("aten._amp_"):
        return SCALER
    if backward and not pending.node and pending.inside is None:
        return CALLBACK
    return PROGRAM if pending.line is not None else ""


def _of(kind: str, modules: Sequence[str | None]) -> str:
    if modules[0] is None:
        return kind
    return f"{kind} of {' to '.join(dict.fromkeys(m or 'the model itself' for m in (modules[0], modules[-1])))}"
