"""Autograd's state: which backward runs on this thread, which node of it, and how nodes are numbered."""

# The stubs do not have private names, or not as they are.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from retrograd.compat.registry import in_fresh_thread, part, works

# What autocast lowers, by the nodes of autograd.
_PRODUCT = re.compile("(Addmm|Mm|Bmm|Baddbmm|Addbmm|Mv|Linear|Convolution|MkldnnConvolution)Backward")
_MAX_NODES = 50_000
_RUN = "_engine_run_backward"


def backward_id() -> int:
    """A number of the backward pass that runs on this thread; -1 where none runs."""
    return torch._C._current_graph_task_id()


@contextmanager
def around_backwards(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Have each backward pass that Python asks for run in a context of its own, hooks and all."""
    stock = getattr(torch.autograd, _RUN, None)
    if stock is None:
        yield
        return

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with context():
            return stock(*args, **kwargs)

    setattr(torch.autograd, _RUN, run_backward)
    try:
        yield
    finally:
        setattr(torch.autograd, _RUN, stock)


def in_backward() -> bool:
    """Whether this thread runs a backward pass, as when a checkpointed forward is computed again."""
    return torch._C._current_graph_task_id() != -1


def is_engine(code: CodeType) -> bool:
    """Whether a frame of this code waits for a backward pass: what is above it has no part in that."""
    return code in (torch.autograd.backward.__code__, torch.autograd.grad.__code__)


def called_back(training: int) -> bool:
    """Whether this thread runs a callback of C++, as of a hook of DDP, for a backward that another thread waits for."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    if frame.f_code.co_filename == threading.__file__:
        return False  # a thread of Python's
    waiting = sys._current_frames().get(training)
    while waiting is not None and not is_engine(waiting.f_code):
        waiting = waiting.f_back
    return waiting is not None


def product_dtypes(training: int) -> set[str]:
    """The dtypes in which matrix products and convolutions of the forward gave results, whose backward now runs.

    Args:
        training: the thread that waits for it, if autograd has one of its own.
    """
    if not in_backward() or not works(GRAPH):
        return set()
    for innermost in (sys._getframe(), sys._current_frames().get(training)):
        frame = innermost
        while frame is not None and not is_engine(frame.f_code):
            frame = frame.f_back
        if frame is not None:
            losses = frame.f_locals.get("tensors", frame.f_locals.get("outputs"))
            return _product_dtypes([losses] if isinstance(losses, torch.Tensor) else list(losses or ()))
    return set()


def _product_dtypes(results: list[torch.Tensor]) -> set[str]:
    nodes, seen, dtypes = [t.grad_fn for t in results if t.grad_fn is not None], set[Any](), set[str]()
    while nodes and len(seen) < _MAX_NODES:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if _PRODUCT.match(node.name()):
            dtypes.add(str(node._input_metadata[0].dtype).removeprefix("torch."))
        nodes += [following for following, _ in node.next_functions if following is not None]
    return dtypes


def in_forward_mode() -> bool:
    """Whether derivatives are computed forward (torch.func.jvp, forward_ad.dual_level)."""
    return forward_ad._current_level >= 0


def running_node() -> tuple[str, int, Any] | None:
    """The node that the backward of this thread runs: its name, the number it got in the forward, and itself."""
    node = torch._C._current_autograd_node() if works(NODES) else None
    return None if node is None else (node.name().removeprefix("torch::autograd::"), node._sequence_nr(), node)


def last_node_number() -> int:
    """The number of the node that was made last on this thread: below autograd that of the operator that runs."""
    return torch.autograd._get_sequence_nr() - 1 if works(NODES) else -1


@part(
    "torch.autograd.backward",
    "asks which backward pass runs",
    "collectives are neither recorded nor put into buckets; retrograd.fsdp.shard_by_size needs no private name",
    names=("torch._C._current_graph_task_id",),
    refuses=True,
)
@in_fresh_thread
def BACKWARD() -> str:
    """Two backward passes have two numbers, each equal in all of its hooks, and -1 stands for none."""
    ids: list[int] = []
    with torch.enable_grad():
        for _ in range(2):
            leaf = torch.ones(1, device="cpu", requires_grad=True)
            middle = leaf * 2
            leaf.register_hook(lambda _: ids.append(backward_id()))
            middle.register_hook(lambda _: ids.append(backward_id()))
            torch.autograd.grad(middle.sum(), leaf)
    if in_backward() or len(ids) != 4:
        return "a backward pass seems to run where none does, or hooks of tensors do not run"
    if -1 in ids or ids[0] != ids[1] or ids[2] != ids[3] or ids[0] == ids[2]:
        return f"two backward passes have the numbers {ids[:2]} and {ids[2:]}"
    return ""


@part(
    "torch.autograd.graph",
    "asks in which dtype a forward computed its products",
    "autocast of one rank under DDP without buffers is told in the second step",
    names=("Node._input_metadata",),
)
@in_fresh_thread
def GRAPH() -> str:
    """A product under autocast is told by the dtype of its node, and one without it, too."""
    with torch.enable_grad():
        leaf = torch.ones(2, 2, device="cpu", requires_grad=True)
        plain = leaf @ leaf
        with torch.autocast("cpu", torch.bfloat16):
            lower = (leaf @ leaf).float()
    dtypes = _product_dtypes([plain.sum()]), _product_dtypes([lower.sum()])
    return "" if dtypes == ({"float32"}, {"bfloat16"}) else f"products have the dtypes {dtypes[0]} and {dtypes[1]}"


class _Nodes(TorchDispatchMode):
    """Sees each operator below autograd, as a recorder does, with the number or the node that belongs to it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()
        self.seen.append((node.name(), node._sequence_nr()) if in_backward() else torch.autograd._get_sequence_nr() - 1)
        return func(*args, **(kwargs or {}))


@part(
    "torch.autograd.nodes",
    "asks which line of the forward an operator of the backward belongs to",
    "operators of the backward are recorded without node, line and module",
    names=("torch._C._current_autograd_node", "torch.autograd._get_sequence_nr", "Node._sequence_nr"),
)
@in_fresh_thread
def NODES() -> str:
    """The number given out last is that of the operator's own node, and backward finds it again."""
    leaf, mode = torch.ones(2, device="cpu", requires_grad=True), _Nodes()
    with torch.enable_grad(), mode:
        result = leaf.sin()
        torch.autograd.grad(result, leaf, torch.ones_like(result))
    number = result.grad_fn._sequence_nr()  # type: ignore[union-attr]
    if mode.seen[0] != number:
        return f"the node of sin has number {number}, and {mode.seen[0]} was the last given out"
    if ("SinBackward0", number) not in mode.seen:
        return f"in the backward of sin run the nodes {mode.seen[1:]}"
    return ""


@part(
    "torch.autograd.engine",
    "has hooks of a backward pass hear of a GPU that is pretended",
    "they hear of none; backwards of Functions do",
    names=("torch.autograd._engine_run_backward",),
)
@in_fresh_thread
def ENGINE() -> str:
    runs: list[int] = []

    @contextmanager
    def counting() -> Iterator[None]:
        runs.append(1)
        yield

    x = torch.ones(1, requires_grad=True, device="cpu")
    with around_backwards(counting):
        (2 * x).backward()
        torch.autograd.grad(2 * x, x)
    return "" if len(runs) == 2 and x.grad is not None else f"{len(runs)} of 2 backward passes were seen"
