"""Outputs of an op by name, whatever they come in, and tensors as the real numbers that are compared.

A tensor alone is "out", those of a tuple are "out0", "out1", those of a dict "out.loss"; nested ones go on like that.
What an op has written into its input `x` is "x after".
A complex tensor is compared as real numbers, with a last dimension of two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from retrograd.check.calling import Returned
from retrograd.check.spec import OpSpec
from retrograd.errors import SpecError, UndecidedError


def inexact(t: Any) -> bool:
    """Whether this is a tensor of floating or complex numbers, which may have a gradient."""
    return isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())


def promoted(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The dtype that holds the numbers of both; of float8, which torch promotes to nothing, the other."""
    return other if dtype.is_floating_point and dtype.itemsize == 1 else torch.promote_types(dtype, other)


def as_real(t: torch.Tensor) -> torch.Tensor:
    """A complex tensor as real numbers with a last dimension of two; others as they are."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def like(real: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """What `as_real` made of a tensor like `t`, as one in its dtype again."""
    return torch.view_as_complex(real.contiguous()).to(t.dtype) if t.is_complex() else real.to(t.dtype)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 of complex64, else the dtype itself."""
    return dtype.to_real() if dtype.is_complex else dtype


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What an op returned.

    Attributes:
        inexact: floating and complex tensors by name, which may have a gradient.
        exact: whole numbers and truth values by name.
        other: kinds of what is no tensor by name, which is not compared.
    """

    inexact: dict[str, torch.Tensor]
    exact: dict[str, torch.Tensor]
    other: dict[str, str]

    @classmethod
    def of(cls, result: Any, spec: OpSpec, argument: str) -> Outputs:
        """The outputs that `fn` or `reference` returned.

        Raises:
            SpecError: there is no tensor among them.
            UndecidedError: one is sparse, whose gradients are sparse too and are not compared.
        """
        leaves = _named(result, argument) if isinstance(result, Returned) else dict(_leaves(result, "out"))
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
        if not tensors:
            kinds = [type(leaf).__name__ for leaf in leaves.values()] or [type(result).__name__]
            raise SpecError(
                f"`{argument}` of {spec.name} returned {kinds}; expected a tensor or a tuple, list or dict of tensors"
            )
        for name, t in tensors.items():
            if t.layout != torch.strided:
                raise UndecidedError(
                    f"{name} of {spec.name} is sparse ({str(t.layout).removeprefix('torch.')}); sparse outputs are not "
                    "compared: check the op followed by .to_dense()"
                )
            if t.is_floating_point() and t.dtype.itemsize == 1:
                raise UndecidedError(
                    f"{name} of {spec.name} is {t.dtype}, in which nobody knows what a rounding is worth: check the op "
                    "followed by .float(), or return it as bytes by .view(torch.uint8)"
                )
        floats = {name: t for name, t in tensors.items() if inexact(t)}
        return cls(
            floats,
            {name: t for name, t in tensors.items() if name not in floats},
            {name: type(leaf).__name__ for name, leaf in leaves.items() if name not in tensors and leaf is not None},
        )

    def detached(self) -> Outputs:
        """The same numbers, from which no gradient flows."""
        return Outputs({name: t.detach() for name, t in self.inexact.items()}, self.exact, self.other)

    def named_as(self, other: Outputs) -> Outputs:
        """The same in the order and under the names of another, where there are as many: a dict or a tuple of them."""
        return Outputs(_names_of(self.inexact, other.inexact), _names_of(self.exact, other.exact), self.other)


def _names_of(t: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    if t.keys() == like.keys():
        return {name: t[name] for name in like}
    return dict(zip(like, t.values(), strict=True)) if len(t) == len(like) else dict(t)


def _named(returned: Returned, argument: str) -> dict[str, Any]:
    """Outputs of an op that may write to arguments: "x after" is what becomes of `x`, others are as without it."""
    leaves, after = dict(_leaves(returned.value, "out")), dict(returned.after)
    others = {n: leaf for n, leaf in leaves.items() if not any(leaf is t for t in after.values())}
    written = len(others) < len(leaves)
    if argument == "reference" and not returned.in_place and not written and len(others) >= len(after):
        rest = len(others) - len(after)
        after = dict(zip(after, list(others.values())[rest:], strict=True))
        others = dict(list(others.items())[:rest])
        written = True
    if written:
        others = dict(_leaves(tuple(others.values()), "out"))
    return others | {f"{name} after": t for name, t in after.items()}


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}")
    elif isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        if len(value) == 1 and name == "out":  # a tuple of one tensor is that tensor
            yield from _leaves(value[0], name)
            return
        for i, item in enumerate(value):
            yield from _leaves(item, f"{name}{i}" if name == "out" else f"{name}.{i}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{name}.{field.name}")
    else:
        yield name, value
