"""Codec of records: dataclasses of plain data become JSON and are read back by their type hints.

JSON has no tuples, no NaN and no infinities: tuples are lists, odd floats the strings "nan", "inf" and "-inf". What
does not fit its hint is refused with the path of the field, what is there and what was expected. No room is known here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from retrograd.core.wording import shortened
from retrograd.errors import UsageError

T = TypeVar("T")

_ODD_FLOATS = ("nan", "inf", "-inf")


class Record:
    """A record with JSON of its own: its dataclass has a field `schema` whose default names the version it reads."""

    __slots__ = ()
    _noun: ClassVar[str]  # for errors: "graph comparison"

    def to_json(self) -> str:
        """The record as JSON text; numbers that JSON lacks are the strings "nan", "inf" and "-inf"."""
        return json.dumps(plain(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; UsageError if it is something else, or of another schema."""
        schema = next(f.default for f in fields(cast(Any, cls)) if f.name == "schema")
        return parsed(text, schema, cls._noun, partial(decode, cls))


class ComparisonOutcome:
    """The outcome of comparing two runs or graphs: true, and of exit code 0, where it has no causes."""

    __slots__ = ()
    causes: tuple[Any, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs that counts."""
        return not self.causes

    def __bool__(self) -> bool:
        return self.same

    @property
    def exit_code(self) -> int:
        """0 same, 1 different."""
        return 0 if self.same else 1


def plain(value: Any) -> Any:
    """JSON-ready copy: records become objects, tuples lists, odd floats strings, anything unknown its repr."""
    if value is None or isinstance(value, (bool, int, str)):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in cast(Sequence[Any], value)]
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in cast(Mapping[Any, Any], value).items()}
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    return plain(value.value) if isinstance(value, Enum) else repr(value)


def parsed(text: str, schema: Any, noun: str, build: Callable[[dict[str, Any]], T]) -> T:
    """What `build` makes of JSON of this schema; UsageError says why it is none, calling it `noun`."""
    try:
        data: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"not a retrograd {noun}: line {error.lineno} is not JSON ({error.msg})") from None
    except RecursionError:
        raise UsageError(f"not a retrograd {noun}: lists within lists without end") from None
    actual: Any = cast(dict[str, Any], data).get("schema") if isinstance(data, dict) else None
    if actual != schema:
        raise UsageError(f"{noun} has schema {actual!r}, this version of retrograd reads {schema!r}")
    try:
        return build(cast(dict[str, Any], data))
    except DecodeError as error:
        raise UsageError(f"{noun} is damaged: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{noun} is damaged: {type(error).__name__} {error}") from None


class DecodeError(ValueError):
    """A value that does not fit its type hint; `path` leads to it and grows on the way out."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem, self.path = problem, ""

    def within(self, step: str) -> DecodeError:
        """The same error, seen from the record or list around it."""
        joint = "." if self.path and not self.path.startswith("[") else ""
        self.path = step + joint + self.path
        return self

    def __str__(self) -> str:
        return f"{self.path or 'the record'} {self.problem}"


def decode(kind: type[T], value: Any) -> T:
    """A record from what `json.loads` made of its JSON.

    Args:
        kind: a dataclass, or any other type hint that the codec knows.
        value: dicts, lists, strings, numbers, booleans and None.

    Raises:
        DecodeError: a field is missing, unknown, or holds something else than its hint says.
    """
    return _read(_shape(kind), value)


def older(*, ignored: Sequence[str]) -> dict[str, Any]:
    """Metadata of a field: fields beside it that files of older versions have and nobody reads any more."""
    return {"ignored": ignored}


@dataclass(frozen=True, slots=True)
class _Shape:
    """What JSON a type hint stands for: in words, a test of the outermost value, the reader of one that fits."""

    expected: str
    fits: Callable[[Any], bool]
    build: Callable[[Any], Any]


def _read(shape: _Shape, value: Any) -> Any:
    if not shape.fits(value):
        raise DecodeError(f"is {shortened(repr(value), 60)}, expected {shape.expected}")
    return shape.build(value)


def _is(*kinds: type) -> Callable[[Any], bool]:
    # type() and not isinstance(): True is an int for Python, and not for whoever reads a count.
    return lambda value: type(value) in kinds


def _same(value: Any) -> Any:
    return value


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def _loose(value: Any) -> Any:
    """A value without a hint, such as a parameter's: lists are tuples, and the words for odd floats are floats."""
    if isinstance(value, list):
        return tuple(_loose(v) for v in cast(list[Any], value))
    return float(value) if value in _ODD_FLOATS else value


_SCALARS: dict[Any, _Shape] = {
    int: _Shape("a whole number", _is(int), _same),
    float: _Shape("a number", lambda value: type(value) in (int, float) or value in _ODD_FLOATS, _number),
    str: _Shape("a text", _is(str), _same),
    bool: _Shape("true or false", _is(bool), _same),
    NoneType: _Shape("null", _is(NoneType), _same),
    Any: _Shape("anything", lambda value: True, _loose),
}


@cache
def _shape(hint: Any) -> _Shape:
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _union([_shape(argument) for argument in arguments])
    if origin is Literal:
        return _Shape(f"one of {', '.join(map(repr, arguments))}", lambda value: value in arguments, _same)
    if origin is list:
        return _Shape("a list", _is(list), partial(_items, _shape(arguments[0])))
    if origin is tuple and arguments[-1] is Ellipsis:
        item = _shape(arguments[0])
        return _Shape("a list", _is(list), lambda value: tuple(_items(item, value)))
    if origin is tuple:
        return _fixed([_shape(argument) for argument in arguments])
    if origin is dict:
        return _Shape("an object", _is(dict), partial(_mapping, *arguments))
    if isinstance(hint, type) and issubclass(hint, Enum):
        values: list[Any] = [member.value for member in hint]
        return _Shape(f"one of {', '.join(map(repr, values))}", lambda value: value in values, hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return _Shape(f"an object with the fields of {hint.__name__}", _is(dict), partial(_record, hint))
    raise TypeError(f"no JSON is known for the type hint {hint!r}")


def _union(members: Sequence[_Shape]) -> _Shape:
    def build(value: Any) -> Any:
        *others, last = [member for member in members if member.fits(value)]
        for member in others:
            try:
                return member.build(value)
            except DecodeError:
                continue
        return last.build(value)

    expected = " or ".join(member.expected for member in members)
    return _Shape(expected, lambda value: any(member.fits(value) for member in members), build)


def _fixed(members: Sequence[_Shape]) -> _Shape:
    def build(value: list[Any]) -> tuple[Any, ...]:
        return tuple(_at(f"[{k}]", member, v) for k, (member, v) in enumerate(zip(members, value, strict=True)))

    def fits(value: Any) -> bool:
        return isinstance(value, list) and len(cast(list[Any], value)) == len(members)

    return _Shape(f"a list of {len(members)}", fits, build)


def _items(item: _Shape, value: list[Any]) -> list[Any]:
    # Plain numbers and texts stay as they are: histograms have hundreds, and a call each took five times as long.
    if item.build is _same and all(map(item.fits, value)):
        return value
    return [_at(f"[{k}]", item, v) for k, v in enumerate(value)]


def _mapping(key: type, item: Any, value: dict[str, Any]) -> dict[Any, Any]:
    # JSON has no keys but texts.
    return {(int(k) if key is int else k): _at(f"[{k!r}]", _shape(item), v) for k, v in value.items()}


def _at(step: str, shape: _Shape, value: Any) -> Any:
    try:
        return _read(shape, value)
    except DecodeError as error:
        raise error.within(step) from None


@cache
def _fields(kind: Any) -> tuple[dict[str, _Shape], list[str], set[str]]:
    """Of a dataclass: shapes by name, the names without default, and those that are ignored."""
    hints = get_type_hints(kind)
    own = [f for f in fields(kind) if f.init]
    by_name = {f.name: _shape(hints[f.name]) for f in own}
    required = [f.name for f in own if f.default is MISSING and f.default_factory is MISSING]
    return by_name, required, {name for f in own for name in f.metadata.get("ignored", ())}


def _record(kind: type, value: dict[str, Any]) -> Any:
    known, required, ignored = _fields(kind)
    arguments: dict[str, Any] = {}
    for name, item in value.items():
        if name in known:
            arguments[name] = _at(name, known[name], item)
        elif name not in ignored:
            raise DecodeError(f"has an unknown field {name!r}; expected the fields of {kind.__name__}")
    if missing := [name for name in required if name not in arguments]:
        raise DecodeError("is missing").within(missing[0])
    record = kind(**arguments)
    # What no hint can say, a record says itself: lists of one length, numbers that lead somewhere.
    if (validate := getattr(record, "validate", None)) is not None:
        try:
            validate()
        except ValueError as error:
            raise DecodeError(f"is wrong: {error}") from None
    return record
