"""FaultList of kernels: accesses outside of tensors, races, reads of unwritten memory, loops without end; in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from retrograd.core.source_text import statement
from retrograd.core.wording import count

Kind = Literal[
    "out of bounds", "overflow", "between rows", "misaligned", "uninitialised", "race", "same value", "assertion",
    "endless loop", "order", "autotune", "beyond a view", "left unwritten",
]  # fmt: skip
Program = tuple[int, int, int]
# What is a note about a kernel that is right, and not a mistake in it.
MILD: frozenset[str] = frozenset({"same value", "order", "beyond a view", "left unwritten"})


@dataclass(frozen=True)
class AccessAt:
    """An access of a program: "reads", "writes" or "updates atomically", in a line of the source."""

    does: str
    file: str
    line: int
    program: Program | None = None

    def text(self) -> str:
        source = statement(self.file, self.line)
        by = f"program {_program(self.program)} " if self.program is not None else ""
        return f"{by}{self.does} in {Path(self.file).name}:{self.line}{': ' if source else ''}{source}"


@dataclass
class KernelFault:
    """One mistake of a kernel, with all its occurrences.

    Attributes:
        kind: which.
        kernel: name of the kernel's function.
        access: where and by which program it was seen first.
        other: the access that it is in conflict with, of a race; None where lanes of one store are.
        argument: name of the pointer argument, "" where none is known.
        element: first element of the argument's tensor, counted in memory from its first; None where there is none.
        detail: what else there is to say.
        count: elements, over all programs.
        launches: in how many launches.
    """

    kind: Kind
    kernel: str
    access: AccessAt
    other: AccessAt | None = None
    argument: str = ""
    element: int | None = None
    detail: str = ""
    count: int = 0
    launches: int = 1
    programs: set[int] = field(default_factory=set, repr=False)

    @property
    def is_mild(self) -> bool:
        """Whether results are right all the same: two programs write one value, bits depend on an order."""
        return self.kind in MILD

    @property
    def is_between_programs(self) -> bool:
        """Whether it is a race of two programs, which may depend on their order; not one of lanes of a store."""
        return self.kind == "race" and self.other is not None

    def text(self) -> str:
        """One or two sentences for a report."""
        where = (
            f"element {self.element} of `{self.argument}`" if self.argument and self.element is not None else "memory"
        )
        if self.kind in ("race", "same value") and self.other is not None:
            same = "two programs write it, " if self.kind == "same value" else ""
            times = count(self.count, "time")
            return (
                f"{self.kind} in kernel {self.kernel}: {same}{where} ({times}): {self.access.text()}; "
                f"{self.other.text()}; nothing orders the two{'; ' if self.detail else ''}{self.detail}"
            )
        kernel = f" in kernel {self.kernel}" if self.kernel else ""
        others = f" and {count(self.count - 1, 'other')}" if self.count > 1 else ""
        place = f"{where}{others}: " if self.argument and self.count else ""
        return f"{self.kind}{kernel}: {place}{self.access.text()}{'; ' if self.detail else ''}{self.detail}"


def _program(program: Program) -> str:
    used = max((i for i, n in enumerate(program) if n), default=0) + 1
    return str(program[0]) if used == 1 else f"({', '.join(map(str, program[:used]))})"


@dataclass
class LaunchRecord:
    """One launch that was executed.

    Attributes:
        kernel: name of its function.
        grid: programs along each axis.
        in_turns: whether programs learn of each other, and ran in turns.
        undecided: why races were not looked for; "" if they were.
        order_matters: lines whose order of programs may decide bits: sums of floats by atomics.
    """

    kernel: str
    grid: tuple[int, int, int]
    in_turns: bool
    undecided: str = ""
    order_matters: list[AccessAt] = field(default_factory=list)


class FaultList:
    """The faults of several launches, those of one kind at one place kept as one."""

    def __init__(self) -> None:
        self._faults: dict[tuple[object, ...], KernelFault] = {}

    def add(self, fault: KernelFault, new_launch: bool = False) -> None:
        """Note a fault, or that one which is known was seen again."""
        # Of two that nothing orders either may come first: a race is one, whichever did.
        ends = sorted((at.file, at.line, at.does) for at in (fault.access, fault.other) if at is not None)
        key = (fault.kind, fault.kernel, *ends, fault.argument)
        known = self._faults.setdefault(key, fault)
        if known is not fault:
            known.count += fault.count
            known.launches += new_launch
            known.programs |= fault.programs

    def add_all(self, faults: Iterable[KernelFault]) -> None:
        """Note copies of faults, which are counted on here."""
        for fault in faults:
            self.add(replace(fault, programs=set(fault.programs)))

    def __iter__(self) -> Iterator[KernelFault]:
        return iter(self._faults.values())

    def __len__(self) -> int:
        return len(self._faults)
