"""Code that Inductor has written where a GPU is pretended: what it asks of devices, and which configuration runs.

Loads neither Dynamo nor Inductor.
"""

# The stubs do not have private names, or not as they are.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from retrograd.compat.registry import part, works
from retrograd.core.import_hook import with_modules

_INTERFACE = "torch._dynamo.device_interface"
_BENCHMARKING, _HEURISTICS = "torch._inductor.runtime.benchmarking", "torch._inductor.runtime.triton_heuristics"
# What times, by module: a class and its method.
_TIMERS = {_BENCHMARKING: ("Benchmarker", "benchmark"), _HEURISTICS: ("CachingAutotuner", "bench")}


@contextmanager
def interface_of(answers: Mapping[str, Any]) -> Iterator[None]:
    """Inside, Dynamo's interface of CUDA devices has other functions of torch.cuda: it looks them up when it is loaded.

    To be entered before torch.cuda is changed, so that it is itself again when an interface is left that was loaded
    inside: that one would speak of the pretended GPU for ever.
    """
    stock = {name: vars(torch.cuda)[name] for name in answers if name in vars(torch.cuda)}

    def change(_: str, module: Any) -> Callable[[], None]:
        owner = module.CudaInterface
        _swap(owner, stock, answers)
        module.caching_worker_device_properties.pop("cuda", None)
        owner.get_raw_stream = staticmethod(lambda device: 0)

        def undo() -> None:
            _swap(owner, answers, stock)
            module.caching_worker_device_properties.pop("cuda", None)
            stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
            owner.get_raw_stream = staticmethod(stream)

        return undo

    with with_modules([_INTERFACE], change):
        yield


def _swap(owner: type, functions: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Others under the names at which a class has these functions, with an underscore or without."""
    for name, value in list(vars(owner).items()):
        static = isinstance(value, staticmethod)
        held = value.__func__ if static else value
        for theirs in (name, f"_{name}"):
            if theirs in functions and functions[theirs] is held:
                setattr(owner, name, staticmethod(others[theirs]) if static else others[theirs])


@contextmanager
def untimed() -> Iterator[None]:
    """Inside, Inductor launches nothing to time it: all takes as long, so that the first configuration is chosen."""

    def change(name: str, module: Any) -> Callable[[], None] | None:
        if not works(TIMING):
            return None
        kind, method = _TIMERS[name]
        return _replace(getattr(module, kind), method)

    with with_modules(list(_TIMERS), change):
        yield


def _replace(owner: Any, method: str) -> Callable[[], None]:
    stock = getattr(owner, method)
    setattr(owner, method, lambda *_, **__: 1.0)  # in ms; some divide by it
    return lambda: setattr(owner, method, stock)


@part(
    "torch.inductor.timing",
    "has kernels that Inductor has written run in their first configuration where there is no GPU",
    "each of their configurations is launched many times, which takes minutes",
    names=tuple(f"{name}.{'.'.join(of)}" for name, of in _TIMERS.items()),
)
def TIMING() -> str:
    """The benchmarker that all ask times by that function."""
    if _BENCHMARKING not in sys.modules:
        return f"{_BENCHMARKING} is no longer what times"
    module, called = sys.modules[_BENCHMARKING], list[int]()
    undo = _replace(module.Benchmarker, "benchmark")
    try:
        took = module.benchmarker.benchmark(lambda: called.append(1), device="cuda")
    finally:
        undo()
    return "" if (took, called) == (1.0, []) else f"what takes {took} ms was called {len(called)} times"
