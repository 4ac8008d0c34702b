"""What `verify` says of Triton ops of 76 libraries without a GPU, beside what was adjudicated before.

    python benchmarks/outside_triton/run.py --list
    pip install --target libs --no-deps liger-kernel==0.8.5 fla-core==0.6.0 flash-linear-attention==0.6.0 einops
    pip install --target libs --no-deps flag-gems==5.0.2 cut-cross-entropy==25.1.1 sqlalchemy pyyaml typing_extensions
    pip install --target libs --no-deps trinix==0.1.4 triformer==3.0.7 torchnorm==0.1.2 lightning-attn==0.0.5 \\
        crossentropy-triton==0.1.2 accelerated-scan==0.3.1 adasplash==0.2.2 siglip-kernel==0.1.2 memeff==0.3.1 \\
        moe-ops==0.1.0 saga-activation==0.2.0 localcorr==0.1.1 mingru-scans==0.2.0
    pip install --target libs --no-deps freesolo-chalk==0.5.7 flash-swiglu-mlp==0.4.3 gru-qat==0.5.0 \\
        kernel-fun==0.2.0 orda-kernel==0.1.0 mlstm-kernels==2.0.6 lasp==0.0.1
    pip install --target libs eai-sparsify==1.3.3 flash-sinkhorn==0.4.1 trifast==0.1.13
    pip install --target libs --no-deps flash-maxsim==0.3.0 flashrnn==1.0.8 jvp-flash-attention==0.14.0 \\
        ring-attention-pytorch==0.5.20 beartype
    MAMBA_SKIP_CUDA_BUILD=TRUE pip install --target libs --no-deps --no-build-isolation mamba-ssm==2.3.2.post1
    python benchmarks/outside_triton/repositories.py | sh; python benchmarks/outside_triton/repositories_routing.py | sh
    python benchmarks/outside_triton/repositories_memory.py | sh
    PYTHONPATH=libs python benchmarks/outside_triton/run.py --results rows.sqlite --libraries liger --dtypes float32

Runs as benchmarks/outside/suite.py: workers, resumed results, seconds of the processor, exit code 1 where anything
differs from adjudicated.toml, that is a finding that is not in it or one of it that no longer occurs. `--references`
needs no library: it runs our formulas in float64, forward and backward, on ordinary inputs.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "outside")]

import opdb  # noqa: E402
import suite  # noqa: E402
import torch  # noqa: E402
from fla_modules import FLA  # noqa: E402
from further import FURTHER  # noqa: E402
from gems import CUT, GEMS  # noqa: E402
from latest import LATEST  # noqa: E402
from liger_attention import LIGER  # noqa: E402
from options_fla_more import FLA_OPTIONS  # noqa: E402
from options_liger_chunked import LIGER_OPTIONS  # noqa: E402
from others import OTHERS  # noqa: E402
from repositories_further import REPOSITORIES  # noqa: E402
from repositories_memory import THIRD  # noqa: E402
from repositories_sparse import SECOND  # noqa: E402
from unseen import UNSEEN  # noqa: E402

from retrograd.check.inputs import base_case, differentiable, draw  # noqa: E402
from retrograd.check.spec import OpSpec  # noqa: E402

LIBRARIES = {
    "liger": LIGER,
    "fla": FLA,
    "gems": GEMS,
    "cut": CUT,
    **OTHERS,
    **FURTHER,
    **LATEST,
    **UNSEEN,
    **REPOSITORIES,
    **SECOND,
    **THIRD,
    **FLA_OPTIONS,
    **LIGER_OPTIONS,
}


def reference_error(spec: OpSpec) -> str:
    """What is wrong with a reference in float64: an error, or an input without a gradient. Empty if nothing is."""
    try:
        case = base_case(spec, "float64")
        inputs = draw(spec, case, 0)
        asked = [inputs[key].requires_grad_() for key in differentiable(spec, inputs)]
        params = {key: values[0] for key, values in spec.params.items()}
        assert spec.reference
        result = spec.reference(*inputs.values(), **params)
        outputs = [y for y in (result if isinstance(result, tuple) else (result,)) if y.requires_grad]
        grads = torch.autograd.grad(outputs, asked, [torch.ones_like(y) for y in outputs], allow_unused=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no gradient for an input" if any(g is None for g in grads) else ""


def report(records: Sequence[dict[str, Any]], entries: Sequence[dict[str, Any]], names: dict[str, str]) -> str:
    """Markdown: verdicts and seconds of the processor by library and dtype, then what is not proved."""
    lines = ["| library | dtype | rows | proved | finding | undecided | other | median s | 90 % | slowest |"]
    lines.append("|---" * 10 + "|")
    for library, dtype in sorted({(names[r["variant"]], r["dtype"]) for r in records}):
        rows = [r for r in records if (names[r["variant"]], r["dtype"]) == (library, dtype)]
        counts = [sum(r["verdict"] == v for r in rows) for v in ("proved", "finding", "undecided")]
        seconds = [r["cpu"] for r in rows if "cpu" in r] or [0.0]
        times = (median(seconds), quantiles(seconds * 2, n=10)[-1], max(seconds))
        cells = [library, dtype, len(rows), *counts, len(rows) - sum(counts), *(f"{s:.1f}" for s in times)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| op | dtype | CPU s | what verify says | adjudicated |", "|---" * 5 + "|"]
    for r in records:
        if r["verdict"] not in opdb.PASSING:
            stages = dict.fromkeys(f"{t[0]}: {t[1]}" for t in r.get("told", [])) or {r["verdict"]: None}
            known = "; ".join(dict.fromkeys(e["class"] for e in opdb.entries_of(entries, r)))
            known = f"**new** {known}" if opdb.uncovered(entries, r) else known
            lines.append(f"| {r['variant']} | {r['dtype']} | {r.get('cpu', 0):.1f} | {', '.join(stages)} | {known} |")
    return "\n".join(lines) + "\n"


def repro(record: dict[str, Any]) -> str:
    """The command that verifies an op again."""
    options = f"--only '^{record['variant']}$' --dtypes {record['dtype']} --results :memory:"
    return f"    PYTHONPATH=libs python benchmarks/outside_triton/run.py {options}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--list", action="store_true", help="names and dtypes")
    add("--references", action="store_true", help="only our formulas, in float64")
    add("--libraries", default=",".join(LIBRARIES))
    add("--only", default="", metavar="REGEX", help="ops whose names it matches somewhere")
    add("--dtypes", default="float32,bfloat16")
    add("--level", default="quick", choices=["quick", "full"])
    add("--device", default="cpu")
    add("--seed", type=int, default=0)
    add("-j", "--jobs", type=int, default=1)
    add("--timeout", type=float, default=300.0, help="seconds of CPU time an op may take")
    add("--minutes", type=float, default=0.0, help="stop taking ops after so long")
    add("--results", type=Path, default=Path("build/outside_triton.sqlite"), help="is continued")
    add("--baseline", type=Path, default=HERE / "adjudicated.toml")
    add("--report", type=Path, help="markdown")
    args = parser.parse_args(argv)
    args.samples = 1
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    warnings.simplefilter("ignore")
    chosen = {LIBRARIES[short].library: LIBRARIES[short].specs for short in args.libraries.split(",")}
    infos = {n: spec for specs in chosen.values() for n, spec in specs.items() if re.search(args.only, n)}
    if args.list:
        print(*(f"{name:45} {', '.join(spec.dtypes)}" for name, spec in infos.items()), sep="\n")
        return 0
    if args.references:
        errors = [f"{name}: {text}" for name, spec in infos.items() if (text := reference_error(spec))]
        print(*errors, sep="\n", end="\n" * bool(errors))
        return int(bool(errors))
    results = opdb.open_results(args)
    wanted = [(n, d) for n, spec in infos.items() for d in spec.dtypes if d in args.dtypes.split(",")]
    tasks = [opdb.Variant(*pair, 1) for pair in wanted]
    opdb.run(tasks, results, args, partial(suite.prepare, infos, args.level, args.seed, args.device))
    records, entries = opdb.records_of(tasks, results), opdb.read_baseline(args.baseline)
    if args.report:
        names = {name: library for library, specs in chosen.items() for name in specs}
        args.report.write_text(report(records, entries, names), encoding="utf-8")
    return opdb.conclude(records, entries, tasks, repro, strict=True)


if __name__ == "__main__":
    sys.exit(main())
