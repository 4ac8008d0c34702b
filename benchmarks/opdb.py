"""What `verify` says of PyTorch's own op database: every variant with autograd, beside what was adjudicated before.

    python benchmarks/opdb.py --results build/opdb.sqlite --report build/opdb.md -j 8
    python benchmarks/opdb.py --results build/opdb.sqlite --level full --samples all --dtypes bfloat16 --shard 1/4
    python benchmarks/opdb.py --minutes 20 --rotate $(( $(date +%s) / 86400 )) --baseline benchmarks/opdb_baseline.toml

The reference of an op is the op itself in float64 (docs/opinfo.md). The results file is SQLite and has each case
(variant, dtype, sample, level, seed); a run that is stopped goes on where it was. Cases run in worker processes, one
thread each, here or on a cluster: a case that crashes or hangs is recorded and ends its worker alone.
`--minutes` with `--rotate DAY` takes one of `--parts` parts of the variants by the number of the day, and begins it
elsewhere each time that it comes round, so that in the end all is seen however few fit into the time.
Exit code 1 where anything is not proved and not in the baseline, or a true bug of the baseline is found no more.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import platform
import re
import sys
import time
import tomllib
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import retrograd as rg
from retrograd import testing
from retrograd.check.input_specs import DTYPES
from retrograd.check.spec import OpSpec
from retrograd.core import campaign
from retrograd.core.campaign import ResultStore
from retrograd.core.tasks import Begin, End, Outcome, Prepare, Task, Work, WorkerOptions
from retrograd.errors import RetrogradError

BASELINE = Path(__file__).resolve().parent / "opdb_baseline.toml"
CLASSES = ("true bug", "documented", "manifold", "cannot say", "false alarm")
PASSING = ("proved", "not checked")
VERDICTS = ("proved", "finding", "undecided", "error", "hang", "crash", "not checked")
THROUGH = "through"  # a note in the results that there are no more samples than those
RECYCLE = 150  # cases after which a worker is replaced, so that what ops leave in memory does not add up
STARTUP = 300.0  # seconds until a worker has imported and drawn what it needs for the first case of a variant


def op_db() -> list[Any]:
    """PyTorch's list of OpInfos. A private name that may go in any release; nothing of retrograd needs it."""
    if importlib.util.find_spec("expecttest") is None:  # a base class of test cases there, which nothing here runs
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase, stub.ACCEPT = unittest.TestCase, False
        sys.modules["expecttest"] = stub
    try:
        from torch.testing._internal.common_methods_invocations import op_db as infos
    except ImportError as error:
        raise SystemExit(
            f"torch {torch.__version__} has no torch.testing._internal.common_methods_invocations.op_db ({error}); "
            "it is private and came with every release up to 2.13: run this under one of them"
        ) from error
    return sorted((o for o in infos if o.supports_autograd), key=testing.full_name)


# ----- one case, in a worker


def verdict_of(spec: OpSpec, level: str, seed: int, device: str = "cpu") -> dict[str, Any]:
    """The verdict on one spec with the first finding or reason, and seconds; samples of PyTorch are on the CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    record: dict[str, Any] = {}
    try:
        report = rg.verify(spec, level=level, seed=seed, device=device)
    except RetrogradError as error:
        record |= {"verdict": "error", "stage": "", "sentence": f"{type(error).__name__}: {error}"}
    except Exception as error:
        record |= {"verdict": "error", "stage": "", "sentence": f"not told by verify: {type(error).__name__}: {error}"}
    else:
        undecided = [(s.id, "undecided", s.reason) for s in report.stages if s.status == "undecided"]
        told = [(f.stage, f.kind, f.what) for f in report.findings] + undecided
        stage, kind, sentence = told[0] if told else ("", "", "")
        record |= {"verdict": report.verdict, "stage": stage, "kind": kind, "sentence": sentence, "told": told}
        record["cases"] = [f.case.text() for f in report.findings]
        if report.verdict == "undecided" and not told:  # tensors without elements
            record |= {"verdict": "not checked", "sentence": "nothing to compare"}
    record["wall"], record["cpu"] = round(time.perf_counter() - wall, 3), round(time.process_time() - cpu, 3)
    return record


def not_checked(spec: OpSpec) -> str:
    """Why today's checker compares nothing of an op; "" if it does."""
    if "complex64" in DTYPES:
        return ""
    try:
        with torch.no_grad():
            outs = spec.fn(*spec.inputs.values())  # type: ignore[union-attr]
    except Exception:
        return ""
    outs = outs if isinstance(outs, tuple) else (outs,)
    if any(t.is_complex() for t in spec.inputs.values()):  # type: ignore[union-attr]
        return "complex inputs"
    return "complex outputs" if outs and not any(t.is_floating_point() for t in outs if not t.is_complex()) else ""


