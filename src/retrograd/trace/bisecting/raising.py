"""Chosen operators of a step computed in higher precision, their results rounded back: everything else stays as it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from retrograd.errors import UndecidedError
from retrograd.trace.record import BACKWARD, FORWARD

_OURS = str(Path(__file__).resolve().parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
PRECISIONS = {"float64": torch.float64, "float32": torch.float32}


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
    raisable: bool


class Raising(TorchDispatchMode):
    """Counts operators as they are dispatched, forward and backward, and computes the chosen ones in `precision`.

    Args:
        model: its modules name where operators belong.
        precision: inputs of a coarser floating-point dtype are cast to it, results rounded back to what they were.
        known: the operators of an earlier run, which must come again; None notes them, in `seen`.
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
        self._model, self._precision, self._known, self._chosen = model, precision, known, chosen
        self._at = 0
        self._stack: list[str] = []
        self._nodes: dict[int, tuple[str, str, str]] = {}  # sequence number of an autograd node -> its forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        at, self._at = self._at, self._at + 1
        if self._known is None:
            out = func(*args, **kwargs)
            self.seen.append(self._candidate(at, func, (args, kwargs), out))
            return out
        if at >= len(self._known) or self._known[at].name != str(func):
            expected = self._known[at].name if at < len(self._known) else "none"
            raise UndecidedError(
                f"the step does not repeat: operator {at} was {expected} and is {func} when it runs again; give "
                "`state` what it changes besides the model, and let it end as it began"
            )
        if at not in self._chosen:
            return func(*args, **kwargs)
        try:
            return self._raised(func, args, kwargs, self._known[at].dtypes)
        except (NotImplementedError, RuntimeError):
            self.refused.add(at)
            return func(*args, **kwargs)

    def _raised(self, func: Any, args: Any, kwargs: Any, dtypes: Sequence[torch.dtype | None]) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        up = {id(t): t.to(self._precision) for t in flat if _coarser(t, self._precision)}
        new_args, new_kwargs = tree_unflatten([up.get(id(t), t) for t in flat], spec)
        out = func(*new_args, **new_kwargs)
        # Nothing is written before the operator has run: one that refuses the dtype leaves all as it was.
        back = {id(up[id(t)]): t for t in flat if id(t) in up}
        for name in _written(func, args, kwargs):
            for t in tree_flatten(name)[0]:
                if isinstance(t, torch.Tensor) and id(t) in up:
                    t.copy_(up[id(t)])
        results, spec = tree_flatten(out)
        return tree_unflatten(
            [_rounded(t, dtype, back) for t, dtype in zip(results, dtypes, strict=True)],
            spec,
        )

    def _candidate(self, at: int, func: Any, given: Any, out: Any) -> Candidate:
        node = torch._C._current_autograd_node()
        if node is None:
            where = (self._stack[-1] if self._stack else "", *_line())
            # Autograd numbers its nodes as the operators come; the last number given out is this one's.
            self._nodes[torch.autograd._get_sequence_nr() - 1] = where
        else:
            where = self._nodes.get(node._sequence_nr(), ("", "", ""))
        flat = tree_flatten(out)[0]
        dtypes = tuple(t.dtype if isinstance(t, torch.Tensor) else None for t in flat)
        coarse = any(_coarser(t, self._precision) for t in tree_flatten(given)[0])
        raisable = coarse and any(d is not None and d.is_floating_point for d in dtypes) and _computes(func)
        return Candidate(at, str(func), where[0], BACKWARD if node else FORWARD, *where[1:], dtypes, raisable)

    @contextmanager
    def watching(self) -> Iterator[Raising]:
        """The mode, with hooks on the model that say which module runs."""
        handles = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda m, given, name=name: self._stack.append(name)))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            with self:
                yield self
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self, module: nn.Module, given: Any, out: Any) -> None:
        self._stack.pop()


def _coarser(t: Any, precision: torch.dtype) -> bool:
    if not isinstance(t, torch.Tensor) or not t.dtype.is_floating_point:
        return False
    return torch.finfo(t.dtype).eps > torch.finfo(precision).eps


def _rounded(t: Any, dtype: torch.dtype | None, back: dict[int, torch.Tensor]) -> Any:
    if not isinstance(t, torch.Tensor):
        return t
    return back[id(t)] if id(t) in back else t.to(dtype)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments that an operator writes into."""
    for k, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if argument.name in kwargs:
                yield kwargs[argument.name]
            elif k < len(args):
                yield args[k]


def _computes(func: Any) -> bool:
    """Whether precision can matter: no view, nothing that only moves numbers, nothing that draws random ones."""
    if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
        return False
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    name = func._schema.name.removeprefix("aten::").rstrip("_")
    return not view and name not in ("clone", "copy", "_to_copy", "detach", "cat", "stack", "fill", "zero", "zeros_like",
                                     "ones_like", "empty_like", "new_zeros", "new_empty", "full_like", "where",
                                     "masked_fill", "embedding", "index_select", "gather", "index")  # fmt: skip


def _line() -> tuple[str, str]:
    """The innermost line that is neither ours nor torch's, and what it says."""
    import linecache

    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, _TORCH, "<")):
            return f"{Path(file).name}:{frame.f_lineno}", linecache.getline(file, frame.f_lineno).strip()
        frame = frame.f_back
    return "", ""
