"""Attribution of collectives: by which modules, in which phase, by which reduction; read from the frames that call it.

Nothing of PyTorch is replaced and no hook is registered on a module, so compiled and patched models stay as they are.
The frames are those of FSDP's parameter groups, of torch.nn.Module and of torch.distributed's functions. DDP's reducer
is C++ without frames: its buckets are told by their sizes.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch

from retrograd.compat import fsdp2, torch_autograd
from retrograd.compat.registry import require, works
from retrograd.compat.torch_ddp import BucketOrders, bucket_orders
from retrograd.core.wording import some
from retrograd.fsdp.schema import JOINED

_DEEP = 400  # frames looked at: a deep model calls 3 a level
_MODULE, _DISTRIBUTED, _SELF, _JOIN, _ENGINE = "module", "distributed", "self", "join", "engine"
_here = threading.local()


class naming:
    """Collectives issued inside carry the gradients of these modules: for code that joins several groups in one.

    Entered for each bucket of each step, hence no generator.
    """

    __slots__ = ("_before", "_names")

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def __enter__(self) -> None:
        self._before: Any = getattr(_here, "names", None)
        _here.names = self._names

    def __exit__(self, *_: object) -> None:
        _here.names = self._before


class Attribution:
    """Reads the frames of one run; names are those of the model's modules, or without one of the outermost at work."""

    def __init__(self, model: Any = None) -> None:
        require(torch_autograd.BACKWARD)
        self.model = model
        self.groups: weakref.WeakSet[Any] = weakref.WeakSet()  # FSDP's parameter groups that were at work
        self.optimizing = False
        self._roles: dict[CodeType, str] = {}
        self._names: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
        self.ddp = _DdpBuckets()

    def of(self, frame: Any, kind: str, numel: int, group: Any) -> tuple[str, tuple[str, ...], str, str]:
        """By whom, for which modules, in which phase and by which reduction a collective is issued in this frame."""
        task = torch_autograd.backward_id()
        owner, inner, outer, op, python, joined = self._frames(frame, task != -1)
        if joined:
            return JOINED, (), "other", op
        if task != -1:
            phase = "backward"
        elif self.optimizing:
            phase = "optimizer"
        elif inner is None:
            phase = "other"
        else:
            # FSDP gathers under no_grad, so the mode alone says nothing.
            phase = "forward" if outer.training or torch.is_grad_enabled() else "inference"
        if getattr(_here, "names", None) is not None:
            return "bucket", _here.names, phase, op
        if owner is not None:
            return "fsdp", self.names(owner), phase, op
        if isinstance(inner, torch.nn.parallel.DistributedDataParallel):
            return "ddp", ("",), phase, op
        if phase == "backward" and kind == "all-reduce" and not python:
            names = self.ddp.names(group, numel, task)
            if names is not None:
                return "ddp", names, phase, op or "sum"
        if inner is None:
            return "", (), phase, op
        return "module", (self._name(inner, self.model if self.model is not None else outer),), phase, op

    def names(self, owner: Any) -> tuple[str, ...]:
        """Names of the modules of a parameter group, with it remembered."""
        self.groups.add(owner)
        names = fsdp2.module_names(owner)
        if names is not None:
            return names
        return tuple(self._name(module, self.model) for module in fsdp2.modules_of(owner))

    def _frames(self, frame: Any, backward: bool) -> tuple[Any, Any, Any, str, bool, bool]:
        """FSDP's group, innermost and outermost module, the reduction, if torch.distributed was called, if Join."""
        owner = inner = outer = None
        op, python, joined = "", False, False
        for _ in range(_DEEP):
            if frame is None or (backward and owner is not None):
                break
            role = self._roles.get(frame.f_code)
            if role is None:
                role = self._roles[frame.f_code] = self._role(frame.f_code)
            if role == _ENGINE and backward:
                break
            if role == _DISTRIBUTED:
                python = True
                op = op or _reduction(frame.f_locals.get("op"))
            elif role == _MODULE:
                outer = frame.f_locals["self"]
                inner = outer if inner is None else inner
            elif role == _JOIN:
                joined = True
            elif role == _SELF and owner is None and (group := fsdp2.param_group_class()) is not None:
                candidate = frame.f_locals.get("self")
                owner = candidate if isinstance(candidate, group) and works(fsdp2.STATE) else None
            frame = frame.f_back
        return owner, inner, outer, op, python, joined

    def _role(self, code: CodeType) -> str:
        """What a frame of this code can tell."""
        name = code.co_filename.replace("\\", "/")
        if torch_autograd.is_engine(code):
            return _ENGINE
        if name.endswith("/torch/distributed/distributed_c10d.py"):
            return _DISTRIBUTED if "op" in code.co_varnames else ""
        if code.co_name == "_call_impl" and name.endswith("/torch/nn/modules/module.py"):
            return _MODULE
        if code.co_name == "__exit__" and name.endswith("/torch/distributed/algorithms/join.py"):
            return _JOIN
        # Also a method that somebody put in the place of FSDP's, as long as it is one.
        first = code.co_varnames[:1] == ("self",)
        return _SELF if first and ("/torch/" not in name or name.endswith("/_fsdp_param_group.py")) else ""

    def _name(self, module: Any, root: Any) -> str:
        if root is None:
            return type(module).__name__
        known = self._names.get(root)
        if known is None or id(module) not in known:
            known = self._names[root] = {id(m): name for name, m in root.named_modules()}
        return known.get(id(module), type(module).__name__)

    def unreduced(self) -> list[str]:
        """Modules of FSDP whose gradients of the last backward wait on this rank and were never reduced."""
        groups = [group for group in self.groups if any(fsdp2.leftovers(group))]
        return sorted({name or "(root)" for group in groups for name in self.names(group)})


