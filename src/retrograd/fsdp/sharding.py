"""Groups of modules that share a collective: by size, over the public `fully_shard([a, b, ...])`.

FSDP2 gathers and reduces one group of parameters at a time, so many small modules mean many small collectives, which
cost latency and reach little bandwidth (torch 2.13's own model of 8 H100: 50 % at 10 MB, 80 % at 40 MB, 90 % at 90 MB).
The plan follows from the model alone, in the order in which modules are registered: the same on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from retrograd.errors import UsageError

_MB = 1_000_000
# The norm before a large head is such: a collective of a few kB is latency alone.
_CRUMB = 10  # times smaller than `mb`
Block = type[nn.Module] | str
Unit = tuple[str, nn.Module]
# Units cut where blocks of one parent begin or end: its name, None where units are no blocks, and the units.
Run = tuple[str | None, list[Unit]]


@dataclass(frozen=True)
class ShardGroup:
    """Modules that share one all-gather and one reduce-scatter.

    Attributes:
        names: qualified names in registration order; () for what is left to the root.
        bytes: of its parameters in the dtype of the reduction, without padding.
        parameters: how many, a shared one once.
    """

    names: tuple[str, ...]
    bytes: int
    parameters: int


@dataclass(frozen=True)
class ShardPlan:
    """What `shard_by_size` does, or has done. As text a table.

    Attributes:
        groups: in registration order, each a `fully_shard` call.
        root: what remains for the root's own call; may be empty.
        mb: the size at which a group is complete.
    """

    groups: tuple[ShardGroup, ...]
    root: ShardGroup
    mb: float

    @property
    def digest(self) -> str:
        """16 hexadecimal digits, equal on ranks that group alike."""
        lines = [f"{group.names} {group.bytes} {group.parameters}" for group in (*self.groups, self.root)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        lines = [f"{len(self.groups)} groups of {self.mb:g} MB and more where there is enough, and the root"]
        for number, group in enumerate((*self.groups, self.root), 1):
            names = _words(group.names) if group.names else "(root)"
            lines.append(f"{number:4}  {group.bytes / _MB:10.2f} MB  {group.parameters:5} parameters  {names}")
        return "\n".join(lines)


def shard_by_size(
    model: nn.Module, mb: float = 100.0, *, blocks: Iterable[Block] | None = None, **fully_shard_kwargs: Any
) -> ShardPlan:
    """Apply `fully_shard` to a model in groups of about `mb` megabytes, the root last.

        plan = retrograd.fsdp.shard_by_size(model, mb=100, mesh=mesh)
        print(plan)

    Consecutive blocks of a ModuleList (or of a Sequential larger than `mb`) are grouped until they reach `mb`; what
    stands before and after them (embeddings; norm and head) is grouped by itself. A list that does not reach `mb` is
    taken with the modules beside it. Groups are formed from the last block on, so that one that stays small is the
    first: its reduce-scatter is the last of backward, which nothing hides; below mb / 10 it joins the next. Modules
    that share a parameter share a group, and parameters of different dtypes do not. What is in no unit, or is tied to
    such, goes with the root.

    Args:
        model: not yet sharded; parameters may be on the meta device.
        mb: 10^6 bytes of parameters, frozen ones too, in the dtype of the reduction (`mp_policy`'s reduce_dtype, else
            param_dtype, else their own) from which on a group is complete. A group is smaller than 1.1 mb + its
            largest module unless tied to another; 0 gives one group a module.
        blocks: classes or names of classes whose modules are the units, where the choice above does not fit: nested
            stages, blocks in no list. A module that some forward passes skip should not share a group with others.
        **fully_shard_kwargs: for every call, as they are: mesh, mp_policy, reshard_after_forward, offload_policy, ...

    Returns:
        The plan that was carried out.

    Raises:
        UsageError: part of the model is sharded already, it has no parameters, mb is negative or no number, or no
            module is of a class in `blocks`.
    """
    from torch.distributed.fsdp import fully_shard

    plan = plan_by_size(model, mb, blocks=blocks, **fully_shard_kwargs)
    modules = dict(model.named_modules())
    for group in plan.groups:
        chosen = [modules[name] for name in group.names]
        fully_shard(chosen if len(chosen) > 1 else chosen[0], **fully_shard_kwargs)
    fully_shard(model, **fully_shard_kwargs)
    return plan


def plan_by_size(
    model: nn.Module, mb: float = 100.0, *, blocks: Iterable[Block] | None = None, **fully_shard_kwargs: Any
) -> ShardPlan:
    """What `shard_by_size` would do; needs no process group and leaves the model alone. Arguments are the same."""
    _check(model, mb)
    sizes = _Sizes(fully_shard_kwargs.get("ignored_params"), fully_shard_kwargs.get("mp_policy"))
    opened = _Automatic(mb, sizes) if blocks is None else _Named(model, tuple(blocks))
    runs = _free(model, _runs(model, opened), sizes)
    groups = _tied([group for run in _joined(runs, mb, sizes) for group in _grouped(run, mb, sizes)], sizes)
    taken: set[int] = set()
    records = tuple(sizes.group(group, taken) for group in groups)
    root = sizes.group([("", model)], taken)
    if not taken:
        raise UsageError(f"`model` ({type(model).__name__}) has no parameters, expected some to shard")
    return ShardPlan(records, replace(root, names=()), mb)


class _Sizes:
    """Sizes and dtypes of modules, without the parameters that FSDP is told to ignore."""

    def __init__(self, ignored: Iterable[nn.Parameter] | None, mp_policy: Any) -> None:
        self._ignored = {id(parameter) for parameter in ignored or ()}
        self._dtype = getattr(mp_policy, "reduce_dtype", None) or getattr(mp_policy, "param_dtype", None)

    def parameters(self, module: nn.Module, recurse: bool = True) -> dict[int, nn.Parameter]:
        """By identity, so that a shared one counts once."""
        return {id(p): p for p in module.parameters(recurse) if id(p) not in self._ignored}

    def bytes_of(self, parameter: nn.Parameter) -> int:
        return parameter.numel() * (self._dtype or parameter.dtype).itemsize

    def mb(self, *modules: nn.Module) -> float:
        parameters = {key: p for module in modules for key, p in self.parameters(module).items()}
        return sum(map(self.bytes_of, parameters.values())) / _MB

    def dtypes(self, module: nn.Module) -> set[torch.dtype]:
        """Of what is trained: FSDP takes one a group."""
        return {p.dtype for p in self.parameters(module).values() if p.requires_grad}

    def group(self, units: list[Unit], taken: set[int]) -> ShardGroup:
        """The record of a group, which takes what earlier ones have left."""
        parameters = {key: p for _, module in units for key, p in self.parameters(module).items() if key not in taken}
        taken.update(parameters)
        total = sum(map(self.bytes_of, parameters.values()))
        return ShardGroup(tuple(name for name, _ in units), total, len(parameters))


class _Automatic:
    """Lists are runs of blocks; what is large and holds a large list is opened."""

    def __init__(self, mb: float, sizes: _Sizes) -> None:
        self._mb, self._sizes = mb, sizes

    def opens(self, parent: nn.Module, child: nn.Module) -> bool:
        """Whether a child is no unit itself but its children are."""
        if _is_list(child):
            return True
        if _is_list(parent) or self._sizes.mb(child) <= self._mb:
            return False
        if _is_sequence(child) or _is_sequence(parent):
            return _is_sequence(child)
        inner = [m for m in child.modules() if _is_list(m) or _is_sequence(m)]
        return any(self._sizes.mb(m) > self._mb for m in inner)

    def is_block(self, parent: nn.Module, child: nn.Module) -> bool:
        return _is_list(parent) or _is_sequence(parent)


class _Named:
    """Modules of the named classes are blocks; what holds one is opened."""

    def __init__(self, model: nn.Module, blocks: tuple[Block, ...]) -> None:
        self._blocks = blocks
        known = sorted({type(m).__name__ for m in model.modules()})
        for block in blocks:
            if not any(_is(m, block) for m in model.modules()):
                name = block if isinstance(block, str) else block.__name__
                raise UsageError(f"blocks names {name!r}, expected classes of `model`: {', '.join(known)}")

    def opens(self, parent: nn.Module, child: nn.Module) -> bool:
        if self.is_block(parent, child):
            return False
        return _is_list(child) or any(self.is_block(child, m) for m in child.modules())

    def is_block(self, parent: nn.Module, child: nn.Module) -> bool:
        return any(_is(child, block) for block in self._blocks)


def _is(module: nn.Module, block: Block) -> bool:
    # Python's own classes of the module, so that "Block" finds a subclass too.
    classes = type(module).__mro__
    return any(c.__name__ == block for c in classes) if isinstance(block, str) else isinstance(module, block)


def _is_list(module: nn.Module) -> bool:
    """A container that nobody calls: FSDP has nothing to hook there."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def _is_sequence(module: nn.Module) -> bool:
    """A Sequential that calls its items one by one."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _runs(model: nn.Module, opened: _Automatic | _Named) -> list[Run]:
    """Units in registration order; a module that is registered twice counts at its first place."""
    runs: list[Run] = []
    seen = {id(model)}

    def walk(parent: nn.Module, prefix: str) -> None:
        for name, child in parent.named_children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            if opened.opens(parent, child):
                walk(child, f"{prefix}{name}.")
                continue
            key = prefix if opened.is_block(parent, child) else None
            if not runs or runs[-1][0] != key:
                runs.append((key, []))
            runs[-1][1].append((f"{prefix}{name}", child))

    walk(model, "")
    return runs


def _free(model: nn.Module, runs: list[Run], sizes: _Sizes) -> list[Run]:
    """The runs without units that have no parameters, or share one with what is in no unit: that is the root's."""
    inside = {id(m) for _, run in runs for _, unit in run for m in unit.modules()}
    outside: set[int] = set()
    for module in model.modules():
        if id(module) not in inside:
            outside.update(sizes.parameters(module, recurse=False))
    return [
        (key, [unit for unit in run if (own := sizes.parameters(unit[1])) and outside.isdisjoint(own)])
        for key, run in runs
    ]


