"""A torch that says it has a GPU, for launchers that make tensors on one: they get CPU tensors, which nobody reads.

Only inside a context, and only what launchers commonly ask: devices in calls, `is_cuda`, `torch.cuda`'s properties.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from retrograd.compat.torch_cuda import pretended_shortcuts
from retrograd.compat.torch_dispatch import eagerly, is_functorch_wrapped
from retrograd.compat.triton_compile import GpuDescription

HOST, FIRST = torch.device("cpu"), torch.device("cuda", 0)
# Descriptors, which torch's stubs call what they give.
_ASKS_CUDA: Any = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_ASKS_DEVICE: Any = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_WRAPPER = type(_ASKS_CUDA)
_NAMES_PLACE = (str, torch.device)
_FRESH = frozenset({torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted, torch.Tensor.new_empty,
                    torch.Tensor.new_empty_strided})  # fmt: skip
_PASSING = ("torch.utils._device", "torch.overrides")


class _OnCpu(TorchFunctionMode):
    """Calls of torch as if tensors on a GPU were there.

    Args:
        knowing: prefixes of the modules that are told the truth about `is_cuda` and `device`.
        devices: whether the others hear of `device` what they hear of `is_cuda`.
        repeats: whether fresh memory always holds the same.
    """

    def __init__(self, knowing: tuple[str, ...], devices: bool, repeats: bool) -> None:
        super().__init__()
        self._knowing, self._devices, self._repeats = knowing, devices, repeats
        self._on_gpu = WeakIdKeyDictionary()  # tensors that were put there
        self._on_cpu = WeakIdKeyDictionary()  # tensors that were asked for there

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A wrapper is made at each look, so that only equality holds.
        if type(func) is _WRAPPER:
            if func == _ASKS_CUDA and not _asker(sys._getframe(1)).startswith(self._knowing):
                return args[0] not in self._on_cpu
            device = func(*args, **(kwargs or {}))
            if func == _ASKS_DEVICE and self._devices and device.type == "cpu" and args[0] not in self._on_cpu:
                return device if _asker(sys._getframe(1)).startswith((*self._knowing, "torch.")) else FIRST
            return device  # or whatever else is asked for, a shape mostly: a third of all calls
        if func is torch.Tensor.cuda:
            return self._moved(args[0], args[0])
        if self._devices and func is torch.Tensor.get_device:
            return -1 if args[0] in self._on_cpu else 0
        if func is torch.Tensor.pin_memory:
            return args[0]
        result = self._placed(func, args, kwargs or {})
        if self._repeats and func in _FRESH:
            _settle(result)
        return result

    def _placed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a call gives that may name a device."""
        if self._devices and func is torch.device:
            return func(*args, **kwargs)
        if "pin_memory" in kwargs:
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        places = [value for value in (*args, *kwargs.values()) if isinstance(value, _NAMES_PLACE)]
        if self._devices and (func is torch.Tensor.cpu or any(map(_is_cpu, places))):
            return self._kept(args[0] if args else None, func(*args, **kwargs))
        if not any(map(_is_cuda, places)):
            return func(*args, **kwargs)
        keywords = {name: _place(value) if name == "device" else value for name, value in kwargs.items()}
        result = func(*map(_place, args), **keywords)
        return self._moved(args[0] if args else None, result) if isinstance(result, torch.Tensor) else result

    def _moved(self, source: Any, result: torch.Tensor) -> torch.Tensor:
        # What comes from the CPU is a copy: who changes it there leaves the other as it is.
        if result is source and source not in self._on_gpu:
            result = source.clone()
        self._on_gpu[result] = True
        self._on_cpu.pop(result, None)
        return result

    def _kept(self, source: Any, result: Any) -> Any:
        """What was asked for on the CPU by name; from a GPU it is a copy."""
        if not isinstance(result, torch.Tensor):
            return result
        if result is source and source not in self._on_cpu:
            result = source.clone()
        self._on_cpu[result] = True
        return result


