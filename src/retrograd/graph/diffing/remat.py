"""Rematerialisation: does one graph compute again, for its backward, what the other saves?

In loops the sign is what they carry; elsewhere values that are computed a second time, behind an optimisation barrier,
or in what JAX calls a rematted computation, since optimising takes the barriers away.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from retrograd.core.wording import count, some
from retrograd.graph.form import Form, elements
from retrograd.graph.ir import Graph, Instruction
from retrograd.graph.schema import Cause
from retrograd.graph.value_names import name_of

_ARGUMENT = "primals"  # of a forward of AOTAutograd, without its number
_CHECKPOINT_ADVICE = "torch.utils.checkpoint or the partitioner's recomputation is on in one of the two"
_SAVING = frozenset({"aten.detach.default", "aten.alias.default", "get-tuple-element", "tuple"})
Forms = dict[str, Form]
# What stacks, unstacks and counts: as many as there are values that a loop saves. It says nothing of recomputation.
_BOOKKEEPING_NAMES = """
    add bitcast broadcast broadcast-in-dim compare concatenate constant convert copy dynamic-slice
    dynamic-update-slice get-tuple-element iota opt-barrier pad parameter reduce-precision
    reshape select slice transpose
"""
_BOOKKEEPING = frozenset(_BOOKKEEPING_NAMES.split())
_INDICES = frozenset({"s32[]", "u32[]", "s64[]", "pred[]"})
_MARK = "rematted_computation"
_AGAIN = re.compile(rf"{_MARK}/(?:(\w+)/)?")
_REMAT_ADVICE = "jax.checkpoint or nn.remat is on in one of the two: what the backward needs is saved in the other"


def find_cause(
    a: Graph, b: Graph, forms_a: Forms, forms_b: Forms, ids: tuple[list[bytes], list[bytes]]
) -> Cause | None:
    """At most one cause. `ids` are keys of the values of both entries, which tell parameters apart."""
    if a.format == "fx":
        return _of_saved(a, b) or _of_forward(a, b)
    return _in_loops(a, b, forms_a, forms_b) or _elsewhere(a, b, forms_a, forms_b, ids)


def _of_saved(a: Graph, b: Graph) -> Cause | None:
    """Parameters of one backward that the other computes: AOTAutograd names what is saved after what makes it.

    Only where the other takes nothing more, but for arguments of the forward, nor in another shape, is it sure that
    these are the same values.
    """
    taken = [Counter(_stem(i) for i in graph.main.instructions if i.opcode == "parameter") for graph in (a, b)]
    computed = [Counter(_stem(i) for i in graph.main.instructions if i.operands) for graph in (a, b)]
    again = computed[1] - computed[0], computed[0] - computed[1]
    for only, graph, own, other, new in (("B", a, *taken, again[0]), ("A", b, *reversed(taken), again[1])):
        saved = own - other
        more = [name for name, _ in other - own if name != _ARGUMENT]
        if saved and not more and not saved - new:
            words = some([name for name, _ in saved], 4)
            text = f"remat in {only}: {words} {'is' if len(saved) == 1 else 'are'} computed again, not saved"
            names = tuple(i.name for i in graph.main.instructions if i.opcode == "parameter" and _stem(i) in saved)
            return Cause("remat_changed", text, "", _CHECKPOINT_ADVICE, names, names, saved.total())
    return None


def _of_forward(a: Graph, b: Graph) -> Cause | None:
    """Values that one forward of AOTAutograd saves, where the other, which computes the same, saves more arguments."""
    graphs = a, b
    if not all(any(i.name.startswith(_ARGUMENT) for i in graph.main.instructions) for graph in graphs):
        return None
    if _computed(a) != _computed(b):
        return None
    sides = [_returned(graph) for graph in graphs]
    for only, (own, other) in (("B", sides[::-1]), ("A", sides)):
        arguments, values = (other[k] - own[k] for k in (0, 1))
        more = [own[k] - other[k] for k in (0, 1)]
        if values and more[0] and not arguments and not more[1]:
            stems = some(list(dict.fromkeys(name for name, _ in values)), 4)
            text = f"remat in {only}: {stems} {'is' if values.total() == 1 else 'are'} not saved, to be computed again"
            names = [
                tuple(graph.main.instructions[o].name for o in graph.main.instructions[graph.main.root].operands)
                for graph in graphs
            ]
            return Cause("remat_changed", text, "", _CHECKPOINT_ADVICE, names[0], names[1], values.total())
    return None


def _computed(graph: Graph) -> Counter[tuple[str, str]]:
    """The operations of a graph, but for copies of what is saved."""
    return Counter((i.opcode, i.shape) for i in graph.main.instructions if i.operands and i.opcode not in _SAVING)


def _returned(graph: Graph) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """The arguments and the values that a graph returns, by name without number, and shape."""
    returned = [graph.main.instructions[o] for o in graph.main.instructions[graph.main.root].operands]
    arguments = [i for i in returned if i.opcode == "parameter"]
    return Counter(map(_stem, arguments)), Counter(_stem(i) for i in returned if i.opcode != "parameter")


def _stem(ins: Instruction) -> tuple[str, str]:
    """The name of a value without its number, and its shape."""
    return ins.name.rstrip("0123456789").rstrip("_"), ins.shape


def _elsewhere(
    a: Graph, b: Graph, forms_a: Forms, forms_b: Forms, ids: tuple[list[bytes], list[bytes]]
) -> Cause | None:
    (again_a, named_a), (again_b, named_b) = _again_of(a, forms_a, ids[0]), _again_of(b, forms_b, ids[1])
    # Values that are there twice in both say nothing: torch_xla gathers weights again, behind barriers.
    if len(again_a) == len(again_b) or (again_a and again_b and not (named_a and named_b)):
        return None
    only, graph, own, other = ("B", b, again_b, again_a) if len(again_b) > len(again_a) else ("A", a, again_a, again_b)
    operations, others = (Counter(form.labels[n][0] for form, n in again) for again in (own, other))
    if others - operations:  # what is computed again is another thing in either
        return None
    around = dict.fromkeys(m[1] for form, n in own if (m := _AGAIN.search(form.origins[n].metadata)) and m[1])
    text = (
        f"remat in {only}{' of more' if other else ''}: {count(len(own) - len(other), 'operation')} "
        f"computed again for the backward ({', '.join(op for op, _ in operations.most_common(4))})"
        + (f", around {some(list(around), 4)}" if around else "")
    )
    names = tuple(name_of(graph, form.home(n), form.origins[n]) for form, n in own)
    sides = ((), names) if only == "B" else (names, ())
    return Cause("remat_changed", text, "", _REMAT_ADVICE, *sides, abs(len(again_a) - len(again_b)))


def _again_of(graph: Graph, forms: Forms, ids: list[bytes]) -> tuple[list[tuple[Form, int]], bool]:
    """Operations that are computed again, those of loops where the text calls them so; whether it does."""
    form = forms[graph.entry]
    bodies = [forms[name] for name in [graph.entry, *_called([form], forms)]]
    texts = {text for body in bodies for text in {ins.metadata for ins in body.origins} if _MARK in text}
    named = [
        (body, n)
        for body in bodies
        if texts
        for n, ins in enumerate(body.origins)
        if body.live[n] and ins.metadata in texts
    ]
    if named or not form.barriers:
        return [(body, n) for body, n in named if body.labels[n][0] not in _BOOKKEEPING], True
    seen, again = set[bytes](), list[int]()
    for n, own in enumerate(ids):
        if own in seen and form.live[n] and form.labels[n][0] not in _BOOKKEEPING:
            again.append(n)
        seen.add(own)
    return [(form, n) for n in again], False


def _called(roots: Iterable[Form], forms: Forms) -> list[str]:
    """The computations that others call, and what these call."""
    names = list(dict.fromkeys(name for form in roots for called in form.called.values() for _, name in called))
    for name in names:
        names += [x for called in forms[name].called.values() for _, x in called if x not in names]
    return names


def _in_loops(a: Graph, b: Graph, forms_a: Forms, forms_b: Forms) -> Cause | None:
    """Recomputation in the loops of one graph: they carry less than the other's, and compute again what these do."""
    loops_a, loops_b = _loops(forms_a.values()), _loops(forms_b.values())
    if len(loops_a) != len(loops_b):  # a loop may be computed again, within one of the entry
        loops_a, loops_b = _loops([forms_a[a.entry]]), _loops([forms_b[b.entry]])
    if not loops_a or len(loops_a) != len(loops_b):
        return None
    carried_a, carried_b = (_carried(loops) for loops in (loops_a, loops_b))
    operations_a, operations_b = _operations(forms_a, loops_a), _operations(forms_b, loops_b)
    more, fewer = operations_b - operations_a, operations_a - operations_b
    stacked_a, stacked_b = (_stacked(forms, loops) for forms, loops in ((forms_a, loops_a), (forms_b, loops_b)))
    # To compute again, a loop may have to be given as much as it saves less.
    if carried_b <= carried_a and stacked_b < stacked_a and _again(more, fewer, forms_b, forms_a):
        only, saved, again = "B", max(carried_a - carried_b, stacked_a - stacked_b), more
    elif carried_a <= carried_b and stacked_a < stacked_b and _again(fewer, more, forms_a, forms_b):
        only, saved, again = "A", max(carried_b - carried_a, stacked_b - stacked_a), fewer
    else:
        return None
    text = (
        f"remat in {only}: its loops save {count(saved, 'value')} fewer for the backward and compute "
        f"{count(again.total(), 'operation')} again ({', '.join(op for op, _ in again.most_common(4))})"
    )
    names_a, names_b = (
        tuple(name_of(graph, form.home(n), form.origins[n]) for form, n in loops)
        for graph, loops in ((a, loops_a), (b, loops_b))
    )
    return Cause("remat_changed", text, "", _REMAT_ADVICE, names_a, names_b)


