"""Following a value: the trails of the founding case by number, calls and loops, tokens, names, limits, an oracle."""

from __future__ import annotations

import gzip
import random
import re
from functools import cache
from pathlib import Path

import pytest

from retrograd.errors import UsageError
from retrograd.graph import follow
from retrograd.graph.ir import Graph
from retrograd.graph.readers.hlo import parse
from retrograd.graph.schema import Follow

DATA = Path(__file__).parent / "data"


@cache
def dump(name: str) -> Graph:
    return parse(gzip.decompress((DATA / f"{name}.hlo.txt.gz").read_bytes()).decode(), name)


def graph(text: str) -> Graph:
    """A module in short: the first instruction may stand behind the brace, the last brace behind an instruction."""
    text = re.sub(r"^((?:ENTRY )?\w+ \{) +", r"\1\n", text, flags=re.MULTILINE)
    return parse("HloModule m\n" + re.sub(r"(?<=\S) \}$", "\n}", text, flags=re.MULTILINE), "m.txt")


def outputs(found: Follow) -> list[int]:
    return [output.index for output in found.outputs]


# The twelve gradients that are carried over the cut: operand of the reduce-scatter, outputs (momentum and weight).
CARRIED = {27: (11, [20, 21]), 30: (8, [24, 25]), 36: (2, [24, 25]), 37: (1, [30, 31]), 38: (0, [28, 29])}


@pytest.mark.parametrize("number", CARRIED)
def test_carried_gradient_goes_unreduced_into_the_bucket_and_into_two_outputs(number: int) -> None:
    found = follow(dump("xla/tied_bucket_step2"), f"p{number}")
    operand, reached = CARRIED[number]
    (crossing,) = found.collectives
    assert (crossing.id, crossing.nth, crossing.alike) == ("reduce-scatter.1760", 3, 4)
    assert (crossing.operand, crossing.of, crossing.result, crossing.exact) == (operand, 13, operand, True)
    assert outputs(found) == reached
    assert not found.dead
    tuples = [(s.id, s.part) for s in found.steps if s.opcode in ("tuple", "opt-barrier")]
    assert ("tuple.1742", str(operand)) in tuples
    assert any(name.startswith("opt-barrier.2049") for name, _ in tuples)


def test_every_carried_gradient_and_no_other_parameter_enters_unreduced() -> None:
    found = [follow(dump("xla/tied_bucket_step2"), f"parameter {n}") for n in range(57)]
    unreduced = [n for n, f in enumerate(found) if any(c.opcode == "reduce-scatter" and c.exact for c in f.collectives)]
    assert unreduced == list(range(27, 39))
    before = [follow(dump("xla/tied_bucket_step1"), f"parameter {n}") for n in range(45)]
    assert not [n for n, f in enumerate(before) if any(c.opcode == "reduce-scatter" and c.exact for c in f.collectives)]


def test_what_is_left_in_the_bucket_is_an_output_itself() -> None:
    found = follow(dump("xla/tied_bucket_step2"), "output 6")
    assert (found.id, found.notes[0]) == (
        "reshape.1467",
        "output 6 is reshape.1467, through tuple.1468, opt-barrier.1469, get-tuple-element.1470",
    )
    assert [(o.index, o.exact) for o in found.outputs] == [(6, True)]
    assert not found.collectives


def test_the_token_chain_carries_nothing() -> None:
    found = follow(dump("xla/tied_bucket_step2"), "%p38.1738")
    (end,) = [s for s in found.steps if s.how == "order"]
    assert end.id == "gather.1776"
    # It would otherwise seem to reach the reduce-scatter that follows.
    assert [c.nth for c in found.collectives] == [3]
    assert [s.how for s in found.steps if s.id == "add.1741"] == ["moved"]


def test_through_while_fusion_and_conditional() -> None:
    found = follow(dump("jax/sharded.opt"), "p0")
    assert [(c.opcode, c.ordinal, c.exact) for c in found.collectives] == [
        ("all-gather", 1, True),
        ("reduce-scatter", 2, False),
    ]
    assert outputs(found) == [0]
    named = {step.id for step in found.steps}
    assert {"while.15", "conditional.1.clone", "fused_computation/dot_general.8", "region_4.5_spmd/param.9"} <= named


