"""Sizes of dimensions: names, whole numbers, and expressions of other names ("2*N", "L+1"); relations between them.

Torch-free. An expression knows +, -, *, //, %, brackets, names and whole numbers; a relation compares two of them.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from retrograd.check.schema import Case, Size
from retrograd.errors import SpecError

_EXPRESSION = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod,
               ast.Name, ast.Load, ast.Constant)  # fmt: skip
_RELATION = (
    *_EXPRESSION,
    ast.Compare,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.Eq,
    ast.NotEq,
    ast.BoolOp,
    ast.And,
    ast.Or,
)
_NAME = re.compile(r"[A-Za-z_]\w*(\.\.\.)?")
_MANY = 64  # sizes up to this one are tried where a relation asks for another

Allows = Callable[[str, Size], bool]


def words(text: str) -> list[str]:
    """The dimensions of "M 2*N": blanks part them, but around an operator."""
    return re.sub(r"\s*(//|[-+*%])\s*", r"\1", text).split()


@cache
def _parsed(text: str, relation: bool) -> tuple[Any, tuple[str, ...]]:
    """The code of an expression or a relation, and the names in it.

    Raises:
        ValueError: it is none.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        raise ValueError(text) from None
    nodes = list(ast.walk(tree))
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    known = all(isinstance(node, _RELATION if relation else _EXPRESSION) for node in nodes)
    compares = isinstance(tree.body, (ast.Compare, ast.BoolOp))
    if not known or compares != relation or any(type(value) is not int for value in constants):
        raise ValueError(text)
    names = dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name))
    return compile(tree, "<sizes>", "eval"), tuple(names)


def check_dim(dim: Any, place: int) -> None:
    """SpecError if a dimension is no size, no name and no expression, or has dots elsewhere than in the first place."""
    try:
        if isinstance(dim, str) and not _NAME.fullmatch(dim):
            _parsed(dim, False)
        ok = isinstance(dim, str) or (isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0)
    except ValueError:
        ok = False
    if not ok or (isinstance(dim, str) and dim.endswith("...") and place):
        raise SpecError(
            f"`dims` has {dim!r} at place {place}; expected a size >= 0, a name such as 'N', an expression of names "
            "such as '2*N' or 'L+1', or in the first place a name with dots such as 'M...'"
        )


def check_relations(where: Any) -> tuple[str, ...]:
    """The relations of `where=`; SpecError if one compares nothing."""
    relations = (where,) if isinstance(where, str) else tuple(where)
    for relation in relations:
        try:
            _parsed(relation, True)
        except (ValueError, AttributeError):
            raise SpecError(
                f"`where` has {relation!r}; expected a comparison of sizes such as 'Q <= K' or 'N % 8 == 0'"
            ) from None
    return relations


def names_of(dim: str | int) -> tuple[str, ...]:
    """The names in a dimension or a relation."""
    if isinstance(dim, int):
        return ()
    if _NAME.fullmatch(dim):
        return (dim.removesuffix("..."),)
    try:
        return _parsed(dim, False)[1]
    except ValueError:
        return _parsed(dim, True)[1]


def substituted(dim: str | int, derived: Mapping[str, str]) -> str | int:
    """A dimension in which names that stand for expressions are these."""
    if isinstance(dim, int) or dim.endswith("..."):
        return dim
    for name, expression in derived.items():
        dim = expression if dim == name else re.sub(rf"\b{name}\b", f"({expression})", dim)
    return dim


def elements(size: Size) -> int:
    """How many elements a dimension has, or the dimensions that "M..." stands for have together."""
    return math.prod(size) if isinstance(size, tuple) else size


def _value(text: str, relation: bool, case: Case) -> int:
    # Names stand for sizes, and for parameters that are whole numbers.
    numbers = {name: value for name, value in case.params if isinstance(value, int)}
    numbers |= {name: elements(size) for name, size in case.sizes}
    try:
        return eval(_parsed(text, relation)[0], {"__builtins__": {}}, numbers)
    except ZeroDivisionError:
        return 0 if relation else -1  # no such size


def size_of(dim: str | int, case: Case) -> Size:
    """The size of a dimension in a case: of an expression its value, of "M..." a tuple."""
    if isinstance(dim, int):
        return dim
    name = dim.removesuffix("...")
    return case.size(name) if name in dict(case.sizes) else _value(dim, False, case)


def shape(dims: tuple[str | int, ...], case: Case) -> tuple[int, ...]:
    """The shape that dimensions have in a case."""
    sizes = (size_of(dim, case) for dim in dims)
    return tuple(n for size in sizes for n in (size if isinstance(size, tuple) else (size,)))


def fits(dims: tuple[str | int, ...], relations: tuple[str, ...], case: Case) -> bool:
    """Whether no dimension is negative and every relation holds."""
    positive = all(elements(size_of(dim, case)) >= 0 for dim in dims)
    return positive and all(_value(relation, True, case) for relation in relations)


def fitted(
    dims: tuple[str | int, ...], relations: tuple[str, ...], case: Case, allows: Allows, keep: str = ""
) -> Case | None:
    """The case if it fits, else one that does and differs in one or two other sizes than `keep`; None without."""
    if fits(dims, relations, case):
        return case
    bound = {name for text in (*dims, *relations) for name in names_of(text)}
    others = [name for name, _ in case.sizes if name != keep and name in bound]
    for few in (1, 2):
        for chosen in itertools.combinations(others, few):
            for sizes in itertools.product(*(_near(case, name, allows, few) for name in chosen)):
                candidate = case
                for name, size in zip(chosen, sizes, strict=True):
                    candidate = candidate.with_size(name, size)
                if fits(dims, relations, candidate):
                    return candidate
    return None


def _near(case: Case, name: str, allows: Allows, few: int) -> Iterator[Size]:
    """Other sizes of a dimension, the nearest first: small ones, and those that others have, double or half."""
    size = case.size(name)
    known = [n for _, other in case.sizes for m in (elements(other),) for n in (m - 1, m, m + 1, 2 * m, 4 * m, m // 2)]
    small = range(_MANY + 1) if few == 1 else (0, 1, 2, 3, 4, 8, 16, 64)
    tried = {n for n in (*small, *known, 128, 256, 1024) if n >= 0}
    for n in sorted(tried, key=lambda n: (abs(n - elements(size)), n)):
        if allows(name, n):
            yield n
