"""What `retrograd graph` says, for a terminal and as annotations of GitHub Actions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from retrograd.graph.record import Cause, Crossing, Diff, Follow, Side, Step, Unique
from retrograd.report import words
from retrograd.report.github import command

GraphRecord: TypeAlias = Diff | Unique | Follow

# What differs where nothing computed does, in words.
_HARMLESS = {
    "barrier_changed": "barriers",
    "packaging_only": "packaging",
    "dead_code_only": "dead code",
    "layout_only": "layouts",
}
LEVELS = {
    "text": "as texts",
    "names": "up to names",
    "dead code": "up to dead code and packaging",
    "parameter order": "up to the order of parameters",
}
# What is printed without `--all`.
_MOST_CAUSES = 20
_MOST_NAMES = 6
_MOST_STEPS = 60
_MOST_CROSSINGS = 12
# From this depth on branches are not indented any further: a line must stay readable.
_DEEPEST = 12


def render(record: GraphRecord, console: Console, everything: bool = False) -> None:
    """Print a record; `everything` leaves nothing out."""
    for text, style in lines(record, everything):
        _line(console, text, style)
    if isinstance(record, Unique):
        console.print(_table(record))


def to_text(record: GraphRecord, width: int = 120, everything: bool = True) -> str:
    """The record as plain text without colour."""
    out = StringIO()
    render(record, Console(file=out, width=width, color_system=None, force_terminal=False), everything)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def lines(record: GraphRecord, everything: bool) -> Iterable[tuple[str, str]]:
    """Lines with their style; of `Unique` those above its table."""
    if isinstance(record, Diff):
        return diff_lines(record, everything)
    return unique_lines(record) if isinstance(record, Unique) else follow_lines(record, everything)


# Diff.


def verdict(diff: Diff) -> str:
    """Same or different, in a few words."""
    if diff.causes:
        return f"different: {_count(len(diff.causes), 'cause')}"
    kinds = list(dict.fromkeys(_HARMLESS.get(note.kind, note.kind.replace("_", " ")) for note in diff.notes))
    return f"same computation; only {_listed(kinds)} differ" if kinds else "same computation"


def diff_lines(diff: Diff, everything: bool = True) -> Iterable[tuple[str, str]]:
    """The verdict, the causes with first cause first, what is harmless, and what is counted only."""
    yield verdict(diff), "bold red" if diff.causes else "bold green"
    for letter, side in (("A", diff.a), ("B", diff.b)):
        yield f"{letter}  {side.title}: {facts(side)}", "dim"
    most = len(diff.causes) if everything else _MOST_CAUSES
    for number, cause in enumerate(diff.causes[:most], 1):
        yield "", ""
        yield from _cause_lines(f"{number}. ", cause, everything)
    if len(diff.causes) > most:
        yield "", ""
        yield f"{len(diff.causes) - most} more causes; --all prints them", "dim"
    if diff.notes:
        yield "", ""
        yield "harmless:", ""
        for note in diff.notes:
            yield f"  {note.text()}", ""
    yield "", ""
    yield counts(diff), "dim"


def _cause_lines(number: str, cause: Cause, everything: bool) -> Iterable[tuple[str, str]]:
    indent = " " * len(number)
    more = f"  ({cause.count} places)" if cause.count > 1 else ""
    yield f"{number}{cause.what}{more}", "bold"
    for label, text in (
        ("at", cause.where),
        ("in A", _some(cause.a, everything)),
        ("in B", _some(cause.b, everything)),
        ("do", cause.advice),
    ):
        if text:
            yield f"{indent}{label:<5}{text}", ""


def facts(side: Side) -> str:
    """How large a graph is."""
    said = [
        _count(side.instructions, "instruction"),
        _count(side.parameters, "parameter"),
        _count(side.outputs, "output"),
        _count(side.collectives, "collective"),
    ]
    return ", ".join([*said, *([f"{side.dead} dead"] if side.dead else [])])


def counts(diff: Diff) -> str:
    """What is the same, and what differs because something below it does."""
    said = f"{_count(diff.matched, 'value')} match"
    if diff.consequences:
        said += f", {diff.consequences} differ only because something below them does"
    return f"{said}{f'; {words.duration(diff.seconds)}' if diff.seconds else ''}"


# Unique.


def unique_lines(unique: Unique) -> Iterable[tuple[str, str]]:
    """How many graphs there are at each level."""
    total = len(unique.titles)
    real = unique.levels[-2 if len(unique.levels) > 1 else -1].unique if unique.levels else 0
    for level in unique.levels:
        if level.name == "dead code":
            real = level.unique
    yield f"{_count(real, 'different computation')} in {_count(total, 'graph')}", "bold"
    for level in unique.levels:
        yield f"  {level.unique:>4}  {LEVELS.get(level.name, level.name)}", ""
    known = [key for key in unique.recorded if key]
    if known:
        yield f"  {len(set(known)):>4}  by the keys recorded with {_all_or(len(known), total)}", ""
    yield "", ""


def letter(number: int) -> str:
    """0 -> A, 25 -> Z, 26 -> AA."""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(ord("A") + rest) + text
    return text


def unique_rows(unique: Unique) -> list[tuple[str, ...]]:
    """A heading and a row for each graph: its letter at each level, recorded key, size."""
    keyed = any(unique.recorded)
    head = ("graph", *(level.name for level in unique.levels), *(["recorded key"] if keyed else []), "instructions")
    found = [(*head, "parameters", "outputs")]
    for k, title in enumerate(unique.titles):
        letters = [letter(level.members[k]) for level in unique.levels]
        recorded = [short(unique.recorded[k])] if keyed else []
        side = unique.sides[k]
        found.append((title, *letters, *recorded, *map(str, (side.instructions, side.parameters, side.outputs))))
    return found


def short(key: str) -> str:
    """The beginning of a key, enough to tell a handful apart."""
    return key[:12]


def _table(unique: Unique) -> Table:
    return _grid(unique_rows(unique), right=3)


def listing(sides: Sequence[Side], console: Console, recorded: Sequence[str]) -> None:
    """Print what graphs files hold, one a line."""
    head = ("graph", "name", "format", "key", "recorded", "instructions", "dead", "parameters", "outputs", "collectives")
    rows = [head]
    for side, key in zip(sides, recorded, strict=True):
        sizes = (side.instructions, side.dead, side.parameters, side.outputs, side.collectives)
        rows.append((side.title, side.name, side.format, short(side.key), short(key), *map(str, sizes)))  # type: ignore[arg-type]
    console.print(_grid(rows, right=5))


def _grid(rows: Sequence[Sequence[str]], right: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for k in range(len(rows[0])):
        numbers = k >= len(rows[0]) - right
        table.add_column(justify="right" if numbers else "left", no_wrap=k > 0, overflow="fold")
    for at, row in enumerate(rows):
        # Text objects, because names such as `x[bold]` would be read as markup.
        table.add_row(*(Text(cell, style="dim" if at == 0 else "") for cell in row))
    return table


# Follow.


def follow_lines(follow: Follow, everything: bool = True) -> Iterable[tuple[str, str]]:
    """What was followed, what it reaches, and the trail."""
    yield from head_lines(follow, everything)
    yield "", ""
    yield from _trail(follow, everything, None if everything else _MOST_STEPS)


def head_lines(follow: Follow, everything: bool = True) -> Iterable[tuple[str, str]]:
    """What was followed, and what it reaches."""
    name = _part(follow.steps[0]) if follow.steps else follow.id
    asked = name if name == follow.asked.strip().lstrip("%") else f"{follow.asked} = {name}"
    yield f"{asked}: {reaches(follow)}", "bold yellow" if follow.dead else "bold"
    yield f"{follow.opcode} {_shape(follow.shape)}{_at(follow.where)}, in {follow.title}", "dim"
    yield from ((note, "") for note in follow.notes)
    yield from _crossing_lines(follow, everything)
    yield from _output_lines(follow)


def reaches(follow: Follow) -> str:
    """The outputs and effects that depend on the value, or that it is dead."""
    if follow.dead:
        if follow.ends == (follow.id,):
            return "dead: nobody uses it"
        ends = f"; it ends at {_some(follow.ends, False)}" if follow.ends else ""
        return f"dead: no output depends on it{ends}"
    said = f"reaches {len(follow.outputs)} of {_count(follow.outputs_of, 'output')}" if follow.outputs else "no output"
    crossed = len({crossing.ordinal for crossing in follow.collectives})
    said += f", through {_count(crossed, 'collective')}" if crossed else ", through no collective"
    return said + (f", and has effects: {_some(follow.effects, False)}" if follow.effects else "")


def _crossing_lines(follow: Follow, everything: bool) -> Iterable[tuple[str, str]]:
    """A line a collective: those of its operands that are the value itself, and those computed from it."""
    groups: dict[tuple[int, bool], list[Crossing]] = {}
    for crossing in follow.collectives:
        groups.setdefault((crossing.ordinal, crossing.exact), []).append(crossing)
    most = len(groups) if everything else _MOST_CROSSINGS
    for found in list(groups.values())[:most]:
        c = found[0]
        place = f"{c.opcode} {c.nth} of {c.alike}, collective {c.ordinal} of {c.collectives}"
        exact = "the value itself" if c.exact else "computed from it"
        yield f"  into {c.id} ({place}): {_operands(found)}{exact}{_at(c.where)}", ""
    if len(groups) > most:
        yield f"  and into {len(groups) - most} more collectives; --all prints them", "dim"


def _operands(found: Sequence[Crossing]) -> str:
    c = found[0]
    if c.of == 1:
        return ""
    results = [x.result for x in found if x.result >= 0]
    said = f"operand{'s' if len(found) > 1 else ''} {ranges([x.operand for x in found])} of {c.of}"
    return said + (f" -> result{'s' if len(results) > 1 else ''} {ranges(results)}, " if results else ", ")


def _output_lines(follow: Follow) -> Iterable[tuple[str, str]]:
    itself = [o.index for o in follow.outputs if o.exact]
    computed = [o.index for o in follow.outputs if not o.exact]
    if itself:
        yield f"  is {_outputs(itself)}", ""
    if computed:
        yield f"  goes into {_outputs(computed)}", ""


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


def trail(follow: Follow) -> Iterable[str]:
    """The steps, a text each: side ways first, behind a line for each way that is open; the longest way goes on left."""
    return (text for text, _ in _trail(follow, True, None))


def _trail(follow: Follow, everything: bool, most: int | None) -> Iterable[tuple[str, str]]:
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
        yield f"{lead}{'- ' if begins else ''}{_step(steps, last, packed, everything)}", _style(steps[last])
        printed, shown = printed + 1, shown + 1 + len(packed)
        ways = sorted(children[last], key=lambda k: weight[k])
        pending += [(k, depth + (k != ways[-1]), k != ways[-1]) for k in reversed(ways)]
    if follow.total > shown:
        yield f"... and {follow.total - shown} more steps{'' if most is None else '; --all prints them'}", "dim"


def _packed(steps: Sequence[Step], children: Sequence[Sequence[int]], first: int) -> tuple[int, list[int]]:
    """The step that a line is about, and the packaging before it that goes on the same line."""
    packed: list[int] = []
    at = first
    while steps[at].how == "packaging" and len(children[at]) == 1 and not steps[at].outputs:
        packed.append(at)
        at = children[at][0]
    return at, packed


def _step(steps: Sequence[Step], k: int, packed: Sequence[int], everything: bool) -> str:
    step = steps[k]
    # `add.7  add` would say it twice.
    said = f"{_part(step)}  {'' if step.opcode in step.id else step.opcode + ' '}{_shape(step.shape)}"
    if len(step.operands) > 1 or (step.operands and step.how == "used"):
        said += f", operand {', '.join(map(str, step.operands))}"
    if step.collective:
        said += f", collective {step.collective}"
    said += _at(step.where) if step.how not in ("packaging", "order") else ""
    said += _via([steps[p] for p in packed], everything)
    if step.how == "order":
        said += "  (ends here: it only puts collectives in order)"
    elif step.ends:
        said += "  (ends here: nobody uses it)"
    return said + (f"  => {_outputs(step.outputs)}" if step.outputs else "")


def _via(packed: Sequence[Step], everything: bool) -> str:
    """What hands a value on; what is taken out of a tuple says no more than the element that was put in."""
    told = [step for step in packed if everything or step.opcode != "get-tuple-element"] or packed
    names = [_part(step) for step in told]
    if not everything and len(names) > _MOST_NAMES:
        names = [*names[:3], f"{len(names) - 5} more", *names[-2:]]
    return f"  [via {', '.join(names)}]" if names else ""


def _part(step: Step) -> str:
    return f"{step.id}[{step.part}]" if step.part else step.id


def _shape(shape: str) -> str:
    """A tuple of thirty shapes says nothing beside its element's number."""
    return shape if len(shape) <= 60 else f"{shape[:40]}...)"


