"""Recorder of interpreted programs: their operations on arrays, to be made again without the Python between.

Of a program on a few elements nearly all time goes into finding out what each line means: types, shapes, constants,
which operation on which arrays. All of that follows from the types of the arguments, from constants and numbers, and
from what the program asks of its values while it runs: a loop's bound, a condition. A recording has the operations on
arrays in their order, with the answers to such questions between them. It is replayed for another program or launch
with arguments of the same types, each operation being the interpreter's own; where an answer is another, it is given
up and the program is interpreted, which makes another recording. So the same bits come out.
"""

# The stubs do not have private names, or not as they are.
# pyright: reportOptionalSubscript=false

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

from retrograd.compat.triton_interpreter.program_replay import Diverged, RecordedProgram

_MOST = 32  # recordings of one kernel for one choice of types and constants: as many ways through it
_MOST_BYTES = 64 << 20  # of all values of a program while it is recorded
# Operations that give another result, or do something, each time that they are made with the same constants.
_LIVE = ("program_id", "num_programs", "load", "store", "atomic", "assert", "assume", "barrier")
_MEMORY = ("load", "store", "atomic", "gather", "scatter")
_WRITES = ("store", "atomic", "scatter")
# Operations that give addresses as far apart as those that they are given: by which argument these are.
_MOVES = {"create_addptr": 0, "create_splat": 1, "create_expand_dims": 0, "create_broadcast": 0}
# Looked up when they are made: whoever watches memory replaces them.
_ACCESSES = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
_RANGES = (-(2**63), -(2**31), 2**31, 2**32, 2**63, 2**64)  # of integers that become tensors of the same type
INTEGERS = ("", "int64", "int32", "uint32", "int64", "uint64", "")
# What a value depends on: on constants; on whole numbers and on which program it is; on these and one pointer, which
# is added to it; on memory and where it lies.
_FIXED, _INDEX, _PLACE, _DATA = range(4)
_LISTS = (list, tuple)
_under_way = False


