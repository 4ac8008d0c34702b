"""HLO text of any size in the style of torch_xla: a recorded training step again and again, under new names.

    python benchmarks/graph_modules.py STEP.hlo.txt.gz 45000 > large.hlo.txt

Each repetition takes its parameters from the outputs of the one before where the shapes agree, so that the graph
grows deep as well as wide.
"""

from __future__ import annotations

import gzip
import re
import sys
from pathlib import Path

_NAME = re.compile(r"%([\w.\-]+)")
_DEFINED = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (\S+) (parameter\((\d+)\)|tuple\()")


def module(step: str, instructions: int) -> str:
    """A module of at least so many instructions, made of repetitions of `step`, a whole module of torch_xla."""
    header, _, rest = step.partition("\n")
    called, _, entry = rest.partition("ENTRY ")
    size = step.count(" = ")
    copies = max(1, -(-instructions // size))
    body = entry.split("\n")[1:]
    body = body[: next(i for i, line in enumerate(body) if line.startswith("}"))]
    outputs: dict[str, list[str]] = {}
    numbers = 0
    subs: list[str] = []
    lines: list[str] = []
    for copy in range(copies):
        rename = _renamer(f".r{copy}")
        subs.append(rename(called))
        used = dict.fromkeys(outputs, 0)
        made: dict[str, list[str]] = {}
        shapes: dict[str, str] = {}
        for line in body:
            line = rename(line)
            if line.lstrip().startswith("ROOT"):
                for name in _NAME.findall(line.partition(" tuple(")[2]):
                    made.setdefault(shapes.get(name, ""), []).append(name)
                continue
            name, _, right = line.strip().partition(" = ")
            shape, _, right = right.partition(" ")
            shapes[name[1:]] = shape
            if right.startswith("parameter("):
                took = used.get(shape, 0)
                if took < len(outputs.get(shape, ())):
                    used[shape] = took + 1
                    line = f"  {name} = {shape} copy({shape} %{outputs[shape][took]})"
                else:
                    line = re.sub(r"parameter\(\d+\)", f"parameter({numbers})", line, count=1)
                    numbers += 1
            lines.append(line)
        outputs = made
    last = [(shape, name) for shape, names in outputs.items() for name in names if shape]
    root = f"  ROOT %root = ({', '.join(s for s, _ in last)}) tuple({', '.join(f'{s} %{n}' for s, n in last)})"
    name = header.split(",")[0]
    return "\n".join([name, "", *subs, "ENTRY %entry {", *lines, root, "}", ""])


def _renamer(suffix: str):
    return lambda text: _NAME.sub(lambda found: found[0] + suffix, text)


def text_of(path: Path) -> str:
    """The text of a file, plain or gzip."""
    data = path.read_bytes()
    return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()


def main(arguments: list[str]) -> int:
    path, instructions = arguments
    sys.stdout.write(module(text_of(Path(path)), int(instructions)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
