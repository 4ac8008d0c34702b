"""Damaged and hostile texts: an error in time, whatever it is. The long version is `fuzz_readers.py`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import fuzz_commands
import pytest
from fuzz_readers import corpus, fuzz, outcome

from retrograd.errors import GraphError
from retrograd.graph.readers import parse

# CPU seconds for 2 MB. Linear readers take under 2; one quadratic expression takes minutes.
LIMIT_S = 30
SIZE = 2_000_000
HLO = "HloModule m\n\nENTRY e {\n"
FX = "class GraphModule(torch.nn.Module):\n    def forward(self, x):\n"


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"longer than {LIMIT_S} s of CPU")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize("seed", range(4))
def test_a_short_fuzz(seed: int) -> None:
    results = fuzz(60, seed, count=300, keep=False)
    assert not [what for what in results if what.startswith("BAD")]
    assert results["read"] > 5
    assert results["refused"] > 50


def test_inputs_that_once_failed() -> None:
    seeds = corpus("crash-*")
    assert seeds
    for data in seeds:
        assert outcome(data, 0, Path()) in ("read", "refused")


def _much(text: str) -> str:
    return text * (SIZE // len(text))


HOSTILE = {
    "brackets": HLO + "  x = f32[] constant(" + _much("("),
    "brackets on lines": HLO + "  x = f32[] constant({" + _much("{\n"),
    "braces after a shape": HLO + "  x = f32[8]" + _much("{"),
    "pairs as a shape": HLO + "  x = " + _much("()"),
    "one line": HLO + "  x = f32[] add(" + _much("a, "),
    "no line end": _much("a"),
    "an open quote": HLO + '  x = f32[] parameter(0), foo="' + _much("a"),
    "escaped quotes": HLO + "  x = f32[] parameter(0), " + _much('\\"'),
    "metadata and quotes": HLO + '  x = f32[] parameter(0), metadata={op_name="' + _much('\\"'),
    "much metadata": HLO + "  x = f32[] parameter(0)" + _much(', metadata={"'),
    "open comments": HLO + "  x = (f32[]" + _much("/*") + ") add()",
    "arrows": "HloModule m\n\nENTRY e (" + _much(") -> "),
    "a word in a table": "HloModule m\n\nFileLocations\n1 " + _much("a"),
    "frames": "HloModule m\n\nStackFrames\n" + "".join(f"{i} {{a=1 parent_frame_id={i}}}\n" for i in range(1, 50_000)),
    "a header": "HloModule m, " + _much("a={[("),
    "headers": _much("HloModule m\n"),
    "headers on a line": _much("HloModule m "),
    "axes of groups": HLO + "  x = f32[] parameter(0), replica_groups=[" + _much("9,") + "]<=[1]\n",
    "open instructions": HLO + "".join(f"  x{i} = f32[] constant((\n" for i in range(50_000)),
    "percents": HLO + "  x = f32[] add(" + _much("%") + ")",
    "FX brackets": FX + "        y = " + "(" * 100_000,
    "FX list": FX + "        y = [" + _much("0,"),
    "FX signs": FX + "        y = " + _much("-") + "x",
    "FX attributes": FX + "        y = x" + _much(".a"),
    "FX sum": FX + "        y = x" + _much("+x"),
    "FX open lines": FX + _much("        y = x.a(\n"),
    "FX positions": FX + "        # " + _much("File: :1 in "),
    "FX in place": FX + "".join(f"        x += x;  a{i} = x\n" for i in range(20_000)),
    "FX classes": _much("class G(Module):\n"),
    "log prefixes": _much("V1234 0 ] [") + "\nclass GraphModule(torch.nn.Module):\n",
    "save-file frames": "TensorsGraphInfo:\n  " + _much(" (a:1"),
    "save-file marks": _much("## BEGIN_GRAPH\n"),
    "half marks": _much("class a("),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_refused_in_linear_time(name: str) -> None:
    with pytest.raises(GraphError, match=r"^dump, line [0-9]+: ") as refused:
        parse(HOSTILE[name], "dump")
    assert len(str(refused.value)) < 600


def test_a_short_fuzz_of_all_commands() -> None:
    hlo = tuple(seed for seed in fuzz_commands.SEEDS if ".mlir" not in seed)  # StableHLO needs jaxlib: the long version
    results = fuzz_commands.fuzz(40, 7, hlo)
    assert not [what for what in results if what.startswith("BAD")]
    assert results["different"] > 5
    assert results["same"] > 5
