"""Arithmetic that is not correctly rounded, and tensor cores, from what stands before the machine code.

There a division says how exact it has to be; in the machine code it is an approximation with or without corrections.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

_PTX = re.compile(
    r"\b((?:ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh|div)\.(?:approx|full)[\w.]*)"
    r"|\b((?:mma|wgmma\.mma_async|tcgen05\.mma)\.[\w.:]+)"
    r"|\b\w+\.(?:\w+\.)*ftz\."
)
# Of a matrix product what is multiplied and added counts, not how operands lie in memory.
_LAYOUT = re.compile(r"\.(?:sync|aligned|row|col|cta_group::\d|sp|satfinite)(?=\.|$)")
_FLUSH = re.compile(r"\.ftz\b")
_LLVM = re.compile(
    r"\bcall (?P<flags>[^@]*)@llvm\.(?P<name>(?:amdgcn\.)?(?:rcp|rsq|sqrt|exp2?|log2?|sin|cos|tanh|fdiv\.fast))\."
    r"|= fdiv (?P<fast>[a-z ]*)(?:float|<|half)(?P<rest>.*)"
)
_LOCAL = re.compile(r"\.local \.align \d+ \.b8\s+__local_depot\d+\[(\d+)\]")
# LLVM's own function of that name is exact unless it is allowed not to be.
_EXACT = ("sqrt",)


def of_ptx(text: str) -> dict[str, Any]:
    """approximations, matrix and flushing, as `Facts` has them."""
    rough: Counter[str] = Counter()
    matrix: Counter[str] = Counter()
    flushing = 0
    for match in _PTX.finditer(text):
        flushing += _FLUSH.search(match[0]) is not None
        if match[1]:
            rough[match[1]] += 1
        elif match[2]:
            matrix[_LAYOUT.sub("", match[2])] += 1
    return {
        "approximations": dict(sorted(rough.items())),
        "matrix": dict(sorted(matrix.items())),
        "flushing": flushing,
    }


def local_bytes(ptx: str) -> int:
    """Stack of arrays that a kernel keeps by itself, as sine does for large angles, in whole 8 bytes."""
    return sum(-(-int(size) // 8) * 8 for size in _LOCAL.findall(ptx))


def of_llvm(text: str) -> dict[str, Any]:
    """approximations of AMD's intermediate code; matrix products stand in the assembly, and nothing is flushed."""
    rough: Counter[str] = Counter()
    for match in _LLVM.finditer(text):
        name, fast = match["name"], match["fast"] or ""
        loose = bool({"afn", "arcp", "fast"} & set((match["flags"] or fast).split()))
        if name is None:
            if loose or "!fpmath" in match["rest"]:
                rough["fdiv.fast"] += 1
        elif loose or name not in _EXACT:
            rough[name] += 1
    return {"approximations": dict(sorted(rough.items()))}
