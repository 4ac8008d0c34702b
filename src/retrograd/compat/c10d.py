"""Sees every collective of torch.distributed on its way to the backend: one Python kernel before each c10d operator.

Python functions, DDP's C++ reducer and functional collectives of compiled graphs all call the operators of namespace
c10d. A kernel at the dispatch key BackendSelect stands between them and the backend, so it also runs under no_grad,
inference_mode and in autograd's threads. It is no TorchDispatchMode, which torch.compile refuses to work under.
Measured on 2 shared cores, torch 2.13: 50 us a collective.

The private names are those of this file: the c10d operators and what `self_test` checks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from retrograd.errors import UsageError

# operator -> kind, argument that holds what this rank gives (or, at scatter and recv, what it gets)
_OPERATORS = {
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
    "scatter_": ("scatter", "output_tensors"),
    "barrier": ("barrier", "tensor"),
    "monitored_barrier_": ("barrier", "tensor"),
    "send": ("send", "tensors"),
    "recv_": ("recv", "tensors"),
    "recv_any_source_": ("recv", "tensors"),
}
_ROOTS = ("root_rank", "dst", "src")
_NO_COLLECTIVES = ("check_for_nan",)
_here = threading.local()


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that is about to start."""

    kind: str
    tensors: list[Any]
    group: Any
    root: int


@contextmanager
def aside() -> Iterator[None]:
    """Collectives issued inside are ours, by which ranks ask each other now and then: no part of the run's sequence."""
    before = getattr(_here, "aside", False)
    _here.aside = True
    try:
        yield
    finally:
        _here.aside = before


def self_test() -> None:
    """Check the private names.

    Raises:
        UsageError: this torch lacks one, or has an operator that is unknown here.
    """
    missing = [
        name
        for name, holder in (
            ("DispatchKey.BackendSelect", getattr(torch._C, "DispatchKey", None)),
            ("_dispatch_keyset_full_after", torch._C),
            ("_dispatch_get_all_op_names", torch._C),
            ("_destroy", torch.library.Library),
            ("unbox", getattr(torch.distributed, "ProcessGroup", None)),
        )
        if not hasattr(holder, name.rpartition(".")[2])
    ]
    if missing:
        raise unknown_torch(f"lacks {', '.join(missing)}")
    names = {n.partition("::")[2] for n in torch._C._dispatch_get_all_op_names() if n.startswith("c10d::")}
    if new := sorted(names - set(_OPERATORS) - set(_NO_COLLECTIVES)):
        raise unknown_torch(f"has operators of c10d that are not known here: {', '.join(new)}")
    for name in sorted(names & set(_OPERATORS)):
        given = [argument.name for argument in _operator(name)._schema.arguments]
        if lacking := {"process_group", _OPERATORS[name][1]} - set(given):
            raise unknown_torch(f"calls c10d::{name} without {', '.join(sorted(lacking))}, but with {', '.join(given)}")


def unknown_torch(what: str) -> UsageError:
    """What is raised where a private name is not what it was in the versions that were tested."""
    return UsageError(
        f"torch {torch.__version__} {what}; collectives are recorded with torch 2.11 to 2.13, on which this was tested"
    )


def _operator(name: str) -> Any:
    return getattr(torch.ops.c10d, name).default


def install(before: Callable[[Call], None]) -> Callable[[], None]:
    """Call `before` for each collective, on the thread that issues it; an exception keeps it from starting.

    Returns:
        What takes it away again.
    """
    self_test()
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    library = torch.library.Library("c10d", "IMPL")
    known = set(torch._C._dispatch_get_all_op_names())
    for name in _OPERATORS:
        if f"c10d::{name}" in known:
            library.impl(name, _kernel(name, after, before), "BackendSelect", with_keyset=True)
    return library._destroy


def _kernel(name: str, after: Any, before: Callable[[Call], None]) -> Callable[..., Any]:
    operator = _operator(name)
    kind, holder = _OPERATORS[name]
    places = {argument.name: at for at, argument in enumerate(operator._schema.arguments)}
    given, group = places[holder], places["process_group"]
    root = next((places[r] for r in _ROOTS if r in places), None)
    unbox = torch.distributed.ProcessGroup.unbox

    def kernel(keys: Any, *args: Any) -> Any:
        if not getattr(_here, "aside", False):
            tensors = list(_tensors(args[given]))
            before(Call(kind, tensors, unbox(args[group]), -1 if root is None else args[root]))
        return operator.redispatch(keys & after, *args)

    return kernel


def _tensors(given: Any) -> Iterator[Any]:
    if isinstance(given, (list, tuple)):
        for one in given:
            yield from _tensors(one)
    else:
        yield given
