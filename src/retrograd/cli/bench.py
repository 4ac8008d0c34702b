"""`retrograd bench`: how fast ops are, beside torch and other libraries; tables on stdout, progress on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from retrograd.cli._options import PATH, examples, options, words
from retrograd.core.loading import near, require_torch
from retrograd.core.system_errors import as_usage_error
from retrograd.errors import UsageError

if TYPE_CHECKING:
    from retrograd.bench.rows import Row

_RESULTS = Path("benchmarks/results")


_OPTIONS = [
    click.option("--list", "listed", is_flag=True, help="Show ops, providers, versions and devices; measure nothing."),
    click.option("--ops", "more", callback=words, metavar="A,B", help="Of the named ones only these."),
    click.option("--shapes", callback=words, metavar="A,B", help="Norms: MxN. Deformable attention: enc800, dec300, "
                 "rfdetr, ... or sizes such as B4-Q300-H8-C32-P4-64x64+32x32. An op of yours: 'M=4096 N=1024,...'."),
    click.option("--providers", callback=words, metavar="A,B", help="Of those that --list shows."),
    click.option("--provider", "users", multiple=True, metavar="NAME=FILE.py:FUNCTION",
                 help="Add yours beside the others, for one OP; or FILE.py, which calls retrograd.bench.register."),
    click.option("--dtypes", "--dtype", callback=words, metavar="A,B", help="float32, bfloat16, float16."),
    click.option("--locations", type=click.Choice(["float32", "same"]), default="float32", show_default=True,
                 help="Deformable attention: dtype of locations and weights beside 16-bit values."),
    click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Default: a CUDA device if there is one."),
    click.option("--threads", type=click.IntRange(1), help="Threads of torch, on a CPU."),
    click.option("--rounds", type=click.IntRange(1), help="How often providers take turns.  [default: 9 on a CPU, 1 on "
                 "CUDA, where each round measures anew]"),
    click.option("--timing", type=click.Choice(["graph", "eager", "do_bench"]), default="graph", show_default=True,
                 help="CUDA: replay graphs, or put events around calls, which counts launches that the host is late "
                 "with, or have triton.testing.do_bench do that."),
    click.option("--host", is_flag=True, help="CUDA: the host's time of an eager forward and backward instead."),
    click.option("--max-seconds", type=float, default=float("inf"), help="Start no measurement after this long."),
    click.option("--out", type=PATH, help="JSON lines  [default: OPS-DEVICE.jsonl]; of msda the table too, as .md."),
    click.option("--plot", type=PATH, help="Draw useful GB/s into FILE.html or FILE.png."),
    click.option("--load", multiple=True, type=PATH, help="Show these results, measure nothing."),
    click.option("--compare", "earlier", multiple=True, type=PATH, help="Show what became slower since."),
    click.option("--fail-slower", type=float, metavar="PCT",
                 help="With --compare: exit 1 if anything takes PCT % longer beyond noise, or went wrong."),
]  # fmt: skip


@click.command(
    epilog=examples(
        "retrograd bench norm --plot norm.html",
        "retrograd bench my_op.py:spec --device cpu",
        "retrograd bench rms_norm --compare earlier.jsonl --fail-slower 10",
    )
)
@click.argument("ops", nargs=-1, metavar="[OP]...")
@options(_OPTIONS)
def bench(
    ops: tuple[str, ...],
    listed: bool,
    plot: Path | None,
    load: tuple[Path, ...],
    earlier: tuple[Path, ...],
    fail_slower: float | None,
    **chosen: Any,
) -> None:
    """Measure ops beside torch and other libraries, forward and backward.

    OP is rms_norm, add_rms_norm, layer_norm, add_layer_norm (all four: norm), ms_deform_attn (or msda), rank_sum, or
    an op of yours as `retrograd verify` takes it: file.py:spec. Every provider is held against float64 before it is
    timed, and what is wrong gets no time. Inputs are not in the cache.
    """
    from retrograd.bench import plot as plotting
    from retrograd.bench import registry, rows
    from retrograd.bench.table import markdown

    if listed:
        click.echo(registry.listing(), nl=False)
        return
    if fail_slower is not None and not earlier:
        raise UsageError("`--fail-slower` needs earlier results to compare with: --compare EARLIER.jsonl")
    if plot:
        plotting.check_path(plot)
    # Before anything is measured: the same file may be written.
    then = rows.load(earlier) if earlier else []
    measured = _loaded(load, ops) if load else _measured(ops, chosen)
    click.echo(markdown(measured), nl=False)
    if plot:
        with as_usage_error(f"cannot write {str(plot)!r}"):
            plot.write_bytes(plotting.png(measured) if plot.suffix.lower() == ".png" else _page(measured))
    if earlier:
        _compare(measured, then, fail_slower)


def _loaded(files: Sequence[Path], ops: tuple[str, ...]) -> list[Row]:
    """Rows of files, of the ops that are named; UsageError if there are none of them."""
    from retrograd.bench import rows

    every = rows.load(files)
    wanted = _resolved(ops) if ops else ()
    chosen = [row for row in every if not ops or row.op in wanted]
    if every and not chosen:
        there = ", ".join(dict.fromkeys(row.op for row in every))
        raise UsageError(f"{', '.join(map(repr, map(str, files)))} has results of {there}, none of {', '.join(ops)}")
    return chosen


def _page(measured: Sequence[Row]) -> bytes:
    from retrograd import report
    from retrograd.bench.rows import BenchResults
    from retrograd.report.html import to_html

    record = BenchResults(tuple(measured))
    return to_html(report.document(record), record.to_json()).encode()


def _compare(measured: Sequence[Row], then: Sequence[Row], fail_slower: float | None) -> None:
    from retrograd.bench import compare

    result = compare.compare(measured, then)
    click.echo("\n" + compare.markdown(result), nl=False)
    if fail_slower is None:
        return
    compare.refuse_other_machines(result)
    slower = result.slower(fail_slower)
    for change in slower:
        click.echo(
            f"slower by more than {fail_slower:g} %: {' '.join(change.label)} {change.direction} {change.ratio}",
            err=True,
        )
    for label, reason in result.lost:
        click.echo(f"no time any more: {' '.join(label)}: {reason}", err=True)
    if slower or result.lost:
        click.get_current_context().exit(1)


def _measured(ops: tuple[str, ...], chosen: dict[str, Any]) -> list[Row]:
    """Rows of what the options ask for, each written to a file as soon as it is there."""
    resolved, only = _resolved(ops), chosen.pop("more")
    if others := [op for op in only if op not in resolved]:
        raise UsageError(f"`--ops` has {others[0]!r}, expected some of {', '.join(resolved)}")
    names = only or resolved
    require_torch("retrograd bench")
    from retrograd.bench import runner
    from retrograd.bench.rows import to_line
    from retrograd.bench.selection import Selection
    from retrograd.bench.table import markdown

    out: Path | None = chosen.pop("out")
    _add_providers(chosen.pop("users"), names)
    device = chosen.pop("device") or _device()
    selection = Selection(names, device=device, **chosen)
    timer = runner.make_timer(selection.device, selection.timing)
    path = out or (_RESULTS if _RESULTS.is_dir() else Path()) / f"{runner.results_name(selection, timer)}.jsonl"
    with as_usage_error(f"cannot write {str(path)!r}"), path.open("w", encoding="utf-8") as lines:

        def keep(row: Row) -> None:
            print(to_line(row), file=lines, flush=True)

        measured = runner.run(selection, timer, lambda line: click.echo(line, err=True), keep)
    if list(selection.groups()) == ["msda"]:
        page = path.with_suffix(".md")
        with as_usage_error(f"cannot write {str(page)!r}"):
            page.write_text(markdown(measured), encoding="utf-8")
    return measured


def _resolved(ops: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the registry; specs of a person's own are added to it."""
    from retrograd.bench import registry

    known = [*registry.GROUPS, *registry.ops()]
    if not ops:
        raise UsageError(f"name an op: {', '.join(known)}, or file.py:spec; see --list")
    names: list[str] = []
    for op in ops:
        if op in registry.GROUPS:
            names += registry.GROUPS[op]
        elif op in registry.ops():
            names.append(op)
        elif ":" in op or op.endswith(".py"):
            require_torch("retrograd bench")
            from retrograd import catalog
            from retrograd.catalog.timing import offer

            names.append(offer(catalog.resolve(op)))
        else:
            raise UsageError(f"unknown op {op!r}{near(op, known)}; expected {', '.join(known)}, or file.py:spec")
    return tuple(dict.fromkeys(names))


def _add_providers(users: tuple[str, ...], ops: tuple[str, ...]) -> None:
    from retrograd.bench import registry
    from retrograd.core import loading

    form = "NAME=FILE.py:FUNCTION, NAME=package.module:FUNCTION, or FILE.py"
    for text in users:
        name, equals, target = text.partition("=")
        place, _, function = (target if equals else text).rpartition(":")
        if not equals:
            loading.load(text, text, form)
            continue
        if not place or not function:
            raise UsageError(f"`--provider` has {text!r}, expected {form}")
        if len(ops) != 1:
            raise UsageError(f"`--provider` {name!r} computes one op, and {len(ops)} are named: {', '.join(ops)}")
        module = loading.load(place, target, form)
        if not hasattr(module, function):
            raise UsageError(f"{place!r} has no {function!r}{loading.near(function, vars(module))}")
        registry.register(name, ops[0], getattr(module, function))


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    click.echo("no CUDA device: times on the CPU (--device cuda insists)", err=True)
    return "cpu"
