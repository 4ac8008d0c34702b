"""Records made by hand, for renderers: a name that looks like markup, one that would end a script, every status."""

from __future__ import annotations

from retrograd.graph.schema import Cause, Crossing, Diff, FlowStep, Follow, Level, Node, Reached, Side, Unique

EVIL = "add.7</script><script>alert(1)</script>[bold]x[/bold]"
A = Side("a.txt", "step", "hlo", 12, 2, 1, 1, 3, "aaaa")
B = Side("b.txt", "step", "hlo", 13, 2, 2, 1, 0, "bbbb")
STRAY = Cause(
    "output_added",
    f"+ output 3 f32[] made by {EVIL}",
    "train.py:79",
    "drop the last reference to it, 100 % of them\nand all",
    b=(EVIL, "mul.6"),
)
CONSTANT = Cause("constant_changed", "constant 0.01 -> 0.02", "torch/optim/sgd.py:3", "", ("c.1",), ("c.2",), 4)
DEAD = Cause("dead_code_only", "dead instructions: 3 -> 0")


def _node(name: str, opcode: str, operands: str, users: str, status: str, twin: str = "", attrs: str = "") -> Node:
    return Node(
        name, opcode, "f32[8]", attrs, "train.py:5", tuple(operands.split()), tuple(users.split()), status, twin
    )  # type: ignore[arg-type]


NODES_A = (
    _node("p.0", "parameter", "", "neg.1 far.9", "same", "p.0", "0"),
    _node("c.1", "constant", "", "neg.1", "changed", "c.2", "0.01"),
    _node("neg.1", "multiply", "p.0 c.1", "", "same", "neg.2"),
)
NODES_B = (
    _node("p.0", "parameter", "", "neg.2 mul.6", "same", "p.0", "0"),
    _node("c.2", "constant", "", "neg.2", "changed", "c.1", "0.02"),
    _node("neg.2", "multiply", "p.0 c.2", "", "same", "neg.1"),
    _node("mul.6", "multiply", "p.0 p.0", "", "added"),
    Node(EVIL, "add", "f32[]", "", "", ("mul.6",), (), "added"),
)


def diff(*causes: Cause, notes: tuple[Cause, ...] = (DEAD,)) -> Diff:
    nodes = (NODES_A, NODES_B) if causes else ((), ())
    return Diff(A, B, causes, notes, 10, 2, 0.25, *nodes)


def unique() -> Unique:
    levels = (
        Level("text", 3, (0, 1, 2), ("x", "y", "z")),
        Level("names", 3, (0, 1, 2), ("x", "y", "z")),
        Level("dead code", 2, (0, 1, 0), ("x", "y")),
        Level("parameter order", 1, (0, 0, 0), ("x",)),
    )
    return Unique(("s.txt", "s.txt#1", EVIL), (A, B, A), levels, ("k" * 40, "l" * 40, "k" * 40))


def follow(dead: bool = False) -> Follow:
    steps = (
        FlowStep("p.30", "parameter", "f32[8]", "train.py:1"),
        FlowStep("tuple.1", "tuple", "(f32[2], f32[8])", "", (1,), "1", 0, "packaging"),
        FlowStep("rs.2", "reduce-scatter", "(f32[1], f32[4])", "x.py:3", (1,), "1", 1, "used", False, (), False, 5),
        FlowStep("neg.3", "negate", "f32[4]", "", (0,), "", 2, "used", False, (), True),
        FlowStep(EVIL, "add", "f32[4]", "y.py:9", (0, 1), "", 2, "used", False, (0, 1, 2, 7)),
    )
    crossing = Crossing("rs.2", "reduce-scatter", 5, 6, 2, 3, 1, 2, 1, "x.py:3")
    reached = tuple(Reached(k, "f32[4]", EVIL, "y.py:9") for k in (0, 1, 2, 7))
    if dead:
        return Follow("a.txt", "p30", "p.30", "parameter", "f32[8]", "", steps[:1], 1, (), 9, (), ("p.30",))
    return Follow(
        "a.txt", "p30", "p.30", "parameter", "f32[8]", "t.py:1", steps, 9, reached, 9, (crossing,), ("neg.3",)
    )
