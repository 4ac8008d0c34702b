"""The plan of a model: its groups, their sizes, and the order in which their gradients will come."""

from __future__ import annotations

from typing import Any

import torch

from retrograd.compat.fsdp2 import foreach_reduce, param_groups
from retrograd.compat.fsdp2.foreach_reduce import ReduceCall
from retrograd.errors import UsageError
from retrograd.fsdp.bucket_plan import BucketPlan, Group, first_difference


class Model:
    """A sharded model as buckets see it; `root` is the module that forward is called on."""

    def __init__(self, root: Any, comm: Any) -> None:
        self.root, self.comm = root, comm  # a reduce-scatter for all groups, or None
        self.states = param_groups.states_of(root)  # what `fully_shard` keeps of each call, the root's first
        groups = self.group_list = param_groups.groups_of(self.states)
        names = param_groups.names_of(root, groups)
        self.groups: dict[str, Any] = dict(zip(names, groups, strict=True))
        # As logs of collectives have them, "" for the root.
        self.modules = dict(zip(names, param_groups.modules_of(root, groups), strict=True))
        self.handle = foreach_reduce.device_handle(groups[0].device)
        self.late: set[str] = set()  # groups whose gradients come when backward ends
        self.launches: dict[Any, Any] = {}  # what was reduced before, so that it need not be described anew
        self._home = {id(p): name for name, group in self.groups.items() for p in group.fsdp_params}
        self._names = param_groups.parameter_names(root, groups)

    def home(self, param: Any) -> str:
        return self._home[id(param)]

    def named(self, param: Any) -> str:
        return self._names[id(param)]

    def expected(self) -> dict[str, list[Any]]:
        """Parameters that want gradients reduced in the backward that begins, by group; groups without any are out."""
        wanted = {name: param_groups.trainable(group) for name, group in self.groups.items() if group.reduce_grads}
        return {name: params for name, params in wanted.items() if params}

    def call(self, name: str) -> ReduceCall:
        """The call that would reduce a group, with no gradients yet."""
        call = ReduceCall.of(self.groups[name])
        if self.comm is not None:
            call.arguments["reduce_scatter_comm"] = self.comm
        return call

    def specs(self) -> dict[str, Group]:
        """Size and kind of each group; UsageError if gradients of one would have several dtypes on the wire."""
        kinds: dict[Any, int] = {}
        specs: dict[str, Group] = {}
        for name, group in self.groups.items():
            params, call = param_groups.trainable(group), self.call(name)
            dtypes = {param_groups.grad_dtype(param) for param in params}
            if len(dtypes) > 1 and call.reduce_dtype is None:
                raise UsageError(
                    f"gradients of group {name} have dtypes {', '.join(sorted(map(word, dtypes)))}, which FSDP2 cannot "
                    "reduce together; shard its modules separately, or give them a reduce_dtype"
                )
            grad = "+".join(sorted(map(word, dtypes))) or "frozen"
            wire = call.reduce_dtype or next(iter(dtypes), torch.float32)
            # Numbered in the order of modules, which ranks share, unlike ids of process groups.
            kind = kinds.setdefault((*call.kind, grad), len(kinds))
            key = f"{grad}->{word(wire)} over {param_groups.shape_of_mesh(group)} ({kind})"
            numel = sum(param_groups.wire_numel(param, group) for param in params)
            specs[name] = Group(name, numel * wire.itemsize, key)
        return specs

    def plan(self, cap_bytes: int) -> BucketPlan:
        """Plan buckets in the order of the forward that was just run, reversed."""
        specs = self.specs()
        known = {id(group): name for name, group in self.groups.items()}
        # dict.fromkeys keeps first uses: a group that is used twice is ready after the backward of its first use.
        order = dict.fromkeys(known[id(g)] for g in param_groups.forward_order(self.states[0]) if id(g) in known)
        unused = [name for name in self.groups if name not in order]
        late = {*self.late, *unused}
        ordered = [specs[name] for name in (*reversed(order), *unused)]
        return BucketPlan.of([Group(s.name, s.bytes, s.key, s.name in late) for s in ordered], cap_bytes)

    def require_fit(self, plan: BucketPlan) -> None:
        """UsageError for a plan of another model, of other groups, sizes or dtypes."""
        specs, planned = self.specs(), {group.name: group for group in plan.groups}
        if planned.keys() != specs.keys():
            lacks, extra = sorted(specs.keys() - planned.keys()), sorted(planned.keys() - specs.keys())
            raise UsageError(
                f"the plan is of another model: it lacks groups [{', '.join(lacks)}] and has [{', '.join(extra)}] too "
                "many; save() one of this model"
            )
        for name, group in planned.items():
            here = specs[name]
            if (group.bytes, group.key) != (here.bytes, here.key):
                raise UsageError(
                    f"the plan has {group.bytes} bytes of {group.key} for {name}, the model {here.bytes} of "
                    f"{here.key}; save() a plan of this model"
                )


def plans_differ(plan: str, other: str) -> str:
    """Where two plans in JSON part."""
    return f"their plans: {first_difference(BucketPlan.from_json(plan), BucketPlan.from_json(other))}"


def word(dtype: torch.dtype) -> str:
    """A dtype without its module."""
    return str(dtype).removeprefix("torch.")
