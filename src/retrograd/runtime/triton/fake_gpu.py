"""A torch that says it has a GPU, for launchers that make tensors on one: they get CPU tensors, which nobody reads.

Only inside a context, and only what launchers commonly ask: devices in calls, `is_cuda`, `torch.cuda`'s properties.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from retrograd.compat.triton_compile import GpuDescription


@contextlib.contextmanager
def gpu(target: GpuDescription, knowing: tuple[str, ...] = ()) -> Iterator[None]:
    """Let code of a person's own believe in a GPU of this architecture.

    Args:
        target: which.
        knowing: prefixes of the modules that are told the truth about `is_cuda`, because they plan for this GPU anyway.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils.weak import WeakIdKeyDictionary

    is_cuda: Any = torch.Tensor.is_cuda  # a descriptor, which torch's stubs call a bool
    asks_cuda = is_cuda.__get__

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # A wrapper is made at each look, so that only equality holds.
            if func == asks_cuda and not sys._getframe(1).f_globals.get("__name__", "").startswith(knowing):
                return True
            if func is torch.Tensor.cuda:
                return moved(args[0], args[0])
            values = (*args, *(kwargs or {}).values())
            if not any(_is_cuda(value) for value in values):
                return func(*args, **(kwargs or {}))
            keywords = {name: _place(value) if name == "device" else value for name, value in (kwargs or {}).items()}
            result = func(*map(_place, args), **keywords)
            return moved(args[0] if args else None, result) if isinstance(result, torch.Tensor) else result

    on_gpu = WeakIdKeyDictionary()  # tensors that were put there

    def moved(source: Any, result: torch.Tensor) -> torch.Tensor:
        # What comes from the CPU is a copy: who changes it there leaves the other as it is.
        if result is source and source not in on_gpu:
            result = source.clone()
        on_gpu[result] = True
        return result

    names, answers = torch.cuda.__dict__, _answers(target)
    stock = {name: names[name] for name in answers}
    names.update(answers)
    try:
        with OnCpu():
            yield
    finally:
        names.update(stock)


def _is_cuda(value: Any) -> bool:
    """Whether a value is a CUDA device, or names one."""
    import torch

    if isinstance(value, str):
        return value == "cuda" or value.startswith("cuda:")
    return isinstance(value, torch.device) and value.type == "cuda"


def _place(value: Any) -> Any:
    """The CPU for a CUDA device, anything else as it is."""
    import torch

    if not _is_cuda(value):
        return value
    return "cpu" if isinstance(value, str) else torch.device("cpu")


class _Device(contextlib.nullcontext):
    """torch.cuda.device of whatever device."""

    def __init__(self, device: Any = None) -> None:
        super().__init__(device)


@functools.cache
def _answers(target: GpuDescription) -> dict[str, Any]:
    import torch

    capability = divmod(target.arch, 10) if isinstance(target.arch, int) else (9, 4)
    properties = SimpleNamespace(
        name=target.name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=target.num_sms,
        warp_size=target.warp_size,
        total_memory=80 * 1024**3,
        shared_memory_per_block_optin=target.shared_limit_bytes,
        gcnArchName=str(target.arch),
    )
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: target.name,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0),
        "device": _Device,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda *_, **__: True,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),  # torch.compile saves and restores it
        "set_rng_state": lambda state, device="cuda": None,
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), lambda device=None: 0),
        "reset_peak_memory_stats": lambda device=None: None,
    }
