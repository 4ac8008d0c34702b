"""Keys: equal for the same computation, in every process; different for different ones."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from random_graphs import EDITS, edited, parameters_exchanged, random_module, text

from retrograd import graph
from retrograd.errors import UsageError

DATA = Path(__file__).parent / "data"


def test_keys_do_not_depend_on_the_process() -> None:
    path = DATA / "xla" / "base_step1.hlo.txt.gz"
    program = (
        f"from retrograd import graph; g = graph.read({str(path)!r})[0]; print(graph.strict_key(g), graph.free_key(g))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    (one,) = graph.read(path)
    assert seen == {f"{graph.strict_key(one)} {graph.free_key(one)}\n"}


def test_keys_of_released_versions_stay() -> None:
    """Keys are kept in lock files: whoever changes the form of a key must change the version of those files."""
    (one,) = graph.read(DATA / "jax" / "base.hlo.txt.gz")
    assert graph.strict_key(one) == "33d68472" + graph.strict_key(one)[8:]


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: e.__name__)
def test_edit_changes_the_strict_key(edit) -> None:
    """Aliasing is in the header: it is compared apart from the key."""
    for seed in range(20):
        rng = random.Random(seed)
        module = random_module(rng, 30, 2)
        found = edited(module, edit, rng)
        if found is None or edit.__name__ == "aliased":
            continue
        a, b = graph.parse(text(module))[0], graph.parse(text(found[0], rng))[0]
        assert graph.strict_key(a) != graph.strict_key(b), seed
        assert (graph.free_key(a) == graph.free_key(b)) == (edit is parameters_exchanged), seed


def test_computations_in_computations_have_keys_however_deep() -> None:
    def deep(opcode: str) -> graph.Graph:
        inner = f"c0 {{\n  p = f32[] parameter(0)\n  ROOT r = f32[] {opcode}(p)\n}}\n"
        bodies = [
            f"c{k} {{\n  p = f32[] parameter(0)\n  ROOT r = f32[] map(p), to_apply=c{k - 1}\n}}\n"
            for k in range(1, 2000)
        ]
        whole = ["HloModule m\n", inner, *bodies[:-1], f"ENTRY {bodies[-1]}"]
        return graph.parse("\n".join(whole))[0]

    assert graph.strict_key(deep("negate")) == graph.strict_key(deep("negate"))
    assert graph.strict_key(deep("negate")) != graph.strict_key(deep("sqrt"))


def test_free_key_is_exact() -> None:
    """f(p0 - p1, p0 * p1) is not f(p0 - p1, p1 * p0) under any numbering of the parameters."""
    head = "HloModule m\n\nENTRY e {\n  p0 = f32[4] parameter(0)\n  p1 = f32[4] parameter(1)\n  s = f32[4] subtract(p0, p1)\n"
    tail = "  ROOT t = (f32[4], f32[4]) tuple(s, m)\n}\n"
    (a,), (b,) = (graph.parse(head + f"  m = f32[4] multiply({x})\n" + tail) for x in ("p0, p1", "p1, p0"))
    assert graph.free_key(a) != graph.free_key(b)
    moved = head.replace("parameter(0)", "parameter(2)").replace("parameter(1)", "parameter(0)").replace("(2)", "(1)")
    (c,) = graph.parse(moved + "  m = f32[4] multiply(p0, p1)\n" + tail)
    assert graph.free_key(a) == graph.free_key(c)
    assert graph.strict_key(a) != graph.strict_key(c)


def test_unique_counts_at_four_levels() -> None:
    names = ("base", "again", "dead", "perm")
    found = graph.unique([DATA / "jax" / f"{name}.opt.hlo.txt.gz" for name in names])
    assert {level.name: level.unique for level in found.levels} == {
        "text": 4,
        "names": 2,
        "dead code": 2,
        "parameter order": 1,
    }
    assert found.level("names").members == (0, 0, 0, 1)
    assert type(found).from_json(found.to_json()) == found


def test_the_founding_case_has_four_graphs_and_the_mended_run_fewer() -> None:
    buggy = [DATA / "xla" / f"tied_bucket_step{k}.hlo.txt.gz" for k in (0, 1, 2, 4)]
    assert graph.unique(buggy).level("parameter order").unique == 4


def test_dead_code_has_a_level_of_its_own() -> None:
    body = "HloModule m\n\nENTRY e {\n  p = f32[4] parameter(0)\n  ROOT t = f32[4] tanh(p)\n}\n"
    dead = body.replace("  ROOT", "  d = f32[4] sine(p)\n  ROOT")
    found = graph.unique([graph.parse(body)[0], graph.parse(dead)[0]])
    assert [level.unique for level in found.levels] == [2, 2, 1, 1]


def test_nothing_to_count_is_refused() -> None:
    with pytest.raises(UsageError, match="`sources` is empty"):
        graph.unique([])


def test_graphs_without_a_text_are_not_taken_for_each_other() -> None:
    """Graphs that are built by hand have no digest; theirs was one cache entry for all."""
    one, other = (graph.read(DATA / "jax" / f"{name}.hlo.txt.gz")[0] for name in ("base", "perm"))
    told = [level.members for level in graph.unique([one, other, one]).levels]
    one.digest = other.digest = ""
    assert [level.members for level in graph.unique([one, other, one]).levels] == told
