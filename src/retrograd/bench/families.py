"""Which benchmark an op belongs to, and what kinds of rows there are. No torch until something is measured."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from retrograd.bench import registry
from retrograd.bench import table as norm_table
from retrograd.bench.general import rows as general_rows
from retrograd.bench.general import table as general_table
from retrograd.bench.msda import rows as msda_rows
from retrograd.bench.msda import table as msda_table
from retrograd.bench.rows import OPS, Measured, Row, load_as


@dataclass(frozen=True)
class Family:
    """Ops that are measured alike.

    Attributes:
        name: on the command line and in names of files.
        kind: their rows.
        markdown: their tables.
        module: has `Settings`, `run` and `machine`; imports torch.
    """

    name: str
    kind: type[Measured]
    markdown: Callable[[Sequence[Any]], str]
    module: str

    def measures(self) -> Any:
        """The module, imported."""
        return importlib.import_module(self.module)


NORM = Family("norm", Row, norm_table.markdown, "retrograd.bench.norm")
MSDA = Family("msda", msda_rows.Row, msda_table.markdown, "retrograd.bench.msda.run")
GENERAL = Family("ops", general_rows.Row, general_table.markdown, "retrograd.bench.general.run")
FAMILIES = (NORM, MSDA, GENERAL)
# What the name of a family stands for.
GROUPS = {"norm": OPS, "msda": (registry.MSDA,)}


def family_of(op: str) -> Family:
    """The benchmark of an op; any that is no norm and no deformable attention is of the general one."""
    return NORM if op in OPS else MSDA if op == registry.MSDA else GENERAL


def load(paths: Iterable[str | os.PathLike[str]]) -> list[Measured]:
    """Read JSON lines of any benchmark; of rows that measure the same thing the last one counts.

    Raises:
        UsageError: a file cannot be read or is not such a file.
    """
    return load_as(lambda op: family_of(op).kind, "OP", paths)


def markdown(rows: Sequence[Measured]) -> str:
    """The tables of all families that rows belong to."""
    parts = []
    for family in FAMILIES:
        own = [row for row in rows if isinstance(row, family.kind)]
        parts += [family.markdown(own)] if own else []
    return "\n".join(parts)
