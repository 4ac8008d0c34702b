"""Damages graphs and reads them: nothing but a Graph or a GraphError may come out, each in time.

    python tests/graph/fuzz_readers.py SECONDS [SEED [SEEDS]]

Not collected by pytest; `test_read_damaged.py` runs a short part of it. Inputs that fail are kept in `fuzz_corpus/` as
`crash-*`, and from then on belong to what is damaged further. SEEDS is a pattern of file names; StableHLO, which takes
a process each, takes part only in `'*.mlir'`.
"""

from __future__ import annotations

import contextlib
import gzip
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from hashlib import blake2b
from pathlib import Path

from retrograd.errors import GraphError, MissingExtraError
from retrograd.graph.readers import parse, read

CORPUS = Path(__file__).parent / "fuzz_corpus"
# CPU seconds. The largest seed has 25 kB and takes 5 ms: a reader that needs this long is not linear.
LIMIT_S = 5
_TOKENS = list('"\\(){}[]<>,=%#:;\n\r\t \0\x0b/*') + [
    "/*",
    "*/",
    "ROOT ",
    "ENTRY ",
    "metadata={",
    "replica_groups=",
    "²",
]
_TOKENS += [
    "HloModule x\n",
    "parameter(0)",
    "parameter(99999999999)",
    "[2,4]<=[8]",
    "index=0",
    "}\n",
    "None",
    "self.",
    "class ",
]
_TOKENS += [
    "constant({",
    "/*index=5*/",
    "StackFrames\n",
    "parent_frame_id=",
    "9" * 5000,
    "(" * 300,
    "## BEGIN_GRAPH\n",
    "-" * 9000,
]


def corpus(names: str = "*") -> list[bytes]:
    """The seeds, in an order that does not depend on the machine."""
    return [path.read_bytes() for path in sorted(CORPUS.glob(names))]


def damaged(seeds: list[bytes], rng: random.Random) -> bytes:
    """One of the seeds with up to six wounds."""
    data = rng.choice(seeds)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        data = rng.choice(_WOUNDS)(data, seeds, rng)
        if len(data) > 200_000:
            data = data[:200_000]
    return data


def _flip(data: bytes, _: list[bytes], rng: random.Random) -> bytes:
    if not data:
        return data
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _insert(data: bytes, _: list[bytes], rng: random.Random) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(_TOKENS).encode() * rng.choice((1, 1, 1, 2, 50)) + data[at:]


def _remove(data: bytes, _: list[bytes], rng: random.Random) -> bytes:
    start = rng.randint(0, len(data))
    return data[:start] + data[start + rng.randint(1, 40) :]


def _truncate(data: bytes, _: list[bytes], rng: random.Random) -> bytes:
    return data[: rng.randint(0, len(data))]


def _splice(data: bytes, seeds: list[bytes], rng: random.Random) -> bytes:
    other = rng.choice(seeds)
    start, end = sorted(rng.randint(0, len(other)) for _ in range(2))
    at = rng.randint(0, len(data))
    return data[:at] + other[start:end] + data[at:]


def _lines(data: bytes, _: list[bytes], rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        del lines[a : a + rng.randint(1, 5)]
    elif kind == 1:
        lines.insert(b, lines[a])
    elif kind == 2:
        lines[a], lines[b] = lines[b], lines[a]
    else:
        lines[a] = lines[a] + lines[b]
    return b"\n".join(lines)


def _endings(data: bytes, _: list[bytes], __: random.Random) -> bytes:
    return data.replace(b"\n", b"\r\n")


_WOUNDS = [_flip, _flip, _insert, _insert, _remove, _truncate, _splice, _lines, _lines, _lines, _endings]


def outcome(data: bytes, way: int, folder: Path) -> str:
    """Reads damaged data as text, as a file or as a damaged gzip file; "ok" or what the reader said."""
    try:
        if way == 0:
            graphs = parse(data.decode(errors="replace"), "fuzz")
        else:
            path = folder / "fuzz"
            path.write_bytes(data if way == 1 else _packed(data))
            graphs = read(path)
    except MissingExtraError:
        return "no jaxlib"
    except GraphError as error:
        refused = str(error)
    else:
        for graph in graphs:
            _sound(graph)
        return "read"
    assert "line " in refused, f"no line number: {refused}"
    assert len(refused) < 600, f"a message of {len(refused)} characters"
    return "refused"


def _packed(data: bytes) -> bytes:
    """gzip, itself damaged where the hash of the data says so."""
    packed = gzip.compress(data, 1, mtime=0)
    rng = random.Random(blake2b(data, digest_size=8).digest())
    return (
        _flip(packed, [], rng) if rng.random() < 0.4 else _truncate(packed, [], rng) if rng.random() < 0.3 else packed
    )


def _sound(graph) -> None:
    """What everything behind the readers relies on."""
    assert graph.entry in graph.computations
    seen = set()
    for name, computation in graph.computations.items():
        size = len(computation.instructions)
        assert 0 <= computation.root < size
        assert all(computation.instructions[at].opcode == "parameter" for at in computation.parameters)
        for at, instruction in enumerate(computation.instructions):
            assert all(0 <= operand < at for operand in instruction.operands), instruction
            assert all(called in seen for _, called in instruction.called), instruction
            graph.where(instruction)
        seen.add(name)


def _late(*_: object) -> None:
    raise TimeoutError(f"longer than {LIMIT_S} s")


def fuzz(seconds: float, seed: int, count: int | None = None, keep: bool = True, names: str = "*") -> Counter[str]:
    """Reads damaged inputs for so long, or so many; the first line of what was wrong is a key that begins with "BAD"."""
    rng = random.Random(seed)
    seeds = corpus(names)
    if not names.endswith("mlir"):
        seeds = [seed for seed in seeds if b"stablehlo." not in seed]
    for seed_text in seeds:  # whatever has to be imported is, before the clock runs
        with contextlib.suppress(GraphError):
            parse(seed_text.decode(errors="replace"))
    results: Counter[str] = Counter()
    end = time.monotonic() + seconds
    signal.signal(signal.SIGVTALRM, _late)
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end and (count is None or sum(results.values()) < count):
            data, way = damaged(seeds, rng), rng.choice((0, 0, 0, 1, 2))
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
            try:
                results[outcome(data, way, Path(folder))] += 1
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                what = f"BAD {type(error).__name__} {where.name}:{where.lineno} {str(error)[:80]}"
                results[what] += 1
                if keep and results[what] == 1:
                    (CORPUS / f"crash-{blake2b(data, digest_size=4).hexdigest()}").write_bytes(data)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return results


def main(arguments: list[str]) -> int:
    seed = int(arguments[1]) if len(arguments) > 1 else int(time.time())
    results = fuzz(float(arguments[0]), seed, names=arguments[2] if len(arguments) > 2 else "*")
    for what, times in results.most_common():
        sys.stdout.write(f"{times:8}  {what}\n")
    sys.stdout.write(f"seed {seed}, {sum(results.values())} inputs\n")
    return int(any(what.startswith("BAD") for what in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
