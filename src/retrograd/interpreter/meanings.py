"""What a line of a kernel means, kept by the types and constants that it is about.

A function of Triton's language finds out from the types of what it is given which operations of the builder to make:
casts, broadcasts, constants. The same types give the same operations. They are noted at the first call and made again,
by the same builder, at later ones, without the way there, which is half of the time of a program on a few elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MOST = 20_000  # calls that are kept
_PLAIN = (int, bool, str, type(None))
_NEVER = ("create_print",)


class _Unknown(Exception):
    """An argument that is not known by a type or a constant."""


class _Notes:
    """Stands for the builder during a call, and keeps what it is asked for."""

    def __init__(self, builder: Any, kind: Any, given: list[Any]) -> None:
        self._builder, self._kind = builder, kind
        self.slots = {id(h): slot for slot, h in enumerate(given)}
        self._kept = [*given]  # as long as they live their ids are theirs
        self.steps: list[tuple[str, tuple[Any, ...], int]] = []
        self.lost = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._builder, name)
        if not callable(found) or name.endswith("_ty"):
            return found

        def method(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            self._note(name, args, kwargs, result)
            return result

        return method

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        kind = self._kind
        places = tuple(self.slots.get(id(a)) if type(a) is kind else None for a in args)
        unknown = any(p is None and (type(a) is kind or _holds(a, kind)) for p, a in zip(places, args, strict=True))
        plain = result is None or type(result) is kind
        if unknown or kwargs or name in _NEVER or not (plain or not any(p is not None for p in places)):
            self.lost = True
        elif plain:
            into = -1
            if result is not None:
                into = self.slots[id(result)] = len(self._kept)
                self._kept.append(result)
            given = tuple((-1, a) if p is None else (p, None) for p, a in zip(places, args, strict=True))
            self.steps.append((name, given, into))

    @property
    def size(self) -> int:
        """How many values there are."""
        return len(self._kept)


def _holds(value: Any, kind: Any) -> bool:
    """Whether a value is, or has among its parts, what the builder gave."""
    if isinstance(value, (list, tuple)):
        return any(type(v) is kind or _holds(v, kind) for v in value)
    return type(value).__name__.endswith("Handle")


def keeper(module: Any, tl: Any) -> Callable[[Any], Any]:
    """What makes of a function of the language one that keeps what its calls mean.

    Args:
        module: `triton.runtime.interpreter`.
        tl: `triton.language`.
    """
    semantic, kind = module.interpreter_semantic, module.TensorHandle
    tensor, constexpr, dtype, several = tl.tensor, tl.constexpr, tl.dtype, getattr(tl, "tuple", None)
    if not hasattr(semantic, "builder"):
        return lambda function: function

    def word(value: Any, tensors: list[Any]) -> Any:
        """What an argument is known by."""
        of = type(value)
        if of is tensor:
            tensors.append(value)
            return value._kind
        if of in _PLAIN:
            return of, value
        if of is float:
            return of, value.hex()  # 0 is not -0
        if of is constexpr:
            return of, word(value.value, tensors)
        if of is list or of is tuple:
            return of, *[word(v, tensors) for v in value]
        if of is several:
            return of, *[word(v, tensors) for v in value.values]
        if of is slice:
            return of, word(value.start, tensors), word(value.stop, tensors), word(value.step, tensors)
        if isinstance(value, dtype):
            return dtype, value.name
        raise _Unknown

    def first(function: Any, args: Any, kwargs: Any, tensors: list[Any]) -> tuple[Any, Any]:
        """Make a call, and what is to be kept of it: False if that is nothing."""
        builder = semantic.builder
        notes = semantic.builder = _Notes(builder, kind, [t.handle for t in tensors])
        try:
            result = function(*args, **kwargs, _semantic=semantic)
        finally:
            semantic.builder = builder
        if notes.lost or type(result) is not tensor:
            return result, False
        slot = None if result.handle is None else notes.slots.get(id(result.handle))
        if slot is None and result.handle is not None:
            return result, False
        return result, (notes.steps, notes.size, slot, result.type)

    def keep(function: Any) -> Any:
        known: dict[Any, Any] = {}

        def member(*args: Any, **kwargs: Any) -> Any:
            tensors: list[Any] = []
            kwargs.pop("_semantic", None)
            try:
                key = word(args, tensors), word([*kwargs.items()], tensors) if kwargs else None
                if any(type(t.handle) is not kind for t in tensors):
                    raise _Unknown
            except (_Unknown, AttributeError):
                return function(*args, **kwargs, _semantic=semantic)
            places: dict[int, int] = {}
            if len(tensors) > 1 and len(
                pattern := [places.setdefault(id(t.handle), len(places)) for t in tensors]
            ) > len(places):
                key = (*key, *pattern)  # x * x is not x * y
            found = known.get(key)
            if found:
                steps, size, slot, result_type = found
                values = [t.handle for t in tensors]
                values += [None] * (size - len(values))
                builder = semantic.builder
                for name, given, into in steps:
                    made = getattr(builder, name)(*[a if p < 0 else values[p] for p, a in given])
                    if into >= 0:
                        values[into] = made
                return tensor(None if slot is None else values[slot], result_type)
            if found is False:
                return function(*args, **kwargs, _semantic=semantic)
            result, meaning = first(function, args, kwargs, tensors)
            if len(known) < _MOST:
                known[key] = meaning
            return result

        return member

    return keep
