"""Edits of real dumps, one at a time: what a comparison may never call the same, and what it always has to.

    python tests/graph/mechanical_edits.py               # every edit of every dump: 20 minutes
    python tests/graph/mechanical_edits.py '*.opt*' 7 3  # every 7th edit of some dumps, from number 3

Not collected by pytest; `test_mechanical_edits.py` runs a part of it, another one every day.
"""

from __future__ import annotations

import fnmatch
import gzip
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from text_edits import LINE, WORD, Edit, edits_of, instructions

from retrograd import graph
from retrograd.errors import RetrogradError
from retrograd.graph.ir import Graph
from retrograd.graph.keys import text_key
from retrograd.graph.schema import Diff

DATA = Path(__file__).parent / "data"
# One of each kind of dump: JAX before and after optimisation, torch_xla, with and without loops, meshes and custom
# calls; StableHLO; Dynamo, AOT forward and backward, compiled autograd.
DUMPS = (
    "trust/mlp.hlo.txt.gz", "trust/mlp.opt.txt.gz", "trust/mlp.shlo.mlir.gz", "trust/mlp_donate.hlo.txt.gz",
    "trust/mlp_drop1.hlo.txt.gz", "trust/cn.hlo.txt.gz", "trust/pm.hlo.txt.gz", "trust/attr_cp.hlo.gz",
    "trust/tf.hlo.txt.gz", "trust/tf.opt.txt.gz", "trust/tf.shlo.mlir.gz",
    "fresh/collectives.hlo.txt.gz", "fresh/collectives.opt.hlo.txt.gz", "fresh/collectives.stablehlo.mlir.gz",
    "fresh/pool.hlo.txt.gz", "fresh/custom.hlo.txt.gz", "fresh/custom.opt.hlo.txt.gz", "fresh/custom.stablehlo.mlir.gz",
    "jax/sharded.hlo.txt.gz", "jax/sharded.opt.hlo.txt.gz", "jax/sharded.stablehlo.mlir.gz",
    "xla/base_step1.hlo.txt.gz",
    "fx/0_fw.txt.gz", "fx/1_bw.txt.gz", "fx/eager_ca_ca0.txt.gz",
    "trust/fx_a1.txt.gz", "trust/fx_f1.txt.gz", "trust/fx_g1.txt.gz", "trust/fx_h1.txt.gz", "trust/fx_opt_c.txt.gz",
    "trust/fx_s2.txt.gz", "trust/device.txt.gz",
)  # fmt: skip


@cache
def text_of(dump: str) -> str:
    """The text of a dump."""
    raw = (DATA / dump).read_bytes()
    return (gzip.decompress(raw) if dump.endswith(".gz") else raw).decode()


def graph_of(dump: str, text: str, source: str) -> Graph:
    """The graph of a text. StableHLO is parsed in this process: a child for each edit would take an hour."""
    if ".mlir" not in dump:
        return graph.parse(text, source)[0]
    from retrograd.graph.readers import mlir

    result = mlir.parse(text, source)
    result.digest = text_key(text)
    return result


@cache
def original(dump: str) -> Graph:
    """The graph of a dump as it is."""
    return graph_of(dump, text_of(dump), "A")


def compared(dump: str, text: str) -> Diff | None:
    """The dump against a changed text; None if that is no graph any more."""
    try:
        return graph.diff(original(dump), graph_of(dump, text, "B"))
    except RetrogradError:
        return None


def edits(dump: str) -> Iterator[Edit]:
    """All edits of a dump, in the order of its lines."""
    return edits_of(text_of(dump), ".mlir" in dump)


# Harmless edits.


