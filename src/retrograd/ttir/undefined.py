"""Memory that nobody has written: what torch.empty gives, until an operator or a kernel writes to it."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.compat.torch_dispatch import (
    HigherOrderOperator,
    implements_operators,
    resolved,
    schema,
    tree_leaves,
    until_dynamo_is_loaded,
)
from retrograd.compat.torch_library import cuda_kernel
from retrograd.core.wording import count
from retrograd.ttir.element_types import Array
from retrograd.ttir.faults import AccessAt, FaultList, KernelFault, Kind
from retrograd.ttir.undefined_origins import Origins

_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
_WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
                    torch.uint16, torch.uint32, torch.uint64})  # fmt: skip
_LOCK = threading.RLock()
_LARGE = 3000.0  # not 0 nor made 0 of, as 0.75 by conversions to whole numbers, and more than most numbers beside it
_OVERWRITING = frozenset({"copy_", "fill_", "zero_", "index_put_", "bernoulli_", "cauchy_", "exponential_",
                          "geometric_", "log_normal_", "normal_", "random_", "uniform_"})  # fmt: skip
# 0 times what is not a number is not one either, and memory may hold that.
_PRODUCTS = frozenset({"mul", "mul_", "mm", "bmm", "mv", "dot", "vdot", "addmm", "addmm_", "addmv", "addmv_", "addbmm",
                       "addbmm_", "baddbmm", "baddbmm_", "addr", "addr_", "addcmul", "addcmul_",
                       "convolution"})  # fmt: skip
_SENDING = ("allreduce", "reduce_", "send", "barrier")  # of collectives, those whose first argument is what was there
_LEAVES = {"_local_scalar_dense": "item(), float() or a condition"}  # what a program calls that torch does so
_RESIZED = frozenset({"resize_", "resize_as_"})  # in place, which may move what they keep


class _Here(threading.local):
    """What holds for one thread: whether operators there are the executor's own."""

    paused = False