LOOP = """
body { p = (f32[2], f32[2], f32[2]) parameter(0)
  a = f32[2] get-tuple-element(p), index=0
  b = f32[2] get-tuple-element(p), index=1
  c = f32[2] get-tuple-element(p), index=2
  n = f32[2] negate(b)
  ROOT t = (f32[2], f32[2], f32[2]) tuple(n, b, c) }
cond { q = (f32[2], f32[2], f32[2]) parameter(0)
  ROOT yes = pred[] constant(true) }
ENTRY e { x = f32[2] parameter(0)
  y = f32[2] parameter(1)
  z = f32[2] parameter(2)
  i = (f32[2], f32[2], f32[2]) tuple(x, y, z)
  w = (f32[2], f32[2], f32[2]) while(i), condition=cond, body=body
  r0 = f32[2] get-tuple-element(w), index=0
  r1 = f32[2] get-tuple-element(w), index=1
  r2 = f32[2] get-tuple-element(w), index=2
  ROOT r = (f32[2], f32[2], f32[2]) tuple(r0, r1, r2) }
"""


def test_elements_of_a_loop_stay_apart() -> None:
    module = graph(LOOP)
    assert [(o.index, o.exact) for o in follow(module, "y").outputs] == [(0, False), (1, True)]
    assert [(o.index, o.exact) for o in follow(module, "z").outputs] == [(2, True)]
    # The loop overwrites x in each turn: nothing but a loop without a turn would return it.
    assert follow(module, "x").dead


def test_a_loop_that_depends_on_the_value_depends_on_it_as_a_whole() -> None:
    module = graph(LOOP.replace("constant(true)", 'custom-call(q), custom_call_target="stop"'))
    assert outputs(follow(module, "z")) == [0, 1, 2]


CALLS = """
f { u = f32[2] parameter(0)
  v = f32[2] parameter(1)
  ROOT t = (f32[2], f32[2]) tuple(v, u)
}
ENTRY e { x = f32[2] parameter(0)
  y = f32[2] parameter(1)
  one = (f32[2], f32[2]) call(x, x), to_apply=f
  two = (f32[2], f32[2]) call(y, x), to_apply=f
  a = f32[2] get-tuple-element(one), index=1
  b = f32[2] get-tuple-element(two), index=1
  c = f32[2] get-tuple-element(two), index=0
  ROOT r = (f32[2], f32[2], f32[2]) tuple(a, b, c)
}
"""


def test_a_function_called_twice_returns_to_the_call_that_was_followed() -> None:
    module = graph(CALLS)
    assert outputs(follow(module, "y")) == [1]
    assert outputs(follow(module, "x")) == [0, 2]
    # From inside it goes to every call.
    assert outputs(follow(module, "f/u")) == [0, 1]
    assert [o.exact for o in follow(module, "f/u").outputs] == [True, True]


def test_more_ways_in_than_are_told_apart_are_named_and_never_lose_an_output() -> None:
    calls = "".join(
        f"  c{k} = f32[{k + 1}] call(x{k}), to_apply=f\n  x{k + 1} = f32[2] negate(c{k})\n" for k in range(20)
    )
    text = (
        f"f {{ u = f32[2] parameter(0)\n  ROOT n = f32[2] negate(u)\n}}\nENTRY e {{ x0 = f32[2] parameter(0)\n{calls}"
    )
    deep = "".join(f"  d{k} = f32[2] call(x{k}, x{k}), to_apply=g{k}\n" for k in range(12))
    bodies = "".join(
        f"g{k} {{ u = f32[2] parameter(0)\n  v = f32[2] parameter(1)\n  w = f32[2] call(v), to_apply=f\n  ROOT n = f32[2] add(u, w)\n}}\n"
        for k in range(12)
    )
    first, _, rest = text.partition("ENTRY")
    module = graph(first + bodies + "ENTRY" + rest + deep + "  ROOT t = (f32[2], f32[2]) tuple(x20, d11)\n}\n")
    assert outputs(follow(module, "x0")) == [0, 1]
    wide = "f { " + "".join(f"u{k} = f32[2] parameter({k})\n" for k in range(30))
    wide += f"  ROOT t = ({', '.join(['f32[2]'] * 30)}) tuple({', '.join(f'u{k}' for k in range(30))})\n}}\n"
    wide += (
        "ENTRY e { x = f32[2] parameter(0)\n"
        + f"  c = ({', '.join(['f32[2]'] * 30)}) call({', '.join(['x'] * 30)}), to_apply=f\n"
    )
    wide += "".join(f"  g{k} = f32[2] get-tuple-element(c), index={k}\n" for k in range(30))
    wide += f"  ROOT r = ({', '.join(['f32[2]'] * 30)}) tuple({', '.join(f'g{k}' for k in range(30))})\n}}\n"
    found = follow(graph(wide), "x")
    assert outputs(found) == list(range(30))
    assert "f: called in more than 8 ways" in found.notes[0]


