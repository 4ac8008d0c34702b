"""What finds broken backwards, and what accuses healthy ones: the checker beside the usual tools, on the corpus.

    python benchmarks/detection.py --seeds 10 --level both -j 8 --out benchmarks/results/detection.md

Sets: `mutants` (known classes of bugs; the checker was developed with all but M.. and W..), `mutants_second` (new
families of ops, written after it was frozen; since then it has been taught what it missed), `mutants_third` (attention
variants, recurrences, routing, Fourier transforms, linear algebra, quantisation, losses, samplers, buffers, views:
written when it was frozen again), `mutants_fourth` (MoE, state spaces, ragged sequences, geometry, transport, fixed
points, filters) and `mutants_fifth` (ten of yet others), `healthy` (unusual and right), `healthy_third` and so on (of
the families of `mutants_third`). Each op of the third and later sets has its proof in plain PyTorch
(`tests/check/test_third_corpus.py`).
The tools are used as their documentation shows, on one ordinary call with a random grad_out: torch.autograd.gradcheck
(slow and fast, float64), torch.library.opcheck, torch.testing.assert_close with its defaults against the reference in
float32, and FlashAttention's rule (at most twice the error of the reference in the same precision, plus 1e-5, against
float64) in float32 and bfloat16. Both files are written after each op, so a
run that is stopped leaves what it has; `--load` joins runs into one table: levels, tools and sets may have
been measured apart, on different machines.
Exit code 1 if the checker missed a broken op or accused a healthy one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from retrograd.check import inputs as make
from retrograd.check.runner import verify
from retrograd.check.schema import Case
from retrograd.check.spec import OpSpec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from corpus import SETS, files, is_healthy, load

Verdict = bool | None  # True: objects. None: cannot be used on the op


def prepare(op: OpSpec, dtype: str, seed: int) -> tuple[Case, dict[str, Any], list[str]]:
    """The ordinary case of an op, its inputs, and which of them want a gradient."""
    case = make.base_case(op, dtype)
    inputs = make.materialise(op, case, seed, "cpu")
    return case, inputs, make.differentiable(op, inputs)


def gradcheck(op: OpSpec, seed: int, *, fast: bool = False) -> Verdict:
    case, inputs, names = prepare(op, "float64", seed)
    for name in names:
        inputs[name] = inputs[name].double().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return not torch.autograd.gradcheck(
            lambda *a: op.fn(*a, **dict(case.params)), tuple(inputs.values()), fast_mode=fast, raise_exception=False
        )


def opcheck(op: OpSpec, seed: int) -> Verdict:
    """opcheck of the op, registered as a custom operator whose backward is the op's."""
    case, inputs, names = prepare(op, "float32", seed)
    if not all(isinstance(v, torch.Tensor) for v in inputs.values()):
        return None
    params = dict(case.params)
    with torch.no_grad():
        many = isinstance(outs := op.fn(*inputs.values(), **params), tuple)
    arguments = ", ".join(f"Tensor a{i}" for i in range(len(inputs)))
    returns = "(" + ", ".join(["Tensor"] * len(outs)) + ")" if many else "Tensor"

    def forward(*args: torch.Tensor) -> Any:
        with torch.no_grad():
            got = op.fn(*args, **params)
        return tuple(t.clone() for t in got) if many else got.clone()

    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        leaves = [t.detach().requires_grad_(n in names) for n, t in zip(inputs, ctx.saved_tensors, strict=True)]
        with torch.enable_grad():
            got = op.fn(*leaves, **params)
        wanted = [t for t in leaves if t.requires_grad]
        found = iter(torch.autograd.grad(got, wanted, grads if many else grads[0], allow_unused=True))
        return tuple(next(found) if t.requires_grad else None for t in leaves)

    try:
        custom = torch.library.custom_op(
            f"corpus::{op.name.lower()}_{time.monotonic_ns()}", forward, mutates_args=(),
            schema=f"({arguments}) -> {returns}",
        )  # fmt: skip
        custom.register_fake(forward)
        custom.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
        for key in names:
            inputs[key].requires_grad_()
        result = torch.library.opcheck(custom, tuple(inputs.values()), raise_exception=False)
    except Exception:
        return None  # e.g. its fake cannot run without data
    return any(v != "SUCCESS" for v in result.values())


