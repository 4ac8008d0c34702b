"""Upcasting: chosen operators of a step run in higher precision, results are rounded where others use them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.compat.torch_autograd import in_backward, last_node_number, running_node
from retrograd.compat.torch_dispatch import resolved, schema, tree_flatten, tree_unflatten
from retrograd.compat.torch_tensors import storage_id
from retrograd.errors import UndecidedError
from retrograd.trace.diffing.identity import names
from retrograd.trace.operator_schemas import Operator, tensors_in
from retrograd.trace.schema import BACKWARD, FORWARD
from retrograd.trace.source_lines import SourceLocator

PRECISIONS = {"float64": torch.float64, "float32": torch.float32}
# They move numbers and compute none: an unrounded value stays unrounded through them.
_MOVES = names(
    "clone _to_copy cat stack where masked_fill embedding index_select gather index repeat roll flip "
    "constant_pad_nd select_backward slice_backward _unsafe_view"
)
_NO_NUMBERS = names(
    "copy_ fill_ zero_ zeros_like ones_like empty_like new_zeros new_empty full_like new_full new_ones full "
    "scalar_tensor as_strided _local_scalar_dense"
)


@dataclass(frozen=True)
class Candidate:
    """An operator of the step, at its position among all of them; `dtypes` are those of its results."""

    index: int
    name: str
    module: str
    phase: str
    place: str
    code: str
    dtypes: tuple[torch.dtype | None, ...]
    upcastable: bool


Place = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


class ShadowValues:
    """Values before rounding, in higher precision, by the memory of the tensors that hold them rounded.

    Autograd returns saved tensors as other objects, so they are told by their memory and their view of it. Each tensor
    is kept, so that its memory is not allocated again.
    """

    def __init__(self) -> None:
        self._storages: dict[int, dict[Place, tuple[torch.Tensor, torch.Tensor]]] = {}

    def of(self, t: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor before it was rounded; None if it was never computed in higher precision."""
        views = self._storages.get(storage_id(t.untyped_storage()), {})
        return views.get(_place(t), (None, None))[1]

    def keep(self, t: torch.Tensor, value: torch.Tensor) -> None:
        """`t` is `value` rounded."""
        self._storages.setdefault(storage_id(t.untyped_storage()), {})[_place(t)] = (t.detach(), value)

    def forget(self, t: torch.Tensor) -> None:
        """The memory of `t` has been written to."""
        self._storages.pop(storage_id(t.untyped_storage()), None)

    def __bool__(self) -> bool:
        return bool(self._storages)


def _place(t: Any) -> Place:
    return t.storage_offset(), tuple(t.shape), tuple(t.stride()), t.dtype