def _settle(fresh: torch.Tensor) -> None:
    """Fill memory that nobody has written with ordinary numbers: about 0.75, ones where they are whole.

    What malloc leaves there is another thing each time, mostly what the same op had there before, which hides that it
    was not written; and kernels that load such memory and mask it were never launched on the same bytes twice.
    """
    strided = type(fresh) is torch.Tensor and fresh.layout == torch.strided
    if strided and fresh.device.type == "cpu" and not is_functorch_wrapped(fresh):
        size, storage = fresh.itemsize, fresh.untyped_storage()
        number = b"\1" + bytes(size - 1) if not (fresh.is_floating_point() or fresh.is_complex()) else b"\x3f" * size
        ctypes.memmove(storage.data_ptr(), number * (storage.nbytes() // size), storage.nbytes())


def _asker(frame: FrameType) -> str:
    """The module that asks, behind modes of torch that pass a question on."""
    while (name := frame.f_globals.get("__name__", "")) in _PASSING and frame.f_back is not None:
        frame = frame.f_back
    return name


@contextlib.contextmanager
def gpu(
    target: GpuDescription, knowing: tuple[str, ...] = (), devices: bool = False, repeats: bool = False
) -> Iterator[None]:  # fmt: skip
    """Let code of a person's own believe in a GPU of this architecture.

    Args:
        target: which.
        knowing: prefixes of the modules that are told the truth about `is_cuda`, because they plan for this GPU anyway.
        devices: whether `device` of a tensor that nobody asked for on the CPU is the GPU, too.
        repeats: whether memory that nobody has written always holds the same.
    """
    names, answers, stock_generator = torch.cuda.__dict__, _answers(target), torch.Generator
    stock_module, stock_fork = torch.get_device_module, torch.random.fork_rng

    def fork_rng(devices: Any = (), *args: Any, **kwargs: Any) -> Any:
        """All draws are the CPU's, whose state is forked whatever the devices."""
        return stock_fork((), *args, **kwargs)

    @functools.wraps(getattr(stock_module, "__wrapped__", stock_module))  # Dynamo asks for its __wrapped__
    def device_module(device: Any = None) -> Any:
        """Not asked with a device that the mode places on the CPU: it would keep that answer for ever."""
        return torch.cuda if _is_cuda(device) else stock_module(device)

    class Generator(torch.Generator):
        """Made by a type, which asks no torch function."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return stock_generator(_place(device))

    mode, function = _OnCpu(knowing, devices, repeats), torch.autograd.function.BackwardCFunction
    stock_apply: Any = function.apply

    def apply_backward(self: Any, *grads: Any) -> Any:
        """The backward of a Function: `torch.autograd.grad` is a call that the mode is asked for, and off inside."""
        with mode:
            return stock_apply(self, *grads)

    stock = {name: names[name] for name in answers}
    names.update(answers)
    torch.Generator, torch.get_device_module, torch.random.fork_rng = Generator, device_module, fork_rng
    function.apply = apply_backward
    try:
        # Compiled parts would be compiled for a GPU, and torch 2.11 traces the mode as well.
        with pretended_shortcuts(), eagerly(), mode:
            yield
    finally:
        function.apply = stock_apply
        torch.Generator, torch.get_device_module, torch.random.fork_rng = stock_generator, stock_module, stock_fork
        names.update(stock)


def _is_cuda(value: Any) -> bool:
    """Whether a value is a CUDA device, or names one."""
    if isinstance(value, str):
        return value == "cuda" or value.startswith("cuda:")
    return isinstance(value, torch.device) and value.type == "cuda"


def _is_cpu(value: Any) -> bool:
    """Whether a value is the CPU as a device, or its name."""
    return value == "cpu" if isinstance(value, str) else isinstance(value, torch.device) and value.type == "cpu"


def _place(value: Any) -> Any:
    """The CPU for a CUDA device, anything else as it is."""
    if not _is_cuda(value):
        return value
    return "cpu" if isinstance(value, str) else torch.device("cpu")


class _Device(contextlib.nullcontext):
    """torch.cuda.device of whatever device."""

    def __init__(self, device: Any = None) -> None:
        super().__init__(device)


class _Event:
    """torch.cuda.Event, each record of which is a second after the one before.

    Nobody knows here what is fastest on a GPU, and by the clock of the CPU a library that times its own kernels chose
    another one at each run, with a NaN or without. By this one it keeps the first, and benchmarks repeat little.
    """

    _records = itertools.count()

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = 0

    def record(self, stream: Any = None) -> None:
        self._at = next(self._records)

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end._at - self._at)

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


class _Stream(contextlib.nullcontext):
    """torch.cuda.Stream, and the context torch.cuda.stream: there is one order of work alone."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(self)

    def wait_stream(self, stream: Any) -> None: ...

    wait_event = record_event = wait_stream

    def synchronize(self) -> None: ...


@functools.cache
def _answers(target: GpuDescription) -> dict[str, Any]:
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
        **dict.fromkeys(("current_stream", "default_stream"), lambda device=None: _Stream()),
        **dict.fromkeys(("Stream", "stream"), _Stream),
        "Event": _Event,
        "device": _Device,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda *_, **__: True,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),  # torch.compile saves and restores it
        "set_rng_state": lambda state, device="cuda": None,
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), lambda device=None: 0),
        "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": lambda device=None: (properties.total_memory, properties.total_memory),
        "nvtx": SimpleNamespace(
            range=contextlib.nullcontext, **dict.fromkeys(("range_push", "range_pop", "mark"), lambda *_: None)
        ),
    }
