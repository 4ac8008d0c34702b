"""What `retrograd codegen` says: a table over architectures a kernel, for a terminal, as a page, as annotations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from retrograd.codegen.schema import Codegen, Facts, Hazard, Kernel, Violation, widths
from retrograd.report import wording
from retrograd.report.github import command

_MOST_CONFIGURATIONS = 3  # named one by one
_VERDICT_STYLE = {"better": "green", "worse": "bold red", "changed": ""}


@dataclass(frozen=True)
class Section:
    """One kernel on every architecture: a heading, rows of cells with a line for each entry, and what is said below."""

    title: str
    heading: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
    asked: tuple[str, ...]
    errors: tuple[str, ...]
    hazards: tuple[tuple[str, Hazard], ...]
    again: int  # hazards that an earlier kernel of that name has told
    kernels: tuple[Kernel, ...]


def sections(record: Codegen) -> list[Section]:
    """Kernels of one name side by side: the n-th of an architecture beside the n-th of the others.

    A hazard is told with the first kernel of a name that has it.
    """
    groups: dict[tuple[str, int], list[Kernel]] = {}
    seen: dict[tuple[str, str], int] = {}
    for kernel in record.kernels:
        at = seen.setdefault((kernel.name, kernel.target), 0)
        seen[kernel.name, kernel.target] = at + 1
        groups.setdefault((kernel.name, at), []).append(kernel)
    told: set[tuple[str, str, Hazard]] = set()
    return [_section(kernels, told) for kernels in groups.values()]


def _section(kernels: list[Kernel], told: set[tuple[str, str, Hazard]]) -> Section:
    built = [(k, k.facts) for k in kernels if k.facts is not None]
    facts = [f for _, f in built]
    rows = [*_options(facts)]
    for label, cell, always in _ROWS:
        cells = tuple(tuple(cell(f)) for f in facts)
        if facts and (always or any(cells)):
            rows.append((label, cells))
    if any(k.measured for k, _ in built):
        rows.append(("time", tuple(_time(k) for k, _ in built)))
    asked = dict.fromkeys(f"{a.text()}{f'  at {a.source}' if a.source else ''}" for f in facts for a in f.asked)
    hazards = list(_merged([(k.target, h) for k in kernels for h in k.hazards], len(kernels)))
    fresh = tuple((at, h) for at, h in hazards if (kernels[0].name, at, h) not in told)
    told |= {(kernels[0].name, at, h) for at, h in hazards}
    return Section(
        kernels[0].name,
        tuple(_heading(kernels, facts)),
        tuple(k.target for k, _ in built),
        tuple(rows),
        tuple(asked),
        tuple(f"does not compile for {k.target}: {k.error}" for k in kernels if k.error),
        fresh,
        len(hazards) - len(fresh),
        tuple(kernels),
    )


def _heading(kernels: list[Kernel], facts: list[Facts]) -> Iterable[str]:
    first = kernels[0]
    grid = f", grid {' x '.join(map(str, first.grid))}" if first.grid and len({k.grid for k in kernels}) == 1 else ""
    yield f"{first.place}  {first.launches} launch{'' if first.launches == 1 else 'es'}{grid}"
    if facts:
        yield ", ".join(f"{name} {kind}{_odd(facts[0], name)}" for name, kind in facts[0].arguments.items())
        same = [entry for entry in _constants(facts[0]) if all(entry in _constants(f) for f in facts)]
        yield from [" ".join(f"{name}={value}" for name, value in same)] if same else []
    if first.tuning is not None and first.tuning.configs > 1:
        choice = " ".join(f"{name}={value}" for name, value in first.tuning.choice.items())
        yield f"autotuned, one of {first.tuning.configs} configurations: {choice}"
        for how, names in (("set to zero", first.tuning.reset_to_zero), ("restored", first.tuning.restore_value)):
            if names:
                yield f"before each tuning run {', '.join(names)} {'is' if len(names) == 1 else 'are'} {how}"


def _options(facts: list[Facts]) -> Iterable[tuple[str, tuple[tuple[str, ...], ...]]]:
    """Rows of what differs between launches of different architectures, and of warps and stages."""
    differ = [tuple(e for e in _constants(f) if not all(e in _constants(g) for g in facts)) for f in facts]
    if any(differ):
        yield "constants", tuple(tuple(f"{name}={value}" for name, value in entries) for entries in differ)
    if facts:
        yield "warps, stages", tuple((f"{f.num_warps}, {f.num_stages}",) for f in facts)


def _constants(facts: Facts) -> list[tuple[str, str]]:
    return [(name, _constant(value)) for name, value in facts.constants.items()]


def _constant(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_constant, cast('Sequence[object]', value)))})"
    return str(value) if isinstance(value, (str, int, float, bool, type(None))) else "..."


def _odd(facts: Facts, name: str) -> str:
    """Alignment is worth a word where it is missing; of floating numbers nothing is known anyway."""
    kind = facts.arguments[name]
    return "" if name in facts.aligned or kind.startswith(("f", "bf")) else " (unaligned)"


def _counts(found: dict[str, int], short: Callable[[str], str] = str) -> list[str]:
    return [f"{count} x {short(name)}" for name, count in found.items()]


def _widths(found: dict[int, int]) -> list[str]:
    return [f"{count} x {width} B" for width, count in found.items()]


def _shared(op: str) -> Callable[[Facts], list[str]]:
    return lambda facts: _widths(widths(facts.shared_accesses, op))


def _product(name: str) -> str:
    """ "wgmma m64n64k8 tf32" of the whole name of an instruction."""
    parts = name.removeprefix("v_").replace("mma_async.", "").replace("kind::", "").split(".")
    return " ".join(parts) if len(parts) <= 3 else " ".join((parts[0], parts[1], parts[3]))


def _early(facts: Facts) -> list[str]:
    return [f"{facts.early} before it waits" if facts.early else "waits first"] if facts.pdl else []


def _contraction(facts: Facts) -> list[str]:
    """Whether a * b + c in the source may be rounded once; a word where there is something to round."""
    return [{True: "allowed", False: "no", None: "unknown"}[facts.fp_fusion]] if facts.fma else []


_ROWS: tuple[tuple[str, Callable[[Facts], list[str]], bool], ...] = (
    ("registers", lambda f: [str(f.registers)], True),
    ("spilled bytes", lambda f: [str(f.spill_bytes)], True),
    ("shared bytes", lambda f: [str(f.shared_bytes)], True),
    ("occupancy", lambda f: [f"{f.occupancy:.0%}"], True),
    ("programs / SM", lambda f: [str(f.programs_per_sm)], True),
    ("global loads", lambda f: _widths(f.load_bytes), True),
    ("global stores", lambda f: _widths(f.store_bytes), True),
    ("bulk copies", lambda f: [str(f.bulk_copies)] if f.bulk_copies else [], False),
    ("shared loads", _shared("load"), False),
    ("shared stores", _shared("store"), False),
    ("launched early", _early, False),
    ("atomics", lambda f: _counts(f.atomics), False),
    ("fences", lambda f: _counts(f.fences), False),
    ("tensor cores", lambda f: _counts(f.matrix, _product), False),
    ("TF32", lambda f: ["yes"] if f.tf32 else [], False),
    ("approximate", lambda f: _counts(f.approximations, lambda name: name.removesuffix(".f32")), False),
    ("flush to zero", lambda f: [str(f.flushing)] if f.flushing else [], False),
    ("fused a*b+c", lambda f: [str(f.fma)] if f.fma else [], False),
    ("contraction", _contraction, False),
    ("float64", lambda f: ["yes"] if f.uses_f64 else [], False),
)


def _time(kernel: Kernel) -> tuple[str, ...]:
    found = kernel.measured
    if found is None:
        return ("not timed",)
    share = "" if found.share is None else f"{found.share:.0%} of a copy"
    return tuple(filter(None, (f"{found.ms * 1e3:.1f} us", f"{found.gb_per_s:.0f} GB/s", share)))


def _merged(found: list[tuple[str, Hazard]], targets: int) -> Iterable[tuple[str, Hazard]]:
    """Each hazard once, with the architectures if these are not all."""
    places: dict[Hazard, list[str]] = {}
    for target, hazard in found:
        places.setdefault(hazard, []).append(target)
    for hazard, names in places.items():
        yield "" if len(names) == targets else ", ".join(names), hazard


def verdict(record: Codegen) -> str:
    """How much there is, and whether limits are kept."""
    hazards = sum(len(section.hazards) for section in sections(record))
    kernels = wording.count(len(sections(record)), "kernel")
    said = [
        f"{kernels} for {wording.count(len(record.architectures), 'architecture')}",
        wording.count(hazards, "hazard"),
    ]
    if record.violations:
        said.append(wording.count(len(violated(record)), "violation"))
    else:
        said.append("all limits kept" if record.limits else "no limits set")
    return ", ".join(said)


def changed(record: Codegen) -> list[tuple[str, str, str]]:
    """(better or worse, kernel, sentence with its architectures), worse first."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for change in record.changes:
        places.setdefault((change.verdict, change.kernel, change.what), []).append(change.target)
    order = ("worse", "better", "changed")
    found: list[tuple[str, str, str]] = []
    for (kind, kernel, what), at in places.items():
        names = list(dict.fromkeys(at))
        where = "" if len(names) == len(record.architectures) else f" ({', '.join(names)})"
        found.append((kind, kernel, f"{what}{where}"))
    return sorted(found, key=lambda entry: order.index(entry[0]))


