"""Windows whose stride, size, padding or dilation changed, and the shapes that follow: a dense layer's behind a pool.

What a window leaves of an image has to be met by what is computed with it: the rows of a layer that reads it flattened,
a table of places that is added, the moments of both. Such a parameter is made for what reaches it, not the other way
round: no size of a parameter says what a stride is. Of a slice or a padding it may, as where positions are cut to the
length of a sentence, so that these are no beginning.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from retrograd.graph.diffing.side_by_side import View
from retrograd.graph.diffing.sizes import changed_dimensions, changed_products

WINDOWED = re.compile(r"conv(?!ert)|pool|reduce[-_]window|select[-_]and[-_]|unfold|im2col")
_ROUNDS = 8  # a parameter that follows may let the next one follow: one behind another, in a net of several


class Shaped:
    """The partners in A that have another shape because a window changed, parameters among them, and `windows`.

    `candidates` are windows of which attributes changed, and no operand's shape.
    """

    def __init__(self, view: View, reshaped: Mapping[int, object], candidates: Collection[int]) -> None:
        self.view, self.candidates = view, candidates
        labels, partner = view.a.form.labels if candidates else [], view.a.partner
        # FX gives no shape to what has several results; its elements have theirs.
        self.reshaped = {*reshaped, *(n for n, label in enumerate(labels) if not label[1] and partner[n] >= 0)}
        self.windows, self.nodes = set[int](), set[int]()
        before = -1
        for _ in range(_ROUNDS if candidates else 0):
            if before < (before := len(self.nodes)):
                self._sweep()

    def parameters(self) -> tuple[tuple[str, str], ...]:
        """The shapes of parameters that follow, before and after."""
        form = self.view.a.form
        return tuple(dict.fromkeys(self._shapes(n) for n in sorted(self.nodes) if form.numbers[n] >= 0))

    def forced(self, a: int) -> bool:
        """Has an operation the shape that it had, of operands that have others? Then its attributes had to change."""
        operands = self.view.a.form.operands[a] if self.windows and a not in self.reshaped else ()
        return not self.nodes.isdisjoint(operands) and all(o in self.nodes or o not in self.reshaped for o in operands)

    def _sweep(self) -> None:
        """Once through the program: what reads shaped values is shaped, and what has to meet them is.

        What depends on no other parameter, as a bias that is spread or a mask that is cut, has the shape that is wanted.
        A window behind a parameter of another shape, as the gradient of a kernel, has its shape from there.
        """
        form, nodes = self.view.a.form, self.nodes
        behind = {n for n in form.parameters if n in self.reshaped and n not in nodes}
        roots = {n: {n} for n in behind}
        for n, operands in enumerate(form.operands):
            if not behind.isdisjoint(operands):
                behind.add(n)
            elif n in self.candidates:
                self.windows.add(n)
                nodes.update({n} & self.reshaped)
            own = [o for o in operands if o in nodes]
            others = {r for o in operands for r in roots.get(o, ())}
            if own and others:
                sizes = {pair for o in own for pair in changed_products(*self._shapes(o))}
                nodes |= {r for r in others if sizes.issuperset(changed_dimensions(*self._shapes(r)) or [(0, 0)])}
                others -= nodes
            if n in self.reshaped and others:
                roots[n] = others
            elif n in self.reshaped and own:
                nodes.add(n)

    def _shapes(self, a: int) -> tuple[str, str]:
        return self.view.a.form.labels[a][1], self.view.b.form.labels[self.view.a.partner[a]][1]