def _style(step: Step) -> str:
    return "bold" if step.collective else "green" if step.outputs else "dim" if step.ends or step.how == "order" else ""


# GitHub.


def to_github(record: GraphRecord) -> str:
    """One annotation a cause, at its line where that is the user's, then a notice with the verdict."""
    from retrograd.graph.places import is_library

    found = []
    title = "retrograd graph"
    if isinstance(record, Diff):
        title = f"retrograd graph diff {record.a.title} {record.b.title}"
        for cause in record.causes:
            file, _, line = cause.where.rpartition(":")
            users = file and line.isdigit() and not is_library(file)
            text = "\n".join(filter(None, [cause.what, "" if users else cause.where, cause.advice]))
            place = {"file": file, "line": line} if users else {}
            found.append(command("error", cause.kind.replace("_", " "), text, **place))
    (first, _), *_ = lines(record, False)
    found.append(command("notice", title, first))
    return "\n".join(found) + "\n"


# Words.


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _some(names: Sequence[str], everything: bool) -> str:
    most = len(names) if everything else _MOST_NAMES
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _all_or(number: int, total: int) -> str:
    return "them" if number == total else f"{number} of them"


def _at(where: str) -> str:
    return f"  at {where}" if where else ""


def _line(console: Console, text: str, style: str) -> None:
    # A Text object, because names such as `x[bold]` would be read as markup in a plain string.
    console.print(Text(text, style=style), soft_wrap=True)