class UpcastMode(TorchDispatchMode):
    """Counts operators as they are dispatched, forward and backward, and computes the chosen ones in `precision`.

    Args:
        model: its modules name where operators belong.
        precision: inputs of a coarser floating-point dtype are cast to it. An input that another chosen operator
            computed is taken as it was before rounding.
        known: the operators of an earlier run, which must run again; None notes them, in `seen`.
        chosen: positions to compute in higher precision.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: torch.dtype,
        known: Sequence[Candidate] | None = None,
        chosen: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self.seen: list[Candidate] = []
        self.refused: set[int] = set()
        self._precision, self._known, self._chosen = precision, known, chosen
        self._locator = SourceLocator(model) if known is None else None
        self._operators: dict[Any, Operator] = {}
        self._nodes: dict[int, tuple[str, str, str]] = {}  # sequence number of an autograd node -> its forward
        self._unrounded = ShadowValues()
        self._at = 0

    @resolved
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = self._operators.get(func) or self._operators.setdefault(func, Operator(func))
        if operator.silent:
            return func(*args, **kwargs)
        at, self._at = self._at, self._at + 1
        if self._known is None:
            out = func(*args, **kwargs)
            self.seen.append(self._candidate(at, func, operator, (args, kwargs), out))
            return out
        if at >= len(self._known) or self._known[at].name != operator.name:
            expected = self._known[at].name if at < len(self._known) else "none"
            raise UndecidedError(
                f"the step does not repeat: operator {at} was {expected} and is {operator.name} when it runs again; "
                "give `state` what it changes besides the model, and let it end as it began"
            )
        if at in self._chosen:
            # What refuses the dtype has written nothing yet.
            with contextlib.suppress(NotImplementedError, RuntimeError):
                return self._upcast_call(func, operator, args, kwargs, self._known[at].dtypes)
            self.refused.add(at)
        out = func(*args, **kwargs)
        for tensor in operator.written(args, kwargs):
            self._unrounded.forget(tensor)
        if self._unrounded and not operator.writes and (operator.aliases or _base(func) in _MOVES):
            self._move_unrounded(func, args, kwargs, out)
        return out

    def _upcast_arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any, dict[int, torch.Tensor]]:
        """The arguments in higher precision, and the tensors that replaced others, by the identity of these."""
        flat, spec = tree_flatten((args, kwargs))
        upcast: dict[int, torch.Tensor] = {}
        for t in flat:
            if _coarser(t, self._precision) and id(t) not in upcast:
                shadow = self._unrounded.of(t)
                upcast[id(t)] = t.to(self._precision) if shadow is None else shadow
        new_args, new_kwargs = tree_unflatten([upcast.get(id(t), t) for t in flat], spec)
        dtype = new_kwargs.get("dtype")
        if dtype is not None and dtype.is_floating_point:
            new_kwargs = {**new_kwargs, "dtype": self._precision}
        return new_args, new_kwargs, upcast

    def _upcast_call(self, func: Any, operator: Operator, args: Any, kwargs: Any, dtypes: Sequence[Any]) -> Any:
        for t in operator.written(args, kwargs):
            shadow = self._unrounded.of(t)
            if shadow is not None:  # it is written to, and views of it must not see that
                self._unrounded.keep(t, shadow.clone())
        new_args, new_kwargs, up = self._upcast_arguments(args, kwargs)
        out = func(*new_args, **new_kwargs)
        back = {}
        for t in operator.written(args, kwargs):
            if id(t) in up:
                t.copy_(up[id(t)])
                back[id(up[id(t)])] = t
                self._unrounded.forget(t)
                self._unrounded.keep(t, up[id(t)])
        results, spec = tree_flatten(out)
        return tree_unflatten([self._rounded(t, d, back) for t, d in zip(results, dtypes, strict=True)], spec)

    def _rounded(self, t: Any, dtype: torch.dtype | None, back: dict[int, torch.Tensor]) -> Any:
        if not isinstance(t, torch.Tensor) or dtype is None:
            return t
        if id(t) in back:
            return back[id(t)]
        rounded = t.to(dtype)
        if rounded is not t:
            self._unrounded.keep(rounded, t)
        return rounded

    def _move_unrounded(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Results of an operator that only moves numbers hold those of its inputs, rounded or not."""
        if not any(
            _coarser(t, self._precision) and self._unrounded.of(t) is not None for t in tensors_in((args, kwargs))
        ):
            return
        new_args, new_kwargs, _ = self._upcast_arguments(args, kwargs)
        # A view of memory laid out otherwise may be impossible; then its rounded numbers count.
        with contextlib.suppress(RuntimeError):
            results = func(*new_args, **new_kwargs)
            for t, value in zip(tensors_in(out), tensors_in(results), strict=True):
                if _coarser(t, self._precision) and value.dtype == self._precision:
                    self._unrounded.keep(t, value)

    def _candidate(self, at: int, func: Any, operator: Operator, arguments: Any, out: Any) -> Candidate:
        assert self._locator is not None
        line, module = self._locator.locate(sys._getframe(2))
        backward = in_backward()
        where = (module or "", *self._locator.text(line))
        if not backward:
            # Autograd numbers its nodes as the operators come; the last number given out is this one's.
            self._nodes.setdefault(last_node_number(), where)
        elif module is None:  # a module at work in a backward computes its forward again, for checkpointing
            running = running_node()
            where = self._nodes.get(running[1], ("", "", "")) if running is not None else where
        dtypes = tuple(t.dtype if isinstance(t, torch.Tensor) else None for t in tree_flatten(out)[0])
        coarse = any(_coarser(t, self._precision) for t in tensors_in(arguments))
        upcastable = coarse and any(d is not None and d.is_floating_point for d in dtypes) and _computes(func, operator)
        return Candidate(at, operator.name, where[0], BACKWARD if backward else FORWARD, *where[1:], dtypes, upcastable)


def _base(func: Any) -> str:
    return schema(func).name.partition("::")[2]


def _coarser(t: Any, precision: torch.dtype) -> bool:
    if not isinstance(t, torch.Tensor) or not t.dtype.is_floating_point:
        return False
    return torch.finfo(t.dtype).eps > torch.finfo(precision).eps


def _computes(func: Any, operator: Operator) -> bool:
    """Whether precision can matter: no view, nothing that only moves numbers, nothing that draws random ones."""
    if operator.random or (operator.aliases and not operator.writes) or getattr(func, "namespace", "") != "aten":
        return False
    return not operator.makes_memory and _base(func) not in _MOVES | _NO_NUMBERS
