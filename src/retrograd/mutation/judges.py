"""The two judges of a mutant: `verify`, stopped at its first finding, and a command that runs the user's tests."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from retrograd import config
from retrograd.check.runner import verify
from retrograd.check.schema import Finding, Report
from retrograd.check.spec import OpSpec
from retrograd.core.subprocesses import Child, death
from retrograd.core.wording import some
from retrograd.errors import RetrogradError, UsageError
from retrograd.mutation.edits import Edit
from retrograd.mutation.functions import frameworks, is_users
from retrograd.mutation.schema import Judgement
from retrograd.mutation.sources import digest_of

_PASSED, _NO_TESTS = 0, 5  # exit codes of pytest


class _Found(BaseException):
    """Passes through whatever catches exceptions of an op."""


def original_findings(spec: OpSpec, level: str, seed: int) -> tuple[Report, set[tuple[str, ...]]]:
    """What verify says of the original, and stage, kind, tensor, dtype and case of each finding before it is shrunk."""
    known = set[tuple[str, ...]]()

    def watch(event: str, thing: Any) -> None:
        if event == "outcome":
            known.update(_key(f) for f in (*thing.findings, *thing.accepted))

    report = verify(spec, level=level, seed=seed, watch=watch)
    return report, known | {_key(f) for stage in report.stages for f in (*stage.findings, *stage.accepted)}


def _key(finding: Finding) -> tuple[str, ...]:
    return finding.stage, finding.kind, finding.tensor, finding.case.dtype, finding.case.text()


def by_verify(spec: OpSpec, level: str, seed: int, known: set[tuple[str, ...]], skip: Sequence[str] = ()) -> Judgement:
    """What verify says of the op as it is now; findings that the original has (`known`) do not count."""
    start = time.perf_counter()
    first: list[Finding] = []

    def watch(event: str, thing: Any) -> None:
        if event == "outcome":
            first.extend(f for f in thing.findings if _key(f) not in known)
        if first:
            raise _Found

    try:
        verify(spec, level=level, seed=seed, watch=watch, skip=skip)
    except _Found:
        pass
    except RetrogradError as error:
        # Whoever runs it gets no proof, but is not told either that anything is wrong with the gradient.
        why = f"no verdict: {type(error).__name__}: {str(error).splitlines()[0]}"
        return Judgement("verify", False, why, _since(start))
    why = f"{first[0].stage}: {first[0].what.splitlines()[0]}" if first else ""
    return Judgement("verify", bool(first), why, _since(start))


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 3)


class Tests:
    """A command that runs tests, its exit code the verdict.

    Args:
        command: as on a command line. Where it is pytest, it is told to stop at the first failure.
        timeout: seconds it may take for a mutant; None for five times what it takes for the original, and 10 more.

    Attributes:
        case: of a campaign: the command, and a digest of the files that its processes import.
        imported: these files.

    Raises:
        UsageError: it fails on the original, or runs no test.
    """

    def __init__(self, command: str, timeout: float | None = None) -> None:
        self.command, words = command, shlex.split(command)
        if not words:
            raise UsageError("`tests` is empty, expected a command such as 'pytest tests/test_op.py'")
        if Path(words[0]).name in ("pytest", "py.test"):
            words[:1] = [sys.executable, "-m", "pytest"]
        elif Path(words[0]).name in ("python", "python3"):
            words[0] = sys.executable
        if "pytest" in words:
            words += ["-x", "-q", "-p", "no:cacheprovider"]
        self._words = words
        start = time.perf_counter()
        with TemporaryDirectory(prefix="retrograd-tests-") as folder:
            names = Path(folder) / "imported"
            names.touch()
            job = json.dumps({"imported": str(names)})
            code, output = self._run(config.request_at_start("retrograd.mutation.injection", job), timeout or 3600.0)
            self.imported = {Path(line) for line in names.read_text(encoding="utf-8").splitlines()}
        self.seconds = _since(start)
        apart = frameworks()
        self.case = f"{command} {digest_of(p for p in self.imported if is_users(p, apart))}"
        self.timeout = timeout or 5 * self.seconds + 10
        if code != _PASSED:
            reason = "runs no test" if "pytest" in words and code == _NO_TESTS else f"ends with {code}"
            last = "\n".join(output.strip().splitlines()[-5:])
            raise UsageError(f"`tests` must pass without any mutant: {command!r} {reason}\n{last}")

    def check(self, files: Iterable[str]) -> None:
        """UsageError where no process of the tests imports any of these files: whatever is done to them, it passes."""
        mutated = sorted({Path(file).resolve() for file in files})
        if self.imported.isdisjoint(mutated):
            alike = [p for p in self.imported if p.parts[-2:] in {m.parts[-2:] for m in mutated}]
            another = f"but {some(sorted(map(str, alike)))}: have both use one copy"
            raise UsageError(
                f"`tests` imports nothing that is mutated, {some([str(path) for path in mutated])}, "
                + (another if alike else "so that they would notice no mutant (a file run as a script is not imported)")
            )

    def judge(self, target: Any, edit: Edit) -> Judgement:
        """Whether the tests fail where the mutant stands in the place of a function with source (`MutationTarget`)."""
        start = time.perf_counter()
        with TemporaryDirectory(prefix="retrograd-mutant-") as folder:
            applied = Path(folder) / "applied"
            job = dict(
                file=target.file, name=target.name, kind=target.kind, line=target.line,
                edited=edit.applied(target.source), applied=str(applied),
            )  # fmt: skip
            code, output = self._run(
                config.request_at_start("retrograd.mutation.injection", json.dumps(job)), self.timeout
            )
            stood = applied.exists()
        seconds = _since(start)
        if code is None:
            return Judgement("tests", True, f"timed out after {self.timeout:.0f} s", seconds)
        if code != _PASSED:
            return Judgement("tests", True, _reason(output, code), seconds)
        return Judgement(
            "tests", False, "" if stood else "the tests never import its file, or run it as a script", seconds
        )

    def _run(self, changes: dict[str, str], timeout: float) -> tuple[int | None, str]:
        with Child(self._words, changes) as child:
            ended = child.wait(timeout)
            return child.process.returncode if ended else None, child.output()


def _reason(output: str, code: int) -> str:
    """How it died, the line of pytest's summary that names the first failure, or else the last line."""
    if code < 0:
        return death(code)
    lines = [line for line in output.splitlines() if line.strip()]
    with contextlib.suppress(StopIteration):
        return next(line for line in lines if line.startswith(("FAILED ", "ERROR ")))
    return lines[-1] if lines else f"exit code {code}"
