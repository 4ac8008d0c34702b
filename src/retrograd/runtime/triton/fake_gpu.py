"""A torch that says it has a GPU, for launchers that make tensors on one: they get CPU tensors, which nobody reads.

Only inside a context, and only what launchers commonly ask: devices in calls, `is_cuda`, `torch.cuda`'s properties.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from retrograd.compat.torch_autograd import around_backwards
from retrograd.compat.torch_cuda import pretended_shortcuts
from retrograd.compat.torch_dispatch import eagerly, is_functorch_wrapped
from retrograd.compat.torch_inductor import interface_of
from retrograd.compat.torch_library import replace_custom_functions
from retrograd.compat.triton_compile import GpuDescription
from retrograd.runtime.triton import fake_cuda_module as fake
from retrograd.runtime.triton.cuda_alone import CUDA_ALONE
from retrograd.runtime.triton.fake_files import file_answers
from retrograd.runtime.triton.fake_places import FIRST, is_cpu, is_cuda, place, plain, unnumbered
from retrograd.runtime.triton.fake_threads import hearing_threads
from retrograd.runtime.triton.registered_kernels import registered_kernels

_AUTOCAST = ("set_autocast_enabled", "set_autocast_dtype")
_VERSIONS = {"cuda": "12.8", "hip": "6.4"}  # that torch says it was built for
Leaves = Callable[[torch.Tensor, str], None]
Asked = Callable[[], None]
# Of each GPU that is pretended, the innermost last: has functions that a call of torch calls hear of it again.
_AGAIN: list[Callable[[], contextlib.AbstractContextManager[None]]] = []
HOST = torch.device("cpu")
# Descriptors, which torch's stubs call what they give.
_ASKS_CUDA: Any = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_ASKS_CPU: Any = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_ASKS_DEVICE: Any = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_WRAPPER = type(_ASKS_CUDA)
_NAMES_PLACE = (str, torch.device)
_FRESH = frozenset({torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted, torch.Tensor.new_empty,
                    torch.Tensor.new_empty_strided})  # fmt: skip
_LEAVING = frozenset({torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist, torch.Tensor.__repr__})
_PASSING = ("torch.utils._device", "torch.overrides")
# Of torch, what asks for a device as anybody does.
_AS_ANYBODY = ("torch.optim.", "torch.autograd.graph")
# Functions that make a tensor on the default device where they are told of none.
_MAKERS = frozenset(
    getattr(torch, name)
    for name in (
        "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace",
        "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices",
        "triu_indices", "zeros",
    )
)  # fmt: skip
# Calls that name no place where they have no keywords: nine of ten of a recurrence, which took half as long again.
_COMPUTING = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "__getitem__", "__setitem__", "add", "add_", "clone", "contiguous", "detach", "div", "exp", "expand", "flatten",
        "float", "log", "masked_fill", "matmul", "mul", "mul_", "neg", "permute", "pow", "reshape", "sigmoid", "size",
        "squeeze", "sub", "sum", "tanh", "transpose", "unsqueeze", "view",
    )
)  # fmt: skip


class _Here(threading.local):
    """What holds for one thread: while the mode answers there, torch asks it nothing."""

    answering = False
    reading = False  # a file that says of each tensor where it was, which is the CPU


class _OnCpu(TorchFunctionMode):
    """Calls of torch as if tensors on a GPU were there.

    Args:
        knowing: prefixes of the modules that are told the truth about `is_cuda` and `device`.
        devices: whether the others hear of `device` what they hear of `is_cuda`.
        repeats: whether fresh memory always holds the same.
        leaves: called with a tensor whose memory NumPy has from now on, or whose numbers Python gets, and by what.
        by_type: called where code that looks at the type of a device is told that a tensor is on the CPU.
    """

    def __init__(self, knowing: tuple[str, ...], devices: bool, repeats: bool, leaves: Leaves, by_type: Asked) -> None:
        super().__init__()
        self._knowing, self._devices, self._repeats, self._leaves = knowing, devices, repeats, leaves
        self._by_type = by_type
        self._on_gpu = WeakIdKeyDictionary()  # tensors that were put there
        self._on_cpu = WeakIdKeyDictionary()  # tensors that were asked for there
        self._pinned = WeakIdKeyDictionary()  # of those
        self._stored = WeakIdKeyDictionary()  # storages that were put on the GPU, of which torch.load makes tensors
        self.default: torch.device | None = None  # that was chosen for tensors that are told of none
        self._here = _Here()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Have it asked in what a call of torch calls: hooks, backwards, functions of custom operators."""
        before, self._here.answering = self._here.answering, False
        try:
            with self if before else contextlib.nullcontext():
                yield
        finally:
            self._here.answering = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A wrapper is made at each look, so that only equality holds.
        if type(func) is _WRAPPER:
            if func == _ASKS_CUDA and not _asker(sys._getframe(1)).startswith(self._knowing):
                return args[0] not in self._on_cpu
            if func == _ASKS_CPU and not _asker(sys._getframe(1)).startswith((*self._knowing, "torch.")):
                return args[0] in self._on_cpu
            device = func(*args, **(kwargs or {}))
            if func == _ASKS_DEVICE and device.type == "cpu" and args[0] not in self._on_cpu:
                asking, told = sys._getframe(1), (*self._knowing, "torch.")
                asker = _asker(asking) if self._devices or "type" in asking.f_code.co_names else "torch."
                if not asker.startswith(told) or (self._devices and asker.startswith(_AS_ANYBODY)):
                    return FIRST if self._devices else self._by_type() or device
            return device  # or whatever else is asked for, a shape mostly: a third of all calls
        before = self._here.answering
        if func in _COMPUTING and not kwargs:
            self._here.answering = True
            try:
                return func(*args)
            finally:
                self._here.answering = before
        if func is torch.Tensor.cuda:
            return self._moved(args[0], args[0])
        if self._devices and func is torch.Tensor.get_device:
            return -1 if args[0] in self._on_cpu else 0
        if func is torch.Tensor.pin_memory:
            return self._kept(args[0], args[0], pinned=True)
        if func is torch.Tensor.is_pinned:
            return args[0] in self._pinned
        if func in _LEAVING:
            self._leaves(args[0], func.__name__)
        self._here.answering = True
        try:
            result = self._placed(func, args, kwargs or {})
        finally:
            self._here.answering = before
        if self._repeats and func in _FRESH:
            _settle(result)
        return result

    def _placed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a call gives that may name a device."""
        if type(kwargs.get("device")) is int:
            kwargs = kwargs | {"device": FIRST}
        args = unnumbered(func, args)
        if self._devices and func is torch.device:
            return func(*args, **kwargs)
        if "pin_memory" in kwargs:
            pinned = kwargs["pin_memory"]
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            if pinned and self._devices:
                return self._kept(None, func(*args, **kwargs), pinned=True)
        if self.default is not None and func in _MAKERS and kwargs.get("device") is None:
            kwargs = kwargs | {"device": self.default}
        places = [value for value in (*args, *kwargs.values()) if isinstance(value, _NAMES_PLACE)]
        if self._devices and not self._here.reading and (func is torch.Tensor.cpu or any(map(is_cpu, places))):
            return self._kept(args[0] if args else None, func(*args, **kwargs))
        if args[1:] and type(args[1]) is torch.UntypedStorage and args[1] in self._stored:
            return self._moved(None, func(*args, **kwargs))
        if func in CUDA_ALONE:
            return CUDA_ALONE[func](func, args, kwargs)
        if not any(map(is_cuda, places)):
            return func(*args, **kwargs)
        keywords = {name: place(value) if name == "device" else value for name, value in kwargs.items()}
        result = func(*map(place, args), **keywords)
        return self._moved(args[0] if args else None, result) if isinstance(result, torch.Tensor) else result

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, the CPU is a place that nobody has asked for."""
        before, self._here.reading = self._here.reading, True
        try:
            yield
        finally:
            self._here.reading = before

    def placed_storage(self, storage: Any) -> Any:
        """A storage as if it had been moved to the GPU."""
        self._stored[storage] = True
        return storage

    def _moved(self, source: Any, result: torch.Tensor) -> torch.Tensor:
        # What comes from the CPU is a copy: who changes it there leaves the other as it is.
        if result is source and source not in self._on_gpu:
            result = source.clone()
        self._on_gpu[result] = True
        self._on_cpu.pop(result, None)
        return result

    def _kept(self, source: Any, result: Any, pinned: bool = False) -> Any:
        """What was asked for on the CPU by name; from a GPU it is a copy. What is pinned is there, too."""
        if not isinstance(result, torch.Tensor):
            return result
        if result is source and source not in self._on_cpu and not pinned:
            result = source.clone()
        self._on_cpu[result] = True
        if pinned:
            self._pinned[result] = True
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
    target: GpuDescription, knowing: tuple[str, ...] = (), devices: bool = False, repeats: bool = False,
    leaves: Leaves = lambda tensor, how: None, registered: bool = True, by_type: Asked = lambda: None,
) -> Iterator[None]:  # fmt: skip
    """Let code of a person's own believe in a GPU of this architecture.

    Args:
        target: which.
        knowing: prefixes of the modules that are told the truth about `is_cuda`, because they plan for this GPU anyway.
        devices: whether `device` of a tensor that nobody asked for on the CPU is the GPU, too.
        repeats: whether memory that nobody has written always holds the same.
        leaves: called with a tensor whose memory NumPy has from now on, and may write to, or whose numbers Python gets.
        registered: whether operators run the kernels that libraries have registered for CUDA; False where another mode
            has them run.
        by_type: called where `devices` does not hold and code looks at the type of a tensor's device.
    """
    stock_generator, stock_module, stock_fork = torch.Generator, torch.get_device_module, torch.random.fork_rng
    stock_default, stock_set, stock_compile = torch.get_default_device, torch.set_default_device, torch.compile
    mode, stack = _OnCpu(knowing, devices, repeats, leaves, by_type), ExitStack()
    function = torch.autograd.function.BackwardCFunction
    stock_apply: Any = function.apply
    may_compile = "torch._dynamo" not in sys.modules

    def fork_rng(devices: Any = (), *args: Any, **kwargs: Any) -> Any:
        """All draws are the CPU's, whose state is forked whatever the devices."""
        return stock_fork((), *args, **kwargs)

    @functools.wraps(getattr(stock_module, "__wrapped__", stock_module))  # Dynamo asks for its __wrapped__
    def get_device_module(device: Any = None) -> Any:
        """Not asked with a device that the mode places on the CPU: it would keep that answer for ever."""
        current = device is None and not _asker(sys._getframe(1)).startswith("torch.")
        return torch.cuda if current or is_cuda(device) else stock_module(device)

    @functools.wraps(stock_default)
    def get_default_device() -> torch.device:
        return mode.default or stock_default()

    @functools.wraps(stock_set)
    def set_default_device(device: Any) -> None:
        """Torch would place what is made below the mode, where a GPU is one."""
        device = plain(device)
        if mode.default is None:
            stack.callback(stock_set, None)
        mode.default = FIRST if is_cuda(device) else device and torch.device(device)
        stock_set(place(device))

    @functools.wraps(stock_compile)
    def compile(*args: Any, **kwargs: Any) -> Any:
        """As the compiler that was loaded before the context, one that is loaded inside compiles nothing."""
        nonlocal may_compile
        if may_compile:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        may_compile = False
        return stock_compile(*args, **kwargs)

    class Generator(torch.Generator):
        """Made by a type, which asks no torch function."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return stock_generator(place(device))

    def apply_backward(self: Any, *grads: Any) -> Any:
        """The backward of a Function: `torch.autograd.grad` is a call that the mode is asked for, and off inside."""
        with mode.again():
            return stock_apply(self, *grads)

    stock_to = torch.nn.Module.to

    stock_hooks: Any = torch.autograd.graph.saved_tensors_hooks.__init__

    def hooks(self: Any, pack_hook: Any, unpack_hook: Any) -> None:
        """Of what autograd saves, which torch calls below every mode."""
        stock_hooks(self, _hearing(pack_hook), _hearing(unpack_hook))

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Of a module: where there is no GPU, torch has none of this number."""
        kwargs = {name: plain(value) if name == "device" else value for name, value in kwargs.items()}
        return stock_to(self, *map(plain, args[:1]), *args[1:], **kwargs)

    pretended = dict(Generator=Generator, get_device_module=get_device_module, get_default_device=get_default_device,
                     set_default_device=set_default_device, compile=compile,
                     **{name: _on_both(getattr(torch, name)) for name in _AUTOCAST})  # fmt: skip
    with stack:
        stack.enter_context(interface_of(answers := fake.cuda_answers(target)))
        # Its class stays what it is, by which Dynamo knows it.
        entered = dict(__enter__=lambda index: None, __exit__=lambda index, *error: None)
        for owner, names in (
            (torch.cuda, answers), (torch.accelerator, fake.accelerator_answers(target)), (torch, pretended),
            (torch.accelerator.device_index, entered), (torch.random, dict(fork_rng=fork_rng)),
            (torch.nn.Module, dict(to=to)), (torch.distributed, fake.group_answers()),
            (torch.library.Library, dict(impl=_registering(torch.library.Library.impl))),
            (torch.nn.parallel.DistributedDataParallel, fake.replica_answers()),
            (torch.autograd.profiler.profile, fake.profiler_answers()),
            *file_answers(mode.placed_storage, mode.reading),
            (torch.autograd.graph.saved_tensors_hooks, dict(__init__=hooks)),
        ):  # fmt: skip
            stack.enter_context(replaced(owner, names))
        moved = dict(cuda=lambda storage, *_, **__: mode.placed_storage(storage))
        stack.enter_context(replaced(torch.UntypedStorage, moved, new=True))
        stack.enter_context(replaced(torch.cpu, {"device": answers["device"]}, new=True))  # which fla 0.4 believes in
        # A method that refuses another stream than torch's before any mode is asked.
        stack.enter_context(replaced(torch.Tensor, dict(record_stream=lambda tensor, stream: None), new=True))
        if getattr(torch.version, target.backend) is None:
            stack.enter_context(replaced(torch.version, {target.backend: _VERSIONS[target.backend]}))
        stack.enter_context(replaced(torch.backends.cuda, fake.built_answers()))
        stack.enter_context(replaced(function, dict(apply=apply_backward)))
        # Compiled parts would be compiled for a GPU, and torch 2.11 traces the mode as well.
        for context in (pretended_shortcuts(), eagerly(), around_backwards(mode.again), hearing_threads(mode), mode):
            stack.enter_context(context)
        if registered:
            stack.enter_context(registered_kernels())
        replace_custom_functions(_hearing)
        stack.callback(fake.STREAMS.__setitem__, slice(None), list(fake.STREAMS))
        _AGAIN.append(mode.again)
        stack.callback(_AGAIN.remove, mode.again)
        yield


