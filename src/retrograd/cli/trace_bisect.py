"""`retrograd trace bisect`: which operators, in higher precision, make a mismatch with a reference go away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrograd.cli._trace import output_options
from retrograd.cli.trace_diff import say
from retrograd.errors import UsageError

_FORMS = "'path/file.py:name' or 'package.module:name'"


@click.command()
@click.argument("target")
@click.option("--tolerance", type=float, metavar="R", help="Relative error allowed  [default: a tenth of what it is].")
@click.option("--precision", type=click.Choice(["float64", "float32"]), default="float64", show_default=True)
@click.option("--by", type=click.Choice(["operator", "module"]), default="operator", show_default=True)
@output_options
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    tolerance: float | None,
    precision: str,
    by: str,
    as_json: bool,
    outputs: tuple[str, ...],
) -> None:
    """Find the fewest operators that must be computed in higher precision for a step to agree with its reference.

    TARGET names a function without arguments, file.py:name or package.module:name, that returns (step, model) or (step,
    model, reference). step runs forward and backward and returns tensors, or None for the gradients of model;
    reference is what it should return, or a function for that; without one it is the step with every operator in higher
    precision.

    Exit code: 0 no mismatch, 1 operators found, 2 wrong usage, 3 cannot decide.
    """
    from retrograd.report import check_paths
    from retrograd.trace import bisect_precision
    from retrograd.trace.bisecting.schema import Bisection

    check_paths(*outputs, of=Bisection)
    step, model, reference = _resolve(target)
    found = bisect_precision(
        step, model, reference, tolerance, precision=precision, by=by, target=target.rpartition("/")[2]
    )
    say(found, as_json, outputs)
    ctx.exit(found.exit_code)


def _resolve(target: str) -> tuple[Any, Any, Any]:
    """Step, model and reference of a target.

    Raises:
        UsageError: there is no such module, file or name, or it gives something else.
        SpecError: the module or the function raises.
    """
    from retrograd.core.loading import guard, is_path, load, near

    place, _, name = target.rpartition(":")
    if not place or not name:
        raise UsageError(f"target {target!r} names no function; expected {_FORMS}")
    module = load(place, target, _FORMS)
    if not callable(getattr(module, name, None)):
        public = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise UsageError(f"{place!r} has no function {name!r}{near(name, public)}")
    made = guard(getattr(module, name), target, Path(place).resolve() if is_path(place) else None)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise UsageError(
            f"{name!r} in {place!r} returned {type(made).__name__}, expected (step, model) or (step, model, reference)"
        )
    return made if len(made) == 3 else (*made, None)
