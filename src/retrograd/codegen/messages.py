"""Messages about generated code: a table over architectures a kernel, hazards, limits; as a document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from retrograd.codegen.schema import Codegen, Facts, Hazard, Kernel, Violation, widths
from retrograd.core import document as doc
from retrograd.core.wording import at_line, count

_MOST_CONFIGURATIONS = 3  # named one by one
_VERDICT_STYLE = {"better": "green", "worse": "bold red", "changed": ""}


@dataclass(frozen=True)
class _Comparison:
    """One kernel name on every architecture.

    `asked`, `errors` and `hazards` are sentences that stand below the table; `repeated` counts hazards that an earlier
    kernel of that name has told.
    """

    heading: tuple[str, ...]
    table: doc.Table | None
    asked: tuple[str, ...]
    errors: tuple[str, ...]
    hazards: tuple[tuple[str, Hazard], ...]
    repeated: int
    kernels: tuple[Kernel, ...]

    @property
    def title(self) -> str:
        return self.kernels[0].name


def document(record: Codegen, everything: bool = True) -> doc.Document:
    """The record; `everything` adds each access to memory with its line to the text."""
    comparisons = _comparisons(record)
    tone = "finding" if record.violations else "proved"
    verdict = _verdict(record, comparisons)
    head = _head(record)
    header = doc.Header(tone, head, (verdict, *record.notes))
    violations: tuple[doc.Section, ...] = ()
    if record.violations:
        violations = (doc.Section("Limits that are not kept", (doc.Paragraphs(tuple(violated(record)), "points"),)),)
    kernels = [_kernel_section(each) for each in comparisons]
    return doc.Document(
        title=head,
        text=tuple(_text(record, comparisons, verdict, everything)),
        page=(header, *violations, *_against(record), *kernels),
        brief=(header, *violations, *kernels),
        annotations=tuple(_annotations(record, comparisons, verdict)),
        file=record.target.rpartition(":")[0],
    )


def _head(record: Codegen) -> str:
    version = f" by Triton {record.versions['triton']}" if "triton" in record.versions else ""
    return f"retrograd codegen {record.target}: {record.origin}{version}"


def _verdict(record: Codegen, comparisons: Sequence[_Comparison]) -> str:
    """How much there is, and whether limits are kept."""
    kernels = f"{count(len(comparisons), 'kernel')} for {count(len(record.architectures), 'architecture')}"
    parts = [kernels, count(sum(len(each.hazards) for each in comparisons), "hazard")]
    if record.violations:
        parts.append(count(len(violated(record)), "violation"))
    else:
        parts.append("all limits kept" if record.limits else "no limits set")
    return ", ".join(parts)


def _text(
    record: Codegen, comparisons: Sequence[_Comparison], verdict: str, everything: bool
) -> Iterator[doc.TextLine | doc.Table]:
    yield doc.TextLine(_head(record), "bold")
    for each in comparisons:
        yield doc.TextLine()
        yield from _kernel_text(each)
        if everything:
            yield from (doc.TextLine(f"  {text}", "dim") for text in _accesses(each.kernels))
    if record.against:
        yield doc.TextLine()
        yield doc.TextLine(f"against {record.against}: {_compared(record)}", "bold")
        for kind, kernel, sentence in changed(record):
            yield doc.TextLine(f"  {kind:<8}{kernel}: {sentence}", _VERDICT_STYLE[kind])
    if record.notes or record.violations:
        yield doc.TextLine()
    yield from (doc.TextLine(f"note: {note}") for note in record.notes)
    yield from (doc.TextLine(f"limit: {text}", "bold red") for text in violated(record))
    yield doc.TextLine()
    yield doc.TextLine(verdict, "bold red" if record.violations else "bold green")


def _kernel_text(each: _Comparison) -> Iterator[doc.TextLine | doc.Table]:
    yield doc.TextLine(each.title, "bold cyan")
    yield from (doc.TextLine(f"  {line}", "dim") for line in each.heading)
    if each.table is not None:
        head = ("", *each.table.head[1:])
        rows = tuple((doc.Cell(f"  {label}", "dim"), *cells) for label, *cells in each.table.rows)
        yield doc.Table(head, rows, fold=tuple(range(1, len(head))))
    yield from (doc.TextLine(f"  source asks for atomic {text}", "dim") for text in each.asked)
    yield from (doc.TextLine(f"  {text}", "bold red") for text in each.errors)
    for where, hazard in each.hazards:
        yield doc.TextLine(f"  hazard: {_hazard(where, hazard)}", "yellow")
        if hazard.advice:
            yield doc.TextLine(f"          {hazard.advice}")
    if each.repeated:
        yield doc.TextLine(f"  {count(each.repeated, 'hazard')} as above", "yellow")


def _kernel_section(each: _Comparison) -> doc.Section:
    parts: list[doc.PagePart] = [doc.Paragraphs(each.heading)]
    parts += [] if each.table is None else [each.table]
    if each.asked:
        parts.append(doc.Paragraphs((f"The source asks for atomic {'; '.join(each.asked)}",)))
    parts += [doc.Card(text, tone="error") for text in each.errors]
    parts += [doc.Card(_hazard(where, h), aside=h.advice, tone="hazard") for where, h in each.hazards]
    if each.repeated:
        parts.append(doc.Paragraphs((f"{count(each.repeated, 'hazard')} as above",)))
    return doc.Section(each.title, tuple(parts))


def _against(record: Codegen) -> list[doc.Section]:
    if not record.against:
        return []
    rows = tuple((doc.Cell(kind, tone=kind), kernel, sentence) for kind, kernel, sentence in changed(record))
    return [doc.Section(f"Against {record.against}: {_compared(record)}", (doc.Table((), rows),) if rows else ())]


def _annotations(record: Codegen, comparisons: Sequence[_Comparison], verdict: str) -> Iterator[doc.Annotation]:
    """An error for each limit that is not kept, a warning for each hazard and what got worse, then a notice."""
    for violation, targets, text in _broken(record):
        yield doc.Annotation("error", f"{violation.kernel}: {targets}", text, violation.place, "codegen/limit")
    # Hazards that are forbidden are errors already.
    for each in comparisons if not record.limits.get("no_hazards") else ():
        for where, hazard in each.hazards:
            text = "\n".join((_hazard(where, hazard), hazard.advice))
            place = _place(each.kernels[0].place, hazard.source)
            yield doc.Annotation("warning", each.title, text, place, "codegen/hazard")
    for kind, kernel, sentence in changed(record):
        if kind == "worse":
            yield doc.Annotation("warning", f"{kernel}: worse than {record.against}", sentence, rule="codegen/worse")
    yield doc.Annotation("notice", f"retrograd codegen {record.target}", verdict)


def _place(place: str, source: str) -> str:
    """File and line of an annotation: `source` where it is a line of the same file, which has no path there."""
    file = place.rpartition(":")[0]
    name, _, line = source.rpartition(":")
    return f"{file}:{line}" if name and file.endswith(name) else place


def _accesses(kernels: Sequence[Kernel]) -> Iterator[str]:
    for kernel in kernels:
        facts = kernel.facts
        for space, accesses in () if facts is None else (("global", facts.accesses), ("shared", facts.shared_accesses)):
            for a in accesses:
                width = f"{a.bytes} B" if a.bytes else a.kind
                names = f" ({', '.join(a.names)})" if a.names else ""
                yield f"{kernel.target:<7} {a.count:>4} x {space} {a.op} {width}  {a.source}{names}"


def _hazard(targets: str, hazard: Hazard) -> str:
    return f"{hazard.what}{at_line(hazard.source)}{f'  ({targets})' if targets else ''}"


def _comparisons(record: Codegen) -> list[_Comparison]:
    """Kernels of one name side by side: the n-th of an architecture beside the n-th of the others.

    A hazard is told with the first kernel of a name that has it.
    """
    groups: dict[tuple[str, int], list[Kernel]] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for kernel in record.kernels:
        seen[kernel.name, kernel.target] += 1
        groups.setdefault((kernel.name, seen[kernel.name, kernel.target]), []).append(kernel)
    told: set[tuple[str, str, Hazard]] = set()
    return [_compare(kernels, told) for kernels in groups.values()]


def _compare(kernels: list[Kernel], told: set[tuple[str, str, Hazard]]) -> _Comparison:
    built = [(k, k.facts) for k in kernels if k.facts is not None]
    facts = [f for _, f in built]
    rows = [*_options(facts)]
    for label, cell, always in _ROWS:
        cells = tuple(tuple(cell(f)) for f in facts)
        if facts and (always or any(cells)):
            rows.append((label, cells))
    if any(k.measured for k, _ in built):
        rows.append(("time", tuple(_time(k) for k, _ in built)))
    table = doc.Table(
        ("", *(k.target for k, _ in built)),
        tuple((label, *("\n".join(cell) or "-" for cell in cells)) for label, cells in rows),
    )
    asked = dict.fromkeys(f"{a.text()}{at_line(a.source)}" for f in facts for a in f.asked)
    hazards = list(_merged([(k.target, h) for k in kernels for h in k.hazards], len(kernels)))
    fresh = tuple((where, h) for where, h in hazards if (kernels[0].name, where, h) not in told)
    told |= {(kernels[0].name, where, h) for where, h in hazards}
    return _Comparison(
        tuple(_heading(kernels, facts)),
        table if built else None,
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
        yield f"autotuned, one of {first.tuning.configs} configurations: {first.tuning.text}"
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


def _counts(numbers: dict[str, int], short: Callable[[str], str] = str) -> list[str]:
    return [f"{number} x {short(name)}" for name, number in numbers.items()]


def _widths(numbers: dict[int, int]) -> list[str]:
    return [f"{number} x {width} B" for width, number in numbers.items()]


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
    time = kernel.measured
    if time is None:
        return ("not timed",)
    share = "" if time.share is None else f"{time.share:.0%} of a copy"
    return tuple(filter(None, (f"{time.ms * 1e3:.1f} us", f"{time.gb_per_s:.0f} GB/s", share)))


def _merged(hazards: list[tuple[str, Hazard]], targets: int) -> Iterable[tuple[str, Hazard]]:
    """Each hazard once, with the architectures if these are not all."""
    places: dict[Hazard, list[str]] = {}
    for target, hazard in hazards:
        places.setdefault(hazard, []).append(target)
    for hazard, names in places.items():
        yield "" if len(names) == targets else ", ".join(names), hazard


def changed(record: Codegen) -> list[tuple[str, str, str]]:
    """(better or worse, kernel, sentence with its architectures), worse first."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for change in record.changes:
        places.setdefault((change.verdict, change.kernel, change.what), []).append(change.target)
    order = ("worse", "better", "changed")
    sentences: list[tuple[str, str, str]] = []
    for (kind, kernel, sentence), targets in places.items():
        names = list(dict.fromkeys(targets))
        where = "" if len(names) == len(record.architectures) else f" ({', '.join(names)})"
        sentences.append((kind, kernel, f"{sentence}{where}"))
    return sorted(sentences, key=lambda entry: order.index(entry[0]))


