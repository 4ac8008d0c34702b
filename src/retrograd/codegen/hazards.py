"""Hazards that make results depend on the run: the order of atomics, locks, autotuning, a launch ahead of time.

And atomics that cost too much.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable

from retrograd.codegen.schema import Facts, Hazard, Tuning
from retrograd.runtime.gpu_targets import target_named

_ACCUMULATING = ("add", "xor")  # a maximum or an exchange is the same the second time
_EARLY = {"load": "loads", "store": "stores", "atomic": "changes memory", "copy": "copies"}
_IN_ORDER = "write partial sums and add them up in a fixed order, in a second kernel"


def hazards(facts: Facts, tuning: Tuning | None, source: str) -> tuple[Hazard, ...]:
    """What is found in one kernel.

    Args:
        facts: what it was compiled to.
        tuning: how it is tuned, None if it is not.
        source: Python source of the kernel function, "" if unknown; it tells which argument an address belongs to.
    """
    pointers = _Pointers(facts, source)
    result = [*_atomics(facts), *_fenced(facts), *_locks(facts, pointers), *_early(facts), *_loops(facts)]
    result += _limits(facts)
    if tuning is not None and tuning.configs > 1:
        result += [*_accumulates(facts, tuning, pointers), *_choice(facts, tuning)]
    return tuple(dict.fromkeys(result))


class _Pointers:
    """Which arguments the variables of an address come from."""

    def __init__(self, facts: Facts, source: str) -> None:
        self._arguments = {name for name, kind in facts.arguments.items() if kind.startswith("*")}
        self._made_of: dict[str, set[str]] = {}
        tree = ast.parse(textwrap.dedent(source)) if source else ast.Module([], [])
        for node in ast.walk(tree):
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
                used = {n.id for n in _address(node.value)}
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            self._made_of.setdefault(name.id, set()).update(used)

    def behind(self, names: Iterable[str]) -> set[str]:
        """Pointer arguments that these variables are made of."""
        variables: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name not in variables:
                variables.add(name)
                todo += self._made_of.get(name, ())
        return variables & self._arguments


def _address(value: ast.AST) -> Iterable[ast.Name]:
    """Names in an expression that may be an address: what is loaded through a pointer is a number."""
    if isinstance(value, ast.Call):
        return
    if isinstance(value, ast.Name):
        yield value
    for child in ast.iter_child_nodes(value):
        yield from _address(child)


def _atomics(facts: Facts) -> Iterable[Hazard]:
    for asked in facts.asked:
        if asked.adds_floating:
            sentence = (
                f"adds {asked.dtype} atomically: the order of additions, and so the last bits, differ from run to run"
            )
            yield Hazard("float_atomics", sentence, _IN_ORDER, asked.source)


def _fenced(facts: Facts) -> Iterable[Hazard]:
    """Sums that publish nothing need no order: it is Triton's default all the same."""
    fences = sum(count for name, count in facts.fences.items() if "CTA" not in name and "VIEW" not in name)
    for asked in facts.asked:
        if fences and asked.adds_floating and asked.order != "relaxed":
            sentence = f"adds with {asked.order} order, Triton's default, which puts fences around every addition"
            yield Hazard(
                "fenced_atomics", sentence, "tl.atomic_add(..., sem='relaxed') where only sums are formed", asked.source
            )


def _locks(facts: Facts, pointers: _Pointers) -> Iterable[Hazard]:
    """Compare-and-swap in the source beside floating memory that is read, changed and written."""
    locks = [asked for asked in facts.asked if asked.op == "cas"]
    floats = {n for n in _in_place(facts, pointers) if facts.arguments[n].startswith(("*f", "*bf"))}
    if locks and floats:
        sentence = (
            f"takes a lock and changes {_listed(floats)} in place: programs add in the order in which they get it"
        )
        yield Hazard("lock_order", sentence, _IN_ORDER, locks[0].source)


def _loops(facts: Facts) -> Iterable[Hazard]:
    others = [asked for asked in facts.asked if asked.op != "cas"]
    if facts.compare_and_swaps and others and not any(asked.op == "cas" for asked in facts.asked):
        sentence = f"there is no instruction for {others[0].op} {others[0].dtype}: compare-and-swap loops instead"
        yield Hazard("cas_loop", sentence, "accumulate in float32 where additions meet", others[0].source)


def _early(facts: Facts) -> Iterable[Hazard]:
    """Launched while the kernel ahead of it ends, whose results may not be there yet."""
    if facts.early and facts.early == sum(access.count for access in facts.accesses) + facts.bulk_copies:
        sentence = "is launched with launch_pdl and does not wait for the kernel ahead of it before it touches memory"
        yield Hazard("early_access", sentence, "call tl.extra.cuda.gdc_wait() before the first load or store")
        return
    for access in facts.ahead_of_wait:
        sentence = f"is launched with launch_pdl and {_EARLY[access.op]} before it waits for the kernel ahead of it"
        advice = "do it after tl.extra.cuda.gdc_wait(), unless no kernel ahead ever writes there"
        yield Hazard("early_access", sentence, advice, access.source)


def _limits(facts: Facts) -> Iterable[Hazard]:
    limit = target_named(facts.target).shared_limit_bytes
    if facts.shared_bytes > limit:
        sentence = (
            f"needs {facts.shared_bytes} bytes of shared memory, {facts.target} has {limit}: it cannot be launched"
        )
        yield Hazard("too_much_shared", sentence, "make blocks smaller or num_stages less")


def _accumulates(facts: Facts, tuning: Tuning, pointers: _Pointers) -> Iterable[Hazard]:
    """Tuning runs a kernel dozens of times on the caller's own tensors."""
    if tuning.hooks:
        return  # the author's own hooks may put everything back
    put_back = {*tuning.reset_to_zero, *tuning.restore_value}
    told: set[str] = set()
    for asked in facts.asked:
        names = pointers.behind(asked.names)
        # Where the argument cannot be told from the line, any that is put back is taken for it.
        if asked.op not in _ACCUMULATING or (names and names <= put_back) or (not names and put_back):
            continue
        told |= names
        where = f"into {_listed(names)} " if names else ""
        sentence = f"is autotuned and {asked.op}s atomically {where}".rstrip()
        yield Hazard(
            "tuning_accumulates",
            f"{sentence}: results of the tuning runs stay in it at the first call",
            f"@triton.autotune(..., reset_to_zero={sorted(names) or ['ARGUMENT']!r})",
            asked.source,
        )
    if left := _in_place(facts, pointers) - put_back - told:
        sentence = f"is autotuned and changes {_listed(left)} in place: tuning changes it many times at the first call"
        yield Hazard("tuning_in_place", sentence, f"@triton.autotune(..., restore_value={sorted(left)!r})")


def _choice(facts: Facts, tuning: Tuning) -> Iterable[Hazard]:
    if facts.reduces or any(asked.adds_floating for asked in facts.asked):
        sentence = f"adds in an order that may depend on which of {tuning.configs} configurations was fastest that day"
        yield Hazard("tuned_choice", sentence, "fix one configuration where bits have to be the same in every process")


def _in_place(facts: Facts, pointers: _Pointers) -> set[str]:
    """Pointer arguments that are loaded from and stored to."""
    reached: dict[str, set[str]] = {"load": set(), "store": set(), "atomic": set()}
    for access in facts.accesses:
        reached[access.op] |= pointers.behind(access.names)
    return reached["load"] & reached["store"]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
