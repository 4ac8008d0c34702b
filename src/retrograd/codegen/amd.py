"""Reads the assembly text of an AMD kernel."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from retrograd.codegen.access import gather

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_PLACE = re.compile(r"^\s*\.loc\s+(\d+) (\d+)")
_MEMORY = re.compile(r"^\s+(?:buffer|global|flat)_(load|store|atomic)_(\w+)(.*)")
_SHARED = re.compile(r"^\s+ds_(read|load|write|store)(2?)(?:st64)?_[a-z]+(\d+)")
_FENCE = re.compile(r"^\s+(buffer_(?:wbl2|inv|wbinvl1\w*)(?: sc\d)*)")
_MATRIX = re.compile(r"^\s+(v_(?:s?mfmac?|swmmac|wmma)_\w+)")
_FMA = re.compile(r"^\s+v_(pk_)?(?:fma|fmac|fmamk|fmaak)_f32")
_F64 = re.compile(r"^\s+v_\w*f64\w*\s")
_COUNTS = re.compile(r"^\s+\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", re.MULTILINE)
_OPS = {"read": "load", "load": "load", "write": "store", "store": "store"}
_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "ushort": 2, "sshort": 2}
_BYTES |= {"byte": 1, "ubyte": 1, "sbyte": 1, "b128": 16, "b64": 8, "b32": 4, "b16": 2, "u16": 2, "u8": 1}


def read(text: str) -> dict[str, Any]:
    """The parts of `Facts` that the machine code tells: registers to fma, by their names there."""
    counts = {name: int(value) for name, value in _COUNTS.findall(text)}
    files: dict[str, str] = {}
    accesses, shared, place, f64, fma = [], [], None, False, 0
    fences: Counter[str] = Counter()
    matrix: Counter[str] = Counter()
    for line in text.splitlines():
        if (named := _FILE.match(line)) is not None:
            files[named[1]] = f"{named[2]}/{named[3]}" if named[3] else named[2]
        elif (at := _PLACE.match(line)) is not None:
            place = (files.get(at[1], ""), int(at[2])) if at[2] != "0" else None
        elif (memory := _MEMORY.match(line)) is not None:
            accesses.append((*_global(*memory.groups()), place))
        elif (local := _SHARED.match(line)) is not None:
            op, pair, bits = local.groups()
            shared.append((_OPS[op], int(bits) // 8 * (2 if pair else 1), "sync", place))
        elif (fence := _FENCE.match(line)) is not None:
            fences[fence[1]] += 1
        elif (product := _MATRIX.match(line)) is not None:
            matrix[product[1]] += 1
        elif (fused := _FMA.match(line)) is not None:
            fma += 2 if fused[1] else 1
        f64 = f64 or _F64.match(line) is not None
    return {
        "registers": counts["vgpr_count"],
        # Bytes of scratch memory; .vgpr_spill_count also counts what moved to accumulation registers.
        "spill_bytes": counts["private_segment_fixed_size"],
        "uses_f64": f64,
        "bulk_copies": 0,
        "accesses": gather(accesses),
        "shared_accesses": gather(shared),
        "fences": dict(sorted(fences.items())),
        "matrix": dict(sorted(matrix.items())),
        "fma": fma,
    }


def _global(op: str, name: str, rest: str) -> tuple[str, int, str]:
    """(op, bytes, kind) of an instruction on global memory."""
    if op == "atomic":
        return "atomic", 0, _atomic_kind(name)
    kind = "async" if (op == "load" and re.search(r"\blds\b", rest)) or "lds_" in name else "sync"
    return op, _width(name), kind


def _width(name: str) -> int:
    """Bytes of `dwordx4`, `short_d16_hi`, `lds_dwordx4`."""
    return next((_BYTES[part] for part in name.split("_") if part in _BYTES), 4)


def _atomic_kind(name: str) -> str:
    """ "add.f32" of add_f32, "add.bf16x2" of pk_add_bf16, "cas" of cmpswap."""
    if name.startswith("cmpswap"):
        return "cas"
    parts = [part for part in name.split("_") if part not in ("pk", "x2")]
    return ".".join(parts) + ("x2" if name.startswith("pk_") else "")
