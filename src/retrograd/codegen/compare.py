"""Two versions of kernels side by side: what got better, what got worse, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from retrograd.codegen.schema import Change, Codegen, Facts, Kernel, Verdict

# Times of one kernel differ by a few percent from run to run.
_NOISE = 0.05


def changes(new: Codegen, old: Codegen) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """What is different in `new`, and notes on what could not be compared.

    Kernels are paired by name and constants, else by name and order; where each side has one kernel only, these two.
    """
    differences: list[Change] = []
    notes = [f"{target} is not in {old.target}" for target in new.architectures if target not in old.architectures]
    compared = 0
    lonely: dict[tuple[str, str], list[str]] = {}
    for target in [name for name in new.architectures if name in old.architectures]:
        mine = [k for k in new.kernels if k.target == target]
        theirs = [k for k in old.kernels if k.target == target]
        pairs, alone, gone = _paired(mine, theirs)
        compared += len(pairs)
        for a, b in pairs:
            differences += _compared(a, b)
        for kernels, where in ((alone, new.target), (gone, old.target)):
            # An autotuned one with its configuration.
            for name in dict.fromkeys(f"{k.name} {k.tuning.text if k.tuning else ''}".rstrip() for k in kernels):
                lonely.setdefault((name, where), []).append(target)
    if not compared and not notes:
        notes.append("no kernel is in both, so nothing is compared")
    notes += [f"{name} for {', '.join(targets)} is in {where} only" for (name, where), targets in lonely.items()]
    return tuple(differences), tuple(notes)


def _paired(mine: list[Kernel], theirs: list[Kernel]) -> tuple[list[tuple[Kernel, Kernel]], list[Kernel], list[Kernel]]:
    if len({k.name for k in mine}) == len({k.name for k in theirs}) == 1:
        names: Callable[[Kernel], str] = lambda k: ""  # noqa: E731 - a renamed kernel is the same kernel
    else:
        names = lambda k: k.name  # noqa: E731
    pairs: list[tuple[Kernel, Kernel]] = []
    rest: list[Kernel] = []
    left = list(theirs)
    keys: tuple[Callable[[Kernel], object], ...] = (lambda k: (names(k), _variant(k)), names)
    for key in keys:
        rest = []
        for kernel in mine:
            twin = next((other for other in left if key(other) == key(kernel)), None)
            if twin is None:
                rest.append(kernel)
            else:
                left.remove(twin)
                pairs.append((kernel, twin))
        mine = rest
    return pairs, rest, left


def _variant(kernel: Kernel) -> str:
    facts = kernel.facts
    if facts is None:
        return repr(kernel.tuning)
    return repr((sorted(facts.arguments.items()), sorted(map(str, facts.constants.items())), facts.num_warps))


def _compared(new: Kernel, old: Kernel) -> Iterable[Change]:
    def change(fact: str, verdict: Verdict, sentence: str) -> Change:
        return Change(new.name, new.target, fact, verdict, sentence)

    if new.error and not old.error:
        yield change("compiles", "worse", f"no longer compiles: {new.error}")
    elif old.error and not new.error:
        yield change("compiles", "better", "compiles, which it did not")
    if new.facts is not None and old.facts is not None:
        yield from (change(*difference) for difference in _differences(new.facts, old.facts))
    kinds = {h.kind: h for h in new.hazards}, {h.kind: h for h in old.hazards}
    for kind in sorted(kinds[0].keys() - kinds[1].keys()):
        yield change("hazards", "worse", f"new hazard: {kinds[0][kind].what}")
    for kind in sorted(kinds[1].keys() - kinds[0].keys()):
        yield change("hazards", "better", f"no longer {kinds[1][kind].what}")
    if new.measured is not None and old.measured is not None and old.measured.ms:
        ratio = new.measured.ms / old.measured.ms
        if abs(ratio - 1) > _NOISE:
            text = f"{old.measured.ms * 1e3:.1f} -> {new.measured.ms * 1e3:.1f} us"
            verdict: Verdict = "worse" if ratio > 1 else "better"
            yield change("time", verdict, f"takes {text}, {ratio:.2f} times as long")


def _differences(new: Facts, old: Facts) -> Iterable[tuple[str, Verdict, str]]:
    for fact, value, sentence, better in _FACTS:
        after, before = value(new), value(old)
        if after == before or (value is _narrowest and None in (after, before)):
            continue
        verdict = _JUDGES[fact](new, old) if fact in _JUDGES else "changed"
        if better:
            verdict = _less(before, after) if better > 0 else _less(after, before)
        yield fact, verdict, sentence.format(old=before, new=after, now="now" if after else "no longer")


def _narrowest(facts: Facts) -> int | None:
    """Of loads of more than one value a program."""
    other = {*facts.one_value, *(asked.source for asked in facts.asked)}
    widths = [a.bytes for a in facts.accesses if a.op == "load" and a.source not in other]
    return min(widths, default=None)


def _atomics(new: Facts, old: Facts) -> Verdict:
    """Fewer instructions for what the source asks for alike are better, and loops are worse."""
    loops = ["cas" in " ".join(facts.atomics) for facts in (new, old)]
    if loops[0] != loops[1]:
        return _less(loops[0], loops[1])
    same = sorted(a.text() for a in new.asked) == sorted(a.text() for a in old.asked)
    counts = sum(new.atomics.values()), sum(old.atomics.values())
    return _less(*counts) if same and counts[0] != counts[1] else "changed"


def _tensor_cores(new: Facts, old: Facts) -> Verdict:
    return "changed" if bool(new.matrix) == bool(old.matrix) else "better" if new.matrix else "worse"


def _less(new: float, old: float) -> Verdict:
    return "better" if new < old else "worse"


def _widths(counts: dict[int, int]) -> str:
    return " ".join(f"{count}x{width}B" for width, count in counts.items()) or "none"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


# Fact, its value, the sentence where it differs, and which is better: 1 the larger, -1 the smaller, 0 neither.
# Registers and shared memory count by what they do to the occupancy.
_FACTS: tuple[tuple[str, Callable[[Facts], Any], str, int], ...] = (
    ("spills", lambda f: f.spill_bytes, "spills {old} -> {new} bytes a thread", -1),
    ("registers", lambda f: f.registers, "{old} -> {new} registers", 0),
    ("shared", lambda f: f.shared_bytes, "{old} -> {new} bytes of shared memory", 0),
    ("occupancy", lambda f: f.occupancy, "occupancy {old:.0%} -> {new:.0%}", 1),
    ("loads", _narrowest, "narrowest load {old} -> {new} bytes a thread", 1),
    ("loads", lambda f: _widths(f.load_bytes), "global loads {old} -> {new}", 0),
    ("stores", lambda f: _widths(f.store_bytes), "global stores {old} -> {new}", 0),
    ("atomics", lambda f: _counts(f.atomics), "atomics {old} -> {new}", 0),
    ("tensor cores", lambda f: _counts(f.matrix), "tensor cores {old} -> {new}", 0),
    ("tf32", lambda f: f.tf32, "float32 operands are {now} rounded to TF32", 0),
    ("f64", lambda f: f.uses_f64, "{now} computes in float64", -1),
    ("approximations", lambda f: ", ".join(f.approximations) or "none", "approximations {old} -> {new}", 0),
    ("contraction", lambda f: f.fp_fusion, "a * b + c is {now} contracted", 0),
)
_JUDGES = {"atomics": _atomics, "tensor cores": _tensor_cores}
