"""Programs of interpreted kernels, kept as the operations that they make, and made again without the Python between.

Of a program on a few elements nearly all time goes into finding out what each line means: types, shapes, constants,
which operation on which arrays. All of that follows from the types of the arguments, from constants and numbers, and
from what the program asks of its values while it runs: a loop's bound, a condition. A tape has the operations on arrays
in their order, with the answers to such questions between them. It is played for another program or launch with
arguments of the same types, each operation being the interpreter's own; where an answer is another, it is given up and
the program is interpreted, which makes another tape. So the same bits come out.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

MARK = "_retrograd_tapes"
_MOST = 32  # tapes of one kernel for one choice of types and constants: as many ways through it
_MOST_BYTES = 64 << 20  # of all values of a program while it is recorded
_BYTES = 1 << 20  # of numbers that a tape keeps, of those that depend on whole numbers and on the program alone
# Operations that give another result, or do something, each time that they are made with the same constants.
_LIVE = ("program_id", "num_programs", "load", "store", "atomic", "assert", "assume", "barrier")
_MEMORY = ("load", "store", "atomic", "gather", "scatter")
_WRITES = ("store", "atomic", "scatter")
# Looked up when they are made: whoever watches memory replaces them.
_ACCESSES = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
_RANGES = (-(2**63), -(2**31), 2**31, 2**32, 2**63, 2**64)  # of integers that become tensors of the same type
INTEGERS = ("", "int64", "int32", "uint32", "int64", "uint64", "")
# What a value depends on: on constants; on whole numbers and on which program it is; on memory and where it lies.
_FIXED, _INDEX, _DATA = range(3)
_LISTS = (list, tuple)
_under_way = False


class Diverged(Exception):
    """A program that is played goes another way; `late` if it has written by then."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late


