"""Acceptances: classes of findings that may stand for a reason, by `accept=` of an op or by a baseline file.

A class is a stage ("higher_order"), a stage and a kind ("mutation/stale-input"), or those and a tensor
("oracle/wrong-value/grad x"). What is accepted is shown and fails nothing; an acceptance of what does not occur any
more fails. Torch-free.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrograd.check.schema import Acceptance, Case, Finding, Report, StageResult
from retrograd.core.loading import near
from retrograd.core.system_errors import as_usage_error
from retrograd.core.wording import shortened
from retrograd.errors import SpecError, UsageError

FILE = "retrograd-baseline.toml"
GONE = "accepted-gone"
LEVELS = ("quick", "full")

_VALUES = ("wrong-value", "wrong-scale", "shape", "missing-gradient", "raises")  # of stages that ask the oracle
# What an executed kernel does, of stages with cases of their own.
_HEARD = ("address-read", "address-write", "race", "assertion")
# Every kind that a stage tells; tests/check/test_acceptance.py reads the stages and compares.
KINDS: dict[str, tuple[str, ...]] = {
    "contract": ("silent-none", "shape", "dtype", "device", "requires-grad", "subset", "output-subset", "raises"),
    "mutation": ("input", "grad_out", "stale-input", "raises"),
    "calls": ("without-grad", "thread", "one-tensor", "result-changed", "autocast", "raises"),
    "poison": ("uninitialised", "raises"),
    "bounds": ("write", "read", "address-write", "address-read", "assertion", "raises"),
    "races": ("race", "autotune", "endless-loop", "uninitialised", "raises"),
    "algebra": ("not-linear", "zero", "raises"),
    "oracle": _VALUES,
    "adjoint": ("not-the-derivative", "raises"),
    "layouts": (*_VALUES, *_HEARD),
    "shapes": (*_VALUES, *_HEARD, "input"),
    "kinks": ("beyond-kink", *_HEARD, "raises"),
    "state": (
        "kept-buffer", "carried-over", "second-backward", "two-graphs", "stale-copy", "stream", "device", "raises",
    ),
    "extremes": (*_VALUES, *_HEARD, "vanished", "spread", "not-finite"),
    "determinism": (*_VALUES, "not-repeatable", "configuration"),
    "batch": ("batch-dependent", "raises"),
    "higher_order": (*_VALUES, "silently-constant", "does-not-raise"),
    "compiler": ("schema", "fake", "operator", "form", *_VALUES),
}  # fmt: skip
# With these the stage has not come to its end, and what it would have said is not known.
ENDED = ("crash", "hang", "memory")


def check_class(text: Any, argument: str) -> str:
    """The class itself; SpecError that names the argument, what it has and what exists if there is none such."""
    stage, kind, _ = (*str(text).split("/", 2), "", "")[:3]
    if isinstance(text, str) and stage in KINDS and (not kind or kind in KINDS[stage]):
        return text
    if stage in KINDS:
        raise SpecError(
            f"`{argument}` has {text!r}; the kinds of findings of stage {stage!r} are {', '.join(KINDS[stage])}"
        )
    raise SpecError(
        f"`{argument}` has {text!r}; expected a stage, 'stage/kind' or 'stage/kind/tensor', as a finding prints them; "
        f"stages are {', '.join(KINDS)}{near(stage.replace('-', '_'), KINDS)}"
    )


def acceptances(accept: Mapping[str, Any] | None) -> tuple[Acceptance, ...]:
    """What `accept=` of `retrograd.op` means; SpecError if a class is unknown or a reason is missing."""
    if accept is not None and not isinstance(accept, Mapping):
        kind = type(accept).__name__
        raise SpecError(f"`accept` is {kind}, expected a dict from classes of findings to reasons")
    result: list[Acceptance] = []
    for key, value in (accept or {}).items():
        fields: Mapping[str, Any] = value if isinstance(value, Mapping) else {"reason": value}
        result.append(_acceptance({"class": key, **fields}, "accept", "accept="))
    return tuple(result)


def _acceptance(entry: Mapping[str, Any], argument: str, source: str) -> Acceptance:
    name = check_class(entry.get("class"), argument)
    reason, level = entry.get("reason"), entry.get("level", LEVELS[0])
    if unknown := set(entry) - {"class", "reason", "level", "target"}:
        raise SpecError(f"`{argument}` of {name!r} has {sorted(unknown)}, expected `reason` and, if need be, `level`")
    if not isinstance(reason, str) or not reason.strip():
        raise SpecError(f"`{argument}` of {name!r} has {reason!r} as the reason, expected a sentence: why it may stand")
    if level not in LEVELS:
        raise SpecError(
            f"`{argument}` of {name!r} has level {level!r}, expected quick or full, the lowest that sees it"
        )
    return Acceptance(name, reason, level, source)


def covers(acceptance: Acceptance, finding: Finding) -> bool:
    """Whether a finding is of the accepted class."""
    parts = acceptance.finding.split("/", 2)
    return finding.kind not in (*ENDED, GONE) and [finding.stage, finding.kind, finding.tensor][: len(parts)] == parts


def accepted(finding: Finding, by: Iterable[Acceptance]) -> Finding | None:
    """The finding with the reason for which it may stand; None if it may not."""
    return next((replace(finding, accepted=a.reason) for a in by if covers(a, finding)), None)


def settled(result: StageResult, by: Iterable[Acceptance]) -> StageResult:
    """The result of a stage, with a finding for each acceptance of what it would have seen, and has not.

    Only if the stage came to its end in everything that was asked of it.
    """
    ended = result.status in ("passed", "failed") and not result.reason and not result.left_out
    if not ended or any(f.kind in ENDED for f in result.findings):
        return result
    stale = [
        a for a in by
        if a.expected and a.finding.split("/")[0] == result.id and not any(covers(a, f) for f in result.accepted)
    ]  # fmt: skip
    if not stale:
        return result
    findings = tuple(
        Finding(
            result.id, GONE, f"{a.finding!r} is accepted ({a.reason}), but does not occur any more: remove it from "
            f"{a.source.rstrip('=')}", Case(""), tensor=a.finding,
        ) for a in stale
    )  # fmt: skip
    return replace(result, status="failed", findings=(*result.findings, *findings))


def settle(report: Report) -> Report:
    """The report with each of its stages settled, once all processes that share it have come to their end."""
    stages = tuple(settled(stage, report.acceptances) for stage in report.stages)
    return report.with_stages(stages) if stages != report.stages else report


def _target(target: str, folder: Path) -> str:
    """A target as the baseline file names it: the file relative to the baseline's folder."""
    path, colon, name = target.rpartition(":")
    if not colon or not path.endswith(".py"):
        return target
    return f"{Path(os.path.relpath(path, folder)).as_posix()}:{name}"


