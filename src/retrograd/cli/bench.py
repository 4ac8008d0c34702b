"""`retrograd bench`: how fast the shipped ops are, beside torch and other libraries; the table on stdout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrograd.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    from retrograd.bench.rows import Row

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
    found = results.load(load) if load else _measure(given, device, out)
    click.echo(markdown(found), nl=False)
    if plot:
        plotting.write(found, plot)


def _measure(given: dict[str, object], device: str, out: Path | None) -> list[Row]:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("torch", "torch", "retrograd bench") from None
    from retrograd.bench import norm as bench
    from retrograd.bench.rows import to_line

    settings, timer = bench.Settings(**given), bench.make_timer(device)
    kind = "-host" if settings.host else ""
    path = out or _folder() / f"norm{kind}-{bench.machine(timer)['gpu'].lower().replace(' ', '-')}.jsonl"
    try:
        with path.open("w", encoding="utf-8") as lines:

            def keep(row: Row) -> None:
                print(to_line(row), file=lines, flush=True)

            return bench.run(settings, timer, lambda line: click.echo(line, err=True), keep)
    except OSError as error:
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def _folder() -> Path:
    return _RESULTS if _RESULTS.is_dir() else Path()
