"""Operations of a recorded backward, changed one at a time: needs no source, and works for C++ too.

An operation is known by the node of the graph that runs it, its name, and how many of that name the node ran before.
A node that has to give fewer gradients runs fewer operations, so that subsets of gradients say nothing of a mutant.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.compat.torch_dispatch import HigherOrderOperator, resolved, tree_leaves, tree_map_only
from retrograd.mutation.edits import Edit

_SCALE = 1.01
# Operations that only look at memory another way, or make it: what is wrong there is wrong in the one that follows.
_PASSED_OVER = (
    "detach",
    "view",
    "_unsafe_view",
    "t",
    "alias",
    "as_strided",
    "empty",
    "empty_like",
    "new_empty_strided",
)
# What becomes of an operation; its result, its arguments and the operation are given.
Change = Callable[[Any, tuple[Any, ...], Callable[..., Any]], Any]


def _map(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda result, args, call: tree_map_only(
        torch.Tensor, lambda t: change(t) if t.is_floating_point() or t.is_complex() else t, result
    )


def _dropped(result: Any, args: tuple[Any, ...], call: Callable[..., Any]) -> Any:
    """The first argument of the same shape, as if the operation had not been written."""
    for argument in args:
        if isinstance(argument, torch.Tensor) and isinstance(result, torch.Tensor) and argument.shape == result.shape:
            return argument.to(result.dtype)
    return tree_map_only(torch.Tensor, torch.zeros_like, result)


def _exchanged(result: Any, args: tuple[Any, ...], call: Callable[..., Any]) -> Any:
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    if len(tensors) < 2:
        return result
    turned = list(args)
    a, b = tensors[:2]
    turned[a], turned[b] = turned[b], turned[a]
    return call(*turned)


def _other_dim(result: Any, args: tuple[Any, ...], call: Callable[..., Any]) -> Any:
    for place, value in enumerate(args[1:], 1):
        if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
            return call(*args[:place], [v - 1 for v in value], *args[place + 1 :])
        if isinstance(value, int) and not isinstance(value, bool):
            return call(*args[:place], value - 1, *args[place + 1 :])
    return result


CHANGES: dict[str, Change] = {
    "dropped": _dropped,
    "sign": _map(torch.neg),
    "gradient scaled": _map(lambda t: t * _SCALE),
    "gradient lost": _map(torch.zeros_like),
    "lower precision": _map(lambda t: t.to(torch.bfloat16).to(t.dtype) if not t.is_complex() else t),
    "variable": _exchanged,
    "dimension": _other_dim,
}


class _AtNode(TorchDispatchMode):
    """Sees the operations of one node of the backward graph, and changes one."""

    supports_higher_order_operators = True

    def __init__(self, operations: BackwardOperations, node: str) -> None:
        super().__init__()
        self._operations, self._node, self._count = operations, node, Counter[str]()

    @resolved
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):
            return result
        key = f"{func} {self._count[str(func)]} of {self._node}"
        self._count[str(func)] += 1
        operations = self._operations
        if operations.recorded is not None and func.overloadpacket.__name__ not in _PASSED_OVER:
            operations.recorded.append((key, _shown(str(func), args, result)))
        if operations.change is not None and operations.change[0] == key:
            return CHANGES[operations.change[1]](result, args, lambda *turned: func(*turned, **kwargs))
        return result


def _shown(name: str, args: Any, result: Any) -> str:
    def text(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return f"[{', '.join(map(text, value))}]" if isinstance(value, (list, tuple)) else repr(value)

    return f"{', '.join(map(text, tree_leaves(result)))} = {name}({', '.join(map(text, args))})"


class _Calls(TorchFunctionMode):
    """Names the nodes of a backward graph by the call of torch that made them, whatever requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[Any, str] = {}
        self._number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._number += 1
        self.name(result)
        return result

    def name(self, result: Any) -> None:
        """Name the nodes that are new behind a result."""
        count = Counter[str]()
        waiting = deque(t.grad_fn for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        while waiting:
            node = waiting.popleft()
            if node is None or node in self.names:
                continue
            kind = node.name()
            self.names[node] = f"call {self._number}: {kind} {count[kind]}"
            count[kind] += 1
            waiting.extend(following for following, _ in node.next_functions)


@dataclass
class BackwardOperations:
    """A function whose backwards are seen, and may be changed at one operation.

    Attributes:
        fn: the op.
        recorded: key and text of each operation so far; None while nobody records.
        listed: those that may be changed.
        change: key of the operation, and what becomes of it; None for the original.
    """

    fn: Callable[..., Any]
    recorded: list[tuple[str, str]] | None = None
    listed: tuple[tuple[str, str], ...] = ()
    change: tuple[str, str] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The op, with a hook before and after each node of its backward."""
        with _Calls() as calls:
            result = self.fn(*args, **kwargs)
        calls.name(result)
        for node, name in calls.names.items():
            self._watch(name, node)
        return result

    def _watch(self, name: str, node: Any) -> None:
        entered: list[_AtNode] = []

        # The engine gives each node the modes that there were at the start, so that one is entered for each.
        def before(grads: Any) -> None:
            entered.append(_AtNode(self, name))
            entered[-1].__enter__()

        def after(results: Any, grads: Any) -> None:
            entered.pop().__exit__(None, None, None)

        node.register_prehook(before)
        node.register_hook(after)

    # ----- as the functions that are mutated by their source

    kind, name, file, line = "operation", "backward", "", 1

    @property
    def source(self) -> str:
        """The operations recorded, one a line."""
        return "".join(f"{text}\n" for _, text in self.listed)

    def edits(self) -> list[Edit]:
        """Every change of every operation."""
        edits, begin = [], 0
        for line, (_, text) in enumerate(self.listed):
            for change in CHANGES:
                edits.append(Edit(change, begin, begin + len(text), f"{text}  # {change}", line))
            begin += len(text) + 1
        return edits

    def replace(self, edit: Edit, others: Any = ()) -> None:
        """Make this change from now on; one of no operator makes none."""
        self.change = (self.listed[edit.line][0], edit.operator) if edit.operator else None
