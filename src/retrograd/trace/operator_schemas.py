"""Facts of an operator's schema: the arguments it writes, whether it draws random numbers or only allocates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from retrograd.compat.torch_dispatch import overload

# Memory without values. `resize_` may grow into such, too.
_EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
          "aten::empty_permuted", "aten::_empty_affine_quantized")  # fmt: skip
# Views with the elements of their source: in the same order, in another one, or several times.
_VIEWS = {"expand": "expanded", **dict.fromkeys(("t", "transpose", "permute", "numpy_T", "movedim"), "permuted")}
_VIEWS |= dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "detach", "alias", "unsqueeze", "squeeze",
                         "lift_fresh", "view_as"), "ordered")  # fmt: skip
# In-place operators that read nothing of what they fill.
_OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_",
               "cauchy_", "geometric_", "_foreach_copy_", "_foreach_zero_", "set_", "resize_", "recv_",
               "recv_any_source_")  # fmt: skip
# Those with a pole at 0, by how many tensors they are given: a division by a number has none.
_QUOTIENTS = {"div": 2, "_foreach_div": 2, "reciprocal": 1, "rsqrt": 1, "_foreach_reciprocal": 1, "_foreach_rsqrt": 1}
# Nothing is computed: dispatched by profilers and by Python itself.
_SILENT = ("profiler", "prim", "prims", "inductor")

Attributes = tuple[tuple[str, Any], ...]  # names and values of arguments that are no tensors


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
        waits: whether it is that wait.
        silent: whether it is left out of the trace.
        divides: of how many tensors on it divides by one of them; 0 if it never does.
    """

    __slots__ = (
        "_arguments", "_defaults", "aliases", "asynchronous", "divides", "makes_memory", "name", "overwrites", "random",
        "silent", "view", "waits", "writes",
    )  # fmt: skip
    is_launch = False  # of a Triton kernel

    def __init__(self, func: Any) -> None:
        schema = getattr(func, "_schema", None)
        if schema is None:  # it takes functions, such as flex_attention: no schema, and nothing is written
            self._arguments, self._defaults, self.writes = [str(n) for n in range(32)], {}, []
            self.name, self.view = str(getattr(func, "name", lambda: func)()), ""
            self.makes_memory = self.random = self.silent = self.aliases = self.asynchronous = self.waits = False
            self.overwrites, self.divides = [], 0
            return
        space, _, base = schema.name.partition("::")
        self.name = str(func) if space == "aten" else schema.name
        self._arguments = [argument.name for argument in schema.arguments]
        defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self._defaults = {name: tuple(value) if type(value) is list else value for name, value in defaults.items()}
        self.writes = [
            (at, argument.name)
            for at, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if space == "c10d":  # collectives do not say what they write; what is sent or an input is only read
            written = [(at, a.name) for at, a in enumerate(schema.arguments) if "Tensor" in str(a.type)]
            self.writes = [(at, name) for at, name in written if base != "send" and not name.startswith("input")]
        self.makes_memory = schema.name in _EMPTY
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.silent = space in _SILENT
        self.waits = schema.name == "_c10d_functional::wait_tensor"
        if self.waits:  # what it returns is its argument, in which the collective's result is only from now on
            self.writes = [(0, self._arguments[0])]
        self.asynchronous = space in ("c10d", "_c10d_functional") and not self.waits
        self.aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        fills = base in _OVERWRITES or overload(func).endswith("out")
        results = [w for w in self.writes if w[1] == "out" or (self.asynchronous and w[1].startswith("output"))]
        self.overwrites = self.writes if fills else results
        self.view = _VIEWS.get(base, "") if space == "aten" else ""
        self.divides = 0 if "Scalar" in overload(func) else _QUOTIENTS.get(base.rstrip("_"), 0)

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        """The tensors among the arguments that it writes to."""
        return _tensors_at(self.writes, args, kwargs)

    def overwritten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        """The tensors that it writes to without reading them."""
        return _tensors_at(self.overwrites, args, kwargs)

    def split_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], Attributes]:
        """The tensors among the arguments, and names and values of the others that are not left at their default."""
        tensors: list[torch.Tensor] = []
        attributes: list[tuple[str, Any]] = []
        defaults = self._defaults
        named = zip(self._arguments, args, strict=False)
        for name, value in (*named, *kwargs.items()) if kwargs else named:
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                continue
            if isinstance(value, (list, tuple)):
                inside = [item for item in value if isinstance(item, torch.Tensor)] or list(tensors_in(value))
                if inside:
                    tensors += inside
                    continue
                value = tuple(value)
            default = defaults.get(name, _MISSING)
            if default is _MISSING or (default is not value and (type(default) is not type(value) or default != value)):
                attributes.append((name, value))
        return tensors, tuple(attributes)

    def attributes_at(self, values: Iterable[tuple[int, Any]]) -> Attributes:
        """Names and values, of arguments by position that are no tensors, of those not left at their default."""
        attributes: list[tuple[str, Any]] = []
        for at, value in values:
            name = self._arguments[at]
            default = self._defaults.get(name, _MISSING)
            if type(default) is not type(value) or default != value:
                attributes.append((name, value))
        return tuple(attributes)


_MISSING = object()


def _tensors_at(
    arguments: list[tuple[int, str]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    for at, name in arguments:
        yield from tensors_in(args[at] if at < len(args) else kwargs.get(name))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in an argument or result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def attributes_text(attributes: Attributes) -> str:
    """ "dim=-1, keepdim=False", without addresses: two runs must have the same text."""
    return ", ".join(f"{name}={_value_text(value)}" for name, value in attributes)


def _value_text(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return "generator"
    if isinstance(value, torch.UntypedStorage):  # its text is all of its bytes, each read by recorded operators
        return f"storage of {value.nbytes()} bytes"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value_text, value))}]"
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text.removeprefix("torch.")
