"""One page of every kind that is written, with what a reader may meet on it: findings, charts, long names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import fake_report as fake

from retrograd import graph, trace
from retrograd.bench import results
from retrograd.catalog import demo
from retrograd.check.runner import verify
from retrograd.codegen.access import Access
from retrograd.codegen.schema import Codegen, Facts, Hazard, Kernel, Violation
from retrograd.flake.schema import Flake, FlakeReport, Margin, Rate, Run, Tail
from retrograd.fsdp.outcome.schema import RankComparison, RankDifference, RankSteps
from retrograd.graph.compilations.listing import compilations
from retrograd.graph.watching import lock
from retrograd.graph.watching.schema import Watched, WatchReport
from retrograd.mutation.schema import Judgement, Mutant, MutantResult, MutationReport
from retrograd.report import document
from retrograd.report.html import to_html
from retrograd.trace import Exponents, Listing, Op, Stats, Trace
from retrograd.trace.bisecting.schema import Bisection, Culprit
from retrograd.trace.diffing.summaries import op_summary
from retrograd.trace.repeating.schema import DifferenceKind, OperatorDifference, RepeatedSteps, ReplicaDifference
from retrograd.ttir.schema import ExecutedKernel, KernelFinding, KernelRun

ROOT = Path(__file__).resolve().parent.parent.parent
DUMPS = ROOT / "tests" / "graph" / "data" / "xla"
FOLDER = "/a/very/long/path/without/any/blank/to/the/file/of/the/training/script/"
WATCHED = Watched(0, "forward", "jit(f)", 0, "k" * 16, instructions=12, parameters=2, outputs=1, seconds=0.5)


def _op(index: int, digest: int, inf: int = 0) -> Op:
    half = Exponents(-16, (1, *(0,) * 16, 4, *(0,) * 14), (*(0,) * 31, 1))
    made = Stats(1, (4096, 8192), "float16", "cpu", -4e4, 2.0, 1.0, 0, inf, 1, 0, digest, 0, "", half)
    taken = replace(made, tensor=0, inf=0, digest=0)
    where = ("model.layers.0.self_attn.q_proj", "", f"{FOLDER}train.py:{index}", "y = <x>.exp()", "")
    return Op(index, 0, "forward", "aten.exp.default", *where, (taken,), (made,))


def _codegen() -> Codegen:
    accesses = (Access("load", 8, "sync", 4, "norm.py:12", ("x_ptr",)),)
    facts = Facts("norm", "sm_90", {"x_ptr": "*bf16"}, {"BLOCK": 64}, (), 4, 3, 40, 8, 1024, False, 0, accesses)
    hazards = (Hazard("float_atomics", "adds f32 atomically", "write partial sums", "norm.py:30"),)
    kernels = tuple(
        Kernel("norm", a, "norm.py:10", facts=replace(facts, target=a), hazards=hazards) for a in ("sm_90", "gfx942")
    )
    return Codegen("norm.py:launch", ("sm_90", "gfx942"), (*kernels, Kernel("bad", "sm_90", "norm.py:99", error="no layout")),
                   violations=(Violation("norm", "sm_90", "spills 8 bytes a thread at 40 registers", "norm.py:10"),))  # fmt: skip


def _flake() -> FlakeReport:
    margins = [Margin("t.py:3", "assert_close", 10 ** (k / 9 - 3), 0.1, 0, 9) for k in range(30)]
    runs = tuple(
        Run(k, "failed" if m.worst > 1 else "passed", margins=(m,), message="x" * 90) for k, m in enumerate(margins)
    )
    rate = Rate(3, 30, 0.02, 0.27, 0.95)
    tail = Tail(0.1, 0.02, 0.2, 0.95, 30, True)
    flake = Flake("tests/test_attention.py::test_backward[float32-2x1024x16]", "flaky", rate, tail=tail, runs=runs,
                  failing_seeds=(3, 4), repro=("pytest " + FOLDER + "tests/test_attention.py",))  # fmt: skip
    return FlakeReport((flake,), 3.0, command="retrograd flake x", environment={"torch": "2.13"})


def _mutation() -> MutationReport:
    diff = "--- a/op.py\n+++ b/op.py\n@@ -1 +1 @@\n-        grad = x * grad_out.sum(dim=-1, keepdim=True)\n+        grad = x\n"
    mutant = Mutant("m1", "python", "MyOp.backward", "drop factor", f"{FOLDER}op.py", 12, diff)
    left = MutantResult(mutant, "differs", "sizes", "float32", "N=33", "grad x[32] is 1, expected 2", "def test(): ...")
    gone = replace(left, judgements=(Judgement("tests", True, "1 failed"),))
    return MutationReport("op.py:spec", 0, "quick", ("MyOp.backward",), 9, (left, gone), ("tests",), 2.0)


def _records() -> Iterator[tuple[str, Any]]:
    base, stray = (DUMPS / f"{name}.hlo.txt.gz" for name in ("base_step1", "stray_step2"))
    yield "demo", verify(demo.spec, level="quick", name="retrograd.catalog.demo:spec")
    yield "verify", fake.report()
    yield "proved", fake.report("proved")
    yield "flake", _flake()
    yield "mutate", _mutation()
    yield "codegen", _codegen()
    yield "graph-diff", graph.diff(base, stray)
    yield "graph-pairs", graph.pairs(DUMPS, DUMPS.parent / "jax")
    yield "graph-compilations", compilations([DUMPS.parent / "formats" / "torch_trace"])
    yield "graph-unique", graph.unique([base, stray, base])
    yield "graph-follow", graph.follow(base, "p0")
    locked, now = lock.of_files([base]), lock.of_files([stray])
    yield (
        "graph-check",
        lock.check({"step": next(iter(now.values()))}, {"step": next(iter(locked.values()))}, "graphs.lock"),
    )
    extra = replace(WATCHED, number=1, step=3, expected=False, against=0, reason="shape [4, 3] is new")
    yield "graph-watch", WatchReport(("compile",), 4, 1, None, (WATCHED, extra), ())
    yield "trace", Listing(tuple(_op(k, k) for k in range(12)), 12, 12, 1, "full", 0, {})
    yield "trace-nan", trace.provenance(Trace([_op(0, 1), _op(1, 2, inf=1)], "full"))
    yield "trace-diff", trace.diff(*(Trace([_op(0, 1), _op(1, held), _op(2, held)], "full") for held in (1, 2)))
    culprit = Culprit("aten.sum.default", "fc", "forward", 0.01, 0.2, place="m.py:3")
    yield (
        "trace-bisect",
        Bisection("m.py:step", "found", "float64", "operator", 1e-3, 0.5, 1e-4, 0.0, "loss", (culprit,)),
    )
    faults = tuple(
        OperatorDifference(kind, op_summary(_op(k, 1)), k, (0, 1, 1, 1, 1, 1), 1, 64, "[0, 3]: 0.5 against 0.25")
        for k, kind in enumerate(get_args(DifferenceKind))
    )
    copies = ReplicaDifference("gradients", ("fc.weight", "fc.bias"), (1,), 4)
    yield "trace-repeat", RepeatedSteps(100, 4, 1, 82, faults, (copies,), (("collectives", 9),), ranks=(0, 1))
    race = KernelFinding("race", "sum_kernel", "two programs write element 3 of `out`", (f"{FOLDER}k.py:12",), count=3)
    for name in ("norm", "msda"):
        yield f"bench-{name}", results(ROOT / "benchmarks" / "results" / f"{name}-nvidia-h200.jsonl")
    stacks = {"rank 0": (f"{FOLDER}train.py:15 step", f"{FOLDER}train.py:99 main"), "rank 1": ()}
    parting = RankDifference("0 (default_pg), collective 5", "rank 1 reduces c where rank 0 reduces b", stacks=stacks)
    ranks = tuple(RankSteps(r, 3, ((2, 9), (1, 8)), "c97e" * 4, ("DDP rebuilt its buckets",)) for r in range(2))
    yield (
        "fsdp",
        RankComparison(f"torchrun {FOLDER}train.py", "differs", "", (parting,), (), ranks, ("no dump of rank 2",)),
    )
    yield "fsdp-same", RankComparison("rank-0.json rank-1.json", "same", "same order: rank 0 and rank 1, 3 steps")
    yield "run-kernel", KernelRun("k.py", "finding", 0, 132, (ExecutedKernel("sum_kernel", 2, 64),), (race,))


def every_page() -> dict[str, str]:
    """HTML by the name of what wrote it."""
    return {name: to_html(document(record), record.to_json()) for name, record in _records()}
