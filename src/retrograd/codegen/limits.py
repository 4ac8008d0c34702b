"""Limits that a person sets for CI, and the sentences for kernels that do not keep them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from retrograd.codegen.schema import Change, Facts, Kernel, Violation


@dataclass(frozen=True)
class Limits:
    """What is asked of every kernel; None and False ask nothing."""

    max_registers: int | None = None  # 32-bit registers of a thread
    max_shared: int | None = None  # bytes of shared memory of a program
    # narrowest load from global memory; loads of one value a program and those of atomics do not count, nor those
    # through `narrow`
    min_load_bytes: int | None = None
    min_occupancy: float | None = None  # percent
    # What there must not be.
    no_spills: bool = False
    no_float_atomics: bool = False
    no_cas_loops: bool = False
    no_f64: bool = False
    no_tf32: bool = False
    no_hazards: bool = False
    no_worse: bool = False  # nothing may be worse than in what it is compared with
    narrow: tuple[str, ...] = ()  # variables whose loads may be narrow

    def asked(self) -> dict[str, Any]:
        """The limits that are set, by name."""
        return {name: value for name, value in asdict(self).items() if value not in (None, False, ())}


def violations(kernels: Iterable[Kernel], changes: Iterable[Change], limits: Limits) -> tuple[Violation, ...]:
    """Every limit that is not kept, kernel by kernel; a kernel that does not compile keeps none."""
    result: list[Violation] = []
    for kernel in kernels:
        sentences = [f"does not compile: {kernel.error}"] if kernel.error else []
        if kernel.facts is not None:
            sentences += _broken(kernel.facts, limits)
        if limits.no_hazards:
            sentences += [f"{h.what}{f' ({h.source})' if h.source else ''}" for h in kernel.hazards]
        how = kernel.tuning.text if kernel.tuning and kernel.tuning.configs > 1 else ""
        result += [Violation(kernel.name, kernel.target, text, kernel.place, how) for text in sentences]
    if limits.no_worse:
        result += [Violation(c.kernel, c.target, f"is worse: {c.what}") for c in changes if c.verdict == "worse"]
    return tuple(result)


def _broken(facts: Facts, limits: Limits) -> Iterator[str]:
    if limits.max_registers is not None and facts.registers > limits.max_registers:
        yield f"uses {facts.registers} registers, at most {limits.max_registers} are allowed"
    if limits.max_shared is not None and facts.shared_bytes > limits.max_shared:
        yield f"uses {facts.shared_bytes} bytes of shared memory, at most {limits.max_shared} are allowed"
    if limits.min_occupancy is not None and 100 * facts.occupancy < limits.min_occupancy:
        yield f"has an occupancy of {facts.occupancy:.0%}, at least {limits.min_occupancy:g} % is asked"
    for load in narrow_loads(facts, limits.min_load_bytes or 0, frozenset(limits.narrow)):
        yield f"{load}, at least {limits.min_load_bytes} bytes are asked"
    if limits.no_spills and facts.spill_bytes:
        yield f"spills {facts.spill_bytes} bytes a thread at {facts.registers} registers"
    adds = sorted({a.source for a in facts.asked if a.adds_floating})
    if limits.no_float_atomics and adds:
        yield f"adds floating numbers atomically at {', '.join(adds)}"
    loops = facts.compare_and_swaps
    # A compare-and-swap that the source asks for is a lock, not a loop made of an addition.
    if limits.no_cas_loops and loops and not any(a.op == "cas" for a in facts.asked):
        yield f"has {loops} compare-and-swap loops"
    if limits.no_f64 and facts.uses_f64:
        yield "computes in float64"
    if limits.no_tf32 and facts.tf32:
        yield f"rounds float32 operands to TF32: {', '.join(facts.matrix)}"


def narrow_loads(facts: Facts, least: int, allowed: frozenset[str] = frozenset()) -> list[str]:
    """Loads of less than `least` bytes a thread, each in words."""
    other = {*facts.one_value, *(asked.source for asked in facts.asked)}
    return [
        f"loads {access.bytes} bytes a thread at {access.source or 'an unknown line'} "
        f"({access.count} load{'' if access.count == 1 else 's'})"
        for access in facts.accesses
        if access.op == "load" and access.bytes < least
        if access.source not in other and not allowed.intersection(access.names)
    ]