def baseline_path(path: str | Path | None) -> Path | None:
    """The file that was named, else `retrograd-baseline.toml` of this folder; None without.

    Raises:
        UsageError: the named file is not there.
    """
    if path is None:
        return Path(FILE) if Path(FILE).exists() else None
    if not Path(path).exists():
        raise UsageError(f"`--baseline` is {str(path)!r}, which is not there; --write-baseline writes it")
    return Path(path)


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the baseline {str(path)!r}: {error}") from None
    entries = data.get("accepted", [])
    unknown = sorted(set(data) - {"accepted"})
    if unknown or not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise UsageError(
            f"the baseline {str(path)!r} has {unknown or 'accepted ='}, expected tables [[accepted]] alone"
        )
    return entries


def read_baseline(path: Path, target: str) -> tuple[Acceptance, ...]:
    """What a baseline file accepts of a target.

    Raises:
        UsageError: the file cannot be read, or an entry is none.
    """
    known = _target(target, path.parent)
    try:
        entries = [(e.get("target"), _acceptance(e, f"{path}: [[accepted]]", str(path))) for e in _entries(path)]
    except SpecError as error:
        raise UsageError(str(error)) from None
    return tuple(acceptance for name, acceptance in entries if name == known)


def write_baseline(path: Path, reports: Sequence[Report]) -> int:
    """Accept in a file what reports have found, and take out what does not occur any more; how many it has of them.

    Entries of other targets, and of stages that were not run to their end, stay as they are.

    Raises:
        UsageError: the file is there and is no baseline, or cannot be written.
    """
    entries = _entries(path) if path.exists() else []
    count = 0
    for report in reports:
        target = _target(report.target, path.parent)
        gone = {f.tensor for f in report.findings if f.kind == GONE}
        entries = [e for e in entries if e.get("target") != target or e.get("class") not in gone]
        here = {e.get("class") for e in entries if e.get("target") == target}
        for finding in report.findings:
            name = "/".join(filter(None, (finding.stage, finding.kind, finding.tensor)))
            if finding.kind in (*ENDED, GONE) or name in here:
                continue
            here.add(name)
            reason = f"as it stood: {shortened(finding.what.splitlines()[0], 100)}"
            entries.append({"target": target, "class": name, "reason": reason, "level": report.level})
        count += len(here)
    lines = ["# Findings that stand for now: `retrograd verify` shows them and does not fail, until they are gone.", ""]
    for entry in entries:
        lines += [
            "[[accepted]]",
            *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in entry.items()),
            "",
        ]
    with as_usage_error(f"cannot write the baseline {str(path)!r}"):
        path.write_text("\n".join(lines), encoding="utf-8")
    return count


def after_writing(report: Report, path: Path) -> Report:
    """The report as the next run will give it, with the baseline that was just written."""
    by = read_baseline(path, report.target)
    stages: list[StageResult] = []
    for stage in report.stages:
        apart = [(f, accepted(f, by)) for f in stage.findings if f.kind != GONE]
        left = tuple(f for f, known in apart if known is None)
        status = "passed" if stage.findings and not left else stage.status
        standing = (*stage.accepted, *(known for _, known in apart if known is not None))
        stages.append(replace(stage, status=status, findings=left, accepted=standing))
    return replace(report.with_stages(stages), acceptances=by)
