"""Verdicts on a corpus with proofs, one process an op with a time limit, by the `retrograd` that PYTHONPATH names.

    PYTHONPATH=CHECKOUT/src python benchmarks/corpus_verdicts.py --commit COMMIT --keep verdicts.jsonl \
        --corpus third --remarks benchmarks/results/third-corpus-remarks.json \
        --out benchmarks/results/third-corpus-frozen

The corpus (`--corpus third`, `fourth` or `fifth`) is that of this checkout, the checker may be another's: a commit
that was frozen before the corpus was written. Each op is made anew for each verification. One that is stopped by the
limit counts as found or accused if a finding was told before. `--keep` has a line for each verification and is
continued where it ends; `--out` gets .md and .json. `--remarks` is a JSON object with a sentence for ops by "NAME" or
"NAME LEVEL", written after reading the findings: one that begins with "other:" says that what was told is not what is
wrong, which then counts as missed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import retrograd
from retrograd.check.runner import verify

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from corpus import files, is_healthy, load_module
from entries import Entries

LEVELS = ("quick", "full")
WALL = 10  # times its limit of CPU time that a verification may last by the clock
Row = dict[str, Any]


def entries(path: Path) -> Entries:
    return next(v for v in vars(load_module(path)).values() if isinstance(v, Entries))


def check(path: Path, name: str, level: str, seed: int, limit: int, pipe: Any) -> None:
    """Verify one op and send what is found at once, then the report's gist."""
    signal.setitimer(signal.ITIMER_PROF, limit)  # of CPU time: other work on the machine makes no op slower
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    warnings.simplefilter("ignore")
    start = time.process_time()

    def tell(kind: str, thing: Any) -> None:
        if kind == "finding":
            pipe.send((kind, thing.stage, thing.what))
        elif kind == "start":
            pipe.send((kind, str(getattr(thing, "id", thing)), ""))

    try:
        report = verify(entries(path).ops[name], level=level, seed=seed, watch=tell)
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        return
    pipe.send(("report", {
        "verdict": report.verdict,
        "findings": [[f.stage, f.what, f.where, f.elements] for f in report.findings],
        "stages": {s.id: s.status for s in report.stages},
        "reasons": {s.id: s.reason for s in report.stages if s.status == "undecided"},
        "notes": [*report.notes, *(f"{s.id}: {n}" for s in report.stages for n in s.notes)],
        "cpu": time.process_time() - start,
    }))  # fmt: skip


def kinds(args: argparse.Namespace) -> tuple[str, str]:
    return f"mutants_{args.corpus}", f"healthy_{args.corpus}"


def judged(path: Path, name: str, level: str, args: argparse.Namespace) -> Row:
    row: Row = {"set": path.parent.name, "name": name, "level": level, "seed": args.seed, "limit": args.limit}
    here, there = multiprocessing.Pipe(duplex=False)
    arguments = (path, name, level, args.seed, args.limit, there)
    process = multiprocessing.get_context("fork").Process(target=check, args=arguments)
    start, told = time.monotonic(), []
    process.start()
    there.close()
    result: Row = {"verdict": "died"}
    while (left := start + WALL * args.limit - time.monotonic()) > 0 and here.poll(left):
        try:
            kind, *rest = here.recv()
        except EOFError:
            break
        if kind == "report":
            result = rest[0]
        elif kind == "error":
            result = {"verdict": "error", "reasons": {"": rest[0]}}
        else:
            told.append([kind, *rest])
    else:
        result = {"verdict": "time limit"}
    process.kill()
    process.join()
    if process.exitcode == -signal.SIGPROF:
        result = {"verdict": "time limit"}
    row |= result | {"wall": round(time.monotonic() - start, 2)}
    if result["verdict"] in ("time limit", "died"):
        row["findings"] = [[stage, text, "", ""] for kind, stage, text in told if kind == "finding"]
        row["reasons"] = {"": f"{result['verdict']} in stage {next((t[1] for t in reversed(told)), '?')}"}
    return row


def objects(row: Row) -> bool:
    return bool(row.get("findings"))


def sentence(row: Row) -> str:
    """The first finding, or why nothing was decided."""
    if objects(row):
        stage, what, where, *_ = row["findings"][0]
        count = len(row["findings"])
        return f"[{stage}] {what}{f' ({where})' if where else ''}" + (f" (and {count - 1} more)" if count > 1 else "")
    if row.get("reasons"):
        return "; ".join(f"[{stage}] {reason}" for stage, reason in row["reasons"].items())
    return row["verdict"]