def _again(more: Counter[str], fewer: Counter[str], own: Forms, others: Forms) -> bool:
    """Are operations computed again that the other graph has, in a loop or before it? Fusing makes others of a few.

    Who computes again computes all that the other does: an operation that only the loops of the other have was taken
    away.
    """
    if fewer or not more:
        return False
    here, there = _kinds(own.values()), _kinds(others.values())
    if _kinds(_bodies(others, _loops(others.values()))).keys() - here.keys() - _BOOKKEEPING:
        return False
    return 8 * sum(min(n, there[op]) for op, n in more.items()) >= 7 * more.total()


def _kinds(forms: Iterable[Form]) -> Counter[str]:
    """How often each operation is in some computations."""
    return Counter(label[0] for form in forms for n, label in enumerate(form.labels) if form.live[n])


def _loops(forms: Iterable[Form]) -> list[tuple[Form, int]]:
    """The loops that computations have, which may stand in other loops."""
    return [
        (form, node) for form in forms for node in form.called if form.labels[node][0] == "while" and form.live[node]
    ]


def _carried(loops: list[tuple[Form, int]]) -> int:
    return sum(len(elements(form.origins[node].shape)) for form, node in loops)


def _stacked(forms: Forms, loops: list[tuple[Form, int]]) -> int:
    """How many values loops write slice by slice, as those that they save."""
    bodies = [forms[name] for form, node in loops for role, name in form.called[node] if role == "body"]
    return sum(body.labels[n][0] == "dynamic-update-slice" for body in bodies for n in body.outputs)


def _operations(forms: Forms, loops: list[tuple[Form, int]]) -> Counter[str]:
    """The operations of loops and of what these call, those apart that only move values."""
    return Counter(
        label[0]
        for body in _bodies(forms, loops)
        for node, label in enumerate(body.labels)
        if body.live[node] and label[0] not in _BOOKKEEPING and label[1] not in _INDICES
    )


def _bodies(forms: Forms, loops: list[tuple[Form, int]]) -> list[Form]:
    """The bodies of loops, and what these call."""
    own = [name for form, node in loops for role, name in form.called[node] if role == "body"]
    return [forms[name] for name in dict.fromkeys([*own, *_called([forms[name] for name in own], forms)])]
