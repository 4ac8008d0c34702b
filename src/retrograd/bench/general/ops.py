"""What the benchmark must know of an op to time it: inputs of a shape, and a function that is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from retrograd.errors import UsageError

# As torch sees them: values by name in the order of the op's arguments, and the names of those that get gradients.
Drawn = tuple[dict[str, Any], tuple[str, ...]]


@dataclass(frozen=True)
class Op:
    """An op of any kind.

    Attributes:
        name: as tables show it.
        shapes: measured unless the user names others.
        dtypes: likewise, by name.
        draw: (shape, dtype) to its inputs on the CPU; gradients are asked for by name, none means forward only.
        options: (shape, dtype) to its keyword arguments.
        reference: the same function in torch operations, in whatever precision its inputs have.
        check_shape: raises a UsageError for a shape that the op cannot have.
    """

    name: str
    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]
    draw: Callable[[str, str], Drawn]
    reference: Callable[..., Any]
    options: Callable[[str, str], dict[str, Any]] = field(default=lambda shape, dtype: {})
    check_shape: Callable[[str], None] = field(default=lambda shape: None)


OPS: dict[str, Op] = {}


def find(name: str) -> Op:
    """The op of a name.

    Raises:
        UsageError: there is none.
    """
    if name not in OPS:
        raise UsageError(f"there is no op {name!r}, expected one of {', '.join(OPS)}")
    return OPS[name]
