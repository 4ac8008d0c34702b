"""Tape engine: the operators that the compiled tape noted in a step, as the records that `observer` makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from retrograd.compat.torch_dynamo import while_compiling
from retrograd.errors import RetrogradError
from retrograd.trace import kernel_launches
from retrograd.trace.compiled_regions import BACKWARD_RAN, FORWARD_CODE_RAN, CompiledRegions
from retrograd.trace.observer import Observer, is_wrapper_subclass
from retrograd.trace.operator_schemas import Operator
from retrograd.trace.pending_op import PendingOp
from retrograd.trace.schema import PHASES, Exponents
from retrograd.trace.source_lines import Line, code_role
from retrograd.trace.statistics.collector import table_limits
from retrograd.trace.statistics.cpu import StatisticsRow
from retrograd.trace.value_ids import Value

_SILENT, _MEMORY, _ALIASES, _ASYNCHRONOUS, _DIVIDES = 1, 2, 4, 8, 16  # and 32: from two tensors on
_VIEWS = ("", "ordered", "permuted", "expanded")


class TapeObserver(Observer):
    """An `Observer` whose operators come from the tape.

    Args, but for those of an `Observer`:
        tape: the extension module.
        recorder: makes records of pending operators, and is told of errors.
    """

    def __init__(self, tape: Any, model: Any, level: str, compiled: CompiledRegions, recorder: Any) -> None:
        self._recording = self._optimizing = False
        super().__init__(model, level, compiled, False, recorder.unrecorded)
        self._tape, self._recorder = tape, recorder
        self._operators: list[Any] = []
        self._lines: list[Line] = []
        self._strings: list[str] = []
        self._values: dict[int, Value] = {}
        self._rows: dict[int, StatisticsRow] = {}  # of values that are not drained yet
        self._newer = 0  # values before it were there at the last `forget`: no operator under way then is still
        self._named: Any = None
        self._fresh: list[int] = []
        self._raised: list[tuple[int, str]] = []
        self._last: list[PendingOp] = []  # drained when recording ended

    # Called by the recorder.

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The tape notes the operators that run inside."""
        self._tape.begin(self, self.level == "names", self.level == "full", *table_limits())
        self._recording = True
        try:
            self._refresh_names()
            with while_compiling(self._tape.quiet):
                yield
        finally:
            try:
                self._last = self.drain()
            finally:
                self._recording = False
                self._tape.end()

    @property
    def buffered(self) -> int:
        """How many operators the tape has noted since the last `drain`."""
        return self._tape.count() if self._recording else len(self._last)

    @property
    def optimizing(self) -> bool:
        return self._optimizing

    @optimizing.setter
    def optimizing(self, now: bool) -> None:
        self._optimizing = now
        if self._recording:
            self._tape.optimizing(now)

    def rewritten(self, tensors: list[torch.Tensor]) -> None:
        if self._recording:
            self._tape.written(tensors)

    def between_steps(self, step: int = 0) -> None:
        if self._recording:
            self._refresh_names()
            self._tape.step(step)

    def fold(self) -> None:
        """A step has ended: launch the measurements that are due, and wait for no device."""
        if self._recording:
            self._tape.flush()
        super().fold()

    def stop(self) -> None:
        if self._recording:
            self._tape.stop()

    def drain(self) -> list[PendingOp]:
        """Operators noted since the last call; their statistics come with the next `StatisticsCollector.collect`."""
        if not self._recording:
            last, self._last = self._last, []
            return last
        new_values, rows, events, links, lines, strings, renamed = self._tape.drain()
        self._lines += lines
        self._strings += [string.decode("utf-8", "replace") for string in strings]
        values = self._values
        for number, *fields in new_values:
            values[number] = Value(number, *fields)
            values[number].row = self._rows.pop(number, None)
        self._set_rows(rows)
        for number, source, repeats, ordered in links:
            value = values[number]
            value.requested, value.source, value.repeats, value.ordered = True, values[source], repeats, ordered
        for number, name in renamed:
            values[number].name, values[number]._stats = name, None
        for number in self._fresh:
            values[number].fresh = True
        self._fresh.clear()
        pending_ops = [self._pending(event) for event in events]
        for at, error in self._raised:
            self._recorder.note_raised(pending_ops[at], error)
        self._raised.clear()
        return pending_ops

    def forget(self) -> None:
        """The operators that were drained have their statistics: drop values that no later operator can name."""
        if self._recording:
            newer, live = self._tape.live()
            self._values = {n: value for n, value in self._values.items() if n >= self._newer or n in live}
            self._newer = newer

    def launch(self, name: str, tensors: list[torch.Tensor], run: Callable[[], Any]) -> Any:
        """Run a Triton kernel and record it: as an operator, or as part of the one that launches it."""
        if self._tape.in_operator():
            self._tape.kernel(name)
            return self._unrecorded(run)
        call = self._tape.Call()
        self._tape.launching(self._operator(kernel_launches.kernel_operator(name)), tensors, call)
        out = self._unrecorded(run)
        self._fresh += self._tape.launched(tensors, call, name)
        return out

    # Called by name from tape.cpp, with the GIL and without its mutex; operators in here are not recorded.

    def operator(self, name: str, overload: str) -> tuple[Any, ...]:
        """Number, flags, kind of view and written arguments of an operator."""
        space, _, base = name.partition("::")
        operator = Operator(getattr(getattr(getattr(torch.ops, space), base), overload or "default"))
        flags = _SILENT * operator.silent + _MEMORY * operator.makes_memory
        flags += _ALIASES * operator.aliases + _ASYNCHRONOUS * operator.asynchronous + _DIVIDES * operator.divides
        writes, overwrites = ([at for at, _ in arguments] for arguments in (operator.writes, operator.overwrites))
        return self._operator(operator), flags, _VIEWS.index(operator.view), writes, overwrites

    def measure(self, tensors: list[tuple[int, torch.Tensor | None]], stream: tuple[int, int, int] | None) -> None:
        """Have tensors measured on the stream on which they were made, None the current one."""
        alive = [
            (t, lambda row, number=number: self._set_rows({number: row})) for number, t in tensors if t is not None
        ]
        if len(alive) < len(tensors):
            self.statistics.notes.add("memory was freed before it could be measured: those values have no statistics")
        with _on(stream):
            self._unrecorded(lambda: self.statistics.request_all(alive))

    def measure_table(
        self, table: torch.Tensor, groups: list[Any], device: str, stream: tuple[int, int, int] | None
    ) -> None:
        """`measure` for tensors on a GPU, by addresses."""
        with _on(stream):
            self._unrecorded(lambda: self.statistics.request_table(torch.device(device), table, groups, self._set_rows))

    def many(self) -> None:
        """The buffer of operators is full."""
        self._unrecorded(self._recorder.read)

    role = staticmethod(code_role)
    exponents = Exponents

    def module(self, inner: Any, outer: Any) -> str:
        """The path of a module that was not known; its whole tree is known from now on."""
        path = self.locator.module_path(inner, outer)
        if self.locator.has_new_root:
            self.locator.has_new_root = False
            self._refresh_names()
        return path

    def waiting_line(self) -> Line | None:
        """The line that waits for the backward that runs."""
        return self.locator.waiting_line(self._thread)

    def compiled_frame(self) -> None:
        """Generated code was among the callers."""
        self._compiled.notice(FORWARD_CODE_RAN)

    def compiled_node(self) -> None:
        """A node of a compiled function was met."""
        self._compiled.notice(BACKWARD_RAN)

    def made_of_others(self, kind: Any) -> bool:
        """Whether tensors of this type wrap others."""
        if not is_wrapper_subclass(kind):
            return False
        if self._tape.above_python:
            unseen = f"operators inside of {kind.__name__} were not seen"
            self.statistics.notes.add(f"{unseen}: for that the tape needs torch 2.13; engine='python' does not")
        return True

    def lost(self, error: Any) -> bool:
        """Note an error of the book-keeping; whether it is to be raised."""
        if isinstance(error, RetrogradError):
            return True
        self._recorder.note_lost(
            f"{type(error).__name__}: {str(error)[:200]}" if isinstance(error, BaseException) else error
        )
        return False

    def failed(self, number: int, kind: str, message: str) -> None:
        """The operator of this number since the last `drain` raised this."""
        self._raised.append((number, f"{kind}: {message[:500]}"))

    def _refresh_names(self) -> None:
        named = self.locator.named_tensors()
        if named is not self._named:
            self._named = named
            self._tape.name(named, self.locator.module_paths)

    def _operator(self, operator: Any) -> int:
        self._operators.append(operator)
        return len(self._operators) - 1

    def _set_rows(self, rows: dict[int, StatisticsRow]) -> None:
        values = self._values
        for number, row in rows.items():
            value = values.get(number)
            if value is None:
                self._rows[number] = row
            else:
                value.take(row)

    def _pending(self, event: tuple[Any, ...]) -> PendingOp:
        op, step, phase, line, inside, module, node, attributes, inputs, outputs, kernels, optimizing = event
        pending = PendingOp(self._operators[op], step)
        pending.phase = PHASES[phase]
        pending.line = self._lines[line] if line >= 0 else None
        pending.inside = self._lines[inside] if inside >= 0 else None
        pending.module = self._strings[module] if module >= 0 else None
        pending.optimizing = optimizing
        pending.node = self._strings[node] if node >= 0 else ""
        pending.attributes = pending.operator.attributes_at(attributes) if attributes else ()
        values = self._values
        pending.inputs, pending.outputs = [values[n] for n in inputs], [values[n] for n in outputs]
        pending.kernels = kernels
        return pending


def _on(stream: tuple[int, int, int] | None) -> Any:
    """A context in which a stream is the current one."""
    if stream is None:
        return nullcontext()
    number, device, kind = stream
    return torch.cuda.stream(torch.cuda.Stream(stream_id=number, device_index=device, device_type=kind))