class ProgramRecorder:
    """Stands for the interpreter's builder while a program runs, and notes its operations.

    A value that the program has from elsewhere than from the builder, from its arguments or from reductions is not
    known here; then there is no recording.
    """

    current: ProgramRecorder | None = None

    def __init__(self, module: Any, builder: Any) -> None:
        self.builder = builder
        self.inner: Any = None  # operands and operation of the last binary operation that the builder has made
        self._handle = module.TensorHandle
        self._opaque = tuple(
            getattr(module, n) for n in ("BlockPointerHandle", "TensorDescHandle") if hasattr(module, n)
        )

    def begin(self, arguments: dict[str, Any]) -> None:
        """Record from here on: nothing is known but the arguments."""
        self.abandoned = ""
        self._bytes = 0
        self._slots: dict[int, int] = {}
        self._kept: list[Any] = []  # as long as they live their ids are theirs
        self._depends: list[int] = []
        self._steps: tuple[list[Any], ...] = ([], [], [])  # what depends on _INDEX, on _PLACE and on _DATA
        self._roots: dict[int, int] = {}  # the slots of pointers that addresses are made of
        self._wrote = False
        for value in arguments.values():
            if hasattr(value, "handle"):
                pointer = value.handle.dtype.is_ptr()
                slot = self._keep(value.handle, _PLACE if pointer else _INDEX)
                if pointer:
                    self._roots[slot] = slot
        self._inputs = len(self._kept)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.builder, name)
        if callable(member) and not name.endswith("_ty"):  # a type is no value
            member = self._constant(member) if name.startswith("get_") else self._operation(name, member)
        elif not callable(member):
            return member
        self.__dict__[name] = member
        return member

    def abandon(self, reason: str) -> None:
        """Give up: no recording of this program."""
        self.abandoned = reason
        self._slots, self._kept = {}, []

    def _constant(self, stock: Any) -> Any:
        def method(*args: Any) -> Any:
            result = stock(*args)
            if not self.abandoned:
                self._keep(result, _FIXED)
            return result

        return method

    def _operation(self, name: str, stock: Any) -> Any:
        live = any(word in name for word in _LIVE)
        least = _DATA if any(word in name for word in _MEMORY) else _INDEX if live else _FIXED
        writes = any(word in name for word in _WRITES)
        stock = _lookup(self.builder, name) if name in _ACCESSES else stock

        def method(*args: Any, **kwargs: Any) -> Any:
            self.inner = None
            result = stock(*args, **kwargs)
            if kwargs or name == "create_print":
                self.abandon(f"{name} {' '.join(kwargs)}")
            elif name == "create_ashr":
                if any(a.data.dtype.kind == "u" for a in args):
                    self.abandon("create_ashr changes its operands")
                self.inner = None
            if not self.abandoned:
                self.note_operation(stock, args, result, least, writes, self.inner, _MOVES.get(name, -1))
            return result

        return method

    def _keep(self, handle: Any, depends: int) -> int:
        """The slot of a value."""
        slot = self._slots.get(id(handle))
        if slot is None:
            slot = self._slots[id(handle)] = len(self._kept)
            self._kept.append(handle)
            self._depends.append(depends)
            self._bytes += getattr(getattr(handle, "data", None), "nbytes", 0)
            if self._bytes > _MOST_BYTES:
                self.abandon("too much memory")
        elif self._depends[slot] != depends:
            self.abandon("a value that is changed")
        return slot

    def note_operation(
        self,
        function: Any,
        args: Any,
        result: Any,
        least: int = _FIXED,
        writes: bool = False,
        inner: Any = None,
        moves: int = -1,
    ) -> None:
        """Keep one operation: `function(*args)` gave `result`.

        Args:
            function, args, result: what was called; tuples and lists of values count as values.
            least: what the result depends on at least, beside its arguments.
            writes: whether memory is written.
            inner: operands and operation, if the builder has made it by one binary operation of NumPy's.
            moves: which argument are addresses that the result has at the same distances, if any.
        """
        kind, opaque, depends = self._handle, self._opaque, least
        for arg in args:
            if type(arg) in _LISTS and any(type(v) is kind for v in arg):
                args, function = _flat(args, function)
                break
        # No values beside constants: a recording that is never replayed is to keep none.
        places, constants, types = list[int](), list[Any](), list[Any]()
        for arg in args:
            of = type(arg)
            if of is kind or of in opaque:
                slot = self._slots.get(id(arg), -1)
                if slot < 0:
                    self.abandon("a value from elsewhere")
                    return
                depends = max(depends, self._depends[slot])
                places.append(slot)
                constants.append(None)
                types.append(arg.dtype if of is kind else None)
            else:
                places.append(-1)
                constants.append(arg)
                types.append(None)
        if depends == _PLACE:
            depends = self._moved(places, moves, result)
        into = self._keep(result, depends) if type(result) is kind else self._results(result, depends)
        if depends == _FIXED or self.abandoned:
            return
        self._wrote |= writes
        plain = inner is not None and len(args) == 2 and inner[0] is args[0] and inner[1] is args[1]
        if plain and args[0].data.dtype == args[1].data.dtype == bool:
            # Arithmetic of int1 wraps in the builder (Triton 3.9), not in NumPy.
            plain = inner[2].__name__.startswith(("bitwise_", "logical_"))
        arrays = (inner[2], args[0].data.dtype, args[1].data.dtype, result.data.dtype) if plain else None
        self._steps[depends - 1].append((function, constants, places, types, into, arrays))

    def _moved(self, places: list[int], moves: int, result: Any) -> int:
        """What a result depends on that depends on pointers: whether it is one of them and something to add."""
        pointers = [slot for slot in places if slot >= 0 and self._depends[slot] == _PLACE]
        if moves < 0 or pointers != [places[moves]] or type(result) is not self._handle:
            return _DATA
        self._roots[self._keep(result, _PLACE)] = self._roots[pointers[0]]
        return _PLACE

    def _results(self, result: Any, depends: int) -> Any:
        """Where the results go: a slot, a list of slots, or None for nothing."""
        if result is None:
            return None
        if type(result) in self._opaque:
            return self._keep(result, depends)
        if type(result) in _LISTS and all(type(r) in (self._handle, *self._opaque) for r in result):
            return [self._keep(r, depends) for r in result]
        if depends != _FIXED:
            self.abandon("an operation whose result is no value")
        return None

    def note_answer(self, answer: Callable[[Any], Any], handle: Any, value: Any) -> None:
        """Keep that Python was told `value`, which is `answer` of the value's numbers."""
        slot = self._slots.get(id(handle))
        if slot is None:
            self.abandon("a question about a value from elsewhere")
        if self.abandoned or slot is None or self._depends[slot] == _FIXED:
            return
        depends = _INDEX if self._depends[slot] == _INDEX else _DATA
        late = self._wrote and depends == _DATA

        def check(data: Any) -> None:
            if answer(data.data) != value:
                raise Diverged(late)

        self._steps[depends - 1].append((check, [None], [slot], [handle.dtype], None, None))

    def finish(self) -> RecordedProgram | None:
        """The recording, which is forgotten here; None if it is not whole."""
        if self.abandoned:
            return None
        used = {slot for steps in self._steps for note in steps for slot in note[2]}
        fixed = {i: h.data if type(h) is self._handle else h for i, h in enumerate(self._kept)
                 if self._depends[i] == _FIXED and i in used}  # fmt: skip
        roots = {slot: root for slot, root in self._roots.items() if slot >= self._inputs}
        constants = [fixed.get(i) for i in range(len(self._kept))]
        program = RecordedProgram(self._handle, self._steps, constants, self._inputs, roots)
        self.abandon("it is finished")
        return program


