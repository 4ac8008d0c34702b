"""One change, one cause: the planted cause of every pair first, what follows from it folded, and nothing else."""

from __future__ import annotations

import gzip
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from retrograd import graph
from retrograd.graph.diffing.literals import shown
from retrograd.graph.schema import Diff

TRUST = Path(__file__).parent / "data" / "trust"
PAIRS = tomllib.loads((TRUST / "pairs.toml").read_text())["pair"]


def text_of(name: str) -> str:
    return gzip.decompress((TRUST / name).read_bytes()).decode()


def diff(a: str, b: str) -> Diff:
    return graph.diff(graph.parse(a, "A")[0], graph.parse(b, "B")[0])


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["name"])
def test_the_planted_cause_comes_first_of_at_most_three(pair: dict) -> None:
    if "mlir" in pair["a"] and find_spec("jaxlib") is None:
        pytest.skip("StableHLO is read by jaxlib")
    a = text_of(pair["a"])
    result = diff(a, text_of(pair["b"]) if "b" in pair else a.replace(*pair["edit"]))
    causes = result.causes or result.unknown
    assert re.search(pair["cause"], causes[0].what), [cause.what for cause in causes]
    assert len(causes) <= 3


def test_what_does_not_follow_from_the_steps_of_a_scan_is_told_beside_it() -> None:
    a, b = text_of("tf.hlo.txt.gz"), text_of("tf_trip.hlo.txt.gz")
    (literal,) = set(re.findall(r"constant\((1e-0?6)\)", b))
    result = diff(a, b.replace(f"constant({literal})", "constant(0.37)"))
    assert [cause.kind for cause in result.causes] == ["loop_changed", "constant_changed"]
    assert "-> 0.37" in result.causes[1].what


def test_what_does_not_follow_from_remat_is_told_beside_it() -> None:
    a, b = text_of("tf.hlo.txt.gz"), text_of("tf_remat.hlo.txt.gz")
    old = re.search(r"constant\((-?0\.\d+)\)", b[b.index("ENTRY") :])
    assert old
    result = diff(a, b.replace(old[0], "constant(0.0625)"))
    assert result.causes[0].kind == "remat_changed"
    assert any("0.0625" in cause.what for cause in result.causes[1:])


def test_a_loop_with_one_operation_less_is_no_remat() -> None:
    a = text_of("tf.hlo.txt.gz")
    body = re.search(r"  (\S+) = (f32\[\S+) tanh\((\S+)\)", a)
    assert body
    result = diff(a, a.replace(body[0], f"  {body[1]} = {body[2]} copy({body[3]})", 1))
    assert result.causes
    assert {cause.kind for cause in result.causes}.isdisjoint({"remat_changed", "loop_changed"})


@pytest.mark.parametrize(
    ("shape", "literal", "text"),
    [("f32[]", "0.899999976", "0.9"), ("f32[]", "-1.000000e-03", "-0.001"), ("f32[]", "0.900000036", "0.90000004"),
     ("bf16[]", "0.898438", "0.9"), ("f64[]", "0.899999976", "0.899999976"), ("s32[]", "12", "12"),
     ("f32[]", "inf", "inf"), ("f32[]", "1e999", "inf"), ("f32[2]", "{0.899999976, 1}", "{0.899999976, 1}")],
)  # fmt: skip
def test_numbers_are_as_short_as_their_dtype_tells_them_apart(shape: str, literal: str, text: str) -> None:
    assert shown(shape, literal, 80) == text