def _joined(runs: list[Run], mb: float, sizes: _Sizes) -> list[list[Unit]]:
    """Runs of blocks that reach `mb`, and what lies between them in one piece each."""
    joined: list[tuple[bool, list[Unit]]] = []
    for key, run in runs:
        alone = key is not None and sizes.mb(*(module for _, module in run)) >= mb
        if not alone and joined and not joined[-1][0]:
            joined[-1][1].extend(run)
        else:
            joined.append((alone, list(run)))
    return [run for _, run in joined]


def _grouped(run: list[Unit], mb: float, sizes: _Sizes) -> list[list[Unit]]:
    """Cut a run into groups that reach `mb`, from its end on; a crumb that is left over joins its neighbour."""
    groups: list[list[Unit]] = []
    size, dtypes = 0.0, set()
    for unit in reversed(run):
        own = sizes.dtypes(unit[1])
        if not groups or size >= mb or len(dtypes | own) > 1:
            groups.append([])
            size, dtypes = 0.0, set()
        groups[-1].append(unit)
        size += sizes.mb(unit[1])
        dtypes |= own
    if len(groups) > 1 and size < mb / _CRUMB:
        beside = set().union(*(sizes.dtypes(module) for _, module in groups[-2]))
        if len(beside | dtypes) <= 1:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [group[::-1] for group in reversed(groups)]


def _tied(groups: list[list[Unit]], sizes: _Sizes) -> list[list[Unit]]:
    """Groups that share a parameter as one, at the place of the first."""
    tied: list[tuple[list[Unit], set[int]]] = []
    for group in groups:
        own = {key for _, module in group for key in sizes.parameters(module)}
        for units, keys in [each for each in tied if not each[1].isdisjoint(own)][::-1]:
            tied[:] = [each for each in tied if each[0] is not units]
            group, own = units + group, keys | own
        tied.append((group, own))
    place = {name: number for number, group in enumerate(groups) for name, _ in group}
    return sorted((group for group, _ in tied), key=lambda group: place[group[0][0]])


def _check(model: nn.Module, mb: float) -> None:
    if not mb >= 0:
        raise UsageError(f"mb={mb!r}, expected 0 or more, in units of 10^6 bytes")
    from torch.distributed.fsdp import FSDPModule

    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise UsageError(
                f"{name or 'the root'} is sharded already, expected a model that fully_shard has not seen; call "
                "shard_by_size instead of fully_shard, once and on the root"
            )


def _words(names: tuple[str, ...]) -> str:
    """At most four names, the first three and the last."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])}, ... {names[-1]}"
