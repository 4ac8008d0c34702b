"""Executions of one operator from the same inputs: what it writes to is copied before, what it draws is drawn again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from retrograd.compat.torch_dispatch import tree_map_only
from retrograd.trace.diffing.divergence_reasons import UNORDERED
from retrograd.trace.diffing.identity import base_name
from retrograd.trace.operator_schemas import Operator, tensors_in
from retrograd.trace.repeating.schema import DifferenceKind

EXECUTIONS = 6  # of an operator of which two differ: one that stands alone among six is told from one that varies
_ALIGNMENT = 512  # bytes: what CUDA's allocator gives, and more than what any kernel chooses its way by
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNDOCUMENTED = "does not have a deterministic implementation"


class CannotRepeat(Exception):
    """The operator can be executed once only; the text says why."""


class Executions:
    """An operator about to be executed, and what is needed to execute it again.

    Args:
        operator: the facts of its schema.
        func, args, kwargs: the call.

    Raises:
        CannotRepeat: it cannot be executed again without a trace of it.
    """

    def __init__(self, operator: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._operator, self._func, self._args, self._kwargs = operator, func, args, kwargs
        self._pristine = _copies_of_written(operator, args, kwargs) if operator.writes else {}
        self._generators = _generators(args, kwargs) if operator.random else []
        self._before = [generator.get_state() for generator in self._generators]

    def first(self) -> tuple[Any, list[torch.Tensor]]:
        """Execute it as the program does: its result, and all tensors that it made or wrote."""
        out = self._func(*self._args, **self._kwargs)
        return out, _results(self._operator, self._args, self._kwargs, out)

    def again(self) -> list[torch.Tensor]:
        """Execute it once more: the tensors that it made or wrote. Generators are left as they were found."""
        args, kwargs = self._args, self._kwargs
        if self._pristine:
            copies = {key: _copied(held) for key, held in self._pristine.items()}
            args, kwargs = tree_map_only(torch.Tensor, lambda t: copies.get(_place(t), t), (args, kwargs))
        states = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, self._before, strict=True):
            generator.set_state(state)
        try:
            return _results(self._operator, args, kwargs, self._func(*args, **kwargs))
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)

    def examine(self, results: list[list[torch.Tensor]]) -> tuple[DifferenceKind | None, tuple[int, ...]]:
        """What two executions that differ are a case of, None for memory that nobody wrote; executes it some more.

        Args:
            results: those of both; the results of further executions are appended.
        """
        with _deterministically() as warned:
            ordered = [self.again() for _ in range(3)]
        if all(_unwritten(a, b, c) for a, b, c in zip(*results, ordered[0], strict=True)):
            return None, (0, 1)
        results += [self.again() for _ in range(EXECUTIONS - len(results))]
        which = tuple(next(k for k, r in enumerate(results) if same(r, result)) for result in results)
        on_cpu = all(t.device.type == "cpu" for t in results[0])
        atomics = not on_cpu and UNORDERED.search(base_name(self._operator.name)) is not None
        if atomics or any(_UNDOCUMENTED in str(warning.message) for warning in warned):
            return "nondeterministic", which
        if max(map(which.count, which)) == len(which) - 1:
            return "once", which
        # Of kernels on a GPU some add in another order each time, and take an ordered way where they are told to.
        settled = not on_cpu and same(ordered[0], ordered[1]) and same(ordered[0], ordered[2])
        return "nondeterministic" if settled else "varies", which


def same(results: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether all tensors have the same bits; NaN is a number as others are."""
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(results, others, strict=True))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as whole numbers of the same width, of the same shape; of complex numbers a further axis of 2."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().resolve_neg().view(_INTEGERS[tensor.element_size()])


def check_comparable(tensors: list[torch.Tensor]) -> None:
    """Raises CannotRepeat where the bits of tensors cannot be looked at."""
    if any(t.layout is not torch.strided or t.is_quantized or t.is_nested for t in tensors):
        raise CannotRepeat("sparse, quantized or nested tensors")
    if any(t.device.type == "meta" for t in tensors):
        raise CannotRepeat("tensors without memory")
    # What is copied between devices may still be on its way.
    if len({t.device for t in tensors if t.dim()}) > 1:
        raise CannotRepeat("copies between devices")


def _results(operator: Operator, args: Any, kwargs: Any, out: Any) -> list[torch.Tensor]:
    results = list(tensors_in(out))
    returned = {id(t) for t in results}
    return results + [t for t in operator.written(args, kwargs) if id(t) not in returned]


# What it writes to.


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _copies_of_written(operator: Operator, args: Any, kwargs: Any) -> dict[tuple[Any, ...], torch.Tensor]:
    """Copies of the tensors that it writes to, by their place in memory."""
    written = {_place(t): t for t in operator.written(args, kwargs) if t.numel()}
    check_comparable(list(written.values()))
    every = {_place(t): t for t in tensors_in((args, kwargs)) if t.numel()} | written
    end = end_written = 0  # of all that begins before
    for place, tensor in sorted(every.items(), key=lambda item: item[1].data_ptr()):
        begin = tensor.data_ptr()
        if begin < end_written or (place in written and begin < end):
            raise CannotRepeat("arguments that overlap what is written to")
        end = max(end, begin + _extent(tensor) * tensor.element_size())
        end_written = end if place in written else end_written
    return {place: _copied(tensor) for place, tensor in written.items()}


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, as well aligned: kernels of products and sums choose their way by that."""
    size = _extent(tensor) * tensor.element_size()
    memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device=tensor.device)  # [size + 512]
    shift = (tensor.data_ptr() - memory.data_ptr()) % _ALIGNMENT
    flat = memory[shift : shift + size].view(tensor.dtype)  # [extent]
    return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


# What it draws.


def _generators(args: Any, kwargs: dict[str, Any]) -> list[torch.Generator]:
    """All generators that it may draw from."""
    named = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    if named:
        return named
    devices = [t.device for t in tensors_in((args, kwargs))]
    if (asked := kwargs.get("device")) is not None:
        devices.append(torch.device(asked))
    kinds = {device.type for device in devices} or {"cpu"}
    if kinds == {"cpu"}:
        return [torch.default_generator]
    if kinds <= {"cpu", "cuda"}:
        numbers = {torch.cuda.current_device() if d.index is None else d.index for d in devices if d.type == "cuda"}
        return [torch.default_generator, *(torch.cuda.default_generators[n] for n in sorted(numbers))]
    raise CannotRepeat("random numbers of another device")


# What may differ.


@contextmanager
def _deterministically() -> Iterator[list[warnings.WarningMessage]]:
    """Ordered kernels where there are any, memory filled that nobody writes; and what PyTorch says of the others."""
    enabled, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = True
        try:
            yield warned
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn)
            deterministic.fill_uninitialized_memory = fill


def _unwritten(result: torch.Tensor, other: torch.Tensor, filled: torch.Tensor) -> bool:
    """Whether two results differ only where memory that was filled before has kept what it was filled with."""
    apart = bits(result) != bits(other)
    if not apart.any():
        return True
    if filled.is_floating_point() or filled.is_complex():
        kept = torch.view_as_real(filled).isnan() if filled.is_complex() else filled.isnan()
    else:
        most = True if filled.dtype is torch.bool else torch.iinfo(filled.dtype).max
        kept = filled == most
    return bool(kept[apart].all())
