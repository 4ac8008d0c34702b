"""Changes dumps word by word and puts what is still a graph through diff, unique, follow, lock and check.

    python tests/graph/fuzz_commands.py [COUNT [SEED]]     # COUNT graphs, 2,000 unless told

A comparison has to end in time, with a record or an error of ours, and two graphs that it calls the same have one key.
Not collected by pytest; `test_read_damaged.py` runs a short part of it. StableHLO is parsed in this process.
"""

from __future__ import annotations

import gzip
import random
import re
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from retrograd import graph
from retrograd.errors import RetrogradError
from retrograd.graph.ir import Graph
from retrograd.graph.keys import compiled_key, strict_key, text_key
from retrograd.graph.messages import document
from retrograd.graph.readers import mlir
from retrograd.graph.watching import lock

DATA = Path(__file__).parent / "data"
SEEDS = (
    "trust/mlp.hlo.txt.gz", "trust/mlp.opt.txt.gz", "trust/mlp.shlo.mlir.gz", "trust/tf.hlo.txt.gz",
    "fresh/collectives.hlo.txt.gz", "fresh/collectives.opt.hlo.txt.gz", "fresh/collectives.stablehlo.mlir.gz",
    "fresh/pool.hlo.txt.gz", "fresh/custom.hlo.txt.gz", "fresh/custom.opt.hlo.txt.gz", "jax/sharded.opt.hlo.txt.gz",
    "fx/0_fw.txt.gz", "fx/1_bw.txt.gz", "fx/eager_ca_ca0.txt.gz", "trust/fx_a1.txt.gz", "trust/fx_opt_a.txt.gz",
    "trust/fx_s1.txt.gz", "trust/attr_cp.hlo.gz",
)  # fmt: skip
LIMIT_S = 20  # CPU seconds for all commands; the largest seed takes 1
_WORD = re.compile(r"%?[A-Za-z_][\w.\-]*|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def changed(text: str, rng: random.Random) -> str:
    """A text with up to four words exchanged for others of it, or lines doubled, moved or left out."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        words = list(_WORD.finditer(text))
        lines = text.split("\n")
        if rng.random() < 0.6 and words:
            word, other = rng.choice(words), rng.choice(words)
            alike = [w for w in rng.sample(words, min(200, len(words))) if w[0][:1].isdigit() == word[0][:1].isdigit()]
            other = rng.choice(alike) if alike else other
            text = text[: word.start()] + other[0] + text[word.end() :]
            continue
        a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
        kind = rng.randrange(3)
        if kind == 0:
            del lines[a]
        elif kind == 1:
            lines.insert(b, re.sub(r"^(\s*(?:ROOT )?%?)([\w.\-]+)( =|: )", rf"\1new{a}\3", lines[a]))
        else:
            lines[a], lines[min(a + 1, len(lines) - 1)] = lines[min(a + 1, len(lines) - 1)], lines[a]
        text = "\n".join(lines)
    return text


def graph_of(name: str, text: str) -> Graph:
    """The graph of a text, without a process of its own."""
    if ".mlir" not in name:
        return graph.parse(text, name)[0]
    result = mlir.parse(text, name)
    result.digest = text_key(text)
    return result


def commands(a: Graph, b: Graph, texts: tuple[str, str], rng: random.Random) -> str:
    """What all commands say of two graphs; the verdict of the first."""
    diff = graph.diff(a, b)
    document(diff)
    if diff.verdict == "same":
        assert strict_key(a) == strict_key(b), "the same, and other keys"
        assert compiled_key(a) == compiled_key(b), "the same, and compiled in another way"
    document(graph.unique([a, b]))
    computation = rng.choice(list(b.computations.values()))
    document(graph.follow(b, f"{computation.name}/{rng.choice(computation.instructions).name}"))
    if a.format != "stablehlo":  # its texts are read again, in a process each
        graphs = [{"it": lock.of_text(text, a.format, "it")} for text in texts]
        lock.check(graphs[0], graphs[1])
    return diff.verdict


def _late(*_: object) -> None:
    raise TimeoutError(f"longer than {LIMIT_S} s")


def fuzz(count: int, seed: int, seeds: tuple[str, ...] = SEEDS) -> Counter[str]:
    """What became of so many changed graphs; what was wrong begins with "BAD"."""
    rng, results = random.Random(seed), Counter[str]()
    texts = {name: gzip.decompress((DATA / name).read_bytes()).decode() for name in seeds}
    originals = {name: graph_of(name, text) for name, text in texts.items()}
    signal.signal(signal.SIGVTALRM, _late)
    while results.total() - results["refused by the reader"] < count:
        name = rng.choice(seeds)
        text = changed(texts[name], rng)
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
        try:
            other = graph_of(name, text)
        except RetrogradError:
            results["refused by the reader"] += 1
            continue
        except Exception as error:
            results[_bad(error, name)] += 1
            continue
        try:
            results[commands(originals[name], other, (texts[name], text), rng)] += 1
        except RetrogradError as error:
            results[f"refused: {type(error).__name__}"] += 1
        except Exception as error:
            results[_bad(error, name)] += 1
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return results


def _bad(error: Exception, name: str) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"BAD {type(error).__name__} {where.filename[-20:]} {where.name}:{where.lineno} {str(error)[:80]} ({name})"


def main(arguments: list[str]) -> int:
    count = int(arguments[0]) if arguments else 2000
    seed = int(arguments[1]) if len(arguments) > 1 else int(time.time())
    started = time.process_time()
    results = fuzz(count, seed)
    for verdict, times in results.most_common():
        sys.stdout.write(f"{times:8}  {verdict}\n")
    sys.stdout.write(f"seed {seed}, {time.process_time() - started:.0f} s of CPU\n")
    return int(any(verdict.startswith("BAD") for verdict in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
