"""Value numbering: equal numbers for equal values (the same label on the same operands), in one table for both sides.

Hash-consing, so no collision can make different values equal; a number means nothing outside its table.
"""

from __future__ import annotations

from retrograd.graph.canonical import Form, Label


class ValueNumbering:
    """Gives the same number to the same value."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def number(self, thing: object) -> int:
        """The number of a hashable thing."""
        return self._numbers.setdefault(thing, len(self._numbers))

    def nodes(self, form: Form, bodies: dict[str, int], numbered: bool) -> list[int]:
        """A number for each node; `numbered`: parameters are told apart by number, else by shape alone."""
        table = self._numbers
        labels: dict[Label, int] = {}
        ids: list[int] = []
        called, numbers = form.called, form.numbers
        for node, (label, operands) in enumerate(zip(form.labels, form.operands, strict=True)):
            own = labels.get(label)
            if own is None:
                own = labels[label] = table.setdefault(label, len(table))
            thing: tuple[object, ...]
            if node in called:
                thing = (own, tuple([ids[o] for o in operands]), tuple([bodies[name] for _, name in called[node]]))
            elif len(operands) == 2:
                thing = (own, ids[operands[0]], ids[operands[1]])
            elif operands:
                thing = (own, *[ids[o] for o in operands])
            elif numbered and numbers[node] >= 0:
                thing = (own, "parameter", numbers[node])
            else:
                thing = (own,)
            ids.append(table.setdefault(thing, len(table)))
        return ids

    def bodies(self, forms: dict[str, Form], entry: str) -> dict[str, int]:
        """A number for each called computation, equal for those that compute the same."""
        ids: dict[str, int] = {}
        for name, form in forms.items():
            if name != entry:
                ids[name] = self.computation(form, self.nodes(form, ids, numbered=True), ordered=False)
        return ids

    def computation(self, form: Form, ids: list[int], ordered: bool) -> int:
        """A number for a computation: outputs, live values with multiplicity, how collectives are coalesced."""
        live = tuple(sorted(i for i, alive in zip(ids, form.live, strict=True) if alive))
        groups = [tuple(ids[n] for n in c.nodes) for c in form.collectives]
        if not ordered:
            groups.sort()
        return self.number(("body", form.structure, tuple(ids[o] for o in form.outputs), live, tuple(groups)))
