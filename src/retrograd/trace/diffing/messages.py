"""The text of a comparison: lines with their style. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.trace.diffing.schema import Cause, Seen, Side, TraceDiff

_MOST_CAUSES = 10
_MODES = {"bitwise": "bit for bit", "attainable": "within the attainable error", "names": "in their operators"}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def verdict(diff: TraceDiff) -> str:
    """Same or different, in a few words."""
    if not diff.causes:
        return f"the same {_MODES[diff.mode]}"
    first, *rest = diff.causes
    seen = first.b or first.a
    more = _count(len(rest), "more cause")
    at = f" at operator {seen.index} (step {seen.step}, {seen.phase})" if seen else ""
    return f"different: first{at}{f', and {more}' if rest else ''}"


def facts(side: Side) -> str:
    """How large a run is, and where it ran."""
    said = [_count(side.ops, "operator"), _count(side.steps, "step"), *side.devices, f"level {side.level}"]
    return ", ".join([*said, *([f"rank {side.rank}"] if side.rank else [])])


def counts(diff: TraceDiff) -> str:
    """What is the same, and what differs because of what it was given."""
    said = [f"{_count(diff.matched, 'operator')} the same"]
    said += [f"{diff.within} within rounding"] if diff.within else []
    said += [f"{diff.carried} differ only because of what they were given"] if diff.carried else []
    return ", ".join(said) + (f"; {diff.seconds:.2f} s" if diff.seconds else "")


def lines(diff: TraceDiff, everything: bool = True) -> Iterator[tuple[str, str]]:
    """The verdict, the causes in the order of the run, notes, counts."""
    yield verdict(diff), "bold green" if diff.same else "bold red"
    for letter, side in (("A", diff.a), ("B", diff.b)):
        yield f"{letter}  {side.title}: {facts(side)}", "dim"
    most = len(diff.causes) if everything else _MOST_CAUSES
    for number, cause in enumerate(diff.causes[:most], 1):
        yield "", ""
        yield from _cause(f"{number}. ", cause)
    if len(diff.causes) > most:
        yield "", ""
        yield f"{len(diff.causes) - most} more causes; --all prints them", "dim"
    yield "", ""
    for note in diff.notes:
        yield f"note: {note}", ""
    yield counts(diff), "dim"


def _cause(number: str, cause: Cause) -> Iterator[tuple[str, str]]:
    indent = " " * len(number)
    yield f"{number}{cause.what}{f'  ({cause.count} places)' if cause.count > 1 else ''}", "bold"
    pairs = [("at", cause.where), ("line", cause.code), ("in", cause.inside), ("why", cause.why), ("do", cause.advice)]
    for label, text in pairs:
        if text:
            yield f"{indent}{label:<6}{text}", ""
    yield from ((f"{indent}{text}", "dim") for text in values(cause))
    for other in cause.others[:3]:
        yield f"{indent}also  {other}", "dim"
    if len(cause.others) > 3:
        yield f"{indent}      and {len(cause.others) - 3} more", "dim"


def values(cause: Cause) -> Iterator[str]:
    """The tensors that differ, in A and in B; of an operator without a counterpart its outputs."""
    for letter, seen in (("A", cause.a), ("B", cause.b)):
        if seen is not None:
            for name, text in shown(seen):
                yield f"{letter}     {name}: {text}"


def shown(seen: Seen) -> Iterator[tuple[str, str]]:
    """The tensors of an operator that differ, or its outputs if none does."""
    every = [(f"input {t.index}", t) for t in seen.inputs]
    every += [(f"output {t.index}" if len(seen.outputs) > 1 else "output", t) for t in seen.outputs]
    differ = [(name, t.text) for name, t in every if t.differs][:4]
    yield from differ or [(name, t.text) for name, t in every if name.startswith("output")][:2]
