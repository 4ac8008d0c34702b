"""Faults of executed kernels as findings: addresses and races, which are looked at in every launch, whatever the stage.

bounds and races tell those of the ordinary case; the stages with sizes, layouts and values of their own tell what a
kernel does there alone, as where the mask of a last block is missing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from retrograd.check import cpu_kernels
from retrograd.check.schema import Case, Finding

if TYPE_CHECKING:
    from retrograd.ttir.faults import KernelFault

ADDRESSES = frozenset({"out of bounds", "overflow", "between rows", "misaligned"})
MEMORY = ADDRESSES | {"assertion"}  # what bounds tells
RACES = {"race": "race", "autotune": "autotune", "endless loop": "endless-loop", "uninitialised": "uninitialised"}
Told = dict[tuple[object, ...], str]  # which stage tells a fault, by what it is and the line that does it


@contextmanager
def heard() -> Iterator[list[KernelFault]]:
    """The faults of launches inside, once they are done, of the session that executes kernels."""
    faults: list[KernelFault] = []
    if (run := cpu_kernels.current()) is not None:
        run.forget_faults()
    try:
        yield faults
    finally:
        if (run := cpu_kernels.current()) is not None:  # the op may have imported Triton meanwhile
            faults += run.faults


def heard_kinds(case: Case) -> frozenset[str]:
    """What a stage with cases of its own tells; by an assertion a kernel may refuse extreme values, such as NaN."""
    return (ADDRESSES if case.values else MEMORY) | {"race"}


def findings(faults: Iterable[KernelFault], kinds: Container[str], case: Case, stage: str, told: Told) -> list[Finding]:
    """Findings of a stage at a case: of faults of these kinds those that no stage before it tells."""
    return [finding(fault, case) for fault in faults if fault.kind in kinds and first_told(fault, stage, told)]


def first_told(fault: KernelFault, stage: str, told: Told) -> bool:
    """Whether no other stage tells the fault; from now on this one does."""
    other = None if fault.other is None else (fault.other.file, fault.other.line)
    key = (fault.kind, fault.kernel, fault.access.file, fault.access.line, fault.access.does, other)
    return told.setdefault(key, stage) == stage


def finding(fault: KernelFault, case: Case) -> Finding:
    """The finding for one fault."""
    if fault.kind in ADDRESSES:
        kind = "address-read" if fault.access.does == "reads" else "address-write"
        return Finding.of(kind, fault.text(), case, tensor=fault.argument, wrong=fault.count)
    return Finding.of(RACES.get(fault.kind, fault.kind), fault.text(), case, wrong=fault.count or None)
