"""`retrograd run-kernel`: anybody's Triton program without a GPU, and what is wrong with its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from retrograd.cli._options import FORMAT, PASSES_OPTIONS_ON, examples, program
from retrograd.cli._output import answers

if TYPE_CHECKING:
    from retrograd.ttir.schema import KernelRun

_SMS = "Multiprocessors that the program is told of, which grids of persistent kernels depend on; the GPU's."
_GPU = "The GPU that the program is told of; an AMD one for options of its backend, as waves_per_eu."
_ORDERS = "Run each launch in N orders of its programs, and name the lines whose bits depend on it."


@click.command(
    "run-kernel",
    context_settings=PASSES_OPTIONS_ON,
    epilog=examples(
        "retrograd run-kernel my_kernel.py", "retrograd run-kernel --orders 4 -o report.html -- my_kernel.py --size 100"
    ),
)
@program("[-- SCRIPT.py ARGS ...]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the order of programs.")
@click.option("--sms", "multiprocessors", type=click.IntRange(min=1), metavar="N", help=_SMS)
@click.option("--gpu", default="sm_90", show_default=True, metavar="NAME", help=_GPU)
@click.option("--orders", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help=_ORDERS)
@answers("retrograd.ttir.schema:KernelRun", FORMAT, early=True, judged=True)
def run_kernel(
    program: tuple[str, ...], seed: int, multiprocessors: int | None, gpu: str, orders: int,
    tell: Callable[[KernelRun], None],
) -> KernelRun:  # fmt: skip
    """Run a Triton program on CPU tensors as a GPU would, and report races, bounds and unwritten memory.

    PROGRAM is a script, -m MODULE or -c CODE, with its arguments. "cuda" is the CPU inside, and launches execute the
    code that Triton makes for a GPU.

    Exit code: the program's own if it failed; 0 clean, 1 a finding, 2 wrong usage, 3 cannot decide. SIGTERM
    ends it with the report so far.
    """
    from retrograd.ttir.run_kernels import run_kernels

    return run_kernels(program, seed, multiprocessors, orders, gpu, tell)