ASYNC = """
add { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
ENTRY e { x = f32[4] parameter(0)
  y = f32[4] parameter(1)
  s = (f32[4], f32[8]) all-gather-start(x), dimensions={0}
  d = f32[8] all-gather-done(s)
  rs = ((f32[4], f32[4]), (f32[2], f32[2])) reduce-scatter-start(x, y), dimensions={0}, to_apply=add
  rd = (f32[2], f32[2]) reduce-scatter-done(rs)
  r0 = f32[2] get-tuple-element(rd), index=0
  r1 = f32[2] get-tuple-element(rd), index=1
  as = (f32[4], f32[4]) all-reduce-start(x, y), to_apply=add
  ad = (f32[4], f32[4]) all-reduce-done(as)
  a1 = f32[4] get-tuple-element(ad), index=1
  cs = (f32[4], f32[4], u32[]) copy-start(y)
  cd = f32[4] copy-done(cs)
  ROOT r = (f32[8], f32[2], f32[2], f32[4], f32[4]) tuple(d, r0, r1, a1, cd)
}
"""


def test_asynchronous_pairs() -> None:
    module = graph(ASYNC)
    x, y = follow(module, "x"), follow(module, "y")
    assert outputs(x) == [0, 1]
    assert [(o.index, o.exact) for o in y.outputs] == [(2, False), (3, False), (4, True)]
    assert [(c.opcode, c.ordinal, c.operand, c.result) for c in y.collectives] == [
        ("reduce-scatter", 2, 1, 1),
        ("all-reduce", 3, 1, 1),
    ]


def test_collectives_that_mix_their_operands_and_dead_ones() -> None:
    module = graph(
        "add { a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT c = f32[] add(a, b)\n}\n"
        "ENTRY e { x = f32[4] parameter(0)\n  n = f32[4] negate(x)\n  dead = f32[4] all-reduce(n), to_apply=add\n"
        "  m = (f32[4], f32[4]) all-to-all(x, n)\n  g = f32[4] get-tuple-element(m), index=1\n"
        "  ROOT r = (f32[4]) tuple(g)\n}"
    )
    found = [(c.id, c.ordinal, c.collectives, c.operand, c.result, c.exact) for c in follow(module, "x").collectives]
    assert found == [("dead", 0, 1, 0, 0, False), ("m", 1, 1, 0, -1, True), ("m", 1, 1, 1, -1, False)]


def test_dead_values_and_effects() -> None:
    module = graph(
        "ENTRY e { x = f32[4] parameter(0)\n  y = f32[4] parameter(1)\n  u = f32[4] parameter(2)\n  n = f32[4] negate(x)\n"
        "  t = (f32[4], f32[4]) tuple(n, y)\n  g = f32[4] get-tuple-element(t), index=1\n  k = token[] after-all()\n"
        "  o = token[] outfeed(u, k)\n  ROOT r = f32[4] negate(g)\n}"
    )
    dead = follow(module, "x")
    assert dead.dead
    assert dead.ends == ("t",)
    assert outputs(follow(module, "y")) == [0]
    sent = follow(module, "u")
    assert not sent.dead
    assert (sent.effects, sent.outputs) == (("o",), ())


def test_limit_keeps_the_nearest_and_says_how_many_there_are() -> None:
    full = follow(dump("xla/tied_bucket_step2"), "p0", limit=None)
    some = follow(dump("xla/tied_bucket_step2"), "p0", limit=10)
    assert len(full.steps) == full.total == some.total > 500
    assert some.steps == full.steps[:10]
    assert some.outputs == full.outputs
    assert all(step.parent < k for k, step in enumerate(full.steps))


