"""Hooks that tell the recorder of programs what does not pass by the interpreter's builder.

Python asks values for a number or a condition, transposes are made of arrays, and reductions too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from retrograd.compat.triton_interpreter.patches import Patches
from retrograd.compat.triton_interpreter.program_recorder import ProgramRecorder


def record_operations(patches: Patches, module: Any, tl: Any) -> None:
    """Have `triton.runtime.interpreter` tell the recorder, while there is one."""
    stock_tensor = module._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        stock_tensor(tensor, scope)
        for name in ("__index__", "__bool__"):
            scope.set_attr(tensor, name, _answering(getattr(tensor, name)))
        for name in ("__repr__", "__str__"):
            scope.set_attr(tensor, name, _showing(getattr(tensor, name)))
        scope.set_attr(tensor, "T", _transposing(module, tensor.T))

    patches.set(module, "_patch_lang_tensor", patch_lang_tensor)
    builder = module.InterpreterBuilder
    patches.set(builder, "binary_op", _operating(builder.binary_op))
    for owner in (module.ReduceOps, module.ScanOps):
        patches.set(owner, "apply_impl", _reducing(module, tl, owner.apply_impl))


def _operating(stock: Any) -> Any:
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if ProgramRecorder.current is not None:
            ProgramRecorder.current.inner = lhs, rhs, op
        return stock(self, lhs, rhs, op)

    return binary_op


class _Bare:
    """As much of a tensor as questions about it need: its handle, and of that the data."""

    def __init__(self, data: Any) -> None:
        self.handle, self.data = self, data


def _answering(stock: Any) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        value = stock(self)
        if ProgramRecorder.current is not None:
            ProgramRecorder.current.note_answer(lambda data: stock(_Bare(data)), self.handle, value)
        return value

    return method


def _showing(stock: Any) -> Callable[[Any], str]:
    def method(self: Any) -> str:
        if ProgramRecorder.current is not None:
            ProgramRecorder.current.abandon("a value is shown")
        return stock(self)

    return method


def _transposing(module: Any, stock: Any) -> Any:
    def again(handle: Any) -> Any:
        return module.TensorHandle(handle.data.transpose(), handle.dtype)

    def method(self: Any) -> Any:
        result = stock.fget(self)
        if ProgramRecorder.current is not None:
            ProgramRecorder.current.note_operation(again, [self.handle], result.handle)
        return result

    return property(method)


def _reducing(module: Any, tl: Any, stock: Any) -> Any:
    """A reduction or scan, which is recorded as one operation unless its function is the kernel's own."""

    def apply_impl(self: Any, input: Any) -> Any:
        recorder = ProgramRecorder.current
        if recorder is None:
            return stock(self, input)
        semantic = module.interpreter_semantic
        ProgramRecorder.current, semantic.builder = None, (usage := _BuilderUsage(recorder.builder))
        try:
            result = stock(self, input)
        finally:
            ProgramRecorder.current, semantic.builder = recorder, recorder
        if usage.used:
            recorder.abandon("a reduction with a function of its own")
        if recorder.abandoned:
            return result
        types = [t.type for t in input]
        is_tuple = isinstance(result, (tuple, list))

        def again(*handles: Any) -> Any:
            results = stock(self, tuple(tl.tensor(h, t) for h, t in zip(handles, types, strict=True)))
            return [t.handle for t in results] if is_tuple else results.handle

        handles = [t.handle for t in result] if is_tuple else result.handle
        recorder.note_operation(again, [t.handle for t in input], handles)
        return result

    return apply_impl


class _BuilderUsage:
    """The builder, which says whether it was used."""

    def __init__(self, builder: Any) -> None:
        self._builder, self.used = builder, False

    def __getattr__(self, name: str) -> Any:
        self.used = True
        return getattr(self._builder, name)