def harmless(dump: str, number: int) -> Iterator[tuple[str, str]]:
    """Other names, no metadata, another order of lines that do not need each other, other channels."""
    text, rng = text_of(dump), random.Random(number)
    if text.startswith("HloModule"):
        yield "names", (_renamed(text, rng))
        yield "metadata", (re.sub(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}', "", text))
        channels = {n: str(1000 + rng.randrange(10**6)) for n in re.findall(r"channel_id=(\d+)", text)}
        yield "channels", (re.sub(r"(?<=channel_id=)\d+", lambda m: channels[m[0]], text))
        yield "order", (_shuffled(text, rng))
    elif ".mlir" in dump:
        yield "names", (re.sub(r"%(?=[a-z0-9])", f"%n{number}_", text))
        yield "positions", (re.sub(r" loc\(#loc\d*\)|^#loc.*\n", "", text, flags=re.MULTILINE))
    else:
        values = set(re.findall(r"^ +(\w+)(?:: \"[^\"]*\")? = ", text, re.MULTILINE))
        words = re.compile(rf"(?<![.\w\"'])({'|'.join(sorted(values))})(?![\w(=])")
        yield "names", (words.sub(lambda m: f"v{number}_{m[1]}", text) if values else text)
        yield "comments", (re.sub(r"^ +# .*\n", "", text, flags=re.MULTILINE))


def _renamed(text: str, rng: random.Random) -> str:
    """All instructions with other names."""
    read, _ = instructions(text)
    names = {i.name: f"n{rng.randrange(10**9)}.{k}" for k, i in enumerate(read)}
    spans = {(a, b): names[n] for i in read for n, a, b in i.operands if n in names}
    starts = {m.span(2): names[m[2]] for m in LINE.finditer(text)}
    for i in read:
        for key, a, b in i.attributes:
            if key == "control-predecessors":
                spans |= {
                    (a + m.start(), a + m.end()): names[m[0]] for m in re.finditer(WORD, text[a:b]) if m[0] in names
                }
    for (a, b), name in sorted((spans | starts).items(), reverse=True):
        text = text[:a] + name + text[b:]
    return text


def _shuffled(text: str, rng: random.Random) -> str:
    """The lines of each computation in another order in which operands stand first."""
    read, _ = instructions(text)
    lines = text.split("\n")
    at = {i.shape[0]: text.count("\n", 0, i.shape[0]) for i in read}
    for computation in dict.fromkeys(i.computation for i in read):
        own = [i for i in read if i.computation == computation]
        if any(
            i.opcode in ("while", "custom-call", "infeed", "rng") or "channel_id" in [k for k, _, _ in i.attributes]
            for i in own
        ):
            continue
        places = {i.name: k for k, i in enumerate(own)}
        waiting = [{places[n] for n, _, _ in i.operands if n in places} for i in own]
        for k, i in enumerate(own):
            before = [text[a:b] for key, a, b in i.attributes if key == "control-predecessors"]
            waiting[k] |= {places[n] for words in before for n in re.findall(WORD, words) if n in places}
        ready, order = [k for k, w in enumerate(waiting) if not w], list[int]()
        while ready:
            k = ready.pop(rng.randrange(len(ready)))
            order.append(k)
            for j, w in enumerate(waiting):
                if k in w:
                    w.discard(k)
                    if not w:
                        ready.append(j)
        old = [lines[at[i.shape[0]]] for i in own]
        for slot, k in zip(own, order, strict=True):
            lines[at[slot.shape[0]]] = old[k]
    return "\n".join(lines)


@dataclass
class Tally:
    """What became of edits, by kind; `wrong` lists those that a comparison is wrong about."""

    total: Counter[str]
    refused: Counter[str]
    named: Counter[str]
    wrong: list[str]


def run(dump: str, step: int = 1, first: int = 0, harmless_too: bool = True) -> Tally:
    """Every `step`-th edit of a dump, from number `first`, and its harmless edits."""
    tally, text = Tally(Counter(), Counter(), Counter(), []), text_of(dump)
    for edit in islice(edits(dump), first, None, step):
        if text[edit.start : edit.end] == edit.new:
            continue
        tally.total[edit.kind] += 1
        diff = compared(dump, edit.of(text))
        if diff is None:
            tally.refused[edit.kind] += 1
            continue
        if diff.verdict == "same":
            tally.wrong.append(f"{dump}: {edit.told(text)}: the same")
        tally.named[edit.kind] += _names(diff, edit)
    for kind, changed in harmless(dump, first) if harmless_too else ():
        diff = compared(dump, changed)
        if diff is None or diff.causes:
            reasons = "refused" if diff is None else [cause.what for cause in diff.causes][:2]
            tally.wrong.append(f"{dump}: other {kind}: {reasons}")
    return tally


def _names(diff: Diff, edit: Edit) -> bool:
    """Does one of the first three causes name the value that was edited, or say the header's word?"""
    causes = (diff.causes or diff.unknown)[:3]
    return any(edit.name in (n.rpartition("/")[2] for n in (*cause.a, *cause.b)) or not edit.name for cause in causes)


def main() -> int:
    pattern, step, first = [*sys.argv[1:], "*", "1", "0"][:3] if len(sys.argv) < 4 else sys.argv[1:4]
    total = wrong = 0
    for dump in DUMPS:
        if fnmatch.fnmatch(dump, pattern):
            started = time.process_time()
            tally = run(dump, int(step), int(first))
            total, wrong = total + tally.total.total(), wrong + len(tally.wrong)
            kinds = ", ".join(
                f"{kind} {n} ({tally.refused[kind]} refused, {tally.named[kind]} named)"
                for kind, n in tally.total.items()
            )
            print(f"{dump}: {tally.total.total()} edits, {time.process_time() - started:.0f} s: {kinds}", flush=True)
            print("".join(f"  {line}\n" for line in tally.wrong), end="", flush=True)
    print(f"{total} edits, wrong about {wrong}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