def _on_both(stock: Any) -> Any:
    """What sets autocast for CUDA, which sets it for the CPU too: there the tensors are."""

    @functools.wraps(stock)
    def both(*args: Any) -> None:
        stock(*args)
        if args[0] == "cuda":
            stock("cpu", *args[1:])

    return both


def _registering(stock: Any) -> Any:
    """`Library.impl` for functions of Python's that hear of a GPU when an operator calls them."""

    @functools.wraps(stock)
    def impl(self: Any, name: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = isinstance(function, FunctionType) and function is not torch.library.fallthrough_kernel
        return stock(self, name, _hearing(function) if theirs else function, *args, **kwargs)

    return impl


def _hearing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which torch calls below every mode, and which hears of a GPU while one is pretended."""

    @functools.wraps(function)
    def heard(*args: Any, **kwargs: Any) -> Any:
        with _AGAIN[-1]() if _AGAIN else contextlib.nullcontext():
            return function(*args, **kwargs)

    return heard


@contextlib.contextmanager
def replaced(owner: ModuleType | type, names: Mapping[str, Any], *, new: bool = False) -> Iterator[None]:
    """Other values under these names of a module or class; a name that it has not is left out, unless it is `new`."""
    stock = {name: vars(owner)[name] for name in names if name in vars(owner)}
    for name in names if new else stock:
        setattr(owner, name, names[name])
    try:
        yield
    finally:
        for name in names if new else stock:
            if name in stock:
                setattr(owner, name, stock[name])
            else:
                delattr(owner, name)
