"""Records by the compiled tape: what it noted in a step becomes the same operators and values as from `observing`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import CodeType
from typing import Any

import torch

from retrograd.core.import_hook import AfterImport
from retrograd.errors import RetrogradError
from retrograd.trace import kernel_launches
from retrograd.trace.compiled_regions import Compiled
from retrograd.trace.observer import Observer, Pending, made_of_others
from retrograd.trace.operator_schemas import Operator
from retrograd.trace.schema import PHASES
from retrograd.trace.source_lines import Line
from retrograd.trace.statistics.collector import tables
from retrograd.trace.statistics.cpu import Row
from retrograd.trace.value_ids import Value

_SILENT, _MEMORY, _ALIASES, _ASYNCHRONOUS = 1, 2, 4, 8
_VIEWS = ("", "ordered", "permuted", "expanded")


class TapeObserver(Observer):
    """An `Observer` whose operators come from the tape.

    Args:
        tape: the extension module.
        model: names are those of its modules.
        level: "names", "fast" or "full".
        compiled: notices compiled regions.
        quietly: runs something that is no part of the step.
        lost: told what went wrong in the book-keeping.
        failed: told the operator that raised, its line, and what it said.
        read: makes records of what waits.
    """

    def __init__(
        self,
        tape: Any,
        model: Any,
        level: str,
        compiled: Compiled,
        quietly: Callable[[Callable[[], Any]], Any],
        lost: Callable[[str], None],
        failed: Callable[[Pending, str], None],
        read: Callable[[], None],
    ) -> None:
        self._at_work = self._optimizing = False
        super().__init__(model, level, compiled, False, quietly)
        self._tape, self._lost, self._failed, self._read = tape, lost, failed, read
        self._operators: list[Any] = []
        self._lines: list[Line] = []
        self._words: list[str] = []
        self._values: dict[int, Value] = {}
        self._rows: dict[int, Row] = {}  # of values that are not drained yet
        self._live: tuple[int, set[int]] | None = None  # of values before a number those that can still be named
        self._fresh: list[int] = []
        self._raised: list[tuple[int, str]] = []
        self._ended: list[Pending] = []

    # What the recorder calls.

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The tape notes what runs inside."""
        self._tape.begin(self, self.level == "names", self.level == "full", *tables())
        self._at_work = True
        try:
            self._name()
            with _compiling(self._tape.quiet):
                yield
        finally:
            try:
                self._ended = self.drain()
            finally:
                self._at_work = False
                self._tape.end()

    @property
    def waiting(self) -> int:
        """How many operators the tape has noted since the last `drain`."""
        return self._tape.count() if self._at_work else len(self._ended)

    @property
    def optimizing(self) -> bool:
        """Whether an optimizer is at work."""
        return self._optimizing

    @optimizing.setter
    def optimizing(self, now: bool) -> None:
        self._optimizing = now
        if self._at_work:
            self._tape.optimizing(now)

    def between_steps(self, step: int = 0) -> None:
        """Learn new names, and forget what is gone."""
        if self._at_work:
            self._name()
            self._live = self._tape.refresh()
            self._tape.step(step)

    def fold(self) -> None:
        """A step has ended: have measured what waits, and wait for no device."""
        if self._at_work:
            self._tape.flush()
        super().fold()

    def stop(self) -> None:
        """Note nothing more."""
        if self._at_work:
            self._tape.stop()

    def drain(self) -> list[Pending]:
        """Operators noted since the last call; their statistics are there, or come with the next `Gather.collect`."""
        if not self._at_work:
            ended, self._ended = self._ended, []
            return ended
        made, events, links, lines, words, renamed = self._tape.drain()
        self._lines += lines
        self._words += [word.decode("utf-8", "replace") for word in words]
        values = self._values
        for number, *facts in made:
            values[number] = Value(number, *facts)
            values[number].row = self._rows.pop(number, None)
        for number, source, times, ordered in links:
            value = values[number]
            value.asked, value.source, value.times, value.ordered = True, values[source], times, ordered
        for number, name in renamed:
            values[number].name, values[number]._stats = name, None
        for number in self._fresh:
            values[number].fresh = True
        self._fresh.clear()
        waiting = [self._pending(*event) for event in events]
        for at, raised in self._raised:
            self._failed(waiting[at], raised)
        self._raised.clear()
        return waiting

    def forget(self) -> None:
        """What was drained has its statistics: values that no later operator can name need not be found any more."""
        if self._live is not None:
            newer, live = self._live
            self._values = {n: value for n, value in self._values.items() if n >= newer or n in live}
            self._live = None

    def launch(self, name: str, tensors: list[torch.Tensor], run: Callable[[], Any]) -> Any:
        """Run a Triton kernel and note it: as an operator, or as part of the one that launches it."""
        if self._tape.in_operator():
            self._tape.kernel(name)
            return self._quietly(run)
        event = self._tape.Event()
        self._tape.launching(self._operator(kernel_launches.kernel(name)), tensors, event)
        out = self._quietly(run)
        self._fresh += self._tape.launched(tensors, event)
        event.kernels = [name]
        self._tape.append(event)
        return out

    # What the tape calls, with the GIL held and its own operators left out.

    def operator(self, name: str, overload: str) -> tuple[Any, ...]:
        """Number, flags, kind of view and written arguments of an operator."""
        space, _, base = name.partition("::")
        operator = Operator(getattr(getattr(getattr(torch.ops, space), base), overload or "default"))
        flags = _SILENT * operator.silent + _MEMORY * operator.makes_memory
        flags += _ALIASES * operator.aliases + _ASYNCHRONOUS * operator.asynchronous
        writes, overwrites = ([at for at, _ in one] for one in (operator.writes, operator.overwrites))
        return self._operator(operator), flags, _VIEWS.index(operator.view), writes, overwrites

    def measure(self, tensors: list[tuple[int, torch.Tensor | None]], stream: tuple[int, int, int] | None) -> None:
        """Have tensors measured on the stream on which they were made, None the current one."""
        given = [(t, self._taking(number)) for number, t in tensors if t is not None]
        if len(given) < len(tensors):
            self.gather.notes.add("memory was freed before it could be measured: those values have no statistics")
        with _on(stream):
            self._quietly(lambda: self.gather.request_all(given))

    def measure_table(
        self, table: torch.Tensor, groups: list[Any], device: str, stream: tuple[int, int, int] | None
    ) -> None:
        """`measure` for tensors on a GPU, by addresses."""
        with _on(stream):
            self._quietly(lambda: self.gather.request_table(torch.device(device), table, groups, self._take))

    def many(self) -> None:
        """More operators wait than should."""
        self._quietly(self._read)

    def role(self, code: CodeType) -> int:
        """Whose code it is."""
        return self.places.role(code)

    def module(self, inner: Any, outer: Any) -> str:
        """The path of a module that was not known; its whole tree is from now on."""
        path = self.places.module(inner, outer)
        if self.places.grown:
            self.places.grown = False
            self._name()
        return path

    def compiled_frame(self) -> None:
        """Generated code was among the callers."""
        self._compiled.in_frames = True

    def compiled_node(self) -> None:
        """A node of a compiled function was met."""
        self._compiled.in_nodes = True

    def made_of_others(self, kind: Any) -> bool:
        """Whether tensors of this type consist of others."""
        if not made_of_others(kind):
            return False
        if self._tape.above_python:
            said = f"operators inside of {kind.__name__} were not seen"
            self.gather.notes.add(f"{said}: for that the tape needs torch 2.13; engine='python' does not")
        return True

    def lost(self, error: Any) -> bool:
        """Told an error of the book-keeping; whether it is to be raised."""
        if isinstance(error, RetrogradError):
            return True
        self._lost(f"{type(error).__name__}: {str(error)[:200]}" if isinstance(error, BaseException) else error)
        return False

    def failed(self, kind: str, said: str) -> None:
        """The operator noted last raised this."""
        self._raised.append((self._tape.count() - 1, f"{kind}: {said[:500]}"))

    def _name(self) -> None:
        self._tape.name(self.places.tensors(), self.places.names)

    def _operator(self, operator: Any) -> int:
        self._operators.append(operator)
        return len(self._operators) - 1

    def _take(self, rows: dict[int, Row]) -> None:
        values = self._values
        for number, row in rows.items():
            value = values.get(number)
            if value is None:
                self._rows[number] = row
            else:
                value.row = row

    def _taking(self, number: int) -> Callable[[Row], None]:
        return lambda row: self._take({number: row})

    def _pending(
        self, op: int, step: int, phase: int, line: int, inside: int, module: int, node: int, facts: Any, *sides: Any
    ) -> Pending:
        inputs, outputs, kernels = sides
        pending = Pending(self._operators[op], step)
        pending.phase = PHASES[phase]
        pending.line = self._lines[line] if line >= 0 else None
        pending.inside = self._lines[inside] if inside >= 0 else None
        pending.module = self._words[module] if module >= 0 else ""
        pending.node = self._words[node] if node >= 0 else ""
        pending.facts = pending.operator.given(facts) if facts else ()
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


@contextmanager
def _compiling(quiet: Callable[[bool], None]) -> Iterator[None]:
    """What torch.compile runs to compile, on tensors without memory, is no part of the step."""
    ended: list[Callable[[], None]] = []

    def watch(name: str) -> None:
        handler = getattr(sys.modules.get(name), "callback_handler", None)
        if handler is None:
            return
        begin, end = (lambda *_: quiet(True)), (lambda *_: quiet(False))
        handler.register_start_callback(begin)
        handler.register_end_callback(end)
        ended.extend([lambda: handler.remove_start_callback(begin), lambda: handler.remove_end_callback(end)])

    name = "torch._dynamo.callback"
    later = AfterImport([] if name in sys.modules else [name], watch)
    watch(name)
    sys.meta_path.insert(0, later)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.meta_path.remove(later)
        for end in ended:
            end()
