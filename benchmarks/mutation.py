"""Mutants that nobody chose: what `verify` notices of them, beside gradcheck and assert_close, by rarity.

    python benchmarks/mutation.py --seeds 10 -j 2 --results build/mutation.sqlite --out build/mutation.md
    python benchmarks/mutation.py --set decompositions --only gelu,nll_loss --level quick --count 60
    python benchmarks/mutation.py --seeds 10-11 --shard 0/4 -j 16 --minutes 6  # a quarter of it
    python benchmarks/mutation.py --results build/mutation.sqlite --out benchmarks/results/mutation.md --summarise

Sets (`mutation_ops/sets.py`): PyTorch's decompositions, our own norms and deformable attention, Liger's and fla's ops,
which pip installs: `pip install --target libs --no-deps liger-kernel==0.8.5 fla-core==0.6.0
flash-linear-attention==0.6.0 einops`, then PYTHONPATH=libs. Mutated are sources of Python and of Triton, operations of
recorded backwards and of TTIR.

A mutant counts where a search of its own finds an input at which it computes something else
(`retrograd.mutation.search`); what raises at every ordinary input does not, findings of the original give no credit,
and a tool that objects to the original is not asked. What verify says of the originals is counted apart. An op and a
seed are a case of a campaign, in a process of its own, here or on a cluster; what the results file (SQLite) has is not
run again. Nothing else is written but the table, and what compilers keep in temporary folders.

The libraries' own tests are not run: each mutant would cost what they do, and pip installs neither PyTorch's nor fla's.
With Liger's, which are in its sdist, `retrograd mutate SPEC --tests ...` tells what they miss (docs/mutate.md).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import detection  # noqa: E402
import torch  # noqa: E402
from mutation_ops.sets import SETS, Subject  # noqa: E402

import retrograd as rg  # noqa: E402
from retrograd.check.cpu_kernels import executed  # noqa: E402
from retrograd.check.schema import Report  # noqa: E402
from retrograd.check.spec import OpSpec  # noqa: E402
from retrograd.core import campaign  # noqa: E402
from retrograd.core.campaign import ResultStore  # noqa: E402
from retrograd.core.tasks import Begin, End, Outcome, Task, Work, WorkerOptions  # noqa: E402
from retrograd.mutation.judges import by_verify, original_findings  # noqa: E402
from retrograd.mutation.schema import RARITIES, MutantResult  # noqa: E402

COUNTS = {"decompositions": 90, "own": 24, "liger": 20, "fla": 20}
CASE = "mutants"  # the only one of an op and a seed
LIMIT = 24 * 3600.0  # seconds of CPU time of an op and a seed beside its mutants, each of which has a limit of its own
ORDINARY = RARITIES[:2]
ALONE = RARITIES[-2:]  # nothing but verify says that it differs
OTHERS: dict[str, Callable[[OpSpec, int], bool | None]] = {
    "gradcheck": detection.gradcheck,
    "gradcheck (fast mode)": lambda spec, seed: detection.gradcheck(spec, seed, fast=True),
    "assert_close": detection.close,
}
Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """An op and a seed: what one process does at a time."""

    set: str
    name: str
    seed: int
    levels: tuple[str, ...]
    count: int

    @property
    def task(self) -> str:
        """Its name in the results file."""
        return f"{self.set} {self.name} {self.seed} {self.count}"


@cache
def subjects(name: str) -> dict[str, Subject]:
    """The ops of a set."""
    return SETS[name]()


def prepare() -> Work:
    """Make a worker of this process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return _work


def _work(argument: tuple[Job, float], done: Mapping[str, Outcome]) -> Iterator[Begin | End]:
    if CASE not in done:  # else the process before this one died of it
        yield Begin(CASE)
        yield End(CASE, mutants_of(*argument))


