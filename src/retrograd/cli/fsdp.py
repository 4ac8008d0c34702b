"""`retrograd fsdp`: the collectives of sharded training, over steps and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrograd.cli._groups import CommandGroup
from retrograd.cli._options import FOLDER, PASSES_OPTIONS_ON, PATH, examples, program
from retrograd.cli._output import answers
from retrograd.core.wording import count
from retrograd.errors import UsageError

if TYPE_CHECKING:
    from retrograd.fsdp.outcome.schema import RankComparison


@click.group(
    cls=CommandGroup,
    epilog=examples(
        "retrograd fsdp check -- torchrun --nproc-per-node 2 train.py", "retrograd fsdp diff rank-0.json rank-1.json"
    ),
)
def fsdp() -> None:
    """Record and compare the collectives of sharded training (FSDP2, DDP): same order at each step, on each rank."""


@fsdp.command(
    context_settings=PASSES_OPTIONS_ON,
    epilog=examples(
        "retrograd fsdp check --steps 3 -- torchrun --nproc-per-node 2 train.py",
        "retrograd fsdp check --logs logs -o report.html -- train.py",
    ),
)
@program("-- torchrun ... SCRIPT ...")
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="End the program after N steps of an optimizer.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="End a job in which a rank issues nothing for S seconds, with the collective that is due.",
)
@click.option("--strict", is_flag=True, help="Compare ranks before each collective, not only before each update.")
@click.option("--nonfinite", is_flag=True, help="Name the rank that gives NaN or Inf to a reduction.")
@click.option("--logs", type=FOLDER, metavar="DIR", help="Keep the logs.")
@answers("retrograd.fsdp.outcome.schema:RankComparison")
def check(program: tuple[str, ...], logs: Path | None, **options: object) -> RankComparison:
    """Run a training job, without a change of its source, and compare the collectives of its ranks and steps.

    A step ends with an optimizer's step(). A job whose ranks differ is stopped before the optimizer uses the gradients.

    Exit code: 0 same order; 1 ranks or steps differ, gradients were not reduced, a rank hangs or failed; 2 wrong usage,
    or the program failed and nothing was found.
    """
    from retrograd.fsdp import check_command, outcome

    return outcome.of_check(check_command.check(program, dict(options), logs), program)


@fsdp.command(epilog=examples("retrograd fsdp diff logs/rank-0.json logs/rank-1.json"))
@click.argument("files", metavar="ONE OTHER...", type=PATH, nargs=-1, required=True)
@answers("retrograd.fsdp.outcome.schema:RankComparison")
def diff(files: tuple[Path, ...]) -> RankComparison:
    """Name the first collective in which ranks or runs differ, with its step and module, or its stacks.

    Files are two logs, those of `log.save(path)` or `retrograd fsdp check --logs DIR`: of two ranks of a run, of which
    the groups that both belong to are compared, or of one rank in two runs.

    Or the dumps of PyTorch's Flight Recorder of two ranks or more (dump_rank0 dump_rank1 ...): the collective of each
    process group in which ranks part, with the stacks of both sides. A log beside the dump of its rank adds modules.

    Exit code: 0 same order, 1 different, 2 wrong usage or a file that is neither log nor dump, 3 dumps that have
    nothing in common.
    """
    from retrograd.fsdp import flight_recorder, log_diff, outcome
    from retrograd.fsdp.schema import Log

    dumps = [path for path in files if flight_recorder.is_dump(path)]
    logs = [Log.load(path) for path in files if path not in dumps]
    if dumps:
        by_rank = {log.rank: log for log in logs}
        ranks = flight_recorder.load(dumps)
        named = [flight_recorder.with_modules(d, by_rank[d.rank]) if d.rank in by_rank else d for d in ranks]
        return outcome.of_dumps(flight_recorder.compare(named), files)
    if len(files) != 2:
        raise UsageError(f"{count(len(files), 'log')} given; expected two, or dumps of Flight Recorder")
    first, second = logs
    names = None if first.rank != second.rank else (str(files[0]), str(files[1]))
    return outcome.of_logs(log_diff.diff(first, second, names), files)
