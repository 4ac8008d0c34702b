"""Verdicts on pairs of dumps with one planted difference: same, different or cannot tell, causes, rank of the planted.

    python benchmarks/graph_trust.py                                     # pairs of tests/graph/data/trust
    python benchmarks/graph_trust.py FOLDER -o benchmarks/results/x.md   # pairs of another folder with a pairs.toml
    python benchmarks/graph_trust_programs.py FOLDER                     # makes such a folder from programs

A folder holds dumps and `pairs.toml`: per pair the files `a` and `b` (or `edit`, a text of `a` and what stands in its
place in B), the expected `verdict`, and `cause`, an expression that only the planted cause matches. The rank is that
of the first cause that matches; "-" if none does. A pair that is refused has the verdict "refused".
"""

from __future__ import annotations

import argparse
import gzip
import platform
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from retrograd import graph
from retrograd.errors import RetrogradError
from retrograd.graph.ir import Graph

TRUST = Path(__file__).parents[1] / "tests" / "graph" / "data" / "trust"


@dataclass(frozen=True)
class Result:
    """What a comparison says of one pair."""

    name: str
    expected: str
    verdict: str
    causes: int
    rank: int
    first: str

    @property
    def right(self) -> bool:
        """The verdict is the expected one; the planted cause comes first, of at most three."""
        told = self.expected == "same" or (self.rank == 1 and self.causes <= 3)
        return self.verdict == self.expected and told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=TRUST)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    results = [result(args.folder, pair) for pair in pairs(args.folder)]
    lines = [
        f"retrograd graph diff on {len(results)} pairs, Python {platform.python_version()}; "
        "`python benchmarks/graph_trust.py`",
        "",
        *summary(results),
        "",
        "| pair | expected | verdict | causes | rank of the planted | first cause |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        first = r.first.replace("|", "\\|")
        verdict = r.verdict if r.verdict == r.expected else f"**{r.verdict}**"
        lines.append(f"| {r.name} | {r.expected} | {verdict} | {r.causes} | {r.rank or '-'} | {first} |")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if args.output:
        args.output.write_text(text)


def summary(results: list[Result]) -> list[str]:
    """The numbers that count."""
    false_same = sum(r.verdict == "same" != r.expected for r in results)
    changed = [r for r in results if r.expected != "same"]
    first = sum(r.rank == 1 for r in changed)
    few = sum(r.causes <= 3 for r in changed)
    return [
        f"False same: {false_same}. Verdict right: {sum(r.verdict == r.expected for r in results)} of {len(results)}. "
        f"Planted cause first: {first} of {len(changed)}. At most 3 causes: {few} of {len(changed)}. "
        f"All of it: {sum(r.right for r in results)} of {len(results)}."
    ]


def pairs(folder: Path) -> list[dict]:
    """The table of a folder."""
    return tomllib.loads((folder / "pairs.toml").read_text())["pair"]


def sides(folder: Path, pair: dict) -> tuple[Graph, Graph]:
    """The graphs of a pair."""
    a, b = read(folder / pair["a"]), read(folder / pair["b"]) if "b" in pair else ""
    if not b:
        old, new = pair["edit"]
        b = a.replace(old, new)
        if a == b:
            raise ValueError(f"{pair['name']}: the text {old!r} is not in {pair['a']}")
    return graph.parse(a, "A")[0], graph.parse(b, "B")[0]


def read(path: Path) -> str:
    """The text of a file that may be compressed."""
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()


def result(folder: Path, pair: dict) -> Result:
    """The comparison of one pair."""
    try:
        diff = graph.diff(*sides(folder, pair))
    except RetrogradError as error:
        return Result(pair["name"], pair["verdict"], "refused", 0, 0, str(error)[:100])
    verdict = getattr(diff, "verdict", "same" if diff else "different")
    causes = diff.causes or getattr(diff, "unknown", ())
    ranks = [k for k, cause in enumerate(causes, 1) if re.search(pair.get("cause", "$^"), cause.what)]
    first = causes[0].what[:140] if causes else ""
    return Result(pair["name"], pair["verdict"], verdict, len(causes), ranks[0] if ranks else 0, first)


if __name__ == "__main__":
    main()
