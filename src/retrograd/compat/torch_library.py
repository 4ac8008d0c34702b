"""Kernels that libraries register for CUDA in Python, called where tensors that pretend to be there are on the CPU."""

# The stubs do not have private names.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any
from weakref import WeakSet

import torch

from retrograd.compat.registry import in_fresh_thread, part, works

_CUDA, _CPU, _EVERYWHERE = "/CUDA", "/CPU", "/CompositeExplicitAutograd"
_NAMESPACES = ("_native", "_inductor_test", "fsdp", "symm_mem")  # of torch, where it registers such kernels
_replacements: WeakSet[Callable[..., Any]] = WeakSet()


def cuda_kernel(operator: Any) -> Callable[..., Any] | None:
    """The kernel in Python that an overload has on CUDA and not on the CPU; None if there is none."""
    registered, key = getattr(torch.library, "_impls", ()), _key(operator)
    if not (key in registered or _by_default(key, registered)) or _is_torchs(key, registered) or not works(REGISTERED):
        return None
    keys = torch._C.DispatchKey
    place = keys.CUDA if key in registered else keys.CompositeExplicitAutograd
    return lambda *args, **kwargs: operator._op_dk(place, *args, **kwargs)


def any_cuda_kernel() -> bool:
    """Whether somebody has registered a kernel for CUDA in Python, torch itself aside."""
    return _any_of(len(getattr(torch.library, "_impls", ())))


# Each run of an op asks, and looking takes 0.4 ms for torch's own 1,800: as many as before are taken for the same.
@lru_cache(maxsize=1)
def _any_of(count: int) -> bool:
    registered = getattr(torch.library, "_impls", ())
    theirs = (key.replace(_CPU, _CUDA) for key in registered if key.endswith(_CUDA) or _by_default(key, registered))
    return any(not _is_torchs(key, registered) for key in theirs) and works(REGISTERED)


@cache  # it is asked for at each operator
def _key(operator: Any) -> str:
    return operator.name().replace("::", "/") + _CUDA


def replace_custom_functions(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put something around the functions of custom operators that there are, once each, and for good."""
    custom = sys.modules.get("torch._library.custom_ops")
    for operator in list(getattr(custom, "OPDEFS", {}).values()):
        functions = getattr(operator, "_backend_fns", {})
        for device, function in list(functions.items()):
            if function not in _replacements:
                functions[device] = around(function)
                _replacements.add(functions[device])


def is_of_register_autograd(function: type) -> bool:
    """Whether torch has made an autograd function of what somebody gave `register_autograd`."""
    return function.__name__.startswith("GeneratedBackwardFor_")


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """Of a function, or of an operator by its schema: a custom operator itself takes anything."""
    schema = getattr(getattr(function, "_opoverload", function), "_schema", None)
    if schema is None:
        return list(inspect.signature(function).parameters.values())
    empty, numbers = inspect.Parameter.empty, {each.__name__: each for each in (int, float, bool)}
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY if each.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=each.default_value if each.has_default_value() else empty,
            annotation=numbers.get(str(each.type), empty),
        )
        for each in schema.arguments
    ]


def _by_default(key: str, registered: Iterable[str]) -> bool:
    """Whether an operator has a kernel for every device, and on the CPU another one."""
    name, _, _ = key.rpartition("/")
    return not name.startswith("aten/") and f"{name}{_CPU}" in registered and f"{name}{_EVERYWHERE}" in registered


def _is_torchs(key: str, registered: Iterable[str]) -> bool:
    """Whether a kernel for CUDA is torch's own: those of its namespaces, and of aten what those of _native begin with.

    Of torch 2.15 aten/bmm has _native/bmm_triton_0, aten/linalg_polar.out has _native/linalg_polar_out_native_3.
    """
    namespace, _, operator = key.removesuffix(_CUDA).partition("/")
    own = f"_native/{operator.replace('.', '_')}_"
    return namespace in _NAMESPACES or (namespace == "aten" and any(name.startswith(own) for name in registered))


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
        results, keys = list[float](), torch._C.DispatchKey
        for name, key in (("twice", "CUDA"), ("doubled", "CompositeExplicitAutograd")):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: 2 * x, key)
            library.impl(name, lambda x: 3 * x, "CPU")
            operator = getattr(torch.ops.retrograd_registered, name).default
            results.append(operator._op_dk(getattr(keys, key), torch.ones(1, device="cpu")).item())
        listed = {f"retrograd_registered/twice{_CUDA}", f"retrograd_registered/doubled{_EVERYWHERE}"}
        listed = listed <= set(torch.library._impls)
    finally:
        library._destroy()
    return "" if listed and results == [2.0, 2.0] else "kernels for CUDA are kept or called otherwise"
