"""Messages of a followed value: what it reaches, then every step on the way, as lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from retrograd.core import document as doc
from retrograd.core.wording import at_line, count, some
from retrograd.graph.schema import Crossing, FlowStep, Follow

# What is printed without `--all`.
MOST_STEPS = 60
_MOST_CROSSINGS = 12
_MOST_NAMES = 6
# From this depth on branches are not indented any further: a line must stay readable.
_DEEPEST = 12


def head_lines(follow: Follow, everything: bool = True) -> Iterable[doc.TextLine]:
    """What was followed, and what it reaches."""
    name = _part(follow.steps[0]) if follow.steps else follow.id
    asked = name if name == follow.asked.strip().lstrip("%") else f"{follow.asked} = {name}"
    yield doc.TextLine(f"{asked}: {reaches(follow)}", "bold yellow" if follow.dead else "bold")
    yield doc.TextLine(f"{follow.opcode} {_shape(follow.shape)}{at_line(follow.where)}, in {follow.title}", "dim")
    yield from map(doc.TextLine, follow.notes)
    yield from _crossing_lines(follow, everything)
    yield from _output_lines(follow)


def reaches(follow: Follow) -> str:
    """The outputs and effects that depend on the value, or that it is dead."""
    if follow.dead:
        if follow.ends == (follow.id,):
            return "dead: nobody uses it"
        ends = f"; it ends at {some(follow.ends, _MOST_NAMES)}" if follow.ends else ""
        return f"dead: no output depends on it{ends}"
    text = f"reaches {len(follow.outputs)} of {count(follow.outputs_of, 'output')}" if follow.outputs else "no output"
    crossed = len({crossing.id for crossing in follow.collectives})
    text += f", through {count(crossed, 'collective')}" if crossed else ", through no collective"
    return text + (f", and has effects: {some(follow.effects, _MOST_NAMES)}" if follow.effects else "")


def _crossing_lines(follow: Follow, everything: bool) -> Iterable[doc.TextLine]:
    """A line a collective: those of its operands that are the value itself, and those computed from it."""
    groups: dict[tuple[str, bool], list[Crossing]] = {}
    for crossing in follow.collectives:
        groups.setdefault((crossing.id, crossing.exact), []).append(crossing)
    most = len(groups) if everything else _MOST_CROSSINGS
    for crossings in list(groups.values())[:most]:
        c = crossings[0]
        place = f"{c.opcode} {c.nth} of {c.alike}, collective {c.ordinal} of {c.collectives}"
        place = place if c.ordinal else "which no output needs"
        exact = "the value itself" if c.exact else "computed from it"
        yield doc.TextLine(f"  into {c.id} ({place}): {_operands(crossings)}{exact}{at_line(c.where)}")
    if len(groups) > most:
        yield doc.TextLine(f"  and into {len(groups) - most} more collectives; --all prints them", "dim")


def _operands(crossings: Sequence[Crossing]) -> str:
    of = crossings[0].of
    if of == 1:
        return ""
    results = [x.result for x in crossings if x.result >= 0]
    text = f"operand{'s' if len(crossings) > 1 else ''} {ranges([x.operand for x in crossings])} of {of}"
    return text + (f" -> result{'s' if len(results) > 1 else ''} {ranges(results)}, " if results else ", ")


def _output_lines(follow: Follow) -> Iterable[doc.TextLine]:
    itself = [o.index for o in follow.outputs if o.exact]
    computed = [o.index for o in follow.outputs if not o.exact]
    if itself:
        yield doc.TextLine(f"  is {_outputs(itself)}")
    if computed:
        yield doc.TextLine(f"  goes into {_outputs(computed)}")


def _outputs(numbers: Sequence[int]) -> str:
    return f"output{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers for reading: "0, 3-7, 9"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def trail(follow: Follow, everything: bool = True, most: int | None = None) -> Iterable[doc.TextLine]:
    """The steps, each a text and its style. Side ways come first, with a dash, the longest last at the same depth."""
    steps = follow.steps
    children: list[list[int]] = [[] for _ in steps]
    weight = [1] * len(steps)
    for k in range(len(steps) - 1, 0, -1):
        children[steps[k].parent].insert(0, k)
        weight[steps[k].parent] += weight[k]
    printed, shown = 0, 0
    pending = [(0, 0, False)] if steps else []
    while pending and (most is None or printed < most):
        first, depth, begins = pending.pop()
        last, packed = _packed(steps, children, first)
        lead = "  " * min(depth - begins, _DEEPEST) if depth else ""
        yield doc.TextLine(
            f"{lead}{'- ' if begins else ''}{_step(steps, last, packed, everything)}", _style(steps[last])
        )
        printed, shown = printed + 1, shown + 1 + len(packed)
        ways = sorted(children[last], key=lambda k: weight[k])
        pending += [(k, depth + (k != ways[-1]), k != ways[-1]) for k in reversed(ways)]
    if follow.total > shown:
        yield doc.TextLine(
            f"... and {follow.total - shown} more steps{'' if most is None else '; --all prints them'}", "dim"
        )


def _packed(steps: Sequence[FlowStep], children: Sequence[Sequence[int]], first: int) -> tuple[int, list[int]]:
    """The step that a line is about, and the packaging before it that goes on the same line."""
    packed: list[int] = []
    at = first
    while steps[at].how == "packaging" and len(children[at]) == 1 and not steps[at].outputs:
        packed.append(at)
        at = children[at][0]
    return at, packed


def _step(steps: Sequence[FlowStep], k: int, packed: Sequence[int], everything: bool) -> str:
    step = steps[k]
    # `add.7  add` would say it twice.
    text = f"{_part(step)}  {'' if step.opcode in step.id else step.opcode + ' '}{_shape(step.shape)}"
    if len(step.operands) > 1 or (step.operands and step.how == "used"):
        text += f", operand {', '.join(map(str, step.operands))}"
    if step.collective:
        text += f", collective {step.collective}"
    text += at_line(step.where) if step.how not in ("packaging", "order") else ""
    text += _via([steps[p] for p in packed], everything)
    if step.how == "order":
        text += "  (ends here: it only puts collectives in order)"
    elif step.ends:
        text += "  (ends here: nobody uses it)"
    return text + (f"  => {_outputs(step.outputs)}" if step.outputs else "")


def _via(packed: Sequence[FlowStep], everything: bool) -> str:
    """What hands a value on; what is taken out of a tuple says no more than the element that was put in."""
    shown = [step for step in packed if everything or step.opcode != "get-tuple-element"] or packed
    names = [_part(step) for step in shown]
    if not everything and len(names) > _MOST_NAMES:
        names = [*names[:3], f"{len(names) - 5} more", *names[-2:]]
    return f"  [via {', '.join(names)}]" if names else ""


def _part(step: FlowStep) -> str:
    return f"{step.id}[{step.part}]" if step.part else step.id


def _shape(shape: str) -> str:
    """A tuple of thirty shapes says nothing beside its element's number."""
    return shape if len(shape) <= 60 else f"{shape[:40]}...)"


def _style(step: FlowStep) -> str:
    return "bold" if step.collective else "green" if step.outputs else "dim" if step.ends or step.how == "order" else ""
