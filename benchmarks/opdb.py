"""What `verify` says of PyTorch's own op database: every variant with autograd, beside what was adjudicated before.

    python benchmarks/opdb.py --results build/opdb.jsonl --report build/opdb.md -j 8
    python benchmarks/opdb.py --results build/opdb.jsonl --level full --samples all --dtypes bfloat16 --shard 1/4
    python benchmarks/opdb.py --minutes 20 --rotate $(( $(date +%s) / 86400 )) --baseline benchmarks/opdb_baseline.toml

The reference of an op is the op itself in float64 (docs/opinfo.md). Each case (variant, dtype, sample, level, seed) is
a line of the results file; a run that is stopped goes on where it was. Cases run in worker processes, one thread each:
a case that crashes or hangs is recorded and ends its worker alone.
`--minutes` with `--rotate DAY` takes one of `--parts` parts of the variants by the number of the day, and begins it
elsewhere each time that it comes round, so that in the end all is seen however few fit into the time.
Exit code 1 where anything is not proved and not in the baseline, or a true bug of the baseline is found no more.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import multiprocessing
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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import torch

import retrograd as rg
from retrograd import testing
from retrograd.check import spec as checked
from retrograd.core.subprocesses import death
from retrograd.errors import RetrogradError

BASELINE = Path(__file__).resolve().parent / "opdb_baseline.toml"
CLASSES = ("true bug", "documented", "manifold", "cannot say", "false alarm")
PASSING = ("proved", "not checked")
VERDICTS = ("proved", "finding", "undecided", "error", "hang", "crash", "not checked")
RECYCLE = 150  # cases after which a worker is replaced, so that what ops leave in memory does not add up
STARTUP = 300.0  # seconds until a worker has imported and drawn what it needs for the first case of a variant
Key = tuple[str, str, int, str, int]


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


def verdict_of(spec: checked.OpSpec, level: str, seed: int, device: str = "cpu") -> dict[str, Any]:
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


def not_checked(spec: checked.OpSpec) -> str:
    """Why today's checker compares nothing of an op; "" if it does."""
    if "complex64" in checked.DTYPES:
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
    """Make a worker of this process: one thread, no output, and everything imported that `verify` imports."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # some ops print, and those that crash write dumps
        os.dup2(sink, stream)
    # What the first verification of a process imports (2 s) is no op's cost.
    rg.verify(torch.sin, reference=torch.sin, inputs=dict(x=torch.rand(3)), level="quick")


def work(pipe: Connection, infos: dict[str, Any], level: str, seed: int) -> None:
    """Take tasks (variant, dtype, how many or "all" or "all/5", numbers to leave out, deadline) until there is None."""
    settle()
    while (task := pipe.recv()) is not None:
        variant, dtype, samples, done, deadline = task
        number = -1
        try:
            numbers = [n for n in sample_numbers(infos[variant], dtype, samples, seed) if n not in done]
            every = testing.sample_specs(infos[variant], dtype, numbers, seed=seed)
            for number in numbers:
                if time.time() > deadline:
                    break
                pipe.send(("begin", number, {}))  # before the op is called for the first time
                if (each := next(every, None)) is None:
                    deadline = math.inf  # there are no more, which is not late
                    break
                reason = each.reason or (not_checked(each.spec) if each.spec else "")
                if each.spec is None or reason:
                    record: dict[str, Any] = {"verdict": "not checked", "sentence": reason}
                else:
                    record = verdict_of(each.spec, level, seed)
                pipe.send(("case", number, record))
            pipe.send(("late" if time.time() > deadline else "end", number, {}))
        except Exception as error:
            pipe.send(("case", max(number, 0), {"verdict": "error", "sentence": f"{type(error).__name__}: {error}"}))
            pipe.send(("end", number, {}))


def sample_numbers(info: Any, dtype: str, samples: int | str, seed: int) -> range:
    """Numbers of the samples that are wanted; of all there are as many as are drawn, which calls no op.

    "all/5" is every fifth, another fifth for each seed.
    """
    if isinstance(samples, int):
        return range(samples)
    count = sum(1 for _ in info.sample_inputs("cpu", getattr(torch, dtype), requires_grad=True))
    every = int(samples.partition("/")[2] or 1)
    return range(seed % every, count, every)


# ----- results


@dataclass
class Results:
    """The results file: a line of JSON a case, and one (sample -1) for each variant that is through."""

    path: Path
    records: dict[Key, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # the last line of a run that was killed
                    self._keep(json.loads(line))

    def _keep(self, record: dict[str, Any]) -> None:
        self.records[tuple(record[k] for k in ("variant", "dtype", "sample", "level", "seed"))] = record  # type: ignore[index]

    def add(self, record: dict[str, Any]) -> None:
        self._keep(record)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def of(self, tasks: Iterable[Task], level: str, seed: int) -> list[dict[str, Any]]:
        """Records of the cases that these tasks want, sorted; the file may have others."""
        most = {(t.variant, t.dtype): t.samples if isinstance(t.samples, int) else math.inf for t in tasks}
        rows = [r for k, r in self.records.items() if 0 <= k[2] < most.get(k[:2], 0) and k[3:] == (level, seed)]
        return sorted(rows, key=lambda r: (r["variant"], r["dtype"], r["sample"]))


@dataclass
class Task:
    """A variant in a dtype: which samples are wanted, and which of them are there already."""

    variant: str
    dtype: str
    samples: int | str
    done: set[int] = field(default_factory=set)
    through: bool = False

    def resume(self, results: Results, level: str, seed: int) -> Task:
        """Itself, with what an earlier run has."""
        for (variant, dtype, sample, *rest), record in results.records.items():
            if (variant, dtype, rest) == (self.variant, self.dtype, [level, seed]):
                if sample >= 0:
                    self.done.add(sample)
                else:
                    self.through = record["samples"] == "all" or record["samples"] == self.samples
        if isinstance(self.samples, int):
            self.through |= self.done >= set(range(self.samples))
        return self


@dataclass
class Worker:
    """A worker process and what it does just now."""

    process: Any
    pipe: Connection
    task: Task | None = None
    number: int | None = None  # of the sample that runs
    since: float = 0.0
    cases: int = 0


# ----- the run


class Run:
    """Hands tasks to workers and writes what they tell."""

    def __init__(
        self, args: argparse.Namespace, infos: dict[str, Any], results: Results, target: Callable[..., None] = work
    ) -> None:
        self.args, self.infos, self.results, self.target = args, infos, results, target
        self.deadline = time.time() + 60 * args.minutes if args.minutes else math.inf
        self.context = multiprocessing.get_context("fork")  # the database takes 5 s to import
        self.workers: list[Worker] = []

    def run(self, tasks: Sequence[Task]) -> None:
        """All tasks, or those for which there is time."""
        queue = [t for t in tasks if not t.through]
        total = len(queue)
        while queue or any(w.task for w in self.workers):
            self._fill(queue)
            busy = {w.pipe: w for w in self.workers if w.task}
            for pipe in wait(list(busy), timeout=1.0):
                self._hear(busy[pipe], queue)  # type: ignore[index]
            for worker in [w for w in self.workers if w.task]:
                limit = self.args.timeout if worker.number is not None else max(STARTUP, self.args.timeout)
                if time.monotonic() - worker.since > limit:
                    worker.process.kill()
                    self._lost(worker, queue, "hang", f"no verdict within {limit:g} s")
            if sys.stderr.isatty():
                print(f"\r{total - len(queue)}/{total} variants x dtypes ", end="", file=sys.stderr)
        for worker in self.workers:
            with contextlib.suppress(OSError):
                worker.pipe.send(None)

    def _fill(self, queue: list[Task]) -> None:
        if time.time() > self.deadline:
            queue.clear()
        while queue and len(self.workers) < self.args.jobs:
            ours, theirs = self.context.Pipe()
            options = (theirs, self.infos, self.args.level, self.args.seed)
            process = self.context.Process(target=self.target, args=options, daemon=True)
            process.start()
            theirs.close()
            self.workers.append(Worker(process, ours))
        for worker in self.workers:
            if not worker.task and queue:
                worker.task, worker.number, worker.since = queue.pop(0), None, time.monotonic()
                task = worker.task
                worker.pipe.send((task.variant, task.dtype, task.samples, task.done, self.deadline))

    def _hear(self, worker: Worker, queue: list[Task]) -> None:
        try:
            event, number, record = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(10)
            self._lost(worker, queue, "crash", f"the process died: {death(worker.process.exitcode or 0)}")
            return
        worker.since = time.monotonic()
        assert worker.task is not None
        if event == "begin":
            worker.number = number
        elif event == "case":
            self._record(worker.task, number, record)
            worker.number, worker.cases = None, worker.cases + 1
        else:
            if event == "end":
                self._record(worker.task, -1, {"samples": self.args.samples})
            worker.task = None
            if worker.cases > RECYCLE:
                worker.pipe.send(None)
                self.workers.remove(worker)

    def _lost(self, worker: Worker, queue: list[Task], verdict: str, sentence: str) -> None:
        """A worker is gone: its case is recorded, the other samples of the variant go to the next worker."""
        self.workers.remove(worker)
        task = worker.task
        assert task is not None
        number = worker.number if worker.number is not None else max(task.done, default=-1) + 1
        self._record(task, number, {"verdict": verdict, "sentence": sentence})
        if worker.number is None:  # not in the checker: a sample cannot be drawn, and none after it
            self._record(task, -1, {"samples": self.args.samples})
        else:
            queue.insert(0, task)

    def _record(self, task: Task, number: int, record: dict[str, Any]) -> None:
        task.done.add(number)
        key = {"variant": task.variant, "dtype": task.dtype, "sample": number}
        self.results.add(key | {"level": self.args.level, "seed": self.args.seed} | record)


def choose(infos: dict[str, Any], args: argparse.Namespace) -> list[Task]:
    """The variants and dtypes of this run, in the order in which they are taken."""
    names = [name for name in infos if re.search(args.only, name)]
    number, shards = (int(v) for v in args.shard.split("/"))
    names = names[number - 1 :: shards]
    if args.rotate is not None:
        names = rotated(names, args.rotate, args.parts)
    return [
        Task(name, dtype, args.samples)
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
    add("--timeout", type=float, default=300.0, help="seconds a case may take")
    add("--minutes", type=float, default=0.0, help="stop taking cases after so long")
    add("--rotate", type=int, metavar="DAY", help="a part of the variants, by this number")
    add("--parts", type=int, default=7, help="of --rotate")
    add("--results", type=Path, default=Path("build/opdb.jsonl"), help="is continued")
    add("--baseline", type=Path, nargs="?", const=BASELINE, help=f"{BASELINE.name} unless another is named")
    add("--report", type=Path, help="markdown")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    infos = {testing.full_name(o): o for o in op_db()}
    results = Results(args.results)
    tasks = [task.resume(results, args.level, args.seed) for task in choose(infos, args)]
    complex_ones = [t for t in tasks if t.dtype.startswith("complex") and t.dtype not in checked.DTYPES]
    for task in complex_ones:
        key = {"variant": task.variant, "dtype": task.dtype, "sample": 0, "level": args.level, "seed": args.seed}
        results.add(key | {"verdict": "not checked", "sentence": "complex"})
    tasks_to_run = [t for t in tasks if t not in complex_ones]
    Run(args, infos, results).run(tasks_to_run)
    records = results.of(tasks, args.level, args.seed)
    entries = read_baseline(args.baseline) if args.baseline else []
    if args.report:
        rows = "\n".join(_excused(records, entries, infos))
        args.report.write_text(f"{report(records, entries, args)}{rows}\n", encoding="utf-8")
    # The baseline is about level quick at seed 0: what does not occur elsewhere may occur there.
    usual = args.samples == "all" and (args.level, args.seed) == ("quick", 0)
    through = {(t.variant, t.dtype) for t in tasks if usual and t.resume(results, args.level, args.seed).through}
    return conclude(records, entries, tasks, repro, through)


def conclude(
    records: Sequence[dict[str, Any]], entries: Sequence[dict[str, Any]], tasks: Sequence[Task],
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
    sys.exit(main())
