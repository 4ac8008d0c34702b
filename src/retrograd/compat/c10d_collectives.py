"""Kernels before the operators of c10d: they see every collective of torch.distributed on its way to the backend.

Python functions, DDP's C++ reducer and functional collectives of compiled graphs all call the operators of namespace
c10d. A kernel at the dispatch key BackendSelect stands between them and the backend, so it also runs under no_grad,
inference_mode and in autograd's threads. It is no TorchDispatchMode, which torch.compile refuses to work under.
Measured on 2 shared cores, torch 2.13: 50 us a collective.
"""

# The stubs do not have private names, or not as they are.
# pyright: reportCallIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from retrograd.compat.registry import in_fresh_thread, part, require
from retrograd.core.rank_store import RankStore

# operator -> kind, argument that holds what this rank sends (or, at scatter and recv, what it gets)
OPERATORS = {
    "_allgather_base_": ("all-gather", "input_tensor"),
    "allgather_": ("all-gather", "input_tensors"),
    "allgather_coalesced_": ("all-gather", "input_list"),
    "allgather_into_tensor_coalesced_": ("all-gather", "inputs"),
    "_reduce_scatter_base_": ("reduce-scatter", "input_tensor"),
    "reduce_scatter_": ("reduce-scatter", "input_tensors"),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", "inputs"),
    "allreduce_": ("all-reduce", "tensors"),
    "allreduce_coalesced_": ("all-reduce", "tensors"),
    "alltoall_base_": ("all-to-all", "input"),
    "alltoall_": ("all-to-all", "input_tensors"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "gather_": ("gather", "input_tensors"),
    "gather_into_tensor_": ("gather", "input_tensor"),  # from torch 2.14 on
    "scatter_": ("scatter", "output_tensors"),
    "barrier": ("barrier", "tensor"),
    "monitored_barrier_": ("barrier", "tensor"),
    "send": ("send", "tensors"),
    "recv_": ("recv", "tensors"),
    "recv_any_source_": ("recv", "tensors"),
}
NO_COLLECTIVES = frozenset({"check_for_nan"})
_ROOTS = ("root_rank", "dst", "src")
_KEY = "BackendSelect"
_thread = threading.local()


@dataclass(frozen=True, slots=True)
class IssuedCollective:
    """A collective that is about to start."""

    kind: str
    tensors: list[Any]
    group: Any
    root: int  # among the ranks of the group, -1 where there is none
    tag: int = 0

    @property
    def peer(self) -> int:
        """The other rank of a message, among all ranks; -1 for any."""
        return torch.distributed.get_process_group_ranks(self.group)[self.root] if self.root >= 0 else -1

    @property
    def channel(self) -> tuple[str, int, int, int] | None:
        """Process group, sender, receiver and tag of a message; None for other collectives. NCCL knows no tags."""
        if self.kind not in ("send", "recv"):
            return None
        sender, receiver = torch.distributed.get_rank(), self.peer
        if self.kind == "recv":
            sender, receiver = receiver, sender
        tag = self.tag if torch.distributed.get_backend(self.group) == "gloo" else 0
        return self.group.group_name, sender, receiver, tag


@contextmanager
def unrecorded() -> Iterator[None]:
    """Collectives issued inside are ours, by which ranks ask each other now and then: no part of the run's sequence."""
    before = getattr(_thread, "unrecorded", False)
    _thread.unrecorded = True
    try:
        yield
    finally:
        _thread.unrecorded = before


def install(before: Callable[[IssuedCollective], None], unknown: Callable[[str], None]) -> Callable[[], None]:
    """Call `before` for each collective, on the thread that issues it; an exception keeps it from starting.

    Args:
        before: is given the collective.
        unknown: is given the name of an operator of c10d whose arguments are not known here, each time it is called.

    Returns:
        What takes it away again.

    Raises:
        UnsupportedVersionError: this torch dispatches otherwise.
    """
    require(PART)
    return _install(before, unknown)


_uses: Counter[str] = Counter()


def rank_store(use: str) -> RankStore | None:
    """All ranks of the job; None for a job of one rank, or as long as there is no process group.

    Args:
        use: what for; each use of each kind has names of its own, and ranks begin those of a kind in the same order.

    Raises:
        UnsupportedVersionError: this torch does not hand out the store of its default group.
    """
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    require(STORE)
    _uses[use] += 1
    store = dist.PrefixStore(f"retrograd/{use}/{_uses[use]}", dist.distributed_c10d._get_default_store())
    return RankStore(store, dist.get_rank(), dist.get_world_size())


def unknown_operators() -> list[str]:
    """Operators of c10d in this torch whose arguments are not known here."""
    return [name for name in _names() if name not in NO_COLLECTIVES and not _is_known(name)]


def _install(before: Callable[[IssuedCollective], None], unknown: Callable[[str], None]) -> Callable[[], None]:
    library = torch.library.Library("c10d", "IMPL")
    unread = unknown_operators()
    for name in _names():
        if name not in NO_COLLECTIVES:
            read = _unread(name, unknown) if name in unread else _read(name, before)
            library.impl(name, _kernel(_operator("c10d", name), read), _KEY, with_keyset=True)
    return library._destroy


def _names() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("c10d::") for name in names if name.startswith("c10d::"))