def mutants_of(job: Job, deadline: float) -> Record:
    """Mutate an op, until a time; what verify says of it as it is comes first."""
    start, subject = sum(os.times()[:4]), subjects(job.set)[job.name]
    spec = subject.spec()
    originals = {level: original_findings(spec, level, job.seed) for level in job.levels}
    beside = {f"verify {level}": _by_verify(level, originals[level][1]) for level in job.levels[1:]}
    beside |= {name: _alone(judge) for name, judge in OTHERS.items() if not _objects(judge, spec, job.seed)}
    report = rg.mutate(
        spec, functions=subject.functions, levels=subject.levels, count=job.count, level=job.levels[0], seed=job.seed,
        lines=subject.holds, beside=beside, timeout=300.0, budget=max(1.0, deadline - time.time()),
    )  # fmt: skip
    told = {level: _told(said) for level, (said, _) in originals.items()}
    return {
        **asdict(job), "originals": told, "place": detection.place(), "candidates": report.candidates,
        "judges": [f"verify {job.levels[0]}", *beside], "mutants": [*map(_kept, report.results)],
        "seconds": round(sum(os.times()[:4]) - start, 1),
    }  # fmt: skip


def _told(report: Report) -> Record:
    findings = [f"{f.stage}: {f.what.splitlines()[0]} ({f.case.dtype} {f.case.text()})" for f in report.findings]
    reasons = [f"{s.id}: {s.reason}"[:300] for s in report.stages if s.status == "undecided"]
    return {"verdict": report.verdict, "told": findings + reasons}


def _by_verify(level: str, known: set[tuple[str, ...]]) -> Callable[[OpSpec, int], bool | None]:
    return lambda spec, seed: by_verify(spec, level, seed, known).killed


def _alone(judge: Callable[[OpSpec, int], bool | None]) -> Callable[[OpSpec, int], bool | None]:
    def asked(spec: OpSpec, seed: int) -> bool | None:
        with executed("cpu", {}):
            return judge(spec, seed)

    return asked


def _objects(judge: Callable[[OpSpec, int], bool | None], spec: OpSpec, seed: int) -> bool:
    """Whether a tool cannot be used on an op, or objects to it as it is."""
    if judge is not OTHERS["assert_close"] and "float64" not in spec.dtypes:
        return True
    try:
        return _alone(judge)(spec, seed) is not False
    except Exception:
        return True


def _kept(result: MutantResult) -> Record:
    """What is kept of a mutant: its diff where somebody will ask for it."""
    mutant, judged = result.mutant, {j.judge: j.killed for j in result.judgements}
    kept: Record = dict(
        id=mutant.id, level=mutant.level, operator=mutant.operator, fate=result.fate, rarity=result.rarity,
        judged=judged, seconds=result.seconds,
    )  # fmt: skip
    missed = not all(killed for judge, killed in judged.items() if judge.startswith("verify"))
    if result.fate in ("crashed", "timed out") or result.rarity in ALONE or (result.fate == "differs" and missed):
        why = "; ".join(j.why for j in result.judgements if j.judge.startswith("verify") and j.why)
        kept |= dict(
            case=result.case, dtype=result.dtype, difference=result.difference, diff=mutant.diff, why=why,
            function=mutant.function,
        )  # fmt: skip
    return kept


# ----- the table


@dataclass(frozen=True)
class Row:
    """A mutant, and the op and seed that it is of."""

    record: Record
    mutant: Record

    def killed(self, judge: str) -> bool | None:
        """Whether a judge notices it; None if it was not asked."""
        own = {"verify": self.record["judges"][0]}
        return {own.get(name, name): killed for name, killed in self.mutant["judged"].items()}.get(judge)


def _rows(records: Sequence[Record]) -> list[Row]:
    return [Row(r, m) for r in records for m in r["mutants"]]


def _cells(rows: Sequence[Row], judges: Sequence[str]) -> list[str]:
    cells = []
    for judge in judges:
        asked = [killed for row in rows if (killed := row.killed(judge)) is not None]
        cells.append(f"{sum(asked)} of {len(asked)}" if asked else "-")
    return cells


