"""Meaning of a line of a kernel, kept by the types and constants that it is about.

A function of Triton's language finds out from the types of what it is given which operations of the builder to make:
casts, broadcasts, constants. The same types give the same operations. They are noted at the first call and made again,
by the same builder, at later ones, without the way there, which is half of the time of a program on a few elements.
"""

from __future__ import annotations

from typing import Any

_MOST = 10_000  # calls of a function that are kept
_PLAIN = (int, bool, str, type(None))
_NEVER = ("create_print",)


class _Unknown(Exception):
    """An argument that is not known by a type or a constant."""


class _OperationRecorder:
    """Stands for the builder during a call, and keeps what it is asked for."""

    def __init__(self, builder: Any, kind: Any, handles: list[Any]) -> None:
        self._builder, self._kind = builder, kind
        self.slots = {id(h): slot for slot, h in enumerate(handles)}
        self._kept = [*handles]  # as long as they live their ids are theirs
        self.steps: list[tuple[str, tuple[Any, ...], int]] = []
        self.abandoned = False

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._builder, name)
        if not callable(attribute) or name.endswith("_ty"):
            return attribute

        def method(*args: Any, **kwargs: Any) -> Any:
            result = attribute(*args, **kwargs)
            self._note(name, args, kwargs, result)
            return result

        return method

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        kind = self._kind
        places = tuple(self.slots.get(id(a)) if type(a) is kind else None for a in args)
        unknown = any(p is None and (type(a) is kind or _holds(a, kind)) for p, a in zip(places, args, strict=True))
        plain = result is None or type(result) is kind
        if unknown or kwargs or name in _NEVER or not (plain or not any(p is not None for p in places)):
            self.abandoned = True
        elif plain:
            into = -1
            if result is not None:
                into = self.slots[id(result)] = len(self._kept)
                self._kept.append(result)
            operands = tuple((-1, a) if p is None else (p, None) for p, a in zip(places, args, strict=True))
            self.steps.append((name, operands, into))

    @property
    def size(self) -> int:
        """How many values there are."""
        return len(self._kept)


def _holds(value: Any, kind: Any) -> bool:
    """Whether a value is, or has among its parts, what the builder gave."""
    if isinstance(value, (list, tuple)):
        return any(type(v) is kind or _holds(v, kind) for v in value)
    return type(value).__name__.endswith("Handle")


class OperationCache:
    """What makes of functions of the language such as keep what their calls mean.

    Args:
        module: `triton.runtime.interpreter`.
        tl: `triton.language`.
    """

    def __init__(self, module: Any, tl: Any) -> None:
        self._semantic, self._kind = module.interpreter_semantic, module.TensorHandle
        self._tensor, self._constexpr, self._dtype = tl.tensor, tl.constexpr, tl.dtype
        self._several = getattr(tl, "tuple", None)

    def _key_of(self, value: Any, tensors: list[Any]) -> Any:
        """What an argument is known by; values are noted in `tensors`."""
        of = type(value)
        if of is self._tensor:
            if type(value.handle) is not self._kind:
                raise _Unknown
            tensors.append(value)
            return value._kind
        if of in _PLAIN:
            return of, value
        if of is float:
            return of, value.hex()  # 0 is not -0
        if of is self._constexpr:
            return of, self._key_of(value.value, tensors)
        if of is list or of is tuple:
            return of, *[self._key_of(v, tensors) for v in value]
        if of is self._several:
            return of, *[self._key_of(v, tensors) for v in value.values]
        if of is slice:
            return of, *[self._key_of(v, tensors) for v in (value.start, value.stop, value.step)]
        if isinstance(value, self._dtype):
            return self._dtype, value.name
        raise _Unknown

    def _key(self, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
        """What a call is known by; None if by nothing."""
        try:
            key = self._key_of(args, tensors), self._key_of([*kwargs.items()], tensors) if kwargs else None
        except (_Unknown, AttributeError):  # a value of an unnamed type
            return None
        places: dict[int, int] = {}
        pattern = [places.setdefault(id(t.handle), len(places)) for t in tensors]
        return key if len(places) == len(tensors) else (*key, *pattern)  # x * x is not x * y

    def _first(self, function: Any, args: Any, kwargs: Any, tensors: list[Any]) -> tuple[Any, Any]:
        """Make a call; its result, and what is to be kept of it: False if that is nothing."""
        builder = self._semantic.builder
        notes = self._semantic.builder = _OperationRecorder(builder, self._kind, [t.handle for t in tensors])
        try:
            result = function(*args, **kwargs)
        finally:
            self._semantic.builder = builder
        if notes.abandoned or type(result) is not self._tensor:
            return result, False
        slot = None if result.handle is None else notes.slots.get(id(result.handle))
        if slot is None and result.handle is not None:
            return result, False
        return result, (notes.steps, notes.size, slot, result.type)

    def keep(self, function: Any) -> Any:
        """The function, given the interpreter's semantic, whose calls are kept."""
        semantic, tensor, known = self._semantic, self._tensor, dict[Any, Any]()
        if not hasattr(semantic, "builder"):
            return lambda *args, **kwargs: function(*args, **{**kwargs, "_semantic": semantic})

        def member(*args: Any, **kwargs: Any) -> Any:
            tensors: list[Any] = []
            kwargs.pop("_semantic", None)
            key = self._key(args, kwargs, tensors)
            kwargs["_semantic"] = semantic
            entry = False if key is None else known.get(key)
            if entry is False:
                return function(*args, **kwargs)
            if entry is None:
                result, meaning = self._first(function, args, kwargs, tensors)
                if len(known) < _MOST:
                    known[key] = meaning
                return result
            steps, size, slot, result_type = entry
            values = [t.handle for t in tensors]
            values += [None] * (size - len(values))
            builder = semantic.builder
            for name, operands, into in steps:
                handle = getattr(builder, name)(*[a if p < 0 else values[p] for p, a in operands])
                if into >= 0:
                    values[into] = handle
            return tensor(None if slot is None else values[slot], result_type)

        return member
