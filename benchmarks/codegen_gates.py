"""Gates for the machine code of a memory-bound kernel: what it must not do. Each fault is a sentence."""

from __future__ import annotations

from retrograd.codegen import Facts, Launch, target_named
from retrograd.codegen.kernel_facts import attempts

WIDE = 16  # bytes that one thread loads at once where memory is aligned


def facts_of_all(launches: list[Launch], workers: int) -> list[Facts]:
    """The facts of each launch, compiled in so many processes."""
    results = dict(attempts(launches, workers))
    failures = [f"{launches[at].kernel} does not compile: {why}" for at, why in results.items() if isinstance(why, str)]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [results[at] for at in range(len(launches))]


def faults(facts: Facts, *, narrow: frozenset[str] = frozenset(), wide: bool = False) -> list[str]:
    """What is wrong with a kernel.

    Args:
        facts: the compiled kernel.
        narrow: variables whose loads need not be wide: one value a row, flags.
        wide: Whether every other load has to move 16 bytes a thread; say so only where pointers, strides and sizes are
            aligned and a thread has that much to load.
    """
    where = f"{facts.kernel} for {facts.target} at {facts.num_warps} warps"
    sentences = []
    if facts.spill_bytes:
        sentences.append(f"{where} spills {facts.spill_bytes} bytes a thread at {facts.registers} registers")
    limit = target_named(facts.target).shared_limit_bytes
    if facts.shared_bytes > limit:
        sentences.append(f"{where} needs {facts.shared_bytes} bytes of shared memory, the limit is {limit}")
    if facts.uses_f64:
        sentences.append(f"{where} computes in float64")
    if loops := {kind: count for kind, count in facts.atomics.items() if "cas" in kind}:
        sentences.append(f"{where} has compare-and-swap loops: {loops}")
    if facts.early:
        sentences.append(f"{where} touches memory {facts.early} times before it waits for the kernel ahead of it")
    if wide:
        if not facts.load_bytes and not facts.bulk_copies:
            sentences.append(f"{where} has no load from global memory that was recognised")
        if loads := narrow_loads(facts, narrow):
            sentences.append(f"{where} has {'; '.join(loads)}")
    return sentences


def narrow_loads(facts: Facts, allowed: frozenset[str] = frozenset()) -> list[str]:
    """The loads of less than 16 bytes but for those through `allowed` variables, each in words.

    LLVM gives a load that it made of those on two paths no line, or that of the branch, where nothing is loaded
    (Triton 3.9 for sm_100): it counts as one of those of its width.
    """
    loads = [access for access in facts.accesses if access.op == "load" and access.bytes < WIDE]
    merged = {access.bytes for access in loads if allowed.intersection(access.names)}
    return [
        f"{access.count} loads of {access.bytes} bytes at {access.source} ({', '.join(access.names) or 'unknown'})"
        for access in loads
        if not allowed.intersection(access.names) and (access.names or access.bytes not in merged)
    ]