def violated(record: Codegen) -> list[str]:
    """Sentences of limits that are not kept, each with its architectures and configurations."""
    return [f"{one.kernel} for {at} {text}" for one, at, text in _broken(record)]


def _broken(record: Codegen) -> Iterable[tuple[Violation, str, str]]:
    """(the first of its kind, architectures, sentence with configurations)."""
    groups: dict[tuple[str, str], list[Violation]] = {}
    for entry in record.violations:
        groups.setdefault((entry.kernel, entry.what), []).append(entry)
    for (_, what), entries in groups.items():
        at = ", ".join(dict.fromkeys(entry.target for entry in entries))
        how = list(dict.fromkeys(entry.configuration for entry in entries if entry.configuration))
        which = f" ({'; '.join(how)})" if len(how) <= _MOST_CONFIGURATIONS else f" ({len(how)} configurations)"
        yield entries[0], at, f"{what}{which if how else ''}"


def render(record: Codegen, console: Console, everything: bool = False) -> None:
    """Print a record; `everything` adds each access to memory with its line."""
    _line(console, head(record), "bold")
    for section in sections(record):
        _line(console)
        _print(section, console, everything)
    if record.against:
        _line(console)
        _line(console, f"against {record.against}: {compared(record)}", "bold")
        for kind, kernel, what in changed(record):
            _line(console, f"  {kind:<8}{kernel}: {what}", _VERDICT_STYLE[kind])
    if record.notes or record.violations:
        _line(console)
    for note in record.notes:
        _line(console, f"note: {note}")
    for text in violated(record):
        _line(console, f"limit: {text}", "bold red")
    _line(console)
    _line(console, verdict(record), "bold red" if record.violations else "bold green")