class Recorder:
    """Stands for the interpreter's builder while a program runs, and keeps what it is asked for.

    A value that the program has from elsewhere than from the builder, from its arguments or from reductions is not
    known here; then there is no tape.
    """

    now: Recorder | None = None

    def __init__(self, module: Any, builder: Any) -> None:
        self.builder = builder
        self.inner: Any = None  # operands and operation of the last binary operation that the builder has made
        self._handle = module.TensorHandle
        self._opaque = tuple(
            getattr(module, n) for n in ("BlockPointerHandle", "TensorDescHandle") if hasattr(module, n)
        )

    def begin(self, arguments: dict[str, Any]) -> None:
        """Record from here on: nothing is known but the arguments."""
        self.lost = ""
        self._bytes = 0
        self._slots: dict[int, int] = {}
        self._kept: list[Any] = []  # as long as they live their ids are theirs
        self._depends: list[int] = []
        self._steps: tuple[list[Any], list[Any]] = ([], [])  # what depends on _INDEX, and on _DATA
        self._wrote = False
        for value in arguments.values():
            if hasattr(value, "handle"):
                pointer = value.handle.dtype.is_ptr()
                self._keep(value.handle, _DATA if pointer else _INDEX)
        self._inputs = len(self._kept)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.builder, name)
        if callable(found) and not name.endswith("_ty"):  # a type is no value
            found = self._constant(found) if name.startswith("get_") else self._operation(name, found)
        elif not callable(found):
            return found
        self.__dict__[name] = found
        return found

    def lose(self, why: str) -> None:
        """Give up: no tape of this program."""
        self.lost = why
        self._slots, self._kept = {}, []

    def _constant(self, found: Any) -> Any:
        def method(*args: Any) -> Any:
            result = found(*args)
            if not self.lost:
                self._keep(result, _FIXED)
            return result

        return method

    def _operation(self, name: str, found: Any) -> Any:
        live = any(word in name for word in _LIVE)
        least = _DATA if any(word in name for word in _MEMORY) else _INDEX if live else _FIXED
        writes = any(word in name for word in _WRITES)
        found = _lookup(self.builder, name) if name in _ACCESSES else found

        def method(*args: Any, **kwargs: Any) -> Any:
            self.inner = None
            result = found(*args, **kwargs)
            if kwargs or name == "create_print":
                self.lose(f"{name} {' '.join(kwargs)}")
            elif name == "create_ashr":
                if any(a.data.dtype.kind == "u" for a in args):
                    self.lose("create_ashr changes its operands")
                self.inner = None
            if not self.lost:
                self.made(found, args, result, least, writes, self.inner)
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
                self.lose("too much memory")
        elif self._depends[slot] != depends:
            self.lose("a value that is changed")
        return slot

    def made(
        self, function: Any, args: Any, result: Any, least: int = _FIXED, writes: bool = False, inner: Any = None
    ) -> None:
        """Keep one operation: `function(*args)` gave `result`.

        Args:
            function, args, result: what was called; tuples and lists of values count as values.
            least: what the result depends on at least, beside its arguments.
            writes: whether memory is written.
            inner: operands and operation, if the builder has made it by one binary operation of NumPy's.
        """
        kind, opaque = self._handle, self._opaque
        for arg in args:
            if type(arg) in _LISTS and any(type(v) is kind for v in arg):
                args, function = _flat(args, function)
                break
        places: list[int] = []
        depends = least
        for arg in args:
            slot = -1
            if type(arg) is kind or type(arg) in opaque:
                slot = self._slots.get(id(arg), -1)
                if slot < 0:
                    self.lose("a value from elsewhere")
                    return
                depends = max(depends, self._depends[slot])
            places.append(slot)
        into = self._keep(result, depends) if type(result) is kind else self._results(result, depends)
        if depends == _FIXED or self.lost:
            return
        self._wrote |= writes
        plain = inner is not None and len(args) == 2 and inner[0] is args[0] and inner[1] is args[1]
        types = [a.dtype if type(a) is kind else None for a in args]
        # No values: a tape that is never played is to keep none.
        given = [None if slot >= 0 else a for slot, a in zip(places, args, strict=True)]
        arrays = (inner[2], *(a.data.dtype for a in (*args, result))) if plain else None
        self._steps[depends == _DATA].append((function, given, places, types, into, arrays))

    def _results(self, result: Any, depends: int) -> Any:
        """Where the results go: a slot, a list of slots, or None for nothing."""
        if result is None:
            return None
        if type(result) in self._opaque:
            return self._keep(result, depends)
        if type(result) in _LISTS and all(type(r) in (self._handle, *self._opaque) for r in result):
            return [self._keep(r, depends) for r in result]
        if depends != _FIXED:
            self.lose("an operation whose result is no value")
        return None

    def asked(self, answer: Callable[[Any], Any], handle: Any, value: Any) -> None:
        """Keep that Python was told `value`, which is `answer` of the value's numbers."""
        slot = self._slots.get(id(handle))
        if slot is None:
            self.lose("a question about a value from elsewhere")
        if self.lost or slot is None or self._depends[slot] == _FIXED:
            return
        late, depends = self._wrote and self._depends[slot] == _DATA, self._depends[slot]

        def check(data: Any) -> None:
            if answer(data.data) != value:
                raise Diverged(late)

        self._steps[depends == _DATA].append((check, [None], [slot], [handle.dtype], None, None))

    def tape(self) -> Tape | None:
        """What was kept, which is forgotten here; None if that is not all."""
        if self.lost:
            return None
        used = {slot for steps in self._steps for note in steps for slot in note[2]}
        fixed = {i: h.data if type(h) is self._handle else h for i, h in enumerate(self._kept)
                 if self._depends[i] == _FIXED and i in used}  # fmt: skip
        tape = Tape(self._handle, self._steps, [fixed.get(i) for i in range(len(self._kept))], self._inputs)
        self.lose("it is made")
        return tape


