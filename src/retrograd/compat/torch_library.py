"""Kernels that libraries register for CUDA in Python, called where tensors that pretend to be there are on the CPU."""

# The stubs do not have private names.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from retrograd.compat.registry import in_fresh_thread, part, works

_CUDA = "/CUDA"
_replacements: WeakSet[Callable[..., Any]] = WeakSet()
_known: tuple[int, frozenset[str]] = 0, frozenset()  # how many there were when last looked at, and those for CUDA


def cuda_kernel(operator: Any) -> Callable[..., Any] | None:
    """The kernel of an overload that somebody has registered for CUDA in Python; None if nobody has."""
    global _known
    registered = getattr(torch.library, "_impls", ())
    if len(registered) != _known[0]:
        _known = len(registered), frozenset(_theirs(registered))
    if not _known[1] or operator.name().replace("::", "/") not in _known[1] or not works(REGISTERED):
        return None
    return lambda *args, **kwargs: operator._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)


def replace_custom_functions(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put something around the functions of custom operators that there are, once each, and for good."""
    custom = sys.modules.get("torch._library.custom_ops")
    for operator in list(getattr(custom, "OPDEFS", {}).values()):
        functions = getattr(operator, "_backend_fns", {})
        for device, function in list(functions.items()):
            if function not in _replacements:
                functions[device] = around(function)
                _replacements.add(functions[device])


def _theirs(registered: Any) -> list[str]:
    """Those for CUDA, as `namespace/name.overload`, but for torch's own, which begin a name in the namespace _native.

    Of torch 2.15 so do aten/bmm and _native/bmm_triton_0, aten/linalg_polar.out and _native/linalg_polar_out_native_3.
    """
    names = [name.removesuffix(_CUDA) for name in registered if name.endswith(_CUDA)]
    own = tuple(name.partition("/")[2] for name in names if name.startswith("_native/"))
    return [name for name in names if not (name.startswith("_native/") or _is_torchs(name, own))]


def _is_torchs(name: str, own: tuple[str, ...]) -> bool:
    namespace, _, operator = name.partition("/")
    return namespace == "aten" and any(n.startswith(f"{operator.replace('.', '_')}_") for n in own)


@part(
    "torch.library.registered",
    "runs the kernels that libraries register for CUDA, where a GPU is pretended",
    "operators with a kernel for CUDA alone are refused by torch, which says so",
    names=("torch.library._impls", "OpOverload._op_dk", "torch._library.custom_ops.OPDEFS", "CustomOpDef._backend_fns"),
)
@in_fresh_thread
def REGISTERED() -> str:
    library = torch.library.Library("retrograd_registered", "DEF")
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CUDA")
        twice = torch.ops.retrograd_registered.twice.default
        listed = "retrograd_registered/twice" in _theirs(torch.library._impls)
        result = twice._op_dk(torch._C.DispatchKey.CUDA, torch.ones(1, device="cpu"))
    finally:
        library._destroy()
    return "" if listed and result.item() == 2.0 else "kernels for CUDA are kept or called otherwise"
