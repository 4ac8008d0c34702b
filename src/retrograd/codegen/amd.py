"""Reads the assembly text of an AMD kernel."""

from __future__ import annotations

import re
from typing import Any

from retrograd.codegen.access import gather

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_PLACE = re.compile(r"^\s*\.loc\s+(\d+) (\d+)")
_MEMORY = re.compile(r"^\s+(?:buffer|global|flat)_(load|store|atomic)_(\w+)(.*)")
_F64 = re.compile(r"^\s+v_\w*f64\w*\s")
_COUNTS = re.compile(r"^\s+\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", re.MULTILINE)
_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "ushort": 2, "sshort": 2}
_BYTES |= {"byte": 1, "ubyte": 1, "sbyte": 1, "b128": 16, "b64": 8, "b32": 4, "b16": 2, "u16": 2, "u8": 1}


def read(text: str) -> dict[str, Any]:
    """registers, spill_bytes, uses_f64, bulk_copies and accesses, as `Facts` names them."""
    counts = {name: int(value) for name, value in _COUNTS.findall(text)}
    files: dict[str, str] = {}
    found, place, f64 = [], None, False
    for line in text.splitlines():
        if (named := _FILE.match(line)) is not None:
            files[named[1]] = f"{named[2]}/{named[3]}" if named[3] else named[2]
        elif (at := _PLACE.match(line)) is not None:
            place = (files.get(at[1], ""), int(at[2])) if at[2] != "0" else None
        elif (memory := _MEMORY.match(line)) is not None:
            op, name, rest = memory.groups()
            if op == "atomic":
                found.append(("atomic", 0, _atomic_kind(name), place))
            else:
                kind = "async" if (op == "load" and re.search(r"\blds\b", rest)) or "lds_" in name else "sync"
                found.append((op, _width(name), kind, place))
        f64 = f64 or _F64.match(line) is not None
    return {
        "registers": counts["vgpr_count"],
        # Bytes of scratch memory; .vgpr_spill_count also counts what moved to accumulation registers.
        "spill_bytes": counts["private_segment_fixed_size"],
        "uses_f64": f64,
        "bulk_copies": 0,
        "accesses": gather(found),
    }


def _width(name: str) -> int:
    """Bytes of `dwordx4`, `short_d16_hi`, `lds_dwordx4`."""
    return next((_BYTES[part] for part in name.split("_") if part in _BYTES), 4)


def _atomic_kind(name: str) -> str:
    """ "add.f32" of add_f32, "add.bf16x2" of pk_add_bf16, "cas" of cmpswap."""
    if name.startswith("cmpswap"):
        return "cas"
    parts = [part for part in name.split("_") if part not in ("pk", "x2")]
    return ".".join(parts) + ("x2" if name.startswith("pk_") else "")