def test_json_round_trip() -> None:
    found = follow(dump("xla/tied_bucket_step2"), "p30")
    assert Follow.from_json(found.to_json()) == found
    with pytest.raises(UsageError, match="schema"):
        Follow.from_json(found.to_json().replace("follow/1", "follow/9"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("p57", r"parameter 57, but .* has parameters 0 to 56"),
        ("output 56", r"output 56, but .* has outputs 0 to 55"),
        ("reduce-scater.1760", "did you mean reduce-scatter.1760"),
        ("reduce-scatter.1", "did you mean .*reduce-scatter"),
        ("x", r"stands for AddComputation|no such value"),
        ("tuple.1742[13]", r"tuple\.1742 is .* which has elements 0 to 12"),
        ("p30.1727[0]", "which has no elements"),
        ("", "no such value; give the name"),
        ("[", "no such value"),
    ],
)
def test_an_unknown_value_is_an_error_that_helps(value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        follow(dump("xla/tied_bucket_step2"), value)


def test_a_name_in_several_computations_has_to_be_made_clear() -> None:
    text = CALLS.replace("ENTRY", "g { u = f32[2] parameter(0)\n  ROOT w = f32[2] negate(u)\n}\nENTRY")
    with pytest.raises(UsageError, match="stands for f/u, g/u; name one of them"):
        follow(graph(text), "u")
    assert follow(graph(text), "g/u").dead


def test_one_element_of_a_tuple() -> None:
    found = follow(dump("xla/tied_bucket_step2"), "reduce-scatter.1760[3]")
    assert outputs(found) == [26, 27]
    assert found.shape == "f32[128]"
    assert not found.collectives


def test_long_chains_and_wide_graphs_take_linear_time_and_no_recursion() -> None:
    n = 30_000
    lines = ["ENTRY e {", "  a0 = f32[] parameter(0)", *(f"  a{k + 1} = f32[] negate(a{k})" for k in range(n))]
    found = follow(graph("\n".join([*lines, f"  ROOT r = (f32[]) tuple(a{n})", "}"])), "a0", limit=None)
    assert found.total == n + 1
    assert outputs(found) == [0]


# An oracle: every value is computed as "depends on it or not", a tuple as the tuple of its elements, a call by doing it.


def depends(module: Graph, target: str) -> list[int]:
    def whole(value: object) -> bool:
        return any(map(whole, value)) if isinstance(value, tuple) else bool(value)

    def run(name: str, arguments: list[object]) -> object:
        values: list[object] = []
        computation = module.computations[name]
        for ins in computation.instructions:
            given = [values[o] for o in ins.operands]
            if ins.opcode == "parameter":
                value = arguments[int(ins.attrs)]
            elif ins.opcode == "tuple" or (ins.opcode == "all-reduce" and len(given) > 1):
                value = tuple(given)
            elif ins.opcode == "get-tuple-element":
                source = given[0]
                value = source[int(ins.attrs)] if isinstance(source, tuple) else source
            elif ins.opcode == "opt-barrier":
                value = given[0]
            elif ins.opcode == "call":
                value = run(ins.called[0][1], given)
            else:
                value = any(map(whole, given))
            if name == module.entry and ins.name == target:
                value = True
            values.append(value)
        return values[computation.root]

    result = run(module.entry, [False] * len(module.main.parameters))
    return [k for k, value in enumerate(result) if whole(value)]


def random_module(seed: int) -> tuple[Graph, list[str]]:
    pick = random.Random(seed)
    functions: list[tuple[str, int, int]] = []  # name, parameters, results
    text = "sum { a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT c = f32[] add(a, b)\n}\n"

    def body(name: str, entry: bool) -> str:
        count = pick.randint(1, 3)
        values = [f"{name}_p{k}" for k in range(count)]
        lines = [f"  {v} = f32[] parameter({k})" for k, v in enumerate(values)]

        def new(shape: str, what: str) -> str:
            made = f"{name}_v{len(lines)}"
            lines.append(f"  {made} = {shape} {what}")
            return made

        for _ in range(pick.randint(3, 12)):
            some = [pick.choice(values) for _ in range(pick.randint(1, 3))]
            shape = f"({', '.join(['f32[]'] * len(some))})"
            kind = pick.choice(["op", "tuple", "barrier", "reduce", "call"])
            if kind == "op":
                values.append(new("f32[]", f"map({', '.join(some)}), to_apply=sum"))
                continue
            results = len(some)
            if kind == "call" and functions:
                callee, takes, results = pick.choice(functions)
                shape = f"({', '.join(['f32[]'] * results)})"
                packed = new(shape, f"call({', '.join(pick.choice(values) for _ in range(takes))}), to_apply={callee}")
            elif kind == "reduce" and len(some) > 1:
                packed = new(shape, f"all-reduce({', '.join(some)}), to_apply=sum")
            else:
                packed = new(shape, f"tuple({', '.join(some)})")
                if kind == "barrier":
                    packed = new(shape, f"opt-barrier({packed})")
            values += [new("f32[]", f"get-tuple-element({packed}), index={k}") for k in range(results)]
        results = [pick.choice(values) for _ in range(pick.randint(1, 4))]
        lines.append(f"  ROOT {name}_r = ({', '.join(['f32[]'] * len(results))}) tuple({', '.join(results)})")
        functions.append((name, count, len(results)))
        return f"{'ENTRY ' if entry else ''}{name} {{\n" + "\n".join(lines) + "\n}\n"

    for k in range(pick.randint(0, 3)):
        text += body(f"f{k}", False)
    text += body("main", True)
    module = graph(text)
    return module, [ins.name for ins in module.main.instructions[:-1] if not ins.shape.startswith("(")]


@pytest.mark.parametrize("seed", range(60))
def test_reaches_what_an_independent_evaluation_says(seed: int) -> None:
    module, names = random_module(seed)
    for name in names:
        found = follow(module, name)
        # With more ways into a function than are told apart it may only say too much.
        if found.notes:
            assert set(outputs(found)) >= set(depends(module, name))
        else:
            assert outputs(found) == depends(module, name), name
        assert found.dead == (not found.outputs)
