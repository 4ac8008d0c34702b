"""Windows whose stride, size, padding or dilation changed, and the shapes that follow: a dense layer's behind a pool.

What a window leaves of an image has to be met by what is computed with it: the rows of a layer that reads it flattened,
a table of places that is added, the moments of both. Such a parameter is made for what reaches it, not the other way
round: no size of a parameter says what a stride is. Of what a slice or a padding leaves it may, as where positions are
cut to the length of a sentence: these explain no more than rows of a product, where they leave one factor of several.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from retrograd.graph.diffing.downstream import nodes_of
from retrograd.graph.diffing.side_by_side import Half, View
from retrograd.graph.diffing.sizes import changed_dimensions, changed_products
from retrograd.graph.schema import Cause

WINDOWED = re.compile(r"conv(?!ert)|pool|reduce[-_]window|select[-_]and[-_]|unfold|im2col")
CUTS = re.compile(r"(?:^|[._])(?:slice|pad)(?:\dd|_nd)?(?:\.|$)")
_ROUNDS = 8  # a parameter that follows may let the next one follow: one behind another, in a net of several


class Shaped:
    """The partners in A that have another shape because a window changed, parameters among them, and `windows`.

    `candidates` are windows of which attributes changed, and no operand's shape, or `cut` one slice or padding.
    """

    def __init__(self, view: View, reshaped: Mapping[int, object], candidates: Collection[int], cut: int = -1) -> None:
        self.view, self.candidates, self.cut = view, candidates, cut
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

        What depends on no other parameter, as a bias that is spread or a mask that is cut, has a shape that is wanted.
        A window behind a parameter of another shape, as the gradient of a kernel, has its shape from there.
        """
        form, nodes = self.view.a.form, self.nodes
        alike = set(self.parameters())
        nodes |= {n for n in form.parameters if alike and n in self.reshaped and self._shapes(n) in alike}
        behind = {n for n in form.parameters if n in self.reshaped and n not in nodes}
        roots = {n: {n} for n in behind}
        for n, operands in enumerate(form.operands):
            if behind.isdisjoint(operands):
                if n in self.candidates:
                    self.windows.add(n)
                    nodes.update({n} & self.reshaped)
                elif n in self.reshaped and not nodes.isdisjoint(operands):
                    nodes.add(n)
                continue
            behind.add(n)
            own = [o for o in operands if o in nodes]
            others = {r for o in operands for r in roots.get(o, ())}
            if own and others:
                sizes = {pair for o in own for pair in changed_products(*self._shapes(o))}
                if self.cut >= 0:
                    sizes -= sizes if n in self.reshaped else {*changed_dimensions(*self._shapes(self.cut))}
                nodes |= {r for r in others if sizes.issuperset(changed_dimensions(*self._shapes(r)) or [(0, 0)])}
                others -= nodes
            if n in self.reshaped and others:
                roots[n] = others
            elif n in self.reshaped and own:
                nodes.add(n)

    def _shapes(self, a: int) -> tuple[str, str]:
        return self.view.a.form.labels[a][1], self.view.b.form.labels[self.view.a.partner[a]][1]


def fitting(view: View, causes: Sequence[Cause]) -> Iterator[int]:
    """The places of causes that are there, or not, for the shape of a value that is joined with what a window shapes.

    As the convolution around a residual block, without which the block's argument is added to its result: it comes
    first in the program, and because of the stride behind it.
    """
    for half, other in ((view.a, view.b), (view.b, view.a)) if view.shaped else ():
        for k, own in enumerate(nodes_of(half, causes)):
            if own and not nodes_of(other, causes[k : k + 1])[0] and _joined(view, half, other, set(own)):
                yield k


def _joined(view: View, half: Half, other: Half, region: set[int]) -> bool:
    """Is what only one side has between a value and one that a window shapes, and does the other join both directly?"""
    operands, partner = half.form.operands, half.partner
    reads = {partner[o] for n in region for o in operands[n]} - {-1}
    for user in {u for n in region for u in half.users[n] if partner[u] >= 0}:
        beside = {partner[o] if half.added else o for o in operands[user]}
        if not reads.isdisjoint(other.form.operands[partner[user]]) and not view.shaped.isdisjoint(beside):
            return True
    return False