def _table(head: Sequence[str], groups: dict[str, list[Row]], judges: Sequence[str]) -> Iterator[str]:
    yield f"| {' | '.join([*head, *judges])} |"
    yield "|---" * (len(head) + len(judges)) + "|"
    for label, rows in groups.items():
        yield f"| {label} | {' | '.join(_cells(rows, judges))} |"


def table(records: Sequence[Record]) -> list[str]:
    """Lines: what each judge notices by rarity, by set and level, by operator; the originals; what is missed."""
    rows = _rows(records)
    differing = [r for r in rows if r.mutant["fate"] == "differs"]
    known = [r for r in differing if r.mutant["rarity"] not in ALONE]
    judges = [j for j in ("verify quick", "verify full", *OTHERS) if any(r.killed(j) is not None for r in differing)]
    by_rarity = {rarity: [r for r in differing if r.mutant["rarity"] == rarity] for rarity in RARITIES}
    groups = {k: v for k, v in by_rarity.items() if v and k not in ALONE}
    groups["rare: all but the first two"] = [r for r in known if r.mutant["rarity"] not in ORDINARY]
    groups["all"] = known
    lines = [
        *_table(["differ at"], groups, judges),
        "",
        "A tool is asked where it does not object to the original.",
        "",
    ]
    fates = {fate: sum(r.mutant["fate"] == fate for r in rows) for fate in {r.mutant["fate"] for r in rows}}
    alone = len(differing) - len(known)
    lines += [
        f"{len(rows)} mutants: {', '.join(f'{n} {fate}' for fate, n in sorted(fates.items()))}; {alone} of those that "
        "differ do so for verify alone, which are in no row.", "",
    ]  # fmt: skip
    verify = [j for j in judges if j.startswith("verify")]
    apart = defaultdict[str, list[Row]](list)
    for row in known:
        apart[f"{row.record['set']} | {row.mutant['level']}"].append(row)
    lines += [*_table(["set", "mutated"], dict(sorted(apart.items())), judges), ""]
    apart = defaultdict[str, list[Row]](list)
    for row in known:
        apart[row.mutant["operator"]].append(row)
    lines += [*_table(["operator"], dict(sorted(apart.items())), verify), ""]
    return lines + [*_of_originals(records), *_missed(rows, known, verify)]


def _of_originals(records: Sequence[Record]) -> Iterator[str]:
    yield "| set | ops | level | runs of the original | proved | undecided | accused |"
    yield "|---" * 7 + "|"
    told: dict[str, None] = {}
    for name, level in product(SETS, ("quick", "full")):
        of = [r for r in records if r["set"] == name and level in r["originals"]]
        verdicts = [r["originals"][level]["verdict"] for r in of]
        counts = " | ".join(str(verdicts.count(v)) for v in ("proved", "undecided", "finding"))
        if of:
            yield f"| {name} | {len({r['name'] for r in of})} | {level} | {len(of)} | {counts} |"
        for r in of:
            told |= {f"* {r['name']}, {level}, seed {r['seed']}: {t}": None for t in r["originals"][level]["told"]}
    yield from ["", *told, ""]


def _missed(rows: Sequence[Row], known: Sequence[Row], judges: Sequence[str]) -> Iterator[str]:
    for row in rows:
        if row.mutant["fate"] in ("crashed", "timed out"):
            yield f"* {row.mutant['fate']}: {row.record['name']} {row.mutant['id']}: {row.mutant['difference'][:200]}"
    yield from ["", "Missed by verify:", ""]
    for row in known:
        if misses := [j.removeprefix("verify ") for j in judges if row.killed(j) is False]:
            m = row.mutant
            yield (
                f"* {row.record['name']}, seed {row.record['seed']}, {m['level']}, {m['operator']}, missed by "
                f"{' and '.join(misses)}, at {m['rarity']} ({m['dtype']} {m['case']}): {m['difference']} {m['why']}"
            )
            changed = [line for line in m["diff"].splitlines()[3:] if line[:1] in "+-"]
            yield from ["", "  ```diff", *(f"  {line}" for line in changed), "  ```", ""]