def results(fn: Callable[..., Any], inputs: Mapping[str, Any], names: list[str], params: Any) -> list[Any]:
    """Outputs and gradients of a function for a random grad_out, which is the same whatever the precision."""
    leaves = {k: v.detach().clone().requires_grad_(k in names) if isinstance(v, torch.Tensor) else v
              for k, v in inputs.items()}  # fmt: skip
    outs = fn(*leaves.values(), **dict(params))
    outs = [t for t in (outs if isinstance(outs, tuple) else (outs,)) if t.requires_grad]
    gen = torch.Generator().manual_seed(0)
    # bfloat16 values, which every precision compared holds exactly.
    grads = [torch.randn(t.shape, generator=gen).bfloat16().to(t.dtype) for t in outs]
    return [*outs, *torch.autograd.grad(outs, [leaves[k] for k in names], grads, allow_unused=True)]


def close(op: OpSpec, seed: int) -> Verdict:
    if op.reference is None:
        return None
    case, inputs, names = prepare(op, "float32", seed)
    want = results(op.reference, inputs, names, case.params)
    got = results(op.fn, inputs, names, case.params)
    try:
        torch.testing.assert_close(got, want)
    except AssertionError:
        return True
    return False


def twice(op: OpSpec, seed: int, *, dtype: str) -> Verdict:
    if op.reference is None:
        return None
    case, inputs, names = prepare(op, dtype, seed)
    wide = {k: v.double() if k in names else v for k, v in inputs.items()}
    try:
        same = results(op.reference, inputs, names, case.params)
    except RuntimeError:
        return None  # no bfloat16 kernel
    truth = results(op.reference, wide, names, case.params)
    for got, low, want in zip(results(op.fn, inputs, names, case.params), same, truth, strict=True):
        if want is None or low is None:
            continue
        if got is None or got.shape != want.shape:
            return True
        error, allowed = (
            (got.double() - want).abs(),
            2 * (low.double() - want).abs().max() + 1e-5 if want.numel() else 0,
        )
        if not bool((error <= allowed).all()):  # NaN fails, as in the rule's assert
            return True
    return False


TOOLS: dict[str, Callable[[OpSpec, int], Verdict]] = {
    "gradcheck slow": gradcheck,
    "gradcheck fast": lambda op, seed: gradcheck(op, seed, fast=True),
    "opcheck": opcheck,
    "assert_close": close,
    "2x error f32": lambda op, seed: twice(op, seed, dtype="float32"),
    "2x error bf16": lambda op, seed: twice(op, seed, dtype="bfloat16"),
}