def _lookup(builder: Any, name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: getattr(builder, name)(*args, **kwargs)


def _flat(args: Any, function: Any) -> tuple[Any, Any]:
    """Arguments with lists taken apart, and the function that puts them together."""
    sizes = [len(a) if type(a) in _LISTS else -1 for a in args]

    def call(*flat: Any) -> Any:
        rest = iter(flat)
        return function(*[next(rest) if n < 0 else [next(rest) for _ in range(n)] for n in sizes])

    return [v for a in args for v in (a if type(a) in _LISTS else (a,))], call


class Tape:
    """The operations of one way through a kernel."""

    def __init__(self, kind: Any, notes: tuple[list[Any], list[Any]], values: list[Any], inputs: int) -> None:
        self._kind, self._notes = kind, notes
        self._index: list[Any] = []
        self._data: list[Any] = []
        self._values, self._inputs = values, inputs
        self._known: dict[Any, list[Any] | None] = {}
        self._room = _BYTES

    def play(self, inputs: list[Any], program: Any) -> bool:
        """Make the operations; False if another way is to be taken and nothing is written yet.

        Args:
            inputs: numbers of the arguments that have some, in order.
            program: what those of the values depend on that depend on neither memory nor where it lies.

        Raises:
            Diverged: another way is to be taken, and something is written.
        """
        if self._notes is not None:  # many tapes are never played
            self._index, self._data = ([_step(self._kind, *note) for note in notes] for notes in self._notes)
            self._notes = None
        try:
            if program in self._known:
                kept = self._known[program]
                if kept is None:
                    return False
                values = kept.copy()
            else:
                values = self._values.copy()
                values[: self._inputs] = inputs
                self._known[program] = None
                _make(self._index, values)
                self._remember(program, values)
                values = values.copy()
            values[: self._inputs] = inputs
            _make(self._data, values)
        except Diverged as other:
            if other.late:
                raise
            return False
        return True

    def _remember(self, program: Any, values: list[Any]) -> None:
        """Keep the values of a program that only its numbers decide."""
        self._known[program] = values
        self._room -= sum(getattr(v, "nbytes", 0) for v in values)
        if self._room < 0:
            self._known, self._room = {}, _BYTES


def _step(
    kind: Any, function: Any, args: list[Any], places: list[int], types: list[Any], into: Any, arrays: Any
) -> tuple[Any, int, int, Any]:
    """The step of an operation, for `_make`: a function of two arrays and its slots, or a function of all values."""
    if arrays is not None:
        op, left, right, out = arrays
        if hasattr(op, "resolve_dtypes") and op.resolve_dtypes((left, right, None))[-1] == out:
            return op, places[0], places[1], into
    given = list(zip(places, args, types, strict=True))
    new = object.__new__

    def handle(data: Any, dtype: Any) -> Any:
        made = new(kind)
        made.__dict__ = {"data": data, "dtype": dtype, "attr": {}}
        return made

    def step(values: list[Any]) -> None:
        result = function(*[a if s < 0 else values[s] if t is None else handle(values[s], t) for s, a, t in given])
        if type(into) is int:
            values[into] = result.data if type(result) is kind else result
        elif into is not None:
            for slot, one in zip(into, result, strict=True):
                values[slot] = one.data if type(one) is kind else one

    return step, -1, -1, -1


def _make(steps: list[Any], values: list[Any]) -> None:
    for op, left, right, into in steps:
        if left < 0:
            op(values)
        else:
            values[into] = op(values[left], values[right])


def fits(module: Any) -> bool:
    """Whether launches can be made by tapes: by this version of the interpreter, and nobody else makes them."""
    own = getattr(module.GridExecutor.__call__, "__module__", "") == module.__name__
    return own and hasattr(module.interpreter_semantic, "builder") and getattr(module, MARK, False)


def kind(value: int) -> int:
    """Which integers become tensors of the same type."""
    return sum(value >= limit for limit in _RANGES)


def number(value: Any) -> Any:
    """What an argument is in a kernel: one address, or one whole number."""
    import numpy as np

    if not isinstance(value, int):
        return np.array([value.data_ptr()], np.uint64)
    return np.array([value], INTEGERS[kind(value)])


def launch(module: Any, executor: Any, given: dict[str, Any], grid: tuple[int, ...], tapes: list[Tape]) -> bool:
    """Make the programs of a launch by tapes, interpreting those that none fits; False if it must be made anew.

    Args:
        module: `triton.runtime.interpreter`.
        executor: the launch.
        given: arguments by name: tensors in the CPU's memory, numbers, constants.
        grid: how many programs.
        tapes: those of such launches, to which are added what this one needs.

    After False memory may have been written to.
    """
    global _under_way
    builder, scope, arguments = module.interpreter_builder, None, None
    _under_way = True
    try:
        varying = [v for n, v in given.items() if n not in executor.constexprs]
        numbers = tuple(v for v in varying if isinstance(v, int))
        inputs = [number(v) for v in varying if isinstance(v, int) or hasattr(v, "data_ptr")]
        size = (*grid, 1, 1)[:3]
        builder.set_grid_dim(*size)
        for at in product(*map(range, size)):
            builder.set_grid_idx(*at)
            if any(tape.play(inputs, (numbers, size, at)) for tape in tapes):
                continue
            scope = scope or module._patch_lang(executor.fn)
            if arguments is None:
                arguments = {n: v if n in executor.constexprs else module._implicit_cvt(v) for n, v in given.items()}
            _interpret(module, executor.fn, arguments, tapes)
    except Exception:
        return False  # another way through, or an error that is to come from where it always comes from
    finally:
        _under_way = False
        if scope is not None:
            scope.restore()
    return True


def refuse() -> None:
    """Have the launch that is under way made anew without tapes: what it does is to be seen line by line."""
    if _under_way:
        raise Diverged(late=True)


def _interpret(module: Any, fn: Any, arguments: dict[str, Any], tapes: list[Tape]) -> None:
    """Interpret a program, and keep its tape if there is room."""
    if len(tapes) >= _MOST:
        fn(**arguments)
        return
    semantic, recorder = module.interpreter_semantic, getattr(module, MARK)
    recorder.begin(arguments)
    Recorder.now, semantic.builder = recorder, recorder
    try:
        fn(**arguments)
    finally:
        Recorder.now, semantic.builder = None, recorder.builder
    if tape := recorder.tape():
        tapes.append(tape)
