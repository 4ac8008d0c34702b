"""Signatures of exported programs: what each input is, and where each output goes, as torch.export prints them.

An output may be returned or written to a buffer, and which state a parameter is stands nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

from retrograd.graph.ir import Instruction
from retrograd.graph.readers.fx_body import Body, Ref

_TITLE, _RANGES = "Graph signature:", "Range constraints:"
_SPEC = re.compile(r"\w+: (\w+(?: .*)?)")
_RETURNED = "USER_OUTPUT"


def signature_of(lines: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """What the header of a graph says of its inputs, and the kind and target of each output; empty if there is none.

    What is in no form that is known counts as it is written.
    """
    sections: dict[str, list[str]] = {"inputs": [], "outputs": [], "signature": [], "range_constraints": []}
    section = ""
    for line in map(str.strip, lines):
        if line.startswith((_TITLE, _RANGES)):
            section = "signature" if line.startswith(_TITLE) else "range_constraints" if section else ""
            line = line.partition(":")[2].strip()
        elif line in ("# inputs", "# outputs") and section:
            section, line = line[2:], ""
        if section and line:
            spec = _SPEC.fullmatch(line) if section in ("inputs", "outputs") else None
            sections[section if spec or section == "range_constraints" else "signature"].append(
                spec[1] if spec else line
            )
    header = {f"export.{name}": ", ".join(own) for name, own in sections.items() if own and own != ["{}"]}
    return header, sections["outputs"]


def exported(body: Body, values: Any, outputs: Sequence[str]) -> Any:
    """Returned values, behind an operation where they are not returned but written to a buffer, say."""
    written = list(cast(Sequence[Any], values)) if isinstance(values, tuple) else []
    if not outputs or len(outputs) != len(written):
        return cast(Any, values)
    for k, (value, output) in enumerate(zip(written, outputs, strict=True)):
        kind, _, target = output.partition(" ")
        if isinstance(value, Ref) and kind != _RETURNED:
            shape = body.instructions[value.place].shape
            written[k] = body.add(Instruction(f"output {k}", kind, shape, (value.place,), target))
    return tuple(written)
