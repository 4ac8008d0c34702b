"""What a recorder of programs is told by the interpreter that does not pass by its builder.

Python asks values for a number or a condition, transposes are made of arrays, and reductions too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from retrograd.compat.triton_interpreter.program_recorder import MARK, Recorder


def listen(module: Any, tl: Any) -> None:
    """Have `triton.runtime.interpreter` tell the recorder, while there is one; nothing where a name is missing."""
    stock_tensor = getattr(module, "_patch_lang_tensor", None)
    if stock_tensor is None or not hasattr(module.interpreter_semantic, "builder"):
        return

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        stock_tensor(tensor, scope)
        for name in ("__index__", "__bool__"):
            scope.set_attr(tensor, name, _answering(getattr(tensor, name)))
        for name in ("__repr__", "__str__"):
            scope.set_attr(tensor, name, _showing(getattr(tensor, name)))
        scope.set_attr(tensor, "T", _transposing(module, tensor.T))

    module._patch_lang_tensor = patch_lang_tensor
    builder = module.InterpreterBuilder
    builder.binary_op = _operating(builder.binary_op)
    for owner in (module.ReduceOps, module.ScanOps):
        owner.apply_impl = _reducing(module, tl, owner.apply_impl)
    setattr(module, MARK, Recorder(module, module.interpreter_builder))


def _operating(stock: Any) -> Any:
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if Recorder.now is not None:
            Recorder.now.inner = lhs, rhs, op
        return stock(self, lhs, rhs, op)

    return binary_op


class _Bare:
    """As much of a tensor as questions about it need: its handle, and of that the data."""

    def __init__(self, data: Any) -> None:
        self.handle, self.data = self, data


def _answering(stock: Any) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        value = stock(self)
        if Recorder.now is not None:
            Recorder.now.asked(lambda data: stock(_Bare(data)), self.handle, value)
        return value

    return method


def _showing(stock: Any) -> Callable[[Any], str]:
    def method(self: Any) -> str:
        if Recorder.now is not None:
            Recorder.now.lose("a value is shown")
        return stock(self)

    return method


def _transposing(module: Any, stock: Any) -> Any:
    def again(handle: Any) -> Any:
        return module.TensorHandle(handle.data.transpose(), handle.dtype)

    def method(self: Any) -> Any:
        result = stock.fget(self)
        if Recorder.now is not None:
            Recorder.now.made(again, [self.handle], result.handle)
        return result

    return property(method)


def _reducing(module: Any, tl: Any, stock: Any) -> Any:
    """A reduction or scan, which is one operation of a tape; one with a function of the kernel's own is none."""

    def apply_impl(self: Any, input: Any) -> Any:
        recorder = Recorder.now
        if recorder is None:
            return stock(self, input)
        semantic = module.interpreter_semantic
        Recorder.now, semantic.builder = None, (watched := _Watched(recorder.builder))
        try:
            result = stock(self, input)
        finally:
            Recorder.now, semantic.builder = recorder, recorder
        if watched.used:
            recorder.lose("a reduction with a function of its own")
        if recorder.lost:
            return result
        types = [t.type for t in input]
        several = isinstance(result, (tuple, list))

        def again(*handles: Any) -> Any:
            made = stock(self, tuple(tl.tensor(h, t) for h, t in zip(handles, types, strict=True)))
            return [t.handle for t in made] if several else made.handle

        handles = [t.handle for t in result] if several else result.handle
        recorder.made(again, [t.handle for t in input], handles)
        return result

    return apply_impl


class _Watched:
    """The builder, which says whether it was used."""

    def __init__(self, builder: Any) -> None:
        self._builder, self.used = builder, False

    def __getattr__(self, name: str) -> Any:
        self.used = True
        return getattr(self._builder, name)