def _reduction(op: Any) -> str:
    """What a reduction is called: "sum", "avg", "premul_sum"; "" if it is none. An object's address never gets in."""
    name = getattr(getattr(op, "op", op), "name", None)
    return name.lower() if isinstance(name, str) else ""


class _DdpBuckets:
    """Which parameters a bucket of DDP holds: buckets come in order, and their sizes say where each ends."""

    def __init__(self) -> None:
        self._looked = 0
        self._task = -1
        # Of each model; None as long as it was not asked.
        self._orders: weakref.WeakKeyDictionary[Any, BucketOrders | None] = weakref.WeakKeyDictionary()
        self._done: dict[int, tuple[int, int]] = {}  # id of DDP -> buckets and parameters so far in this backward

    def names(self, group: Any, numel: int, task: int) -> tuple[str, ...] | None:
        """Modules of the bucket that is reduced now; None if no DDP model uses this group."""
        if task != self._task:
            self._task, self._done = task, {}
        models = self._of(group)
        for model in models:
            bucket, at = self._done.get(id(model), (0, 0))
            match = self._walk(model, at, numel)
            if match is not None:
                self._done[id(model)] = bucket + 1, match[1]
                return match[0]
        if not models:
            return None
        bucket, at = self._done.get(id(models[0]), (0, 0))
        self._done[id(models[0])] = bucket + 1, at
        return (f"DDP bucket {bucket}",)

    def refresh(self) -> None:
        """Ask DDP for its order, which it tells only while no backward runs."""
        for model, orders in list(self._orders.items()):
            if orders is None or not orders.final:
                self._orders[model] = bucket_orders(model)

    def replicas(self) -> dict[int, tuple[str, tuple[int, ...]]]:
        """Parameters whose gradients DDP adds up, by id: name, and the ranks that hold the same."""
        return {
            id(parameter): (name, tuple(sorted(torch.distributed.get_process_group_ranks(model.process_group))))
            for model in self._orders
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad
        }

    def idle(self, optimizer: torch.optim.Optimizer | None) -> str:
        """Parameters of DDP that have no gradient although this optimizer has updated them before; "" if none."""
        names = {id(p): name for model in self._orders for name, p in model.module.named_parameters()}
        groups, state = (optimizer.param_groups, optimizer.state) if optimizer is not None else ([], {})
        params = (p for group in groups for p in group["params"] if p.grad is None)
        idle = [names[id(p)] for p in params if id(p) in names and p in state]
        return f"no gradient for {some(idle, 3)}, which the optimizer has updated before" if idle else ""

    def _of(self, group: Any) -> list[Any]:
        models = [model for model in self._orders if model.process_group is group]
        # The collector knows every object; 0.1 s for a million, so it is asked only while a group has no model.
        if not models and self._looked < 8:
            self._looked += 1
            kind = torch.nn.parallel.DistributedDataParallel
            for item in gc.get_objects():
                if issubclass(type(item), kind):
                    self._orders.setdefault(item, None)
            models = [model for model in self._orders if model.process_group is group]
        return models

    def _walk(self, model: Any, at: int, numel: int) -> tuple[tuple[str, ...], int] | None:
        """The parameters from `at` on, in one of the orders that DDP uses, that make up exactly `numel`."""
        named = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
        for order in (self._orders.get(model) or bucket_orders(model, ask=False)).orders:
            total, end = 0, at
            while end < len(order) and total < numel:
                total += named[order[end]][1].numel()
                end += 1
            if total == numel and end > at:
                modules = (named[i][0].rpartition(".")[0] for i in order[at:end])
                return tuple(dict.fromkeys(modules)), end
        return None
