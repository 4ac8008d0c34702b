"""Tensors' storages: identity, elements of sparse ones, whether memory holds the numbers; and what modules hold."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import torch

from retrograd.compat.registry import in_fresh_thread, part

# A number of an untyped storage, which no other has that is alive at the same time.
storage_id: Callable[[Any], int] = attrgetter("_cdata")
# The elements that a COO tensor stores, coalesced or not.
sparse_values: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_values")
# Whether a tensor is zeros that nobody stored, as autograd's forward mode makes them.
has_no_memory: Callable[[torch.Tensor], bool] = methodcaller("_is_zerotensor")
# The parameters, buffers and modules that a module holds itself, by name: three mappings that change as it does.
own_members: Callable[[torch.nn.Module], tuple[Any, ...]] = attrgetter("_parameters", "_buffers", "_modules")


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a subclass as one of torch.Tensor, without calling what the subclass does instead."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def is_zeros_without_memory(operator: Any) -> bool:
    """Whether an operator makes such zeros."""
    return operator is torch.ops.aten._efficientzerotensor.default


@part(
    "torch.tensors",
    "asks where tensors keep their numbers",
    "verify and traces stop where they ask for such a name",
    names=(
        "UntypedStorage._cdata",
        "Tensor._values",
        "Tensor._is_zerotensor",
        "aten::_efficientzerotensor",
        "Module._parameters",
        "Module._buffers",
        "Module._modules",
        "_C.DisableTorchFunctionSubclass",
    ),
)
@in_fresh_thread
def PART() -> str:
    base = torch.zeros(4, device="cpu")
    same, other = (storage_id(t.untyped_storage()) for t in (base[1:], base.clone()))
    if storage_id(base.untyped_storage()) != same or same == other:
        return "storages are told apart otherwise than by _cdata"
    if torch.eye(2, device="cpu").to_sparse_coo()._values().tolist() != [1.0, 1.0]:
        return "_values are not the elements of a sparse tensor"
    if type(as_plain(torch.nn.Parameter(base))) is not torch.Tensor:
        return "a tensor of a subclass is not shown as one of torch.Tensor"
    module = torch.nn.Module()
    members = own_members(module)
    module.weight, module.inner = torch.nn.Parameter(base), torch.nn.Module()
    module.register_buffer("total", same_buffer := torch.zeros(1, device="cpu"))
    if [list(held.values()) for held in members] != [[module.weight], [same_buffer], [module.inner]]:
        return "modules hold what they are assigned elsewhere"
    zeros = torch.ops.aten._efficientzerotensor.default([2], device="cpu")
    return "" if has_no_memory(zeros) and not has_no_memory(base) else "zeros without memory are not told apart"
