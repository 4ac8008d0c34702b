"""Sentences of a flake record that need the runs: how to see it again, and what was not looked at."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from retrograd.flake import classify
from retrograd.flake.plan import Settings, Target
from retrograd.flake.schema import Kind, Reason, Run


def repro(target: Target, failed: Sequence[Run], kinds: Sequence[Kind], reasons: Sequence[Reason]) -> tuple[str, ...]:
    """Commands that show the failure again: by this tool, and by pytest with the same seed."""
    ordered = [run for run in failed if run.stage == "order" and run.before]
    shown = min(ordered, key=lambda run: len(run.before)) if ordered and "order" in kinds else failed[0]
    words = shlex.split(shown.setting)
    threads = next((word.removeprefix("threads=") for word in words if word.startswith("threads=")), "")
    variables = [shlex.quote(word) for word in words if not word.startswith("threads=")]
    if any(reason.kind == "hash" for reason in reasons):
        variables.append(f"PYTHONHASHSEED={shown.hash_seed}")
    name = shlex.quote(_argument(target))
    plan = ["--threads", threads] if threads else []
    if "order" in kinds and not shown.before:
        # It is the runs before it that matter: the same seeds up to this one.
        plan += [f"--seed {max(shown.seed - shown.place, 0)} --seeds {shown.place + 1} --repeats 1"]
    else:
        plan += [f"--seed {shown.seed} --seeds 1"] + (["--repeats 20"] if "run" in kinds else [])
    if shown.fill == "nan":
        plan = [f"--seed {shown.seed} --seeds 1"]
    again = " ".join([*_set(variables), "retrograd flake", name, *plan, "--no-history"])
    if not target.is_test or ("order" in kinds and not shown.before):
        return (again,)
    variables += [f"OMP_NUM_THREADS={threads}"] if threads else []
    before = [shlex.quote(_beside(target, other)) for other in shown.before]
    test = " ".join([*_set(variables), "python -m pytest", *before, name, f"--retrograd-flake-seed {shown.seed}"])
    return (test,) if before else (again, test)


def _set(variables: Sequence[str]) -> list[str]:
    """By env, since a quoted word such as 'A=b c' is no assignment to a shell."""
    return ["env", *variables] if variables else []


def _argument(target: Target) -> str:
    """The test as it is named from here; its node id is relative to pytest's root."""
    return _beside(target, target.item) if target.item else target.argument


def _beside(target: Target, item: str) -> str:
    file = target.argument.partition("::")[0]
    return f"{file}::{item.partition('::')[2]}" if file.endswith(".py") else item


def notes(runs: Sequence[Run], settings: Settings, target: Target | None) -> list[str]:
    """What a reader should know beside the rate."""
    main = classify.main_runs(runs)
    said: list[str] = []
    if classify.self_seeded(main):
        seeds = len(classify.by_seed(main))
        said.append(
            f"what is compared is the same to the bit for {seeds} seeds: the test seeds itself or draws nothing after "
            "its import, so other data were not tried"
        )
    elif target and not any(run.margins for run in main):
        said.append("the test compares nothing that can be measured (torch, numpy, retrograd), so no margins are known")
    everything = classify.counted(run for run in runs if run.stage == "seeds")
    if not any(run.failed for run in everything) and classify.mixed(everything, "bits"):
        said.append("what is compared differs to the bit between runs of one seed, and all of them passed")
    skipped = sum(run.outcome == "skipped" for run in runs)
    if skipped:
        said.append(f"{skipped} runs were skipped and do not count")
    if target is None:
        return said
    untried: list[str] = [] if settings.threads else ["threads (--threads 1,2)"]
    untried += [] if settings.env else ["variables (--env NAME=a,b)"]
    untried += [] if settings.orders or not target.is_test else ["other tests first (--order 3)"]
    if untried:
        said.append(f"not tried: {', '.join(untried)}")
    return said
