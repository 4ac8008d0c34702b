"""What an operator's schema says once and for all: which arguments it writes, whether it draws or only makes memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

# Memory without values. `resize_` may grow into such, too.
_EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
          "aten::empty_permuted", "aten::_empty_affine_quantized")  # fmt: skip
# Views with the elements of their source in the same order ...
_ORDERED = (
    "view",
    "_unsafe_view",
    "_reshape_alias",
    "detach",
    "alias",
    "unsqueeze",
    "squeeze",
    "lift_fresh",
    "view_as",
)
# ... and in another one.
_PERMUTED = ("t", "transpose", "permute", "numpy_T", "movedim")
# In-place operators that read nothing of what they fill.
_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_",
               "cauchy_", "geometric_", "_foreach_copy_", "_foreach_zero_", "set_", "resize_")  # fmt: skip
# Nothing is computed: asked for by profilers and by Python itself.
_SILENT = ("profiler", "prim", "prims", "inductor")


class Operator:
    """The facts of one overload.

    Attributes:
        name: "aten.mm.default", or "retrograd::norm_fwd" of an operator that is not PyTorch's own.
        writes: positions and names of arguments that are written to.
        overwrites: those of them that are not read before.
        makes_memory: whether the result is memory without values.
        random: whether it draws from a generator.
        view: "ordered" or "permuted" if a result may show the elements of its source so, "expanded"; "" otherwise.
        aliases: whether the result shows a part of its source, or its elements in some other way.
        asynchronous: whether its results are there only after a wait, as those of collectives.
        silent: whether it is left out of the trace.
    """

    __slots__ = (
        "_arguments", "_defaults", "aliases", "asynchronous", "makes_memory", "name", "overwrites", "random", "silent",
        "view", "writes",
    )  # fmt: skip
    launch = False  # of a Triton kernel

    def __init__(self, func: Any) -> None:
        schema = getattr(func, "_schema", None)
        if (
            schema is None
        ):  # an operator that takes functions, such as flex_attention: no schema, and nothing is written
            self._arguments, self._defaults, self.writes = [str(n) for n in range(32)], {}, []
            self.name, self.view = str(getattr(func, "name", lambda: func)()), ""
            self.makes_memory = self.random = self.silent = self.aliases = self.asynchronous = False
            self.overwrites = []
            return
        space, _, base = schema.name.partition("::")
        self.name = str(func) if space == "aten" else schema.name
        self._arguments = [argument.name for argument in schema.arguments]
        given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self._defaults = {name: tuple(value) if type(value) is list else value for name, value in given.items()}
        self.writes = [
            (at, argument.name)
            for at, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if space == "c10d":  # collectives do not say what they write
            self.writes = [(at, a.name) for at, a in enumerate(schema.arguments) if "Tensor" in str(a.type)]
        self.makes_memory = schema.name in _EMPTY
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.silent = space in _SILENT
        self.asynchronous = space in ("c10d", "_c10d_functional") and base != "wait_tensor"
        self.aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        whole = base in _OVERWRITES or func._overloadname.endswith("out")
        self.overwrites = [w for w in self.writes if whole or (self.asynchronous and w[1].startswith("output"))]
        self.view = _view(base) if space == "aten" else ""

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        """The tensors among the arguments that it writes to."""
        if not self.writes:
            return
        for at, name in self.writes:
            given = args[at] if at < len(args) else kwargs.get(name)
            yield from tensors_in(given)

    def overwritten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        """The tensors that it writes to without reading them."""
        for at, name in self.overwrites:
            yield from tensors_in(args[at] if at < len(args) else kwargs.get(name))

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], tuple[tuple[str, Any], ...]]:
        """The tensors among the arguments, and names and values of the others that are not left at their default."""
        tensors: list[torch.Tensor] = []
        facts: list[tuple[str, Any]] = []
        defaults = self._defaults
        named = zip(self._arguments, args, strict=False)
        for name, value in (*named, *kwargs.items()) if kwargs else named:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                continue
            if isinstance(value, (list, tuple)):
                inside = [one for one in value if isinstance(one, torch.Tensor)] or list(tensors_in(value))
                if inside:
                    tensors += inside
                    continue
                value = tuple(value)
            default = defaults.get(name, _MISSING)
            if default is _MISSING or (default is not value and (type(default) is not type(value) or default != value)):
                facts.append((name, value))
        return tensors, tuple(facts)

    def given(self, values: Iterable[tuple[int, Any]]) -> tuple[tuple[str, Any], ...]:
        """Names and values, of all arguments that are no tensors, of those that are not left at their default."""
        facts: list[tuple[str, Any]] = []
        for at, value in values:
            name = self._arguments[at]
            default = self._defaults.get(name, _MISSING)
            if type(default) is not type(value) or default != value:
                facts.append((name, value))
        return tuple(facts)


_MISSING = object()


def _view(base: str) -> str:
    if base == "expand":
        return "expanded"
    return "ordered" if base in _ORDERED else "permuted" if base in _PERMUTED else ""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in an argument or result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)


def told(facts: tuple[tuple[str, Any], ...]) -> str:
    """Facts as text, without addresses: two runs must say the same."""
    return ", ".join(f"{name}={_said(value)}" for name, value in facts)


def _said(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return "generator"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_said, value))}]"
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text.removeprefix("torch.")