# ----- running


def records_of(results: ResultStore) -> list[Record]:
    """All records, by set, op and seed; an op whose process died is named."""
    records = []
    for task in results.tasks():
        outcome = results.of(task)[CASE]
        if outcome.state == "done":
            records.append(outcome.value)
        else:
            print(f"lost: {task}: {outcome.state} {outcome.text}")
    order = {name: number for number, name in enumerate(SETS)}
    return sorted(records, key=lambda r: (order[r["set"]], r["name"], r["seed"]))


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """All that a command line asks for, its shard of it."""
    first, _, last = args.seeds.partition("-")
    sets = list(SETS) if args.set == "all" else args.set.split(",")
    levels = ("quick", "full") if args.level == "both" else (args.level,)
    wanted = set(filter(None, args.only.split(",")))
    every = [
        Job(s, name, seed, levels, args.count or COUNTS[s])
        for seed in range(int(first), int(last or first) + 1)
        for s in sets
        for name in subjects(s)
        if not wanted or name in wanted
    ]
    number, _, of = args.shard.partition("/")
    return every[int(number) :: int(of)]


def execute(jobs: Sequence[Job], results: ResultStore, args: argparse.Namespace) -> None:
    """Do what the results have not, and print a line of each as it ends."""
    seconds = 60 * args.minutes if args.minutes else math.inf
    deadline, until = time.time() + seconds, time.monotonic() + seconds
    waiting = [Task(job.task, (job, deadline)) for job in jobs if not results.of(job.task)]
    options = WorkerOptions(jobs=args.jobs, timeout=LIMIT, cluster=args.cluster)
    for task, _, outcome in campaign.run(prepare, waiting, results, options, until):
        if outcome.state == "done":
            record = outcome.value
            counts = _cells([r for r in _rows([record]) if r.mutant["fate"] == "differs"], record["judges"])
            told = "; ".join(f"{j} {c}" for j, c in zip(record["judges"], counts, strict=True))
            print(f"{record['name']} {record['seed']}: {told} in {record['seconds']:.0f} CPU s", flush=True)
        else:
            print(f"lost: {task}: {outcome.state} {outcome.text}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--set", default="all", help=f"of {', '.join(SETS)}, comma separated")
    add("--only", default="", help="ops, comma separated")
    add("--seeds", default="0", help="one, or A-B")
    add("--count", type=int, default=0, help=f"mutants of an op and seed; by default {COUNTS}")
    add("--level", choices=("quick", "full", "both"), default="both", help="of verify")
    add("--shard", default="0/1", metavar="I/N", help="every N-th op from number I on")
    add("-j", "--jobs", type=int, default=1, help="processes")
    add("--minutes", type=float, default=0.0, help="begin nothing after so long")
    add("--cluster", default="", metavar="ADDRESS", help="of a Dask scheduler, whose workers take the ops")
    add("--results", type=Path, default=Path("build/mutation.sqlite"), help="is continued")
    add("--out", type=Path, help="of the table, markdown")
    add("--summarise", action="store_true", help="run nothing")
    return parser.parse_args()


def main() -> int:
    args = parse()
    results = ResultStore(args.results, campaign=args.level)
    if not args.summarise:
        execute(jobs_of(args), results, args)
    records = records_of(results)
    seeds = ", ".join(map(str, sorted({r["seed"] for r in records})))
    head = [
        "# Mutants of backward passes", "",
        f"`python benchmarks/mutation.py` makes it. {len({(r['set'], r['name']) for r in records})} ops, "
        f"seeds {seeds}; {'; '.join(sorted({r['place'] for r in records}))}.", "",
    ]  # fmt: skip
    text = "\n".join(head + table(records)).rstrip() + "\n"
    if args.out:
        args.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    import mutation  # so that what is sent to workers of a cluster has a module that they can import

    sys.exit(mutation.main())
