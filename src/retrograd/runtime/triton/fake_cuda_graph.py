"""CUDA graphs where a GPU is pretended: operators and launches that are captured, which each replay repeats."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from retrograd.compat.torch_dispatch import HigherOrderOperator, UnwrappedMode, resolved, schema, tree_leaves
from retrograd.compat.triton_launch import KernelLaunch, Proceed, around_launches

_CAPTURES: list[_Capture] = []  # the innermost last


def is_capturing() -> bool:
    """Whether what runs now is captured."""
    return bool(_CAPTURES)


class _Capture(UnwrappedMode):
    """Keeps operators and launches in their order; what they wrote to is put back, as a capture runs nothing."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # octets of storages, and what they held
        self._made: set[int] = set()
        self._is_passing = False  # while what runs is no operator of the program's

    @contextlib.contextmanager
    def _passing(self) -> Iterator[None]:
        before, self._is_passing = self._is_passing, True
        try:
            yield
        finally:
            self._is_passing = before

    @resolved
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_passing or isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        declared = schema(func)
        if declared.name == "aten::_local_scalar_dense":
            raise RuntimeError("operation not permitted when stream is capturing: a value is read by the CPU")
        if declared.is_mutable:
            self._keep((args, kwargs))
        result = func(*args, **kwargs)
        fresh = [] if any(r.alias_info is not None for r in declared.returns) else _tensors(result)
        self._made.update(t.untyped_storage().data_ptr() for t in fresh)

        def again() -> None:
            for kept, now in zip(fresh, _tensors(func(*args, **kwargs)), strict=False):
                kept.copy_(now)

        self.calls.append(again)
        return result

    def launched(self, launch: KernelLaunch, proceed: Proceed) -> Any:
        """Keep a launch, which may write to any of its tensors."""
        self._keep((launch.args, launch.kwargs))
        self.calls.append(proceed)
        with self._passing():
            return proceed()

    def _keep(self, values: Any) -> None:
        for tensor in _tensors(values):
            start = tensor.untyped_storage().data_ptr()
            if start not in self._before and start not in self._made:
                with self._passing():
                    octets = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
                    self._before[start] = octets, octets.clone()

    def put_back(self) -> None:
        """Have what was there before hold what it held."""
        for octets, held in self._before.values():
            octets.copy_(held)
        self._before.clear()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


class CUDAGraph:
    """torch.cuda.CUDAGraph; random operators draw anew at each replay."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._calls: list[Callable[[], Any]] = []
        self._stack = contextlib.ExitStack()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        capture = _Capture()
        _CAPTURES.append(capture)
        self._stack.callback(_CAPTURES.remove, capture)
        self._stack.enter_context(around_launches(capture.launched))
        self._stack.enter_context(capture)

    def capture_end(self) -> None:
        capture = _CAPTURES[-1]
        self._stack.close()
        capture.put_back()
        self._calls = capture.calls

    def replay(self) -> None:
        with torch.no_grad():
            for call in self._calls:
                call()

    def reset(self) -> None:
        self._calls = []

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def instantiate(self) -> None: ...

    def enable_debug_mode(self) -> None: ...

    def debug_dump(self, path: str) -> None: ...


class AcceleratorGraph(CUDAGraph):
    """torch.accelerator.Graph, which is its own context."""

    def __init__(self, keep_graph: bool = False, *, pool: Any = None, capture_error_mode: str = "default") -> None:
        super().__init__(keep_graph)
        self.graph_pool, self.capture_error_mode = pool, capture_error_mode

    def __enter__(self) -> None:
        self.capture_begin()

    def __exit__(self, *error: object) -> None:
        self.capture_end()


class graph:
    """torch.cuda.graph."""

    def __init__(self, cuda_graph: CUDAGraph, *_: Any, **__: Any) -> None:
        self._graph = cuda_graph

    def __enter__(self) -> None:
        self._graph.capture_begin()

    def __exit__(self, *error: object) -> None:
        self._graph.capture_end()


def graphed(callables: Any, *_: Any, **__: Any) -> Any:
    """torch.cuda.make_graphed_callables: the same functions, as a graph is only faster."""
    return callables