def violated(record: Codegen) -> list[str]:
    """Sentences of limits that are not kept, each with its architectures and configurations."""
    return [f"{violation.kernel} for {targets} {text}" for violation, targets, text in _broken(record)]


def _broken(record: Codegen) -> Iterable[tuple[Violation, str, str]]:
    """(the first of its kind, architectures, sentence with configurations)."""
    groups: dict[tuple[str, str], list[Violation]] = {}
    for entry in record.violations:
        groups.setdefault((entry.kernel, entry.what), []).append(entry)
    for (_, sentence), entries in groups.items():
        targets = ", ".join(dict.fromkeys(entry.target for entry in entries))
        how = list(dict.fromkeys(entry.configuration for entry in entries if entry.configuration))
        which = f" ({'; '.join(how)})" if len(how) <= _MOST_CONFIGURATIONS else f" ({len(how)} configurations)"
        yield entries[0], targets, f"{sentence}{which if how else ''}"


def _compared(record: Codegen) -> str:
    """How many changes there are of each kind."""
    kinds = [kind for kind, _, _ in changed(record)]
    counts = [f"{kinds.count(kind)} {kind}" for kind in ("worse", "better", "changed") if kind in kinds]
    return ", ".join(counts) or ("nothing differs in what both have" if record.notes else "nothing differs")
