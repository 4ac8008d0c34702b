"""The correspondence of the nodes of two graphs: which of them are partners, and which outputs."""

from __future__ import annotations

from collections.abc import Sequence

from retrograd.graph.form import Form

Places = Sequence[tuple[int, int]] | None


class Matching:
    """A one-to-one correspondence of the nodes of two forms: `a[k]` is the partner in B of node k of A, or -1.

    `outputs` are pairs of places in the lists of outputs.
    """

    def __init__(self, form_a: Form, form_b: Form, ids_a: list[bytes], ids_b: list[bytes]) -> None:
        self.form_a, self.form_b = form_a, form_b
        self.ids_a, self.ids_b = ids_a, ids_b
        self.a = [-1] * len(form_a)
        self.b = [-1] * len(form_b)
        self.outputs: list[tuple[int, int]] = []
        self.bold = True
        self.votes: dict[int, dict[int, int]] = {}

    def pair(self, a: int, b: int) -> None:
        """Make two nodes partners."""
        self.a[a], self.b[b] = b, a

    def free(self, a: int, b: int) -> bool:
        """Has neither a partner yet?"""
        return self.a[a] < 0 and self.b[b] < 0

    def alike(self, a: int, b: int) -> bool:
        """Are both the same operation with the same attributes and shape, whatever their operands?"""
        return self.form_a.labels[a] == self.form_b.labels[b]

    def descend(self, a: int, b: int) -> None:
        """GraphPair two equal values and everything below them."""
        pending = [(a, b)]
        operands_a, operands_b = self.form_a.operands, self.form_b.operands
        while pending:
            a, b = pending.pop()
            if self.a[a] < 0 and self.b[b] < 0:
                self.pair(a, b)
                pending.extend(zip(operands_a[a], operands_b[b], strict=True))