def _operator(namespace: str, name: str) -> Any:
    name, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def _is_known(name: str) -> bool:
    if name not in OPERATORS:
        return False
    arguments = {argument.name for argument in _operator("c10d", name)._schema.arguments}
    return {"process_group", OPERATORS[name][1]} <= arguments


def _kernel(operator: Any, read: Callable[..., None]) -> Callable[..., Any]:
    """The kernel that calls `read` with the operator's arguments, then the kernels below it."""
    below = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(_thread, "unrecorded", False):
            read(*args)
        return operator.redispatch(keys & below, *args, **kwargs)

    return kernel


def _unread(name: str, unknown: Callable[[str], None]) -> Callable[..., None]:
    return lambda *args: unknown(f"c10d::{name}")


def _read(name: str, before: Callable[[IssuedCollective], None]) -> Callable[..., None]:
    kind, holder = OPERATORS[name]
    places = {argument.name: at for at, argument in enumerate(_operator("c10d", name)._schema.arguments)}
    sent, group = places[holder], places["process_group"]
    root = next((places[r] for r in _ROOTS if r in places), None)
    tag = places.get("tag")
    unbox = torch.distributed.ProcessGroup.unbox

    def read(*args: Any) -> None:
        tensors = list(_tensors(args[sent]))
        from_or_to = -1 if root is None else args[root]
        before(IssuedCollective(kind, tensors, unbox(args[group]), from_or_to, 0 if tag is None else args[tag]))

    return read


def _tensors(nested: Any) -> Iterator[Any]:
    if isinstance(nested, (list, tuple)):
        for part in nested:
            yield from _tensors(part)
    else:
        yield nested


@part(
    "torch.c10d",
    "records collectives of torch.distributed",
    "collectives are not recorded; use torch.profiler, or TORCH_NCCL_DUMP_ON_TIMEOUT for the order of the last",
    names=(
        "torch._C._dispatch_keyset_full_after", "torch._C._dispatch_get_all_op_names", "torch._C.DispatchKey",
        "torch.library.Library._destroy", "OpOverload._schema", "OpOverload.redispatch", "ProcessGroup.unbox",
        "torch.ops.c10d",
    ),
    refuses=True,
)  # fmt: skip
@in_fresh_thread
def PART() -> str:
    """Issue collectives of a process group without a backend: our kernels must see them, and may stop them."""
    group, tensor = torch.distributed.ProcessGroup(0, 1), torch.ones(2, device="cpu")
    issued: list[IssuedCollective] = []

    def stop(collective: IssuedCollective) -> None:
        issued.append(collective)
        raise InterruptedError

    uninstall = _install(stop, lambda name: None)
    try:
        for issue in (
            lambda: group.allreduce([tensor], torch.distributed.AllreduceOptions()),  # as DDP does, through C++
            lambda: torch.ops.c10d.broadcast_([tensor], group.boxed(), 0, 0),
        ):
            try:
                issue()
            except InterruptedError:
                continue
            return "a collective starts although the kernel before it raises"
    finally:
        uninstall()
    if [(c.kind, c.root) for c in issued] != [("all-reduce", -1), ("broadcast", 0)]:
        return f"kernels before c10d's operators see {[(c.kind, c.root) for c in issued]}"
    if any(c.tensors[0] is not tensor or c.group != group for c in issued):
        return "kernels before c10d's operators see other tensors or another process group"
    return _redispatch_test()


def _redispatch_test() -> str:
    """An operator of our own reaches the kernel below ours, with its result."""
    library, seen = torch.library.Library("retrograd_self_test", "FRAGMENT"), list[Any]()
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        kernel = _kernel(_operator("retrograd_self_test", "twice"), seen.append)
        library.impl("twice", kernel, _KEY, with_keyset=True)
        result = torch.ops.retrograd_self_test.twice(torch.ones(2, device="cpu"))
    finally:
        library._destroy()
    if len(seen) != 1 or result.tolist() != [2.0, 2.0]:
        return "a kernel at BackendSelect does not go on to the kernel of the device"
    return ""


@part(
    "torch.c10d.store",
    "lets ranks compare notes through the store of the default process group",
    "ranks are compared through a folder alone: retrograd.graph.watch(ranks=FOLDER)",
    names=("torch.distributed.distributed_c10d._get_default_store",),
    refuses=True,
)
def STORE() -> str:
    """What is put into the default group's store comes back; under a key of this rank, which disturbs no other."""
    dist = torch.distributed
    if not dist.is_initialized():
        return ""
    store = dist.PrefixStore("retrograd/self-test", dist.distributed_c10d._get_default_store())
    key = str(dist.get_rank())
    store.set(key, "posted")
    value = store.get(key) if store.check([key]) else None
    store.delete_key(key)
    return "" if value == b"posted" and not store.check([key]) else f"its store gives {value!r} for b'posted'"
