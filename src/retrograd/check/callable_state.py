"""State that a callable keeps from call to call: modules it is made of, variables it closes over, globals it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from retrograd.compat.torch_dispatch import is_functorch_wrapped, tree_leaves

_MOST = 1000  # objects that are looked at: a module of 50 layers has some 600, and is read in 0.3 ms
_WIDE = (torch.float64, torch.complex128)
_NOTHING_WITHIN = (type, ModuleType, str, int, float, bool, type(None), torch.dtype)
_PLAIN = frozenset(_NOTHING_WITHIN)  # most of what is met: one look instead of eight


@dataclass
class _Bindings:
    """What refers to what, before a call."""

    mappings: list[tuple[dict[Any, Any], dict[Any, Any]]] = field(default_factory=list)
    lists: list[tuple[list[Any], list[Any]]] = field(default_factory=list)
    cells: list[tuple[CellType, Any]] = field(default_factory=list)
    data: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    variables: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)  # globals that code names
    absent: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)  # or would name, if there were any
    functions: list[tuple[FunctionType, Any, Any]] = field(default_factory=list)  # and their defaults
    complete: bool = True  # whether there is nothing that is not kept here

    def holds(self) -> bool:
        """Whether all still refers to what it did: then a walk would meet the same."""
        return (
            all(f.__defaults__ is plain and f.__kwdefaults__ is named for f, plain, named in self.functions)
            and all(now.get(name, now) is value for now, old in self.variables for name, value in old.items())
            and all(now.keys().isdisjoint(names) for now, names in self.absent)
            and all(dict.__len__(now) == len(old) for now, old in self.mappings)
            and all(dict.get(now, name, now) is value for now, old in self.mappings for name, value in old.items())
            and all(list.__len__(now) == len(old) for now, old in self.lists)
            and all(all(map(is_, list.__iter__(now), old)) for now, old in self.lists)
            and all(_contents(cell) is value for cell, value in self.cells)
        )


_LATEST: list[tuple[Callable[..., Any], _Bindings]] = []  # of callables, what was found last
_ROOTS = 4


@contextmanager
def without_traces(fn: Callable[..., Any]) -> Iterator[None]:
    """A call after which `fn` keeps no tensor that is only of that call, as after `self.w = self.w.to(x.device)`.

    References run on meta tensors, inside vmap and in float64: kept, such a tensor would make the next call fail, of
    the op too where both are one module. Put back are attributes, entries of dicts and lists, variables of closures,
    globals and `.data`; other changes stay.
    """
    before = _bindings(fn)
    try:
        yield
    finally:
        if before.data or not before.complete or not before.holds():
            _put_back(before)


def _put_back(before: _Bindings) -> None:
    for current, old in before.mappings:
        for name in [n for n, v in current.items() if n in old and v is not old[n] and _of_a_call(v, old[n])]:
            current[name] = old[name]
    for current, old in before.variables:  # not by all globals of a module, of which code names a few
        for name, value in old.items():
            if name in current and current[name] is not value and _of_a_call(current[name], value):
                current[name] = value
    for current, old in before.mappings:
        for name in [n for n, value in current.items() if n not in old and _of_a_call(value, None)]:
            del current[name]
    for items, old_items in before.lists:
        known = {id(value) for value in old_items}
        if any(_of_a_call(value, None) for value in items if id(value) not in known):
            items[:] = old_items
    for cell, old_value in before.cells:
        if _of_a_call(cell.cell_contents, old_value):
            cell.cell_contents = old_value
    for tensor, data in before.data:
        if tensor.dtype != data.dtype or tensor.device != data.device:
            tensor.data = data


def _of_a_call(value: Any, old: Any) -> bool:
    """Whether a binding holds a tensor of a kind that the op is not called with, and did not before."""
    if value is old:
        return False
    known = {id(leaf) for leaf in tree_leaves(old)}
    return any(isinstance(t, torch.Tensor) and id(t) not in known and _is_unlike(t) for t in tree_leaves(value))


def _is_unlike(t: torch.Tensor) -> bool:
    return is_functorch_wrapped(t) or t.is_meta or t.dtype in _WIDE or t.is_inference()


def _bindings(fn: Callable[..., Any]) -> _Bindings:
    """All that can be reached from a callable without entering libraries, but for what is behind `_MOST` others."""
    for known, kept in _LATEST:
        if known is fn and kept.holds():
            return kept
    kept = _reached(fn)
    _LATEST[:] = [(known, other) for known, other in _LATEST if known is not fn][-_ROOTS:]
    if kept.complete and not kept.data:
        _LATEST.append((fn, kept))
    return kept


def _reached(fn: Callable[..., Any]) -> _Bindings:
    kept, met = _Bindings(), set[int]()
    waiting: list[Any] = [fn]
    while waiting and len(met) < _MOST:
        value = waiting.pop()
        if type(value) in _PLAIN or id(value) in met or isinstance(value, _NOTHING_WITHIN):
            continue
        met.add(id(value))
        if isinstance(value, torch.Tensor):
            if not is_functorch_wrapped(value):
                kept.data.append((value, value.data))
        elif isinstance(value, FunctionType):
            waiting += _of_function(value, kept)
        elif isinstance(value, MethodType):
            waiting += [value.__self__, value.__func__]
        elif isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, dict):
            kept.mappings.append((value, dict(dict.items(value))))
            waiting += dict.values(value)
        elif isinstance(value, list):
            kept.lists.append((value, [*list.__iter__(value)]))
            waiting += list.__iter__(value)
        elif isinstance(value, tuple):  # not by what a class makes of one: those of e3nn have no length
            waiting += tuple.__iter__(value)
        elif isinstance(value, (set, frozenset)):
            waiting += value
            kept.complete = False
        else:
            waiting.append(getattr(value, "__dict__", None))
    kept.complete = kept.complete and not waiting
    return kept


def _contents(cell: CellType) -> Any:
    """What a variable that is closed over holds; the cell itself where it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _of_function(fn: FunctionType, kept: _Bindings) -> Iterator[Any]:
    """What a function refers to: variables it closes over, defaults, globals it names."""
    kept.functions.append((fn, fn.__defaults__, fn.__kwdefaults__))
    for cell in fn.__closure__ or ():
        if (value := _contents(cell)) is cell:
            kept.complete = False
            continue
        kept.cells.append((cell, value))
        yield value
    yield fn.__defaults__
    yield fn.__kwdefaults__
    named = {name: fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__}
    if absent := [name for name in fn.__code__.co_names if name not in named]:
        kept.absent.append((fn.__globals__, absent))
    if named:
        kept.variables.append((fn.__globals__, named))
        yield from named.values()
