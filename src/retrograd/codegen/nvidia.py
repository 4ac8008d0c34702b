"""Reads `cuobjdump -res-usage` and `nvdisasm -c -gi` text."""

from __future__ import annotations

import re
from typing import Any

from retrograd.codegen.access import gather

_PLACE = re.compile(r'//## File "([^"]*)", line (\d+)( inlined at )?')
# An instruction: its offset in a comment, perhaps a predicate, the name with its modifiers.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:\{\s*)?(@!?U?P[T\d]\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)")
_USAGE = re.compile(r"\b(REG|STACK|LOCAL):(\d+)")

_LOADS = {"LDG": "sync", "LD": "sync", "LDGSTS": "async"}
_STORES = ("STG", "ST")
_ATOMICS = ("RED", "REDG", "ATOM", "ATOMG")
_BULK = ("UBLKCP", "UBLKRED", "UTMALDG", "UTMASTG", "UTMAREDG")
_F64 = ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX", "DMMA")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_MEMORY_ORDER = ("E", "EF", "EL", "GPU", "SM", "SYS", "CTA", "STRONG", "WEAK", "CONSTANT", "PRIVATE")


def read(usage: str, code: str) -> dict[str, Any]:
    """registers, spill_bytes, uses_f64, bulk_copies and accesses, as `Facts` names them."""
    resources = {name: int(value) for name, value in _USAGE.findall(usage)}
    found, place, f64, bulk, inlined = [], None, False, 0, False
    for line in code.splitlines():
        at = _PLACE.search(line)
        if at is not None:
            # After the line of an inlined function come those of its callers, up to the first that is not inlined.
            place = place if inlined else (at[1], int(at[2]))
            inlined = at[3] is not None
            continue
        instruction = _INSTRUCTION.search(line)
        if instruction is None or (instruction[1] or "").strip() == "@!PT":
            continue
        name, *modifiers = instruction[2].split(".")
        f64 = f64 or name in _F64 or "F64" in modifiers or "RCP64H" in modifiers or "RSQ64H" in modifiers
        bulk += name in _BULK
        if name in _LOADS:
            found.append(("load", _width(modifiers), _LOADS[name], place))
        elif name in _STORES:
            found.append(("store", _width(modifiers), "sync", place))
        elif name in _ATOMICS:
            found.append(("atomic", 0, _atomic_kind(modifiers), place))
    return {
        "registers": resources["REG"],
        "spill_bytes": resources["STACK"] + resources["LOCAL"],
        "uses_f64": f64,
        "bulk_copies": bulk,
        "accesses": gather(found),
    }


def _width(modifiers: list[str]) -> int:
    """Bytes of a load or store; 4 where no modifier says otherwise."""
    return next((_BYTES[modifier] for modifier in modifiers if modifier in _BYTES), 4)


def _atomic_kind(modifiers: list[str]) -> str:
    """ "add.f32x4" of E.ADD.F32x4.FTZ.RN.STRONG.GPU."""
    kept = [m for m in modifiers if m not in (*_MEMORY_ORDER, "FTZ", "RN") and not m.startswith("LTC")]
    return ".".join(kept).lower()
