"""Messages of executed kernels: what was noticed of them, in words and as a document."""

from __future__ import annotations

from retrograd.core import document as doc
from retrograd.ttir.schema import KernelFinding, KernelRun

_TONES: dict[str, doc.Tone] = {"clean": "proved", "finding": "finding", "undecided": "undecided"}
_STYLES = {"clean": "bold green", "finding": "bold red", "undecided": "bold yellow"}
_WORDS = {"clean": "CLEAN", "finding": "FINDING", "undecided": "CANNOT DECIDE"}


def document(record: KernelRun, everything: bool = True) -> doc.Document:
    """The record; nothing of it is left out."""
    header = doc.Header(_TONES[record.verdict], verdict(record), (facts(record),), _WORDS[record.verdict])
    cards = tuple(_card(finding) for finding in record.findings)
    remarks = (*record.undecided, *record.notes)
    page: list[doc.PagePart] = [header, *[doc.Section("Findings", cards)] * bool(cards)]
    if remarks:
        page.append(doc.Section("Notes", (doc.Paragraphs(remarks, "points"),)))
    page.append(doc.Section("Kernels", (_kernels(record),)))
    text = [
        doc.TextLine(facts(record), "dim"),
        *(doc.TextLine(("note: " if f.mild else "") + f.text) for f in record.findings),
        *(doc.TextLine(f"undecided: {reason}") for reason in record.undecided),
        *(doc.TextLine(f"note: {note}") for note in record.notes),
        doc.TextLine(f"{_WORDS[record.verdict]}: {verdict(record)}", _STYLES[record.verdict]),
    ]
    return doc.Document(
        f"retrograd run-kernel {record.target}", tuple(text), tuple(page), (header, *cards), "findings",
        tuple(_annotation(finding) for finding in record.findings),
    )  # fmt: skip


def verdict(record: KernelRun) -> str:
    """What came out, in a sentence."""
    count = sum(not finding.mild for finding in record.findings)
    if count:
        return f"{count} finding{'s' * (count != 1)}"
    if record.verdict == "undecided":
        return "; ".join(record.undecided)
    return "every access inside its tensor, of written memory, and ordered"


def facts(record: KernelRun) -> str:
    """What was executed, and in which order."""
    launches = sum(kernel.launches for kernel in record.kernels)
    kernels = ", ".join(kernel.name for kernel in record.kernels) or "no kernel"
    order = f"seed {record.seed}, {record.gpu} of {record.multiprocessors} multiprocessors"
    return f"{record.target}: {launches} launch{'es' * (launches != 1)} of {kernels}; {order}"


def _kernels(record: KernelRun) -> doc.Table:
    rows = tuple(
        (kernel.name, str(kernel.launches), str(kernel.programs), "in turns" if kernel.in_turns else "together")
        for kernel in record.kernels
    )
    return doc.Table(("kernel", "launches", "programs", "ran"), rows, numbers=(1, 2))


def _card(finding: KernelFinding) -> doc.Card:
    facts = (doc.Fact("what", finding.text), doc.Fact("at", "\n".join(finding.places), "mono"))
    return doc.Card(
        f"{finding.kind}{' (note)' * finding.mild}", facts, finding.kernel, "" if finding.mild else "finding"
    )


def _annotation(finding: KernelFinding) -> doc.Annotation:
    title = f"{finding.kind} in {finding.kernel}" if finding.kernel else finding.kind
    level, place = "notice" if finding.mild else "error", next(iter(finding.places), "")
    return doc.Annotation(level, title, finding.text, place, f"kernel/{finding.kind}")