def settle() -> None:
    """Make a worker of this process: one thread, no warnings, and everything imported that `verify` imports."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # What the first verification of a process imports (2 s) is no op's cost.
    rg.verify(torch.sin, reference=torch.sin, inputs=dict(x=torch.rand(3)), level="quick")


@dataclass(frozen=True)
class SampleWork:
    """What makes the work on samples of OpInfos in a worker; those of `infos`, or of PyTorch's list if that is None."""

    infos: dict[str, Any] | None
    level: str
    seed: int

    def __call__(self) -> Work:
        settle()
        infos = {testing.full_name(o): o for o in op_db()} if self.infos is None else self.infos
        return partial(_cases, infos, self.level, self.seed)


def _cases(
    infos: dict[str, Any], level: str, seed: int, task: tuple[Variant, float], done: Mapping[str, Outcome]
) -> Iterator[Begin | End]:
    """The samples of a variant that are wanted and not there, by number; none is begun after the deadline."""
    (wanted, deadline), number = task, 0
    info = infos[wanted.variant]
    try:
        numbers = [n for n in sample_numbers(info, wanted.dtype, wanted.samples, seed) if str(n) not in done]
        every = testing.sample_specs(info, wanted.dtype, numbers, seed=seed)
        for number in numbers:
            if time.time() > deadline:
                return
            yield Begin(str(number))  # before the op is called for the first time
            if (each := next(every, None)) is None:
                break  # there are no more
            reason = each.reason or (not_checked(each.spec) if each.spec else "")
            if each.spec is None or reason:
                yield End(str(number), {"verdict": "not checked", "sentence": reason})
            else:
                yield End(str(number), verdict_of(each.spec, level, seed))
    except Exception as error:
        yield End(str(number), {"verdict": "error", "sentence": f"{type(error).__name__}: {error}"})
    yield End(THROUGH, wanted.samples)


def sample_numbers(info: Any, dtype: str, samples: int | str, seed: int) -> range:
    """Numbers of the samples that are wanted; of all there are as many as are drawn, which calls no op.

    "all/5" is every fifth, another fifth for each seed.
    """
    if isinstance(samples, int):
        return range(samples)
    count = sum(1 for _ in info.sample_inputs("cpu", getattr(torch, dtype), requires_grad=True))
    every = int(samples.partition("/")[2] or 1)
    return range(seed % every, count, every)


# ----- the run


@dataclass(frozen=True)
class Variant:
    """A variant in a dtype, and which samples of it are wanted: how many, "all", or "all/5"."""

    variant: str
    dtype: str
    samples: int | str

    @property
    def name(self) -> str:
        """Of the task in the results file."""
        return f"{self.variant} {self.dtype}"

    def through(self, done: Mapping[str, Outcome]) -> bool:
        """Whether all wanted samples are there, or no further one can be drawn."""
        if isinstance(self.samples, int) and all(str(n) in done for n in range(self.samples)):
            return True
        return "" in done or (THROUGH in done and done[THROUGH].value in ("all", self.samples))

    def records(self, results: ResultStore) -> list[dict[str, Any]]:
        """What is known of the wanted samples, by number; the file may have others."""
        level, _, seed = results.campaign.partition(" ")
        done = results.of(self.name)
        numbers = {case: int(case) for case in done if case.isdigit()}
        if "" in done:  # a process that ended while it drew a sample
            numbers[""] = max(numbers.values(), default=-1) + 1
        most = self.samples if isinstance(self.samples, int) else math.inf
        key = {"variant": self.variant, "dtype": self.dtype, "level": level, "seed": int(seed)}
        chosen = sorted((n, case) for case, n in numbers.items() if n < most)
        return [key | {"sample": n} | _record(done[case]) for n, case in chosen]