def head(record: Codegen) -> str:
    """What was looked at, and how."""
    version = f" by Triton {record.versions['triton']}" if "triton" in record.versions else ""
    return f"retrograd codegen {record.target}: {record.origin}{version}"


def compared(record: Codegen) -> str:
    """How many changes there are of each kind."""
    found = changed(record)
    counts = [(sum(v == kind for v, _, _ in found), kind) for kind in ("worse", "better", "changed")]
    nothing = "nothing differs in what both have" if record.notes else "nothing differs"
    return ", ".join(f"{count} {kind}" for count, kind in counts if count) or nothing


def _print(section: Section, console: Console, everything: bool) -> None:
    _line(console, section.title, "bold cyan")
    for line in section.heading:
        _line(console, f"  {line}", "dim")
    if section.columns:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        for _ in section.columns:
            table.add_column(overflow="fold")
        table.add_row("", *(Text(name, style="bold") for name in section.columns))
        for label, cells in section.rows:
            table.add_row(Text(f"  {label}", style="dim"), *(Text("\n".join(cell) or "-") for cell in cells))
        console.print(table)
    for text in section.asked:
        _line(console, f"  source asks for atomic {text}", "dim")
    for text in section.errors:
        _line(console, f"  {text}", "bold red")
    for at, hazard in section.hazards:
        _line(console, f"  hazard: {said(at, hazard)}", "yellow")
        if hazard.advice:
            _line(console, f"          {hazard.advice}")
    if section.again:
        _line(console, f"  {again(section)}", "yellow")
    if everything:
        _accesses(section, console)


