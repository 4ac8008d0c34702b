"""Schema and fake of an operator looked at without the compiler, which `torch.library.opcheck` imports for 1 s."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.schema_check_mode import SchemaCheckMode

from retrograd.compat.registry import in_fresh_thread, part, works
from retrograd.compat.torch_dispatch import KEPT_OUT, tree_leaves, tree_map_only


def agrees(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator does what its schema says, and gives the forms that its fake gives on meta tensors.

    Arguments are copied. False also where that takes opcheck to say: an operator without a kernel for meta tensors.
    """
    return works(AGREES) and _agrees(func, args, kwargs)


def _agrees(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    def copied(make: Any) -> Any:
        return tree_map_only(torch.Tensor, make, (args, kwargs))

    try:
        checked, arguments, meta = copied(torch.Tensor.clone), copied(torch.Tensor.clone), copied(_without_values)
        with _without_dynamo(SchemaCheckMode), SchemaCheckMode():
            func(*checked[0], **checked[1])
        real, fake = func(*arguments[0], **arguments[1]), func(*meta[0], **meta[1])
        return _forms(real, arguments) == _forms(fake, meta) and all(t.is_meta for t in _tensors(fake))
    except Exception:
        return False


def _without_values(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _forms(results: Any, arguments: Any) -> list[Any]:
    """Shapes, dtypes and strides of results, and whose memory they have."""
    every = [*_tensors(arguments), *_tensors(results)]
    forms: list[Any] = []
    for leaf in tree_leaves(results):
        if isinstance(leaf, torch.Tensor):
            steps = [step for size, step in zip(leaf.shape, leaf.stride(), strict=True) if size > 1]
            # Of one element strides mean nothing.
            form = leaf.shape, leaf.dtype, leaf.storage_offset(), leaf.requires_grad, steps * (leaf.numel() > 1)
            forms.append((*form, [leaf is other for other in every], [_shares(leaf, other) for other in every]))
        else:
            forms.append(type(leaf))
    return forms


def _shares(t: torch.Tensor, other: torch.Tensor) -> bool:
    return torch._C._is_alias_of(t, other)  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _without_dynamo(mode: type) -> Iterator[None]:
    """Have a mode of torch's own run inside without Dynamo, which torch loads to keep it out."""
    method = inspect.unwrap(mode.__torch_dispatch__)  # pyright: ignore[reportAttributeAccessIssue]
    loaded = "torch._dynamo" in sys.modules or hasattr(method, KEPT_OUT)
    if not loaded:
        setattr(method, KEPT_OUT, method)
    try:
        yield
    finally:
        if not loaded:
            delattr(method, KEPT_OUT)


@part(
    "torch.opcheck",
    "looks at schemas and fakes of operators at level quick",
    "torch.library.opcheck alone does it, which takes 1 s the first time",
    names=("torch._subclasses.schema_check_mode.SchemaCheckMode", KEPT_OUT, "torch._C._is_alias_of"),
)
@in_fresh_thread
def AGREES() -> str:
    library = torch.library.Library("retrograd_probe", "FRAGMENT")
    kernels = {
        "right": (lambda x: x * 2, torch.empty_like),
        "changes": (lambda x: x.mul_(2).clone(), torch.empty_like),
        "shares": (lambda x: x, torch.empty_like),
        "sizes": (lambda x: x * 2, lambda x: x.new_empty(x.numel() + 1)),
        "dtypes": (lambda x: x * 2, lambda x: torch.empty_like(x, dtype=torch.float64)),
        "strides": (lambda x: (x * 2).t(), torch.empty_like),
        "places": (lambda x: x * 2, lambda x: torch.empty_like(x, device="cpu")),
    }
    right: list[str] = []
    try:
        for name, (kernel, fake) in kernels.items():
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, kernel, "CompositeExplicitAutograd")
            torch.library.register_fake(f"retrograd_probe::{name}", fake, lib=library)
            operator = getattr(torch.ops.retrograd_probe, name).default
            right += [name] * _agrees(operator, (torch.ones(3, 3, device="cpu"),), {})
    finally:
        library._destroy()
    return "" if right == ["right"] else f"nothing is wrong, it seems, with {', '.join(right)}"