def _record(outcome: Outcome) -> dict[str, Any]:
    if outcome.state == "done":
        return outcome.value
    if outcome.state == "crashed":
        return {"verdict": "crash", "sentence": f"the process died: {outcome.text}"}
    return {"verdict": "hang", "sentence": f"no verdict {outcome.text}"}


def open_results(args: argparse.Namespace) -> ResultStore:
    """The results file, of which a run reads and continues those of its level and seed."""
    return ResultStore(args.results, campaign=f"{args.level} {args.seed}")


def run(tasks: Sequence[Variant], results: ResultStore, args: argparse.Namespace, prepare: Prepare) -> None:
    """All tasks that are not through, or those for which there is time."""
    seconds = 60 * args.minutes if args.minutes else math.inf
    deadline, until = time.time() + seconds, time.monotonic() + seconds
    waiting = [Task(t.name, (t, deadline)) for t in tasks if not t.through(results.of(t.name))]
    options = WorkerOptions(
        jobs=args.jobs, timeout=args.timeout, startup=max(STARTUP, args.timeout), recycle=RECYCLE,
        cluster=vars(args).get("cluster", ""),
    )  # fmt: skip
    seen = set[str]()
    for name, _, _ in campaign.run(prepare, waiting, results, options, until):
        seen.add(name)
        if sys.stderr.isatty():
            print(f"\r{len(seen)} of {len(waiting)} variants x dtypes begun ", end="", file=sys.stderr)


def records_of(tasks: Sequence[Variant], results: ResultStore) -> list[dict[str, Any]]:
    """What is known of the samples that these tasks want, sorted."""
    ordered = sorted(tasks, key=lambda task: (task.variant, task.dtype))
    return [record for task in ordered for record in task.records(results)]


def choose(infos: dict[str, Any], args: argparse.Namespace) -> list[Variant]:
    """The variants and dtypes of this run, in the order in which they are taken."""
    names = [name for name in infos if re.search(args.only, name)]
    number, shards = (int(v) for v in args.shard.split("/"))
    names = names[number - 1 :: shards]
    if args.rotate is not None:
        names = rotated(names, args.rotate, args.parts)
    return [
        Variant(name, dtype, args.samples)
        for name in names
        for dtype in args.dtypes.split(",")
        if not testing.unsupported(infos[name], dtype)
    ]