@dataclass
class Row:
    """One op: per tool its verdicts by seed and the CPU seconds they took."""

    name: str
    kind: str
    verdicts: dict[str, list[Verdict]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    stages: set[str] = field(default_factory=set)

    def add(self, tool: str, judge: Callable[[], Verdict]) -> None:
        start = time.process_time()
        try:
            verdict = judge()
        except Exception:
            verdict = True  # the tool or the op raised: a person would look
        self.verdicts.setdefault(tool, []).append(verdict)
        self.seconds[tool] = self.seconds.get(tool, 0.0) + time.process_time() - start

    def cell(self, tool: str) -> str:
        used = [v for v in self.verdicts[tool] if v is not None]
        return f"{sum(used)}/{len(used)}" if used else "-"

    def join(self, other: Row) -> None:
        """Add what was measured with further seeds."""
        for tool, verdicts in other.verdicts.items():
            self.verdicts.setdefault(tool, []).extend(verdicts)
            self.seconds[tool] = self.seconds.get(tool, 0.0) + other.seconds[tool]
        self.stages |= other.stages

    def to_json(self) -> str:
        """One line, with where it was measured."""
        return json.dumps(vars(self) | {"stages": sorted(self.stages), "place": place()})


@dataclass(frozen=True)
class Job:
    """One op with one seed: what a process does at a time."""

    path: Path
    name: str
    seed: int
    levels: tuple[str, ...]
    peers: bool


def measure(job: Job) -> Row:
    """All tools on one op. Each gets it fresh, as what is wrong with it may show in its first call only."""
    row = Row(job.name, job.path.parent.name)

    def judge(level: str) -> bool:
        report = verify(load(job.path)[job.name], level=level, seed=job.seed)
        row.stages |= {f.stage for f in report.findings}
        for f in report.findings[:2] if is_healthy(row.kind) else []:
            print(f"  {job.name} seed {job.seed} [{f.stage}] {f.what} | {f.where}", file=sys.stderr)
        return report.verdict != "proved"

    tools = {f"retrograd {level}": lambda level=level: judge(level) for level in job.levels}
    if job.peers:
        tools |= {t: lambda check=check: check(load(job.path)[job.name], job.seed) for t, check in TOOLS.items()}
    for tool, call in tools.items():
        torch.manual_seed(job.seed)  # of ops that draw numbers: the same whatever ran before in this process
        row.add(tool, call)
    return row


def ready() -> None:
    """Make a process ready to measure: one thread, and nothing left that its first verification would import."""
    torch.set_num_threads(1)
    # The first verification of a process imports parts of torch (1.3 s), which is no op's cost.
    verify(next(iter(load(files("healthy")[0]).values())), level="quick", seed=0)


def measured(jobs: list[Job], processes: int) -> Iterator[Row]:
    """A row for each op, in the order of `jobs`, whichever process is first."""
    if processes == 1:
        ready()
        yield from joined(map(measure, jobs))
        return
    # Not forked: torch has threads by now, which a fork would leave without their owners.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, ready) as pool:
        yield from joined(pool.map(measure, jobs))


def joined(rows: Iterator[Row]) -> Iterator[Row]:
    """Rows of one op with one seed each, put together; those of an op follow each other."""
    for _, same in groupby(rows, lambda row: (row.kind, row.name)):
        whole, *others = same
        for row in others:
            whole.join(row)
        yield whole


def totals(rows: list[Row], tools: list[str]) -> list[str]:
    """Shares of verifications that objected: found in broken sets, false alarms in the healthy one."""
    lines = [f"| set | ops | | {' | '.join(tools)} |", "|---" * (len(tools) + 3) + "|"]
    for kind in dict.fromkeys(r.kind for r in rows):
        of = [r for r in rows if r.kind == kind]
        shares, always, costs = [], [], []
        for tool in tools:
            used = [v for r in of for v in r.verdicts[tool] if v is not None or not is_healthy(kind)]
            objected = sum(bool(v) for v in used)
            shares.append(f"{objected}/{len(used)} = {100 * objected / max(len(used), 1):.0f} %")
            always.append(str(sum(all(r.verdicts[tool]) for r in of)))
            costs.append(f"{sum(r.seconds[tool] for r in of) / sum(len(r.verdicts[tool]) for r in of):.2f}")
        lines.append(
            f"| {kind} | {len(of)} | {'false alarms' if is_healthy(kind) else 'found'} | {' | '.join(shares)} |"
        )
        lines.append(f"| | | ops, at every seed | {' | '.join(always)} |")
        lines.append(f"| | | CPU s a call | {' | '.join(costs)} |")
    return lines


def wrong(rows: list[Row]) -> list[str]:
    """Broken ops that the checker missed and healthy ones that it accused, with how often and at which seeds."""
    found = []
    for row in rows:
        for tool, verdicts in row.verdicts.items():
            odd = [str(seed) for seed, v in enumerate(verdicts) if v == is_healthy(row.kind)]
            if tool.startswith("retrograd") and odd:
                at = f", wrong at {' '.join(odd)}" if len(odd) < len(verdicts) else ""
                found.append(f"{row.name} ({tool.removeprefix('retrograd ')} {row.cell(tool)}{at})")
    return found


def place() -> str:
    """Versions and machine, for the head of a table."""
    return f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"


def read(files: list[Path]) -> tuple[list[Row], dict[str, Counter[str]]]:
    """Rows that were kept, one an op with the tools of all files, and on how many ops each tool was measured where."""
    rows: dict[tuple[str, str], Row] = {}
    places: dict[str, Counter[str]] = {}
    for line in (line for file in files for line in file.read_text().splitlines()):
        data = json.loads(line)
        row = rows.setdefault((data["kind"], data["name"]), Row(data["name"], data["kind"]))
        row.join(Row(data["name"], data["kind"], data["verdicts"], data["seconds"], set(data["stages"])))
        places.setdefault(data["place"], Counter()).update(list(data["verdicts"]))
    return list(rows.values()), places


def text(rows: list[Row], places: Mapping[str, Counter[str]]) -> str:
    order = ["retrograd quick", "retrograd full", *TOOLS]
    tools = [t for t in order if any(t in row.verdicts for row in rows)]
    rows = [row for row in rows if all(t in row.verdicts for t in tools)]
    seeds = {t: max(len(row.verdicts[t]) for row in rows) for t in tools}
    lines = []
    for where, measured in places.items():
        said = [f"{t} ({measured[t]} ops, seeds {seeds[t]})" for t in tools if t in measured]
        lines += [f"{where}: {', '.join(said)}.", ""]
    lines += ["1 thread a process. Cells: objected / seeds; `-` where a tool cannot be used on the op: not found.", ""]
    lines += [*totals(rows, tools), ""]
    lines += [f"Checker wrong: {', '.join(wrong(rows)) or 'nowhere'}.", ""]
    lines += [f"| op | set | {' | '.join(tools)} | stages | CPU s |", "|---" * (len(tools) + 4) + "|"]
    for row in rows:
        cost = sum(s / len(row.verdicts[t]) for t, s in row.seconds.items() if t.startswith("retrograd"))
        cells = [row.name, row.kind, *map(row.cell, tools), " ".join(sorted(row.stages)), f"{cost:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--level", default="quick", choices=["quick", "full", "both", "none"])
    parser.add_argument("--sets", default=",".join(SETS), help="comma separated")
    parser.add_argument("--names", default="", help="only these ops, comma separated")
    parser.add_argument("--no-peers", action="store_true", help="the checker alone")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="processes that the ops are dealt out to")
    parser.add_argument("--keep", type=Path, help="JSON lines, one an op")
    parser.add_argument("--load", type=Path, nargs="+", help="measure nothing: join what --keep wrote in earlier runs")
    parser.add_argument("--out", type=Path, help="markdown")
    args = parser.parse_args()
    if args.load:
        rows, places = read(args.load)
        return finish(rows, places, args.out)
    levels = {"both": ("quick", "full"), "none": ()}.get(args.level, (args.level,))
    wanted = [n for n in args.names.split(",") if n]
    paths = [path for kind in args.sets.split(",") for path in files(kind, kernels=False)]
    ops = [(path, name) for path in paths for name in load(path) if not wanted or name in wanted]
    jobs = [Job(*op, seed, levels, not args.no_peers) for op in ops for seed in range(args.seeds)]
    rows = []
    if args.keep:
        args.keep.write_text("")
    for row in measured(jobs, args.jobs):
        rows.append(row)
        print(row.name, {t: row.cell(t) for t in row.verdicts}, *sorted(row.stages), flush=True)
        if args.keep:
            with args.keep.open("a") as lines:
                lines.write(row.to_json() + "\n")
        if args.out:
            args.out.write_text(text(rows, {place(): Counter(t for r in rows for t in r.verdicts)}))
    return finish(rows, {place(): Counter(t for r in rows for t in r.verdicts)}, None)


def finish(rows: list[Row], places: Mapping[str, Counter[str]], out: Path | None) -> int:
    """Print the table, write it if wanted, and return the exit code."""
    table = text(rows, places)
    print(table)
    if out:
        out.write_text(table)
    return bool(wrong(rows))


if __name__ == "__main__":
    sys.exit(main())
