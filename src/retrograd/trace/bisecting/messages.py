"""The text of a bisection: lines with their style. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.trace.bisecting.schema import Bisection, Culprit


def verdict(found: Bisection) -> str:
    """What came out, in a sentence."""
    if found.verdict == "within":
        return f"no mismatch: the error {found.before:.2g} is within the tolerance {found.tolerance:.2g}"
    if found.verdict == "undecided":
        return (
            f"not a matter of operators' precision: with all of them in {found.precision} the error is "
            f"{found.everything:.2g}, the tolerance {found.tolerance:.2g}"
        )
    noun = found.by if len(found.culprits) == 1 else f"{found.by}s"
    return f"{len(found.culprits)} {noun} in {found.precision}: error {found.before:.2g} -> {found.after:.2g}"


def facts(found: Bisection) -> str:
    """The errors, and how they were found."""
    return (
        f"error {found.before:.2g} as it is ({found.worst}), {found.everything:.2g} with every operator in "
        f"{found.precision}, tolerance {found.tolerance:.2g}; {found.candidates} operators, {found.runs} runs, "
        f"{found.seconds:.1f} s"
    )


def place(culprit: Culprit) -> str:
    """Line, module and phase, as far as they are known."""
    module = f"module {culprit.module}" if culprit.module and f"module {culprit.module}" != culprit.name else ""
    return ", ".join(filter(None, (culprit.place, module, culprit.phase)))


def lines(found: Bisection) -> Iterator[tuple[str, str]]:
    """The verdict, the culprits in the order of the step, notes."""
    tone = {"within": "bold green", "found": "bold red", "undecided": "bold yellow"}[found.verdict]
    yield verdict(found), tone
    yield f"{found.target}: {facts(found)}" if found.target else facts(found), "dim"
    for number, culprit in enumerate(found.culprits, 1):
        indent = " " * len(f"{number}. ")
        yield "", ""
        yield f"{number}. {culprit.name}{f'  ({culprit.ops} operators)' if culprit.ops > 1 else ''}", "bold"
        yield f"{indent}at     {place(culprit)}", ""
        if culprit.code:
            yield f"{indent}line   {culprit.code}", ""
        yield f"{indent}error  {found.before:.2g} -> {culprit.alone:.2g} with it alone in {found.precision}", ""
        if len(found.culprits) > 1:
            yield f"{indent}       {culprit.without:.2g} with the others so, and it as it is", ""
    if found.notes:
        yield "", ""
    for note in found.notes:
        yield f"note: {note}", ""