def said(at: str, hazard: Hazard) -> str:
    """A hazard in a line."""
    return f"{hazard.what}{f'  at {hazard.source}' if hazard.source else ''}{f'  ({at})' if at else ''}"


def again(section: Section) -> str:
    """That hazards were told before."""
    return f"{wording.count(section.again, 'hazard')} as above"


def _accesses(section: Section, console: Console) -> None:
    for kernel in section.kernels:
        for space in ("global", "shared") if kernel.facts is not None else ():
            assert kernel.facts is not None
            for a in kernel.facts.accesses if space == "global" else kernel.facts.shared_accesses:
                width = f"{a.bytes} B" if a.bytes else a.kind
                names = f" ({', '.join(a.names)})" if a.names else ""
                _line(console, f"  {kernel.target:<7} {a.count:>4} x {space} {a.op} {width}  {a.source}{names}", "dim")


def to_text(record: Codegen, width: int = 140) -> str:
    """The record as plain text without colour."""
    out = StringIO()
    render(record, Console(file=out, width=width, color_system=None, force_terminal=False), everything=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def to_html(record: Codegen) -> str:
    """The record as one page that needs no network."""
    from markupsafe import Markup

    from retrograd.report import codegen as own
    from retrograd.report.html import island, template

    return template("codegen.html.j2").render(record=record, words=own, island=Markup(island(record)))


def to_github(record: Codegen) -> str:
    """An error for each limit that is not kept, a warning for each hazard and what got worse, then a notice."""
    lines: list[str] = []
    for one, at, text in _broken(record):
        lines.append(command("error", f"{one.kernel}: {at}", text, **_place(one.place)))
    # Hazards that are forbidden are errors already.
    for section in sections(record) if not record.limits.get("no_hazards") else ():
        for at, hazard in section.hazards:
            place = _place(section.kernels[0].place, hazard.source)
            lines.append(command("warning", section.title, "\n".join((said(at, hazard), hazard.advice)), **place))
    for kind, kernel, what in changed(record):
        if kind == "worse":
            lines.append(command("warning", f"{kernel}: worse than {record.against}", what))
    lines.append(command("notice", f"retrograd codegen {record.target}", verdict(record)))
    return "\n".join(lines) + "\n"


def _place(place: str, source: str = "") -> dict[str, str]:
    """File and line of an annotation; `source` is a line in the same file, or in another that has no path here."""
    file, _, line = place.rpartition(":")
    name, _, at = source.rpartition(":")
    if not file:
        return {}
    return {"file": file, "line": at if name and file.endswith(name) else line}


def _line(console: Console, text: str = "", style: str = "") -> None:
    # A Text object, because names such as `x[bold]` would be read as markup in a plain string.
    safe = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    console.print(Text(safe, style=style), soft_wrap=True)


def hazard_lines(section: Section) -> Sequence[tuple[str, str]]:
    """Hazards of a section with their advice, for the page."""
    return [(said(at, hazard), hazard.advice) for at, hazard in section.hazards]