def _lookup(builder: Any, name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: getattr(builder, name)(*args, **kwargs)


def _flat(args: Any, function: Any) -> tuple[Any, Any]:
    """Arguments with lists taken apart, and the function that puts them together."""
    sizes = [len(a) if type(a) in _LISTS else -1 for a in args]

    def call(*flat: Any) -> Any:
        rest = iter(flat)
        return function(*[next(rest) if n < 0 else [next(rest) for _ in range(n)] for n in sizes])

    return [v for a in args for v in (a if type(a) in _LISTS else (a,))], call


def kind(value: int) -> int:
    """Which integers become tensors of the same type."""
    return sum(value >= limit for limit in _RANGES)


def number(value: Any) -> Any:
    """What an argument is in a kernel: one address, or one whole number."""
    import numpy as np

    if not isinstance(value, int):
        return np.array([value.data_ptr()], np.uint64)
    return np.array([value], INTEGERS[kind(value)])


def launch(
    module: Any, executor: Any, arguments: dict[str, Any], grid: tuple[int, ...], recordings: list[RecordedProgram]
) -> bool:
    """Make the programs of a launch by recordings, interpreting those that none fits; False if it must be made anew.

    Args:
        module: `triton.runtime.interpreter`.
        executor: the launch.
        arguments: by name: tensors in the CPU's memory, numbers, constants.
        grid: how many programs.
        recordings: those of such launches, to which are added what this one needs.

    After False memory may have been written to.
    """
    global _under_way
    builder, scope, converted = module.interpreter_builder, None, None
    _under_way = True
    try:
        varying = [v for n, v in arguments.items() if n not in executor.constexprs]
        if any(type(v) is bool for v in varying):
            return False  # one bit to Triton 3.9, an integer to those before
        numbers = tuple(v for v in varying if isinstance(v, int))
        inputs = [number(v) for v in varying if isinstance(v, int) or hasattr(v, "data_ptr")]
        size = (*grid, 1, 1)[:3]
        builder.set_grid_dim(*size)
        for at in product(*map(range, size)):
            builder.set_grid_idx(*at)
            if any(recording.replay(inputs, (numbers, size, at)) for recording in recordings):
                continue
            scope = scope or module._patch_lang(executor.fn)
            if converted is None:
                constexprs = executor.constexprs
                converted = {n: v if n in constexprs else module._implicit_cvt(v) for n, v in arguments.items()}
            _interpret(module, executor.fn, converted, recordings)
    except Exception:
        return False  # another way through, or an error that is to come from where it always comes from
    finally:
        _under_way = False
        if scope is not None:
            scope.restore()
    return True


def interpret_again() -> None:
    """Have the launch that is under way made anew without recordings: what it does is to be seen line by line."""
    if _under_way:
        raise Diverged(late=True)


@cache
def recorder_of(module: Any) -> ProgramRecorder:
    """The one recorder, which keeps the builder's methods that it has wrapped."""
    return ProgramRecorder(module, module.interpreter_builder)


def _interpret(module: Any, fn: Any, arguments: dict[str, Any], recordings: list[RecordedProgram]) -> None:
    """Interpret a program, and record it if there is room."""
    if len(recordings) >= _MOST:
        fn(**arguments)
        return
    semantic = module.interpreter_semantic
    recorder = recorder_of(module)
    recorder.begin(arguments)
    ProgramRecorder.current, semantic.builder = recorder, recorder
    try:
        fn(**arguments)
    finally:
        ProgramRecorder.current, semantic.builder = None, recorder.builder
    if recording := recorder.finish():
        recordings.append(recording)
