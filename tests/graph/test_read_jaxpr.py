"""Jaxprs: a real one, edited everywhere; what it closes over, effects, lines, and what is damaged."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from retrograd import graph
from retrograd.errors import GraphError
from retrograd.graph.readers import parse, read

STEP = Path(__file__).parent / "data" / "formats" / "step.jaxpr"
TEXT = STEP.read_text()
SMALL = """{ lambda ; a:f32[3]. let
    b:f32[3] = sin a  # /home/u/train.py:7:4 (step)
    c:f32[3] d:f32[2] = scan[
      jaxpr={ lambda ; e:f32[3]. let f:f32[3] = mul e 2.0:f32[]; g:f32[] = reduce_sum[axes=(0,)] f in (f, g) }
      length=2
    ] b
    h:f32[3] = add
      c -1.0:f32[]
  in (h, d) }
"""


def _diff(text: str, other: str) -> graph.Diff:
    return graph.diff(parse(text, "a")[0], parse(other, "b")[0])


def test_loops_calls_literals_and_lines() -> None:
    [module] = parse(SMALL, "small")
    main = module.main
    assert [(i.name, i.opcode, i.shape) for i in main.instructions] == [
        ("a", "parameter", "f32[3]"),
        ("b", "sin", "f32[3]"),
        ("c", "scan", "(f32[3],f32[2])"),
        ("c", "get-tuple-element", "f32[3]"),
        ("d", "get-tuple-element", "f32[2]"),
        ("-1.0", "constant", "f32[]"),
        ("h", "add", "f32[3]"),
        ("output", "tuple", "(f32[3],f32[2])"),
    ]
    assert str(module.where(main.instructions[1])) == "/home/u/train.py:7"
    assert main.instructions[2].attrs == "jaxpr=@, length=2"
    assert [i.opcode for i in module.computations["jaxpr"].instructions] == [
        "parameter", "constant", "mul", "reduce_sum", "tuple",
    ]  # fmt: skip
    assert main.instructions[6].line == 7
    [step] = read(STEP)
    assert len(step.main.parameters) == 3
    assert {"jaxpr"} <= {name.partition(".")[0] for name in step.computations}
    assert not any(i.has_effect for c in step for i in c.instructions)


def test_other_names_and_a_shared_jaxpr_are_the_same() -> None:
    renamed = re.sub(
        r"\b([a-z]{1,2})\b(?=[:\s,)])(?! lambda)", lambda m: m[1] if m[1] in ("in", "f") else f"v_{m[1]}", TEXT
    )
    assert renamed.count("v_") > 50
    assert _diff(TEXT, renamed).verdict == "same"
    inner = SMALL[SMALL.index("{ lambda ; e") : SMALL.index("\n      length")]
    shared = f"let body = {inner} in\n{SMALL.replace(inner, 'body')}"
    assert _diff(SMALL, shared).verdict == "same"


def _edits(text: str) -> list[str]:
    """Each number, each primitive, each variable that is read, one at a time."""
    edits = [
        text[: m.start()] + str(int(m[0]) + 1) + text[m.end() :] for m in re.finditer(r"(?<![\w.])\d+(?![\w])", text)
    ]
    edits += [text[: m.start(1)] + "sinh" + text[m.end(1) :] for m in re.finditer(r"= (\w+)(?=[ \[])", text)]
    for match in re.finditer(r"= \w+(?:\[[^\[\]{}]*\])? (\w+)(?: (\w+))?$", text, re.MULTILINE):
        if match[2] and match[1] != match[2]:
            edits.append(text[: match.start(1)] + match[2] + text[match.end(1) :])
    return edits


@pytest.mark.parametrize(("text", "dead"), [(TEXT, ("n:", "p:", "q:", "r:")), (re.sub(" *#.*", "", SMALL), ())])
def test_no_edit_is_called_the_same(text: str, dead: tuple[str, ...]) -> None:
    """Nobody reads the loss, so that what only it needs is dead."""
    verdicts: list[str] = []
    for edit in _edits(text):
        at = next(
            k for k, (old, new) in enumerate(zip(text.splitlines(), edit.splitlines(), strict=True)) if old != new
        )
        try:
            verdict = _diff(text, edit).verdict
        except GraphError:
            continue
        assert verdict == ("same" if text.splitlines()[at].strip().startswith(dead or "-") else "different"), edit
        verdicts.append(verdict)
    assert verdicts.count("different") > (100 if dead else 8)


def test_what_a_jaxpr_closes_over_cannot_be_told() -> None:
    closed = "{ lambda a:f32[3]; b:f32[3]. let c:f32[3] = add a b in (c,) }"
    assert _diff(closed, closed.replace("c:", "d:").replace("(c,", "(d,")).verdict == "cannot tell"
    assert _diff(closed, closed.replace("add", "sub")).verdict == "different"


def test_effects_keep_their_order_and_unknown_primitives_have_some() -> None:
    calls = "{ lambda ; a:f32[3]. let\n    b:f32[3] = ONE a\n    c:f32[3] = TWO a\n  in (a,) }"
    [first] = parse(calls.replace("ONE", "debug_callback").replace("TWO", "my_kernel"), "x")
    assert [i.name for i in first.main.instructions if i.has_effect] == ["b", "c"]
    dropped = calls.replace("    b:f32[3] = ONE a\n", "").replace("TWO", "my_kernel")
    assert graph.diff(first, parse(dropped, "y")[0]).verdict == "different"
    assert (
        _diff(calls.replace("ONE", "sin").replace("TWO", "cos"), "{ lambda ; a:f32[3]. let  in (a,) }").verdict
        == "same"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{ lambda ; a:f32[3]. let b:f32[3] = sin a", "line 1: this bracket is not closed"),
        ("{ lambda ; a:f32[3]. let b:f32[3] = sin q in (b,) }", "the value q is not defined above"),
        ("{ lambda ; a:f32[3]. let b:f32[3] = in (b,) }", "this equation has no primitive"),
        ("{ lambda ; a:f32[3]. let b = sin a in (b,) }", "expected a variable and its type"),
        ("{ lambda ; a:f32[3]. sin a }", "expected `{ lambda ; ... let ... in ... }`"),
        ("{ lambda ; a:f32[3]. let  in a) }", "a bracket closes here that was not opened"),
        ("{ lambda ; " + "(" * 300 + ")" * 300 + " }", "brackets nest more than 200 deep"),
    ],
)
def test_what_is_damaged(text: str, words: str) -> None:
    with pytest.raises(GraphError, match=re.escape(words)):
        parse(text, "dump")


def test_no_cut_and_no_typing_error_ends_in_a_traceback() -> None:
    draw = random.Random(24)
    texts = [TEXT[:cut] for cut in range(10, len(TEXT), 61)]
    for _ in range(300):
        at = draw.randrange(len(TEXT))
        texts.append(
            TEXT[:at] + draw.choice("{}()[]=;:, \nabz0") * draw.randrange(1, 3) + TEXT[at + draw.randrange(3) :]
        )
    refused = 0
    for text in texts:
        try:
            parse(text, "dump", "jaxpr")
        except GraphError:
            refused += 1
    assert refused > 50
