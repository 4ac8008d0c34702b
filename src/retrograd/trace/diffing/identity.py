"""Identity of operators: keys under which those of two runs correspond, from all that is known down to their module."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from functools import lru_cache

from retrograd.trace.schema import Op, Stats

# What a run on another device or in another dtype changes in the arguments, and addresses.
_INCIDENTAL = re.compile(
    r"\b(?:device|\w*dtype|pin_memory|layout|generator|half_to_float)=(?:device\([^)]*\)|[^,\s]+)(?:,\s*)?"
    r"|torch\.(?:float\d+|bfloat16|strided)|\bcuda:\d+|0x[0-9a-fA-F]+"
)
_NUMBER = re.compile(r"[-+]?(?:\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+|inf\b|nan\b)", re.IGNORECASE)
# Modules that wrap one of the same name: DistributedDataParallel, torch.compile, FSDP, checkpointing.
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def names(text: str) -> frozenset[str]:
    """The words of a text, for tables of operators."""
    return frozenset(text.split())


@lru_cache(maxsize=65536)
def comparable_arguments(text: str) -> str:
    """Arguments without what another device, dtype or address changes."""
    return _INCIDENTAL.sub("", text).rstrip(", ")


def without_numbers(text: str) -> str:
    """Arguments with every floating-point number left out: a coefficient computed from data is a result."""
    return _NUMBER.sub("#", comparable_arguments(text))


@lru_cache(maxsize=65536)
def unwrapped_module(path: str) -> str:
    """A module's path without the wrappers around it."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


@lru_cache(maxsize=65536)
def base_name(name: str) -> str:
    """ "aten.add_.Tensor" -> "add": without namespace, overload and the sign of working in place."""
    parts = re.split(r"::|\.", name)
    middle = parts[1] if len(parts) > 1 else parts[0]
    # `__and__` is no in-place operator.
    return middle if middle.startswith("__") else middle.removesuffix("_") or middle


def _shapes(tensors: tuple[Stats, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple([t.shape for t in tensors])


def key_without_arguments(op: Op) -> Hashable:
    """The same operator of the same module on tensors of these sizes."""
    return op.name, op.phase, unwrapped_module(op.module), _shapes(op.inputs), _shapes(op.outputs)


# In this order: each is tried only between operators that the ones before it have paired.
LEVELS: tuple[tuple[str, Callable[[Op], Hashable]], ...] = (
    # Everything that may stay the same between runs of one program.
    ("same", lambda op: (key_without_arguments(op), comparable_arguments(op.arguments))),
    ("arguments", key_without_arguments),
    # The same operator of the same module, on tensors of other sizes.
    ("sizes", lambda op: (op.name, op.phase, unwrapped_module(op.module), len(op.outputs))),
    # The same operator, whatever its overload and its module are called.
    ("module", lambda op: (base_name(op.name), op.phase, _shapes(op.outputs))),
    # Something in the same module with results of the same sizes: the operator has another name.
    ("name", lambda op: (op.phase, unwrapped_module(op.module), _shapes(op.outputs))),
)


def gives_its_input(op: Op) -> bool:
    """Whether the only result of an operator has the dtype and the bits of its first input, as far as digests tell."""
    if not op.inputs or len(op.outputs) != 1:
        return False
    source, result = op.inputs[0], op.outputs[0]
    return source.dtype == result.dtype and None is not source.digest == result.digest
