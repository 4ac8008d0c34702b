"""Tensors' storages: identity, elements of sparse ones, and whether memory holds the numbers."""

# The stubs do not have private names, or not as they are.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import torch

from retrograd.compat.registry import in_fresh_thread, part, works

# A number of an untyped storage, which no other has that is alive at the same time.
storage_id: Callable[[Any], int] = attrgetter("_cdata")
# The elements that a COO tensor stores, coalesced or not.
sparse_values: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_values")
# Whether a tensor is zeros that nobody stored, as autograd's forward mode makes them.
has_no_memory: Callable[[torch.Tensor], bool] = methodcaller("_is_zerotensor")


def is_zeros_without_memory(operator: Any) -> bool:
    """Whether an operator makes such zeros."""
    return operator is torch.ops.aten._efficientzerotensor.default


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may lie in one place, as those of expand() do."""
    if not works(PART):
        # A sufficient test: strides that grow past what lies within never overlap.
        reach = 0
        for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
            if stride <= reach:
                return True
            reach += stride * (size - 1)
        return False
    return torch._debug_has_internal_overlap(tensor) == 1


@part(
    "torch.tensors",
    "asks where tensors keep their numbers",
    "a view that may overlap itself is copied before it gets guard bands",
    names=(
        "UntypedStorage._cdata", "Tensor._values", "Tensor._is_zerotensor", "torch._debug_has_internal_overlap",
        "aten::_efficientzerotensor",
    ),
)  # fmt: skip
@in_fresh_thread
def PART() -> str:
    base = torch.zeros(4, device="cpu")
    same, other = (storage_id(t.untyped_storage()) for t in (base[1:], base.clone()))
    if storage_id(base.untyped_storage()) != same or same == other:
        return "storages are told apart otherwise than by _cdata"
    if torch.eye(2, device="cpu").to_sparse_coo()._values().tolist() != [1.0, 1.0]:
        return "_values are not the elements of a sparse tensor"
    zeros = torch.ops.aten._efficientzerotensor.default([2], device="cpu")
    if not has_no_memory(zeros) or has_no_memory(base):
        return "zeros without memory are not told apart"
    expanded = [torch._debug_has_internal_overlap(t) for t in (base[:1].expand(3), base, base.view(2, 2).t())]
    return "" if expanded == [1, 0, 0] else f"overlap within a tensor is told as {expanded}"
