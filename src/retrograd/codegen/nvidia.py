"""Reader of NVIDIA's machine code: what instructions of each name mean."""

from __future__ import annotations

from collections import Counter
from typing import Any

from retrograd.codegen.access import gather
from retrograd.compat.cuda_tools import assembly_lines, instructions, resources

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


def read(usage: str, code: str, ptx: str = "") -> dict[str, Any]:
    """The parts of `Facts` that the machine code tells: registers to fma, by their names there."""
    lines = assembly_lines(ptx)
    counts = resources(usage)
    accesses, shared, ahead, f64, bulk, fma, waited = [], [], [], False, 0, 0, False
    fences: Counter[str] = Counter()
    for instruction, place in instructions(code):
        name, *modifiers = instruction.split(".")
        if name in _GLOBAL and place is not None:
            place = lines.get(place, place)
        f64 = f64 or name in _F64 or "F64" in modifiers or "RCP64H" in modifiers or "RSQ64H" in modifiers
        bulk += name in _BULK
        waited = waited or name == _WAIT
        fma += _FMA.get(name, 0)
        if name in _LOADS:
            accesses.append(("load", _width(modifiers), _LOADS[name], place))
        elif name in _STORES:
            accesses.append(("store", _width(modifiers), "sync", place))
        elif name in _ATOMICS:
            accesses.append(("atomic", 0, _atomic_kind(modifiers), place))
        elif name in _SHARED:
            width = _matrix_width(modifiers) if name.endswith("M") else _width(modifiers)
            shared.append((_SHARED[name], width, "sync", place))
        elif name in _FENCES:
            fences[instruction] += 1
        if name in _GLOBAL and not waited:
            ahead.append(("copy", 0, "bulk", place) if name in _BULK else accesses[-1])
    return {
        "registers": counts["REG"],
        "spill_bytes": counts["STACK"] + counts["LOCAL"],
        "uses_f64": f64,
        "bulk_copies": bulk,
        "accesses": gather(accesses),
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