def table(rows: list[Row], remarks: dict[str, str], args: argparse.Namespace) -> str:
    by = {(r["set"], r["name"], r["level"]): r for r in rows}
    broken, right = kinds(args)
    sets = {kind: [entries(path) for path in files(kind)] for kind in (broken, right)}
    lines = [
        "# The checker on a corpus written after it was frozen", "",
        f"Checker: commit {args.commit}. Level quick and full, seed {args.seed}, one process an op, at most "
        f"{args.limit} s; torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}.", "",
        "    PYTHONPATH=CHECKOUT/src python benchmarks/corpus_verdicts.py --commit COMMIT --keep verdicts.jsonl \\",
        f"        --corpus {args.corpus} --remarks benchmarks/results/{args.corpus}-corpus-remarks.json \\",
        f"        --out {args.out}",
        "",
    ]  # fmt: skip

    def remark(name: str, level: str) -> str:
        return remarks.get(f"{name} {level}", remarks.get(name, ""))

    def outcome(kind: str, name: str, level: str) -> str:
        row = by.get((kind, name, level))
        if row is None:
            return "-"
        if objects(row) and remark(name, level).startswith("other:"):
            return "missed (another finding)"
        if objects(row):
            return "accused" if is_healthy(kind) else "found"
        return row["verdict"]

    lines += [remarks[""], ""] if "" in remarks else []
    told = {kind: [n for e in groups for n in e.ops] for kind, groups in sets.items()}
    lines += ["| set | level | ops | outcomes |", "|---|---|---|---|"]
    for kind, names in told.items():
        for level in LEVELS:
            counts = Counter(outcome(kind, n, level) for n in names)
            lines.append(
                f"| {kind} | {level} | {len(names)} | {', '.join(f'{k} {v}' for k, v in counts.most_common())} |"
            )
    rarity = {n: e.rarity[n] for e in sets[broken] for n in e.ops}
    lines += ["", "| rarity | ops | found at quick | found at full |", "|---|---|---|---|"]
    for word in dict.fromkeys(rarity.values()):
        of = [n for n in rarity if rarity[n] == word]
        shares = [sum(outcome(broken, n, level) == "found" for n in of) for level in LEVELS]
        lines.append(f"| {word} | {len(of)} | {shares[0]} | {shares[1]} |")
    for kind, title in zip(sets, ("Broken", "Right"), strict=True):
        heads = ["op", *(["bug", "rarity"] if kind == broken else []), *LEVELS, "sentence", "remark"]
        lines += ["", f"## {title}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for group in sets[kind]:
            for name in group.ops:
                cells = [name, *([group.bugs[name], group.rarity[name]] if kind == broken else [])]
                cells += [outcome(kind, name, level) for level in LEVELS]
                last: Row = next(
                    (by[kind, name, v] for v in reversed(LEVELS) if (kind, name, v) in by), {"verdict": ""}
                )
                odd = [v for v in LEVELS if kind == broken or by.get((kind, name, v), last)["verdict"] != "proved"]
                notes = [remark(name, v) for v in odd]
                cells += [sentence(last)[:400], "; ".join(dict.fromkeys(n for n in notes if n))]
                lines.append("| " + " | ".join(" ".join(c.replace("|", "\\|").split()) for c in cells) + " |")
    lines += ["", "## Not sayable", "", "| op | bug | rarity | why no spec describes it |", "|---|---|---|---|"]
    for group in sets[broken]:
        for name, reason in group.not_sayable.items():
            lines.append(f"| {name} | {group.bugs[name]} | {group.rarity[name]} | {reason} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", default="third", choices=("third", "fourth", "fifth"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=60, help="seconds of CPU time a verification may take")
    parser.add_argument("--levels", default=",".join(LEVELS))
    parser.add_argument("--names", default="", help="only these ops, comma separated")
    parser.add_argument("--commit", default="?", help="of the checker")
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--remarks", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in args.keep.read_text().splitlines()] if args.keep.exists() else []
    done = {(r["set"], r["name"], r["level"]) for r in rows}
    wanted = [n for n in args.names.split(",") if n]
    for level in [v for v in args.levels.split(",") if v]:
        for kind in kinds(args):
            for path in files(kind):
                for name in entries(path).ops:
                    if (kind, name, level) in done or (wanted and name not in wanted):
                        continue
                    row = judged(path, name, level, args)
                    rows.append(row)
                    with args.keep.open("a") as lines:
                        lines.write(json.dumps(row) + "\n")
                    print(level, name, row["verdict"], row["wall"], sentence(row)[:150], flush=True)
    if args.out:
        remarks = json.loads(args.remarks.read_text()) if args.remarks else {}
        source = f"{Path(retrograd.__file__).resolve().parents[1]}/"
        rows = json.loads(json.dumps(rows).replace(source, ""))
        args.out.with_suffix(".md").write_text(table(rows, remarks, args))
        kept = [r | {"remark": remarks.get(f"{r['name']} {r['level']}", remarks.get(r["name"], ""))} for r in rows]
        args.out.with_suffix(".json").write_text("[\n" + ",\n".join(json.dumps(r) for r in kept) + "\n]\n")


if __name__ == "__main__":
    main()
