"""`retrograd bench`: how fast the shipped ops are, beside torch and other libraries; the table on stdout."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import click

from retrograd.errors import MissingExtraError, UsageError

_RESULTS = Path("benchmarks/results")


def _split(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (value or "").split(",") if word.strip())


def _shapes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[tuple[int, int], ...]:
    shapes = []
    for word in _split(ctx, param, value):
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", word):
            raise UsageError(f"`--shapes` has {word!r}, expected MxN such as 32768x4096")
        m, _, n = word.partition("x")
        shapes.append((int(m), int(n)))
    return tuple(shapes)


@click.group()
def command() -> None:
    """Measure the shipped ops beside torch and other libraries."""


@command.command()
@click.option("--ops", callback=_split, metavar="A,B", help="rms_norm, add_rms_norm, layer_norm, add_layer_norm.")
@click.option("--shapes", callback=_shapes, metavar="MxN,...", help="Shapes, instead of the usual list.")
@click.option("--providers", callback=_split, metavar="A,B", help="retrograd, retrograd-atomic, torch, ...")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--host", is_flag=True, help="Host time of an eager forward and backward instead (at 512x4096).")
@click.option("--max-seconds", type=float, default=float("inf"), help="Start no measurement after this long.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON lines  [default: norm-<gpu>.jsonl].")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw GB/s against N into FILE.html or FILE.png.")
@click.option("--load", multiple=True, type=click.Path(path_type=Path), help="Show these results, measure nothing.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", hidden=True)
def norm(out: Path | None, plot: Path | None, load: tuple[Path, ...], device: str, **what: object) -> None:
    """Useful bandwidth of RMSNorm and LayerNorm, with and without a residual, forward and backward.

    Needs a CUDA device, except with --load.
    """
    from retrograd.bench import plot as plotting
    from retrograd.bench import rows as results
    from retrograd.bench.table import markdown

    if plot:
        plotting.check_path(plot)
    # An option that was not given keeps the default of the settings.
    given = {name: value for name, value in what.items() if value != ()}
    if load:
        found = results.load(load)
    else:
        _need_torch()
        from retrograd.bench import norm as bench
        from retrograd.bench.harness import make_timer

        settings, timer = bench.Settings(**given), make_timer(device)
        path = out or _default("norm-host" if settings.host else "norm", bench.machine(timer))
        found = _measure(bench, settings, timer, path)
    click.echo(markdown(found), nl=False)
    if plot:
        plotting.write(found, plot)


@command.command()
@click.option(
    "--shapes",
    callback=_split,
    metavar="A,B",
    help="enc800, enc800b1, bench10k, dec300, dec900b16 (the usual ones), rtdetr, rfdetr, mask2former, or sizes such "
    "as B4-Q300-H8-C32-P4-64x64+32x32.",
)
@click.option("--providers", callback=_split, metavar="A,B", help="retrograd, retrograd-triton, grid_sample, ...")
@click.option("--dtypes", callback=_split, metavar="A,B", help="float32, bfloat16 (both by default), float16.")
@click.option(
    "--locations",
    type=click.Choice(["float32", "same"]),
    default="float32",
    show_default=True,
    help="Dtype of locations and weights beside 16-bit values.",
)
@click.option(
    "--timing",
    type=click.Choice(["graph", "eager"]),
    default="graph",
    show_default=True,
    help="Replay CUDA graphs, or put events around eager calls, which counts launches that the host is late with.",
)
@click.option("--max-seconds", type=float, default=float("inf"), help="Start no measurement after this long.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON lines  [default: msda-<gpu>.jsonl]; table as .md.")
@click.option("--load", multiple=True, type=click.Path(path_type=Path), help="Show these results, measure nothing.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", hidden=True)
def msda(out: Path | None, load: tuple[Path, ...], device: str, timing: str, **what: object) -> None:
    """Time and memory of multi-scale deformable attention, forward and backward, beside other libraries.

    Needs a CUDA device, except with --load.
    """
    from retrograd.bench.msda import rows as results
    from retrograd.bench.msda.table import markdown

    given = {name: value for name, value in what.items() if value != ()}
    if load:
        click.echo(markdown(results.load(load)), nl=False)
        return
    _need_torch()
    from retrograd.bench.harness import make_timer
    from retrograd.bench.msda import run as bench

    settings, timer = bench.Settings(**given), make_timer(device, timing)
    path = out or _default("msda" if timing == "graph" else "msda-eager", bench.machine(timer))
    text = markdown(_measure(bench, settings, timer, path))
    click.echo(text, nl=False)
    with _writing(path.with_suffix(".md")) as table:
        table.write(text)


def _need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("torch", "torch", "retrograd bench") from None


def _measure(bench: Any, settings: object, timer: object, path: Path) -> list[Any]:
    """Rows of a benchmark, each written to `path` as soon as it is there."""
    from retrograd.bench.rows import Measured, to_line

    with _writing(path) as lines:

        def keep(row: Measured) -> None:
            print(to_line(row), file=lines, flush=True)

        return bench.run(settings, timer, lambda line: click.echo(line, err=True), keep)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[TextIO]:
    try:
        with path.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def _default(kind: str, machine: dict[str, str]) -> Path:
    folder = _RESULTS if _RESULTS.is_dir() else Path()
    return folder / f"{kind}-{machine['gpu'].lower().replace(' ', '-')}.jsonl"
