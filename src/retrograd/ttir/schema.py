"""Record of a program whose kernels were executed without a GPU, and its JSON. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from retrograd.core.notebook import Shown
from retrograd.core.schema import Record

KERNELS_SCHEMA = "retrograd.kernel-run/1"


@dataclass(frozen=True)
class ExecutedKernel:
    """A kernel that was executed: how often, with how many programs at most, and whether these ran in turns."""

    name: str
    launches: int
    programs: int
    in_turns: bool = False


@dataclass(frozen=True)
class KernelFinding:
    """One mistake of a kernel, with all its occurrences; `mild` is what leaves results as they are.

    `places` are the lines, "file.py:12", of the access and of the one that it is in conflict with.
    """

    kind: str
    kernel: str
    text: str
    places: tuple[str, ...]
    argument: str = ""
    element: int | None = None
    count: int = 0
    launches: int = 1
    mild: bool = False


@dataclass(frozen=True)
class KernelRun(Record, Shown):
    """What was noticed of the kernels of a program.

    `verdict` is "clean", "finding" (a fault that is not mild), or "undecided" (`undecided` has the reasons, and there
    may be none but that no kernel was launched). `code` is the exit code of the program itself.
    """

    _noun: ClassVar[str] = "run of kernels"

    target: str
    verdict: Literal["clean", "finding", "undecided"]
    seed: int
    multiprocessors: int
    kernels: tuple[ExecutedKernel, ...]
    findings: tuple[KernelFinding, ...]
    undecided: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    code: int = 0
    gpu: str = "sm_90"
    schema: str = KERNELS_SCHEMA

    @property
    def exit_code(self) -> int:
        """That of the program if it failed; else 0 clean, 1 finding, 3 cannot decide."""
        return self.code or {"clean": 0, "finding": 1, "undecided": 3}[self.verdict]