def rotated(names: Sequence[str], day: int, parts: int) -> list[str]:
    """Part `day % parts` of the names, from a place that moves each time, through all places in the end."""
    part = list(names[day % parts :: parts])
    if not part:
        return []
    step = next(n for n in range(max(1, round(0.38 * len(part))), 2 * len(part) + 1) if math.gcd(n, len(part)) == 1)
    start = (day // parts) * step % len(part)
    return part[start:] + part[:start]


# ----- the baseline and the report


def read_baseline(path: Path) -> list[dict[str, Any]]:
    """Entries of the baseline, one a name where an entry has `names`; SystemExit where one is malformed."""
    entries = []
    for case in tomllib.loads(path.read_text(encoding="utf-8")).get("case", []):
        entries += [case | {"name": name} for name in case["names"]] if "names" in case else [case]
    for entry in entries:
        if not {"name", "dtype", "class", "reason"} <= set(entry) or entry["class"] not in CLASSES:
            raise SystemExit(f"{path}: {entry} needs name, dtype, class (one of {', '.join(CLASSES)}) and reason")
    return entries


def entries_of(entries: Sequence[dict[str, Any]], record: dict[str, Any]) -> list[dict[str, Any]]:
    """What the baseline says of the variant and dtype of a record."""
    return [e for e in entries if e["name"] == record["variant"] and e["dtype"] in ("*", record["dtype"])]


def uncovered(entries: Sequence[dict[str, Any]], record: dict[str, Any]) -> list[Any]:
    """Findings and reasons of a record, by stage, that no entry has: those of an entry are in its `stages`, or all."""
    stages = [e.get("stages") for e in entries_of(entries, record)]
    told = record.get("told") or [(record.get("stage") or record["verdict"], "", record.get("sentence", ""))]
    return [] if None in stages else [t for t in told if not any(t[0] in known for known in stages)]


def sentence(record: dict[str, Any]) -> str:
    """The first sentence of a finding or reason, on one line that fits a cell."""
    text = " ".join(str(record.get("sentence", "")).split())
    return (text if len(text) <= 240 else text[:237] + "...").replace("|", "\\|")


def repro(record: dict[str, Any]) -> str:
    """Python that verifies a case again."""
    return "\n".join(
        (
            "    import retrograd as rg",
            "    from torch.testing._internal.common_methods_invocations import op_db  # wants the package expecttest",
            f"    info = next(o for o in op_db if rg.testing.full_name(o) == {record['variant']!r})",
            f"    (spec,) = rg.testing.specs(info, {record['dtype']!r}, [{record['sample']}], seed={record['seed']})",
            f"    rg.verify(spec, level={record['level']!r}, seed={record['seed']}, device='cpu').raise_if_failed()",
        )
    )


def compared(
    records: Sequence[dict[str, Any]],
    entries: Sequence[dict[str, Any]],
    whole: Collection[tuple[str, str]] | None = None,
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Records that the baseline does not cover, and entries that did not occur where all of their cases ran.

    `whole` has the variants and dtypes of which everything ran; None: all.
    """
    new = [r for r in records if r["verdict"] not in PASSING and uncovered(entries, r)]
    mended = []
    for entry in entries:
        if "met_at" in entry:  # not at level quick and seed 0: that it did not occur says nothing
            continue
        rows = [r for r in records if r["variant"] == entry["name"] and entry["dtype"] in ("*", r["dtype"])]
        rows = [r for r in rows if whole is None or (r["variant"], r["dtype"]) in whole]
        failing = [r for r in rows if r["verdict"] not in PASSING]
        stages = {t[0] for r in failing for t in r.get("told") or [(r.get("stage") or r["verdict"],)]}
        if rows and stages.isdisjoint(entry.get("stages", stages)):
            mended.append(entry)
    return new, mended


def machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, one thread a case"


def versions() -> str:
    words = (f"torch {torch.__version__}", f"Python {platform.python_version()}", f"retrograd {rg.__version__}")
    return ", ".join((*words, machine()))


def report(records: Sequence[dict[str, Any]], entries: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """Markdown: how many of each verdict, what is not proved, and what it cost."""
    return "\n".join(_report(records, entries, args)) + "\n"


def _report(
    records: Sequence[dict[str, Any]], entries: Sequence[dict[str, Any]], args: argparse.Namespace
) -> Iterator[str]:
    yield from (
        "# PyTorch's op database",
        "",
        "`python benchmarks/opdb.py` prints it ([how](../../docs/opinfo.md)).",
        "",
    )
    yield f"level {args.level}, seed {args.seed}, samples {args.samples}, shard {args.shard}; {versions()}"
    dtypes = [d for d in args.dtypes.split(",") if any(r["dtype"] == d for r in records)]
    yield from ("", "| verdict | " + " | ".join(dtypes) + " |", "|---" * (len(dtypes) + 1) + "|")
    for verdict in VERDICTS:
        counts = [sum(r["verdict"] == verdict and r["dtype"] == d for r in records) for d in dtypes]
        if any(counts):
            yield f"| {verdict} | " + " | ".join(map(str, counts)) + " |"
    variants = [len({r["variant"] for r in records if r["dtype"] == d}) for d in dtypes]
    yield "| variants | " + " | ".join(map(str, variants)) + " |"
    seconds = [[r[k] for r in records if k in r] for k in ("cpu", "wall")]
    if all(seconds):
        cpu, wall = seconds
        yield from ("", f"CPU seconds a case: median {median(cpu):.2f}, longest {max(cpu):.1f}, all {sum(cpu):.0f}; "
                    f"wall clock: median {median(wall):.2f}, longest {max(wall):.1f}")  # fmt: skip
    skipped = Counter(re.sub(r", its draws.*", "", r["sentence"]) for r in records if r["verdict"] == "not checked")
    if skipped:
        yield from ("", "Not checked: " + "; ".join(f"{reason}: {n}" for reason, n in skipped.most_common()))
    yield from ("", "| variant | dtype | samples | verdict | stage | first sentence | adjudicated |", "|---" * 7 + "|")
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in records:
        if r["verdict"] not in PASSING:
            known = "; ".join(f"{e['class']}: {e['reason']}" for e in entries_of(entries, r))
            known = f"**new** {known}".strip() if uncovered(entries, r) else known
            alike.setdefault((r["variant"], r["dtype"], r["verdict"], r.get("stage", ""), known), []).append(r)
    for (variant, dtype, verdict, stage, known), rows in alike.items():
        numbers = ", ".join(str(r["sample"]) for r in rows[:6]) + (
            f" and {len(rows) - 6} more" if len(rows) > 6 else ""
        )
        yield f"| {variant} | {dtype} | {numbers} | {verdict} | {stage} | {sentence(rows[0])} | {known} |"


# Tests of PyTorch's suite that ask what a stage of ours asks: gradients, strides, and in-place variants' gradients.
GRADIENTS = (
    "test_fn_grad",
    "test_fn_gradgrad",
    "test_noncontiguous_samples",
    "test_inplace_grad",
    "test_output_grad_match",
)


def excuses(info: Any) -> list[str]:
    """The tests of `GRADIENTS` that an OpInfo skips, or expects to fail, on a CPU."""
    names = set()
    for each in getattr(info, "decorators", ()):
        for decorator in getattr(each, "decorators", ()):
            skips = decorator is unittest.expectedFailure or "skip" in getattr(decorator, "__qualname__", "")
            if skips and getattr(each, "device_type", None) in (None, "cpu") and each.test_name in GRADIENTS:
                names.add(each.test_name)
    return sorted(names)


def _excused(
    records: Sequence[dict[str, Any]], entries: Sequence[dict[str, Any]], infos: dict[str, Any]
) -> Iterator[str]:
    """A table of the variants that PyTorch's own suite excuses, and of the true bugs that it runs into nowhere."""
    shown = {r["variant"] for r in records}
    bugs = {e["name"] for e in entries if e["class"] == "true bug"} & shown
    excused = {name: excuses(infos[name]) for name in sorted(shown)}
    count = sum(map(bool, excused.values()))
    silent = len([name for name in bugs if not excused[name]])
    yield from ("", "## Excused by PyTorch", "")
    yield f"Of {len(shown)} variants PyTorch's suite skips, or expects to fail, a test of gradients or strides in"
    yield f"{count} ({', '.join(GRADIENTS)})."
    yield f"Of the {len(bugs)} with a true bug it excuses {len(bugs) - silent}, and passes {silent}."
    yield from ("", "| variant | excused | samples | not proved | adjudicated |", "|---" * 5 + "|")
    for name in sorted(bugs | {name for name, tests in excused.items() if tests}):
        rows = [r for r in records if r["variant"] == name]
        known = "; ".join(sorted({f"{e['class']}: {e['reason']}" for e in entries if e["name"] == name}))
        bad = sum(r["verdict"] not in PASSING for r in rows)
        yield f"| {name} | {', '.join(excused[name])} | {len(rows)} | {bad} | {known} |"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--level", default="quick", choices=("quick", "full"))
    add("--seed", type=int, default=0)
    add("--dtypes", default="float32", help="of float32,float64,bfloat16,float16,complex64")
    add(
        "--samples",
        default=2,
        type=lambda text: text if text.startswith("all") else int(text),
        help="how many, or all, or all/5 for every fifth",
    )
    add("--only", default="", metavar="REGEX", help="variants whose names it matches somewhere")
    add("--shard", default="1/1", metavar="I/N", help="every N-th variant from number I on")
    add("-j", "--jobs", type=int, default=1)
    add("--timeout", type=float, default=300.0, help="seconds of CPU time a case may take")
    add("--minutes", type=float, default=0.0, help="stop taking cases after so long")
    add("--rotate", type=int, metavar="DAY", help="a part of the variants, by this number")
    add("--parts", type=int, default=7, help="of --rotate")
    add("--cluster", default="", metavar="ADDRESS", help="of a Dask scheduler, whose workers take the cases")
    add("--results", type=Path, default=Path("build/opdb.sqlite"), help="is continued")
    add("--baseline", type=Path, nargs="?", const=BASELINE, help=f"{BASELINE.name} unless another is named")
    add("--report", type=Path, help="markdown")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    infos = {testing.full_name(o): o for o in op_db()}
    results, tasks = open_results(args), choose(infos, args)
    complex_ones = [t for t in tasks if t.dtype.startswith("complex") and t.dtype not in DTYPES]
    for task in complex_ones:
        results.add(task.name, "0", Outcome("done", {"verdict": "not checked", "sentence": "complex"}))
    work = SampleWork(None if args.cluster else infos, args.level, args.seed)
    run([t for t in tasks if t not in complex_ones], results, args, work)
    records = records_of(tasks, results)
    entries = read_baseline(args.baseline) if args.baseline else []
    if args.report:
        rows = "\n".join(_excused(records, entries, infos))
        args.report.write_text(f"{report(records, entries, args)}{rows}\n", encoding="utf-8")
    # The baseline is about level quick at seed 0: what does not occur elsewhere may occur there.
    usual = args.samples == "all" and (args.level, args.seed) == ("quick", 0)
    through = {(t.variant, t.dtype) for t in tasks if usual and t.through(results.of(t.name))}
    return conclude(records, entries, tasks, repro, through)


def conclude(
    records: Sequence[dict[str, Any]], entries: Sequence[dict[str, Any]], tasks: Sequence[Variant],
    command: Callable[[dict[str, Any]], str], whole: Collection[tuple[str, str]] | None = None,
    strict: bool = False,
) -> int:  # fmt: skip
    """Print what differs from the baseline, each with how to see it again.

    1 if anything is new, or a true bug is found no more. That something else is gone (an alarm known to be false, a
    result that is documented or has no derivative) is told, and no failure unless `strict`.
    """
    counts = Counter(r["verdict"] for r in records)
    print(", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v]) or "no case")
    if unseen := {(t.variant, t.dtype) for t in tasks} - {(r["variant"], r["dtype"]) for r in records}:
        print(f"{len(unseen)} variants x dtypes were not reached in the time, or have no sample")
    new, mended = compared(records, entries, whole)
    for entry in mended:
        stages = ", ".join(entry.get("stages", ("any stage",)))
        print(f"in the baseline, and no longer so: {entry['name']} ({entry['dtype']}; {stages})")
    for record in new:
        print(f"\n{record['variant']} {record['dtype']} sample {record['sample']}: {record['verdict']}")
        for stage, _, text in uncovered(entries, record):
            print(f"  {stage}: {sentence({'sentence': text})}")
        print(command(record))
    return 1 if new or any(strict or entry["class"] == "true bug" for entry in mended) else 0


if __name__ == "__main__":
    import opdb  # so that what is sent to workers of a cluster has a module that they can import

    sys.exit(opdb.main())
