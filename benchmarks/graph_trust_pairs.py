"""Pairs of texts of programs with one planted change, and their table: what the scripts that make such pairs share.

A pair is a name, a program, its options on either side, and an expression that only the planted cause matches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Options = dict[str, Any]
Texts = dict[str, str]  # of one variant, by what is appended to its name
Pair = tuple[str, Callable, Options, Options, str]
SAME = "same"  # expected of a pair that computes the same


def called(program: Callable, options: Options) -> Texts:
    """The texts of a program that returns them."""
    return program(options)


def write(folder: Path, pairs: list[Pair], texts: Callable[[Callable, Options], Texts] = called) -> None:
    """The texts of pairs and their table; texts that are equal, since a change was dropped before, are no pair."""
    folder.mkdir(parents=True, exist_ok=True)
    table: list[str] = []
    known: dict[str, Texts] = {}
    for name, program, *sides, cause in pairs:
        keys = [f"{program.__name__}{options}" for options in sides]
        for key, options in zip(keys, sides, strict=True):
            known[key] = known.get(key) or texts(program, options)
        a, b = (known[key] for key in keys)
        for kind in [kind for kind in a if kind in b and a[kind] != b[kind]]:
            stem = name.replace(" ", "_").replace(",", "")
            files = [f"{stem}.{side}.{kind if '.' in kind else f'{kind}.txt'}" for side in "ab"]
            for file, text in zip(files, (a[kind], b[kind]), strict=True):
                (folder / file).write_text(text)
            # Optimised text leaves out the numbers of arrays.
            hidden = kind == "opt.txt" and cause.startswith("constant")
            verdict, told = ("cannot tell", "left out") if hidden else ("different", cause)
            verdict = "same" if cause == SAME else verdict
            table.append(
                f'[[pair]]\nname = {json.dumps(f"{name}, {kind}")}\na = "{files[0]}"\nb = "{files[1]}"\n'
                f"verdict = \"{verdict}\"\ncause = '{told}'\n"
            )
        print(name, *a, flush=True)
    (folder / "pairs.toml").write_text("\n".join(table))


def main(doc: str, sets: dict[str, list[Pair]], texts: Callable[[Callable, Options], Texts] = called) -> None:
    """The command of a script: a folder, and which of its sets."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", choices=list(sets), default=next(iter(sets)))
    args = parser.parse_args()
    write(args.folder, sets[args.set], texts)
