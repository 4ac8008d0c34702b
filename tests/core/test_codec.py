"""Codec of records: what goes in comes out, of any hint; what does not fit is told with its path."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import types
import typing
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from retrograd.check.schema import Report
from retrograd.codegen.schema import Codegen
from retrograd.core.notebook import Shown
from retrograd.core.schema import DecodeError, Record, decode, older, parsed, plain
from retrograd.errors import UsageError
from retrograd.flake.schema import FlakeReport
from retrograd.fsdp.bucket_plan import BucketPlan
from retrograd.fsdp.schema import Log
from retrograd.graph.schema import Diff, Follow, Unique
from retrograd.graph.watching.lock import Check
from retrograd.graph.watching.schema import WatchReport
from retrograd.trace.bisecting.schema import Bisection
from retrograd.trace.diffing.schema import TraceDiff
from retrograd.trace.filters import Listing
from retrograd.trace.nan_provenance import Provenance

RECORDS = (Report, FlakeReport, Diff, Unique, Follow, WatchReport, Check, Provenance, Listing, TraceDiff, Bisection)
OTHERS = (Codegen, Log, BucketPlan)
OLD = Path(__file__).parent / "records"  # as version 0.1.0 wrote them, before there was a codec


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Point:
    x: float
    label: str = ""


@dataclass(frozen=True)
class Circle:
    radius: float


@dataclass(frozen=True)
class Everything(Record):
    _noun: ClassVar[str] = "test record"

    count: int
    shape: Point | Circle
    colour: Colour = Colour.RED
    size: int | tuple[int, ...] = 0
    pair: tuple[str, float] = ("", 0.0)
    kind: Literal["a", "b", 3] = "a"
    points: tuple[Point, ...] = ()
    rows: list[list[int]] = field(default_factory=list)
    by_name: dict[str, Point] = field(default_factory=dict)
    by_number: dict[int, str] = field(default_factory=dict)
    maybe: Point | None = None
    flag: bool = False
    loose: Any = None
    title: str = field(default="", metadata=older(ignored=("gone",)))
    schema: str = "test/1"


FULL = Everything(
    2, Circle(math.inf), Colour.BLUE, (3, 4), ("p", -0.5), 3, (Point(math.nan, "nan"), Point(1.5)), [[1], []],
    {"k": Point(0.0)}, {7: "seven"}, Point(-math.inf), True, (1, (math.inf, "word")), "t",
)  # fmt: skip


def random_value(hint: Any, rng: random.Random, depth: int = 0) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return rng.choice([1, 2.5, True, "word", None, (1, ("M", 2))])
    if origin in (typing.Union, types.UnionType):
        return random_value(rng.choice(args), rng, depth)
    if origin is Literal:
        return rng.choice(args)
    if origin is tuple and args[-1] is not Ellipsis:
        return tuple(random_value(arg, rng, depth + 1) for arg in args)
    if origin in (tuple, list):
        return origin(random_value(args[0], rng, depth + 1) for _ in range(rng.randrange(4 if depth < 6 else 2)))
    if origin is dict:
        return {random_value(args[0], rng, depth): random_value(args[1], rng, depth + 1) for _ in range(2)}
    if dataclasses.is_dataclass(hint):
        if hint.__name__ == "Exponents":  # as many counts of either sign
            return hint(rng.randrange(-9, 9), *(tuple(range(2)) for _ in range(2)))
        hints = typing.get_type_hints(hint)
        names = [f.name for f in dataclasses.fields(hint) if f.name != "schema"]
        return hint(**{name: random_value(hints[name], rng, depth + 1) for name in names})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return rng.choice(list(hint))
    values: dict[Any, list[Any]] = {
        type(None): [None],
        bool: [True, False],
        int: [0, 1, -1, 2**40],
        float: [0.0, 1.5, -2e-9, 1e300, math.inf, -math.inf],
        str: ["", "a word", "nan", "\u00e4 \"q\" </x>", "two\nlines"],
    }  # fmt: skip
    return rng.choice(values[hint])


@pytest.mark.parametrize("kind", [*RECORDS, Codegen, Everything], ids=lambda kind: kind.__name__)
def test_random_records_survive(kind):
    for seed in range(40):
        record = random_value(kind, random.Random(f"{kind.__name__} {seed}"))
        text = record.to_json()
        assert kind.from_json(text) == record, seed
        assert json.loads(text, parse_constant=pytest.fail)["schema"] == record.schema


# Fields that came after the records were written; they are at their defaults, which are empty.
ADDED = {
    "Report": {
        "accepted",
        "acceptances",
        "between",
        "budget",
        "compared",
        "gradients",
        "left_out",
        "place",
        "sizes",
        "uncompared",
    },
    "Diff": {"passes", "unknown"},
    "Provenance": {"births", "owner", "rank", "ranks"},
    "Listing": {"owner"},
    "Log": {"group"},
}


def added(old, new) -> set[str]:
    """Names of the fields that a record has in addition, all of them empty; everything else has to be the same."""
    if isinstance(old, dict) and isinstance(new, dict):
        assert [key for key in new if key in old] == list(old)
        extra = {key for key in new if key not in old}
        assert not any(new[key] for key in extra)
        return extra.union(*(added(value, new[key]) for key, value in old.items()))
    if isinstance(old, list) and isinstance(new, list):
        assert len(old) == len(new)
        return set().union(*map(added, old, new))
    assert repr(old) == repr(new)
    return set()


@pytest.mark.parametrize("kind", [*RECORDS, *OTHERS], ids=lambda kind: kind.__name__)
def test_old_records_are_read_and_written_back_as_they_were(kind):
    text = (OLD / f"{kind.__name__}.json").read_text(encoding="utf-8")
    assert added(json.loads(text), json.loads(kind.from_json(text).to_json())) <= ADDED.get(kind.__name__, set())
    if not isinstance(json.loads(text)["schema"], str):
        return
    with pytest.raises(UsageError, match=r"has schema '.*/0', this version of retrograd reads '"):
        kind.from_json(text.replace('/1"', '/0"'))


def test_everything_a_hint_can_say():
    again = Everything.from_json(FULL.to_json())
    assert repr(again) == repr(FULL)  # NaN is not equal to itself
    assert json.loads(FULL.to_json())["by_number"] == {"7": "seven"}
    assert json.loads(FULL.to_json())["colour"] == "blue"
    assert plain({1: (math.nan, object)}) == {"1": ["nan", repr(object)]}


def test_a_record_of_an_older_version():
    data = json.loads(Everything(1, Point(2)).to_json())
    data["gone"] = [1]
    del data["points"]
    assert Everything.from_json(json.dumps(data)) == Everything(1, Point(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": "3"}, "count is '3', expected a whole number"),
        ({"count": 3.0}, "count is 3.0, expected a whole number"),
        ({"count": True}, "count is True, expected a whole number"),
        ({"flag": 1}, "flag is 1, expected true or false"),
        ({"title": None}, "title is None, expected a text"),
        ({"colour": "green"}, "colour is 'green', expected one of 'red', 'blue'"),
        ({"kind": "c"}, "kind is 'c', expected one of 'a', 'b', 3"),
        ({"size": "big"}, "size is 'big', expected a whole number or a list"),
        ({"size": [1, "x"]}, "size[1] is 'x', expected a whole number"),
        ({"pair": ["a"]}, "pair is ['a'], expected a list of 2"),
        ({"pair": ["a", "b"]}, "pair[1] is 'b', expected a number"),
        ({"points": [{"x": 1}, {"x": 1, "y": 2}]}, "points[1] has an unknown field 'y'; expected the fields of Point"),
        ({"points": [{"label": ""}]}, "points[0].x is missing"),
        ({"points": {}}, "points is {}, expected a list"),
        ({"rows": [[1], [2, None]]}, "rows[1][1] is None, expected a whole number"),
        ({"by_name": {"k": 3}}, "by_name['k'] is 3, expected an object with the fields of Point"),
        ({"maybe": {"x": "far"}}, "maybe.x is 'far', expected a number"),
        ({"shape": {"radius": "r"}}, "shape.radius is 'r', expected a number"),
        ({"other": 1}, "the record has an unknown field 'other'; expected the fields of Everything"),
        ({"title": "x" * 99, "flag": "y" * 99}, f"flag is '{'y' * 56}..., expected true or false"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_does_not_fit_is_told_with_its_path(change, message):
    data = json.loads(Everything(1, Point(2)).to_json()) | change
    with pytest.raises(UsageError) as error:
        Everything.from_json(json.dumps(data))
    assert str(error.value) == f"test record is damaged: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a retrograd test record: line 1 is not JSON (Expecting property name enclosed in double quotes)"),
        ("[" * 100_000, "not a retrograd test record: lists within lists without end"),
        ("[]", "test record has schema None, this version of retrograd reads 'test/1'"),
        ('{"schema": "test/2"}', "test record has schema 'test/2', this version of retrograd reads 'test/1'"),
        ('{"schema": "test/1"}', "test record is damaged: count is missing"),
    ],
)
def test_what_is_no_such_record(text, message):
    with pytest.raises(UsageError) as error:
        Everything.from_json(text)
    assert str(error.value) == message


def test_what_no_hint_can_say_a_record_says_itself():
    data = json.loads((OLD / "BucketPlan.json").read_text(encoding="utf-8"))
    data["buckets"] = data["buckets"][:-1]
    with pytest.raises(UsageError, match="bucket plan is damaged: the record is wrong: the buckets do not hold each"):
        BucketPlan.from_json(json.dumps(data))


def test_a_builder_that_trips_makes_no_traceback():
    with pytest.raises(UsageError, match="thing is damaged: KeyError 'rows'"):
        parsed('{"schema": 1}', 1, "thing", lambda data: data["rows"])


def test_a_hint_without_json_is_a_mistake_in_the_schema():
    with pytest.raises(TypeError, match="no JSON is known for the type hint <class 'complex'>"):
        decode(complex, 1)
    with pytest.raises(DecodeError, match="the record is 'x', expected a whole number"):
        decode(int, "x")


def test_a_record_is_html_where_there_is_a_renderer(monkeypatch):
    class Drawn(Shown):
        pass

    def without_jinja2(record: Any) -> str:
        raise ImportError("jinja2")

    monkeypatch.setattr(Shown, "renderer", staticmethod(lambda record: type(record).__name__))
    assert Drawn()._repr_html_() == "Drawn"
    monkeypatch.setattr(Shown, "renderer", staticmethod(without_jinja2))
    assert Drawn()._repr_html_() is None
    monkeypatch.setattr(Shown, "renderer", None)
    assert Drawn()._repr_html_() is None
