"""Two versions of kernels side by side: what got better, what got worse, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
            for name in dict.fromkeys(_called(kernel) for kernel in kernels):
                lonely.setdefault((name, where), []).append(target)
    if not compared and not notes:
        notes.append("no kernel is in both, so nothing is compared")
    notes += [f"{name} for {', '.join(targets)} is in {where} only" for (name, where), targets in lonely.items()]
    return tuple(differences), tuple(notes)


def _called(kernel: Kernel) -> str:
    """Its name, with the configuration of an autotuned one."""
    choice = {} if kernel.tuning is None else kernel.tuning.choice
    return " ".join([kernel.name, *(f"{name}={value}" for name, value in choice.items())])


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
        for fact, verdict, sentence in (*_resources(new.facts, old.facts), *_code(new.facts, old.facts)):
            yield change(fact, verdict, sentence)
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


Said = tuple[str, Verdict, str]


def _resources(new: Facts, old: Facts) -> Iterable[Said]:
    """Registers and shared memory count by what they do to the occupancy."""
    if new.spill_bytes != old.spill_bytes:
        sentence = f"spills {old.spill_bytes} -> {new.spill_bytes} bytes a thread"
        yield "spills", _less(new.spill_bytes, old.spill_bytes), sentence
    shares = f"{old.occupancy:.0%} -> {new.occupancy:.0%}"
    for fact, a, b, unit in (
        ("registers", new.registers, old.registers, "registers"),
        ("shared", new.shared_bytes, old.shared_bytes, "bytes of shared memory"),
    ):
        if a != b:
            yield fact, "changed", f"{b} -> {a} {unit}"
    if new.occupancy != old.occupancy:
        yield "occupancy", _less(old.occupancy, new.occupancy), f"occupancy {shares}"


def _code(new: Facts, old: Facts) -> Iterable[Said]:
    loads = tuple(_narrowest(facts) for facts in (old, new))
    if None not in loads and loads[0] != loads[1]:
        sentence = f"narrowest load {loads[0]} -> {loads[1]} bytes a thread"
        yield "loads", _less(loads[0] or 0, loads[1] or 0), sentence
    for fact, ours, theirs in (
        ("loads", new.load_bytes, old.load_bytes),
        ("stores", new.store_bytes, old.store_bytes),
    ):
        if ours != theirs:
            yield fact, "changed", f"global {fact} {_widths(theirs)} -> {_widths(ours)}"
    if new.atomics != old.atomics:
        yield "atomics", _atomics(new, old), f"atomics {_counts(old.atomics)} -> {_counts(new.atomics)}"
    if new.matrix != old.matrix:
        verdict: Verdict = "changed"
        if bool(new.matrix) != bool(old.matrix):
            verdict = "better" if new.matrix else "worse"
        yield "tensor cores", verdict, f"tensor cores {_counts(old.matrix)} -> {_counts(new.matrix)}"
    if new.tf32 != old.tf32:
        yield "tf32", "changed", f"float32 operands are {'now' if new.tf32 else 'no longer'} rounded to TF32"
    if new.uses_f64 != old.uses_f64:
        yield "f64", _less(new.uses_f64, old.uses_f64), f"{'now' if new.uses_f64 else 'no longer'} computes in float64"
    if new.approximations.keys() != old.approximations.keys():
        sentence = f"approximations {_listed(old.approximations)} -> {_listed(new.approximations)}"
        yield "approximations", "changed", sentence
    if new.fp_fusion != old.fp_fusion:
        yield "contraction", "changed", f"a * b + c is {'now' if new.fp_fusion else 'no longer'} contracted"


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


def _less(new: float, old: float) -> Verdict:
    return "better" if new < old else "worse"


def _widths(counts: dict[int, int]) -> str:
    return " ".join(f"{count}x{width}B" for width, count in counts.items()) or "none"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
