"""Coverage of a stage: which results were compared, which gradients there were, at which sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from retrograd.check.schema import StageResult
from retrograd.check.sizes import elements
from retrograd.check.stages import StageContext

_UNJUDGED = " is not judged in "  # between a subject and its reason


@dataclass(frozen=True)
class Coverage:
    """What is written down while a stage runs, in the contexts of all dtypes."""

    contexts: tuple[StageContext, ...]

    @classmethod
    def begin(cls, contexts: Iterable[StageContext]) -> Coverage:
        """The coverage of a stage in which nothing has run yet."""
        coverage = cls(tuple(contexts))
        for context in coverage.contexts:
            for notes in (context.judge.compared, context.runner.gradients, context.runner.uncompared):
                notes.clear()
            context.runner.judged.clear()
        return coverage

    def fields(self, earlier: StageResult) -> dict[str, Any]:
        """The fields of `StageResult` that say it, together with what cases of the stage before these covered."""
        compared = dict.fromkeys([*earlier.compared, *(name for c in self.contexts for name in c.judge.compared)])
        gradients = dict.fromkeys([*earlier.gradients, *(name for c in self.contexts for name in c.runner.gradients)])
        others = [f"{name} ({kind})" for c in self.contexts for name, kind in c.runner.uncompared.items()]
        ranges: dict[str, list[int]] = {name: [low, high] for name, low, high in earlier.sizes}
        for case in (case for c in self.contexts for case in c.runner.judged):
            for name, size in case.sizes:
                ranges.setdefault(name, []).append(elements(size))
        return {
            "compared": tuple(compared),
            "gradients": tuple(gradients),
            "uncompared": tuple(dict.fromkeys([*earlier.uncompared, *others])),
            "sizes": tuple((name, min(counts), max(counts)) for name, counts in ranges.items()),
        }


def joined(notes: Iterable[str]) -> tuple[str, ...]:
    """Notes of a stage, each once; all that is not judged for the same reason is one note."""
    subjects: dict[str, dict[str, None]] = {}
    for note in notes:
        subject, middle, reason = note.rpartition(_UNJUDGED)
        subjects.setdefault(middle + reason, {})[subject] = None
    return tuple(
        ", ".join(names) + (end if len(names) == 1 else end.replace(" is ", " are ", 1))
        for end, names in subjects.items()
    )