class UndefinedMemory(TorchDispatchMode):
    """Keeps for each tensor of torch.empty which bytes nobody has written, and follows them through operators.

    An operator on such memory is run twice, with two fillings: what differs in its results is undefined as well.

    Args:
        faults: where it goes that a value which is undefined leaves torch.
        pretends: whether operators run the kernels that libraries have registered for CUDA.
        lock: held while memory has a filling that is not the program's, of whose threads others run meanwhile.
    """

    supports_higher_order_operators = True

    def __init__(
        self, faults: Callable[[], FaultList], *, pretends: bool = False, lock: AbstractContextManager[Any] = _LOCK
    ) -> None:
        super().__init__()
        self._faults, self._pretends, self._here, self.origins = faults, pretends, _Here(), Origins()
        self._lock = lock
        self._known: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}
        self._untouched: set[int] = set()  # those of which nothing is written either
        self._elsewhere = 0  # sessions inside of this one, which execute what is launched now

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether torch.compile may trace below it: compiled code is a program like any other."""
        return True

    def of(self, tensor: torch.Tensor, begin: bool = False) -> Array | None:
        """Which bytes of the tensor's storage are undefined, to be changed in place; None if none are.

        `begin`: none is, but some will be.
        """
        mask = self._mask(tensor)
        self._untouched.discard(_start(tensor))
        if begin and mask is None and tensor.numel():
            self._known[_start(tensor)] = _, mask = _unmarked(tensor.untyped_storage())
        octets = None if mask is None else mask.numpy()
        return octets if octets is not None and (begin or octets.any()) else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, operators are the executor's own: nothing is followed, and no kernel of a library runs for them."""
        before, self._here.paused = self._here.paused, True
        try:
            yield
        finally:
            self._here.paused = before

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Inside, another session executes kernels, whose stores are not seen here: nothing is followed, in no thread.

        Behind it all memory is taken for written.
        """
        self._elsewhere += 1
        try:
            yield
        finally:
            self._elsewhere -= 1
            self._known.clear()
            self._untouched.clear()
            self.origins.clear()

    def leaves(self, tensor: torch.Tensor, how: str) -> None:
        """NumPy has a tensor's memory from now on, and reads it or fills it: all of it is taken for written.

        What is left of a tensor that is written in part is noted; a list has numbers, so that any is told, and so has
        a print of one element. A print of more is noted, as it may show what is written alone.
        """
        if self._elsewhere:
            return None
        with self.paused():
            marks = self._marks(tensor)
            left = 0 if marks is None else int(marks.any(-1).sum())
        if how == "tolist" or (how == "__repr__" and tensor.numel() == 1):
            return self._tell(how.strip("_"), [tensor]) if left else None
        if how == "__repr__":
            detail = f"nobody has written {left} of the {count(tensor.numel(), 'element')} that are printed here"
            return self._add("left unwritten", detail) if left else None
        if left and _start(tensor) not in self._untouched:
            detail = f"nobody has written {left} of the {count(tensor.numel(), 'element')} that NumPy is given here"
            self._add("left unwritten", detail)
        self._known.pop(_start(tensor), None)

    @until_dynamo_is_loaded
    @resolved
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        if self._here.paused or self._elsewhere or any(implements_operators(kind) for kind in types):
            return func(*args, **kwargs)
        if self._pretends and (kernel := cuda_kernel(func)) is not None:
            with self:  # what it does is followed like anything else
                return kernel(*args, **kwargs)
        name = func.name().partition("::")[2].partition(".")[0]
        returns = schema(func).returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if name in _RESIZED:
            return self._resized(func, args, kwargs)
        if func.namespace == "c10d":
            return self._joined(func, name, args, kwargs)
        if self._known and not is_view and name not in _EMPTY and name != "set_":
            tensors = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            touched = [t for t in tensors.values() if self._marks(t) is not None]
            if touched:
                adds = name == "index_put_" and any((*args[3:], *kwargs.values()))
                reads = adds or any(a is args[0] for a in args[1:])
                if name in _OVERWRITING and not reads and all(t is args[0] for t in touched):
                    return self._overwritten(func, name, args, kwargs)
                with self._lock:
                    return self._twice(func, name, args, kwargs, touched)
        result = func(*args, **kwargs)
        if not any(r.alias_info is not None for r in returns):
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self._fresh(tensor, name in _EMPTY)
        return result

    def _overwritten(self, func: Any, name: str, args: Any, kwargs: Any) -> torch.Tensor:
        """Run an operator that reads nothing of what it writes: caches are large, and filled row by row."""
        result = func(*args, **kwargs)
        self._untouched.discard(_start(args[0]))
        if (marks := self._marks(args[0])) is not None:
            if name != "index_put_" and marks.numel() == args[0].untyped_storage().nbytes() and args[0].is_contiguous():
                self._known.pop(_start(args[0]))  # all of it: a cache of 4 GB has 4 GB of marks
            elif name == "index_put_":
                func(marks, args[1], torch.zeros((), dtype=torch.bool, device="cpu"))
            else:
                marks.fill_(False)
        return result

    def _joined(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run a collective, once, since ranks wait for each other: what it receives, its first argument, is written."""
        result = func(*args, **kwargs)
        for tensor in () if name.startswith(_SENDING) else tree_leaves(args[:1]):
            if isinstance(tensor, torch.Tensor):
                self._untouched.discard(_start(tensor))
                if (marks := self._marks(tensor)) is not None:
                    marks.fill_(False)
        return result

    def _twice(self, func: Any, name: str, args: Any, kwargs: Any, touched: list[torch.Tensor]) -> Any:
        """Run an operator with two fillings of what is undefined, and mark what depends on them."""
        written = _written(func, args, kwargs)
        places = {id(t): _elements(_octets(t), t) for t in (*touched, *written)}
        storages = {_start(place) for place in places.values()}
        before = [(place, place.clone()) for place in places.values()]
        generators = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
        random = [(generator, generator.get_state()) for generator in (torch.default_generator, *generators)]
        self._fill(touched, math.nan if name in _PRODUCTS else 0.0)
        first = func(*args, **kwargs)
        kept = [_octets(t).clone() if _is_apart(t, storages) else t for t in tree_leaves(first)]
        moved = [(t, _octets(t).clone()) for t in written if _is_apart(t, storages)]  # its out= was too small
        once = [places[id(t)].clone() for t in written]
        for place, was in before:
            place.copy_(was)
        for generator, state in random:
            generator.set_state(state)
        self._fill(touched, _LARGE)
        second = func(*args, **kwargs)
        sources = [_start(t) for t in touched]
        for tensor, was in zip(written, once, strict=True):
            if (start := _start(tensor)) not in storages:
                continue
            self.origins.follow([s for s in sources if s != start] or sources, start)
            self._untouched.discard(start)
            if self._mask(tensor) is None:
                self._known[start] = _unmarked(tensor.untyped_storage())
            # Each element has a byte in which the fillings differ, so that one which was not written stays undefined.
            marks = _elements(self._known[start][1], tensor)
            marks.copy_((was != places[id(tensor)]).any(-1, True).expand_as(marks))
        for tensor, was in [*moved, *zip(tree_leaves(second), kept, strict=True)]:
            if not isinstance(tensor, torch.Tensor):
                if tensor != was and not all(isinstance(n, float) and math.isnan(n) for n in (tensor, was)):
                    self._tell(name, touched)
            elif _is_apart(tensor, storages):
                now = _octets(tensor)
                if now.shape != was.shape:  # how many there are is a number that a program reads
                    self._tell(name, touched)
                self._fresh(tensor, now != was if now.shape == was.shape else True)
                self.origins.follow(sources, _start(tensor))
        return second

    def _resized(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that keeps of a tensor what it has room for: nobody has written the rest."""
        tensor = args[0]
        mask, had = self._mask(tensor), tensor.untyped_storage().nbytes()
        known = torch.zeros(had, dtype=torch.bool, device="cpu") if mask is None else mask
        result = func(*args, **kwargs)
        storage = tensor.untyped_storage()
        if storage.nbytes() > had:
            marks = torch.ones(storage.nbytes(), dtype=torch.bool, device="cpu")
            marks[:had] = known
            self._known[storage.data_ptr()] = weakref.ref(storage), marks
        return result

    def _fill(self, tensors: list[torch.Tensor], number: float) -> None:
        """Fill undefined elements with a number."""
        for tensor in tensors:
            mask = self._mask(tensor)
            if mask is not None:
                place = _elements(_octets(tensor), tensor)
                place.copy_(torch.where(_elements(mask, tensor), _filling(tensor.dtype, number), place))

    def _fresh(self, tensor: torch.Tensor, undefined: bool | torch.Tensor) -> None:
        """A tensor with memory of its own: what lay there before is forgotten."""
        if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        self._known.pop(storage.data_ptr(), None)
        self._untouched.discard(storage.data_ptr())
        self.origins.forget(storage.data_ptr())
        if undefined is True:
            self._untouched.add(storage.data_ptr())
            self.origins.allocated(storage.data_ptr(), *_caller(sys._getframe(2)))
        if not storage.nbytes() or undefined is False or (undefined is not True and not undefined.any()):
            return
        mask = torch.ones(storage.nbytes(), dtype=torch.bool, device="cpu") if undefined is True else undefined
        self._known[storage.data_ptr()] = weakref.ref(storage), mask

    def _mask(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        known = self._known.get(storage.data_ptr())
        if known is None:
            return None
        if known[0]() is not storage or len(known[1]) != storage.nbytes():
            del self._known[storage.data_ptr()]
            return None
        return known[1]

    def _marks(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The marks of a tensor's elements; None where all are defined."""
        mask = self._mask(tensor)
        if mask is None:
            return None
        marks = _geometry(mask, tensor)
        # Where nothing is written the first one tells; any() of 8 MB takes 2 ms.
        if marks[(0,) * marks.ndim] or marks.any():
            return marks
        if marks.numel() == len(mask) and tensor.is_contiguous():
            del self._known[_start(tensor)]  # all of it is written by now
        return None

    def _tell(self, name: str, tensors: list[torch.Tensor]) -> None:
        by, origin = _LEAVES.get(name, name), self.origins.text(map(_start, tensors))
        detail = f"a value that leaves torch by {by} depends on memory that nobody has written{origin}"
        self._add("uninitialised", detail)

    def _add(self, kind: Kind, detail: str) -> None:
        file, line = _caller(sys._getframe(3))
        self._faults().add(KernelFault(kind, "", AccessAt("reads", file, line), detail=detail))


def _filling(dtype: torch.dtype, number: float) -> torch.Tensor:
    """The bytes of a number; in whole numbers, and in floats of 8 bits, of 0 or of what is large there."""
    large = number == _LARGE
    if dtype in _WHOLE:
        number, large = float(large), False
    if dtype.itemsize == 1:
        return torch.full((1,), 0x45 if large else int(number > 0), dtype=torch.uint8, device="cpu")
    return torch.full((1,), number, dtype=dtype, device="cpu").view(torch.uint8)


def _geometry(octets: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Of all bytes of a storage, or marks of them, those of a tensor's elements, along a last axis."""
    size = tensor.element_size()
    strides = (*(size * stride for stride in tensor.stride()), 1)
    return octets.as_strided((*tensor.shape, size), strides, tensor.storage_offset() * size)


def _elements(octets: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The same, each once: to be written to. A column of 4,096 in a storage of 8 MB takes 20 us, all of that 15 ms."""
    once = [0 if stride else 1 for stride in tensor.stride()]
    shape = [1 if only else size for only, size in zip(once, tensor.shape, strict=True)]
    return _geometry(octets, tensor.as_strided(shape, tensor.stride()) if any(once) else tensor)


def _is_apart(value: Any, storages: set[int]) -> bool:
    """Whether it is a tensor with memory that is none of these."""
    return isinstance(value, torch.Tensor) and _start(value) not in storages


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Arguments that an operator writes to."""
    arguments = schema(func).arguments
    pairs = [*zip(arguments, args, strict=False)]
    pairs += [(a, kwargs[a.name]) for a in arguments[len(args) :] if a.name in kwargs]
    writes = [value for argument, value in pairs if argument.alias_info is not None and argument.alias_info.is_write]
    return [t for t in tree_leaves(writes) if isinstance(t, torch.Tensor) and t.numel()]


def _unmarked(storage: torch.UntypedStorage) -> tuple[weakref.ref[Any], torch.Tensor]:
    return weakref.ref(storage), torch.zeros(storage.nbytes(), dtype=torch.bool, device="cpu")


def _start(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())


def _caller(frame: FrameType | None) -> tuple[str, int]:
    """The innermost line that is neither torch's nor ours."""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "retrograd"):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0
