"""Reads `cuobjdump -res-usage` and `nvdisasm -c -gi` text."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from retrograd.codegen.access import gather

_PLACE = re.compile(r'//## File "([^"]*)", line (\d+)( inlined at )?')
# An instruction: its offset in a comment, perhaps a predicate, the name with its modifiers.
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:\{\s*)?(@!?U?P[T\d]\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)")
_USAGE = re.compile(r"\b(REG|STACK|LOCAL):(\d+)")

_SHARED = {"LDS": "load", "LDSM": "load", "STS": "store", "STSM": "store"}
_FENCES = ("MEMBAR", "FENCE")
_FMA = {"FFMA": 1, "FFMA2": 2}  # HFMA2 moves constants as often as it multiplies
_LOADS = {"LDG": "sync", "LD": "sync", "LDGSTS": "async"}
_STORES = ("STG", "ST")
_ATOMICS = ("RED", "REDG", "ATOM", "ATOMG")
_BULK = ("UBLKCP", "UBLKRED", "UTMALDG", "UTMASTG", "UTMAREDG")
_GLOBAL = (*_LOADS, *_STORES, *_ATOMICS, *_BULK)
_WAIT = "ACQBULK"  # griddepcontrol.wait
_F64 = ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX", "DMMA")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_MEMORY_ORDER = ("E", "EF", "EL", "GPU", "SM", "SYS", "CTA", "STRONG", "WEAK", "CONSTANT", "PRIVATE")


def read(usage: str, code: str) -> dict[str, Any]:
    """The parts of `Facts` that the machine code tells: registers to fma, by their names there."""
    resources = {name: int(value) for name, value in _USAGE.findall(usage)}
    found, shared, ahead, place, f64, bulk, inlined = [], [], [], None, False, 0, False
    fences: Counter[str] = Counter()
    fma = 0
    waited = False
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
        waited = waited or name == _WAIT
        fma += _FMA.get(name, 0)
        if name in _LOADS:
            found.append(("load", _width(modifiers), _LOADS[name], place))
        elif name in _STORES:
            found.append(("store", _width(modifiers), "sync", place))
        elif name in _ATOMICS:
            found.append(("atomic", 0, _atomic_kind(modifiers), place))
        elif name in _SHARED:
            width = _matrix_width(modifiers) if name.endswith("M") else _width(modifiers)
            shared.append((_SHARED[name], width, "sync", place))
        elif name in _FENCES:
            fences[instruction[2]] += 1
        if name in _GLOBAL and not waited:
            ahead.append(("copy", 0, "bulk", place) if name in _BULK else found[-1])
    return {
        "registers": resources["REG"],
        "spill_bytes": resources["STACK"] + resources["LOCAL"],
        "uses_f64": f64,
        "bulk_copies": bulk,
        "accesses": gather(found),
        "shared_accesses": gather(shared),
        "fences": dict(sorted(fences.items())),
        "fma": fma,
        "ahead_of_wait": gather(ahead),
    }


def _width(modifiers: list[str]) -> int:
    """Bytes of a load or store; 4 where no modifier says otherwise."""
    return next((_BYTES[modifier] for modifier in modifiers if modifier in _BYTES), 4)


def _matrix_width(modifiers: list[str]) -> int:
    """Bytes that a thread moves by LDSM.16.M88.4: four bytes for each 8 x 8 matrix."""
    return 4 * int(modifiers[-1]) if modifiers and modifiers[-1] in ("2", "4") else 4


def _atomic_kind(modifiers: list[str]) -> str:
    """ "add.f32x4" of E.ADD.F32x4.FTZ.RN.STRONG.GPU."""
    kept = [m for m in modifiers if m not in (*_MEMORY_ORDER, "FTZ", "RN") and not m.startswith("LTC")]
    return ".".join(kept).lower()
