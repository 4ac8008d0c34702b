"""Comparison of two graphs: whether they are the same, and if not, why, the first cause first."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from typing import Any, get_args

from retrograd.core import gc_pause
from retrograd.core.wording import count
from retrograd.graph import keys, undecided
from retrograd.graph.canonical import forms
from retrograd.graph.diffing import (
    carried_gradients,
    collectives,
    compiled,
    downstream,
    loops,
    precedence,
    regions,
    relabeled,
    remat,
    reordered,
    windows,
)
from retrograd.graph.diffing.consequences import STRUCTURE, Placed, first_causes, reshapes
from retrograd.graph.diffing.correspondence import Matching, Places
from retrograd.graph.diffing.matching import in_order, is_nothing, match, places_of
from retrograd.graph.diffing.merging import merged
from retrograd.graph.diffing.neighbourhood import neighbourhoods
from retrograd.graph.diffing.side_by_side import Half, View
from retrograd.graph.form import Form
from retrograd.graph.ir import Graph
from retrograd.graph.schema import HARMLESS, Cause, Diff, Kind, Side

_RANK: tuple[str, ...] = get_args(Kind)
# What an operation computes; which of them comes first in the program is the cause of the others.
_OPERATIONS = frozenset(
    {
        "shape_changed", "dtype_changed", "constant_changed", "attribute_changed", "instruction_replaced",
        "instruction_inserted", "instruction_removed", "state_changed",
    }
)  # fmt: skip
# What a program is given; which of them it uses first.
_PARAMETERS = frozenset({"shape_changed", "dtype_changed", "parameter_added"})
# Kinds that another assignment of parameters may explain with fewer instructions, and those that another alignment may.
_DOUBTFUL = frozenset({"operand_changed", "parameter_moved", "output_removed"})
_NAMED = frozenset({"parameter_added", "parameter_removed", "output_added", "output_removed", "operand_changed"})
_STRUCTURAL = _NAMED | {"instruction_replaced", "instruction_inserted", "instruction_removed"}
_RESHAPED = frozenset({"operand_changed", "instruction_replaced", "instruction_removed"})


_Ids = tuple[list[bytes], list[bytes]]  # keys of the values of both sides
_Hypothesis = tuple[View, tuple[list[Cause], int]]  # what corresponds, and by that the causes and consequences


def compare(a: Graph, b: Graph, pictured: bool = True) -> Diff:
    """Compare two graphs. `pictured`: keep the neighbourhood of the causes, for pictures."""
    with gc_pause.paused():
        return _compare(a, b, pictured)


def _compare(a: Graph, b: Graph, pictured: bool) -> Diff:
    started = time.perf_counter()
    both = _Comparison(a, b)
    placed, consequences = both.computation(a.entry, b.entry)
    placed += [Placed(cause, position=1.0) for cause in both.loops()]
    placed, more = first_causes(placed)
    placed += [Placed(cause, position=1.0) for cause in both.compiled(bool(placed))]
    reshaped = any(reshapes(p) and p.cause.kind == "attribute_changed" and not p.within for p in placed)
    computing = {p.within for p in placed if p.cause.kind in _OPERATIONS}
    placed.sort(key=lambda p: (*_rank(p, reshaped, p.within not in computing), p.position))
    causes, consequences = merged(placed), consequences + more
    view = both.entry
    live_b = sum(view.b.form.live) if view else sum(both.forms_b[b.entry].live)
    notes = both.notes(causes)
    matched = sum(1 for k, p in enumerate(view.a.partner) if p >= 0 and view.a.form.live[k]) if view else live_b
    nodes = neighbourhoods(view, causes) if view and pictured else ((), ())
    return Diff(
        side(a, both.forms_a),
        side(b, both.forms_b),
        tuple(causes),
        tuple(notes),
        matched=matched,
        consequences=consequences,
        seconds=time.perf_counter() - started,
        nodes_a=nodes[0],
        nodes_b=nodes[1],
        unknown=tuple(both.unknown),
    )


def side(graph: Graph, of: dict[str, Form], key: str = "") -> Side:
    """What a graph is, in numbers."""
    main = of[graph.entry]
    return Side(
        title=graph.title,
        name=graph.name,
        format=graph.format,
        instructions=len(graph),
        parameters=len(main.parameters),
        outputs=len(main.outputs),
        collectives=sum(len(f.collectives) for f in of.values()),
        dead=main.dead,
        key=key or graph.key,
    )


class _Comparison:
    """The state of one comparison. `entry` is the view of the entry computations, None if they are equal."""

    def __init__(self, a: Graph, b: Graph) -> None:
        self.a, self.b = a, b
        self.forms_a, self.forms_b = forms(a), forms(b)
        self.bodies = keys.Bodies(self.forms_a), keys.Bodies(self.forms_b)
        same_text = a.digest and (a.source, a.ordinal, a.digest) == (b.source, b.ordinal, b.digest)
        self.unknown = (
            []
            if same_text
            else [
                cause for side in ((a, self.forms_a, "A"), (b, self.forms_b, "B")) for cause in undecided.causes(*side)
            ]
        )
        self.entry: View | None = None
        self.compared: set[tuple[bytes, bytes]] = set()
        self.steps: dict[str, list[tuple[str, str]]] = {}  # loops and switches by what differs in their size

    def computation(self, name_a: str, name_b: str, places: Places = None) -> tuple[list[Placed], int]:
        """Causes within one pair of computations and those that they call, and the number of consequences.

        `places` says which parameter of the one is which of the other.
        """
        form_a, form_b = self.forms_a[name_a], self.forms_b[name_b]
        numbered = self.ids(form_a, form_b, numbered=True)
        key_a = keys.form_key(form_a, numbered[0], keys.ordered(self.a, form_a))
        if key_a == keys.form_key(form_b, numbered[1], keys.ordered(self.b, form_b)):
            return [], 0
        entry = name_a == self.a.entry and name_b == self.b.entry
        view, explained = self.simplest(form_a, form_b, numbered, entry, places)
        if entry:
            self.entry = view
        follows, renewed = downstream.following(view, explained[0])
        callers, more = self.called(view, renewed)
        kept = [cause for k, cause in enumerate(explained[0]) if k not in follows]
        others = precedence.borrowed(view, kept)
        kept = [cause for k, cause in enumerate(kept) if k not in others]
        where = precedence.positions(view, kept)
        fits = set(windows.fitting(view, kept))
        texts = [(view.changes.get(c, ()), at, view.follow.get(c)) for c, at in zip(kept, where, strict=True)]
        own = [Placed(c, "", *own, fits=k in fits) for k, (c, own) in enumerate(zip(kept, texts, strict=True))]
        causes = _before_calls(view, own, callers)
        more += sum(c.count for c in explained[0]) + sum(p.cause.count for inner in callers.values() for p in inner)
        more -= sum(p.cause.count for p in causes)
        unexplained = [Placed(_unexplained(view))] * (entry and not self.unknown)
        return causes or unexplained, explained[1] + more

    def loops(self) -> list[Cause]:
        """What differs in loops as a whole."""
        if self.entry is None:
            return []
        ids = self.entry.a.exact, self.entry.b.exact
        again = remat.find_cause(self.a, self.b, self.forms_a, self.forms_b, ids)
        return [*loops.steps_cause(self.steps), *([again] if again else [])]

    def simplest(self, form_a: Form, form_b: Form, numbered: _Ids, entry: bool, places: Places = None) -> _Hypothesis:
        """The correspondence that explains the difference with the fewest instructions.

        In the entry, parameters may have changed places, which is tried first; in a called computation the caller gives
        them their places. Where the answer is doubtful, that each kept its number or its name is tried as well, and
        that nothing came between two operations that look alike.
        """
        first = numbered if not entry else self.ids(form_a, form_b, False)

        def tried(ids: _Ids, **options: Any) -> _Hypothesis:
            matching = match(form_a, form_b, *ids, entry=entry, places=places, **options)
            return self.hypothesis(matching, numbered)

        best = tried(first)
        if _cost(best) == (1, 0):  # no other correspondence can explain less than one instruction
            return best
        if entry and any(c.kind in _DOUBTFUL for c in best[1][0]):
            best = min(best, tried(numbered), key=_cost)
        if entry and any(c.kind in _NAMED for c in best[1][0]):
            best = min(best, tried(first, named=True), key=_cost)
        ordered = in_order(form_a, form_b) if entry and any(_about_parameters(c) for c in best[1][0]) else []
        if ordered:
            best = min(best, tried(first, ordered=ordered), key=_cost)
        if any(c.kind in _STRUCTURAL for c in best[1][0]):
            best = min(best, tried(numbered, named=True, traced=True), key=_cost)
        if ordered:
            best = min(best, tried(first, named=True, traced=True, ordered=ordered), key=_cost)
        if any(c.kind in _RESHAPED for c in best[1][0]):
            best = min(best, tried((best[0].a.ids, best[0].b.ids), bold=False), key=_cost)
        return best

    def ids(self, form_a: Form, form_b: Form, numbered: bool) -> _Ids:
        """Keys of the values of both; `numbered`: parameters are told apart by their numbers."""
        numbers = [form.numbers if numbered else [-1] * len(form) for form in (form_a, form_b)]
        return keys.digests(form_a, self.bodies[0], numbers[0]), keys.digests(form_b, self.bodies[1], numbers[1])

    def hypothesis(self, matching: Matching, exact: _Ids) -> _Hypothesis:
        """What differs by a correspondence."""
        paired_a, paired_b = ({pair[k] for pair in matching.outputs} for k in (0, 1))
        half_a = Half(self.a, matching.form_a, matching.ids_a, exact[0], matching.a, False, paired_a)
        half_b = Half(self.b, matching.form_b, matching.ids_b, exact[1], matching.b, True, paired_b)
        half_a.meet(half_b)
        half_b.meet(half_a)
        view = View(half_a, half_b, matching)
        return view, self.causes(view)

    def causes(self, view: View) -> tuple[list[Cause], int]:
        relabelled, consequences = relabeled.find_causes(view)
        moved, remark = reordered.parameters(view)
        carried = carried_gradients.find_causes(view)
        causes = _without_doubles(
            carried,
            [
                *regions.find_causes(view),
                *relabelled,
                *reordered.operands(view),
                *collectives.find_causes(view),
                *reordered.outputs(view),
                *moved,
            ],
        )
        if remark:
            more = ("parameter_added", "output_added")
            causes = [replace(c, what=f"{c.what}; {remark}") if c.kind in more else c for c in causes]
        return causes, consequences + self.consequences_of(view)

    def consequences_of(self, view: View) -> int:
        """Nodes that are the same operation on corresponding operands, and differ because something below them does."""
        ids_a, ids_b = view.a.ids, view.b.ids
        labels_a, labels_b, live, rewired = view.a.form.labels, view.b.form.labels, view.a.form.live, view.rewired
        return sum(
            [
                live[a] and labels_a[a] == labels_b[b] and a not in rewired
                for a, b in enumerate(view.a.partner)
                if b >= 0 and ids_a[a] != ids_b[b]
            ]
        )

    def called(self, view: View, renewed: set[int]) -> tuple[dict[int, list[Placed]], int]:
        """Causes inside computations that partners call, by caller: each pair of computations once.

        What is computed in another way in those that take other parameters, `renewed`, follows from these.
        """
        callers: dict[tuple[str, str, str], tuple[int, Places]] = {}
        bodies_a, bodies_b = self.bodies
        for a, pairs in view.a.form.called.items():
            b = view.a.partner[a]
            if b < 0 or not view.a.form.live[a]:
                continue
            others = view.b.form.called.get(b, ())
            self.count_steps(view, a, b, len(pairs), len(others))
            # Of another number of branches nobody knows which are the same ones.
            for (role, x), (_, y) in zip(pairs, others, strict=True) if len(pairs) == len(others) else ():
                if bodies_a[x] != bodies_b[y]:
                    loop = view.a.form.labels[a][0] == "while"
                    callers.setdefault((role, x, y), (a, places_of(view.matching, a, b) if loop else None))
        causes: dict[int, list[Placed]] = defaultdict(list)
        consequences = 0
        for (role, x, y), (a, places) in callers.items():
            if (bodies_a[x], bodies_b[y]) in self.compared:
                continue
            self.compared.add((bodies_a[x], bodies_b[y]))
            inner, more = self.computation(x, y, places)
            kept = [p for p in inner if a not in renewed or p.cause.kind not in STRUCTURE]
            consequences += more + sum(p.cause.count for p in inner) - sum(p.cause.count for p in kept)
            place = f"the {role} of {view.a.form.labels[a][0]} {view.a.name(a)}"
            for p in kept:
                at = (a + p.position / 2) / len(view.a.form)  # a literal of the caller stands half a place behind
                causes[a].append(replace(p, within=f"{place}: in {p.within}" if p.within else place, position=at))
        return causes, consequences

    def count_steps(self, view: View, a: int, b: int, branches_a: int, branches_b: int) -> None:
        """Note two loops that make another number of steps, or two switches of another number of branches."""
        before = loops.steps(self.forms_a, view.a.form, a)
        after = loops.steps(self.forms_b, view.b.form, b)
        names = view.a.name(a), view.b.name(b)
        if before is not None and after is not None and before != after:
            self.steps.setdefault(f"scan of {before} -> {after} steps", []).append(names)
        if branches_a != branches_b:
            self.steps.setdefault(f"switch of {branches_a} -> {branches_b} branches", []).append(names)

    def compiled(self, computed: bool) -> list[Cause]:
        """What compiles again, beside what was computed in another way: of graphs that compute the same all of it."""
        causes = compiled.module_causes(self.a, self.b, not computed)
        forms = self.forms_a, self.forms_b
        if not computed and not any(c.kind == "aliasing_changed" for c in causes):
            walk = compiled.Placements((self.a, self.b), forms, lambda x, y: self.ids(x, y, numbered=True))
            causes += walk.causes() if not causes or not self.unknown else []
        if not computed and not causes and self.a.key and self.b.key and self.a.key != self.b.key:
            causes.append(
                Cause(
                    "key_changed",
                    f"the same computation under two keys, {self.a.key[:12]} and {self.b.key[:12]}: what is not in the "
                    "text differs (donated inputs, order of parameters of the framework, sharding flags)",
                    advice="keep parameter aliasing on or off for the whole run",
                )
            )
        return causes

    def notes(self, causes: list[Cause]) -> list[Cause]:
        """What differs without changing what is computed or, where something else does, what is compiled."""
        if self.a.digest and self.a.digest == self.b.digest:
            return []
        notes: list[Cause] = []
        main_a, main_b = self.forms_a[self.a.entry], self.forms_b[self.b.entry]
        if main_a.dead != main_b.dead:
            notes.append(
                Cause("dead_code_only", f"dead instructions, which no output needs: {main_a.dead} -> {main_b.dead}")
            )
        if any(c.kind == "barrier_changed" for c in causes):
            return notes
        if causes:
            return notes + compiled.barrier_causes(main_a, main_b)
        if not notes and keys.names_key(self.a) != keys.names_key(self.b):
            notes.append(
                Cause("packaging_only", "packaging: tuples, asynchronous pairs or the order of unordered collectives")
            )
        assert all(n.kind in HARMLESS for n in notes)
        return notes


def _rank(placed: Placed, reshaped: bool, rewired: bool) -> tuple[bool, int]:
    """The first cause first; those of one rank in the order of the program.

    `reshaped`: an operation that no loop explains has another shape, and with it a loop over this another length.
    `rewired`: nothing in this computation is computed in another way, so that who reads what is all that differs there.
    """
    cause = placed.cause
    rank = _RANK.index("shape_changed" if cause.kind in _PARAMETERS else cause.kind)
    if reshaped and cause.kind == "loop_changed":
        rank = _RANK.index("constant_changed")
    read = cause.kind == "operand_changed" and (rewired or cause.what.endswith("exchanged"))
    if read or (cause.kind in _OPERATIONS and "parameter" not in cause.what.partition(" ->")[0]):
        rank = _RANK.index("constant_changed")
    rank = _RANK.index("attribute_changed") if placed.fits else rank  # behind the window that wants it
    return "became dynamic" not in cause.what, rank


def _about_parameters(cause: Cause) -> bool:
    """Do parameters come or go, or have another shape?"""
    return cause.kind in ("parameter_added", "parameter_removed") or (
        cause.kind in ("shape_changed", "dtype_changed") and cause.what.startswith("parameter")
    )


def _before_calls(view: View, own: list[Placed], callers: dict[int, list[Placed]]) -> list[Placed]:
    """The causes of a computation and of what it calls, without those behind a call that computes something else."""
    if not callers:
        return own
    inside = {a: [p.cause for p in inner] for a, inner in callers.items()}
    follows, behind = downstream.across_calls(view, [p.cause for p in own], inside)
    rest = [p for k, p in enumerate(own) if k not in follows]
    for a, inner in callers.items():
        rest += [p for p in inner if a not in behind or p.cause.kind not in downstream.BEHIND_CALLS]
    return rest or [*own, *(p for inner in callers.values() for p in inner)]


def _cost(hypothesis: _Hypothesis) -> tuple[int, int]:
    causes, consequences = hypothesis[1]
    sizes = {c: max(c.count, len(c.a) + len(c.b)) for c in causes}
    # Any permutation is one event: 3, a little more than one operand that changed, which names one instruction a side.
    return sum(min(n, 3) if c.kind == "parameter_moved" else n for c, n in sizes.items()), consequences


def _unexplained(view: View) -> Cause:
    """Two computations that are not equal always differ for a reason; never say "same" for want of words."""
    count_a, count_b = (sum(is_nothing(half.form.labels[o]) for o in half.form.outputs) for half in (view.a, view.b))
    if count_a != count_b:
        kind, sign, letter = ("output_added", "+", "B") if count_b > count_a else ("output_removed", "-", "A")
        several = count(abs(count_b - count_a), "output")
        return Cause(kind, f"{sign} {several} None in {letter} only: gradients of inputs that need none")
    count_a, count_b = (sum(half.form.live) for half in (view.a, view.b))
    text = f"the two differ in a way that has no name here ({count_a} and {count_b} live instructions)"
    return Cause("operand_changed", text, advice="please report it, with both files")


def _without_doubles(carried: list[Cause], others: list[Cause]) -> list[Cause]:
    """Causes that are not said by another: a collective inside a carried-over gradient; constants written twice."""
    if carried or any(c.kind != "duplicate_changed" for c in others):
        others = [c for c in others if c.kind != "duplicate_changed"]
    explained_a, explained_b = {n for c in carried for n in c.a}, {n for c in carried for n in c.b}
    return carried + [
        c
        for c in others
        if not (c.kind.startswith("collective_") and explained_a.issuperset(c.a) and explained_b.issuperset(c.b))
    ]
