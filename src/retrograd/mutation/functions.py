"""Functions that an op runs, forward and backward, and how one is replaced wherever it was imported."""

from __future__ import annotations
import __future__

import ast
import gc
import inspect
import operator
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from retrograd.compat import triton_source
from retrograd.compat.triton_launch import around_launches
from retrograd.errors import UsageError
from retrograd.mutation.edits import Edit
from retrograd.mutation.operators import python_edits, triton_edits

_FRAMEWORKS = ("torch", "triton", "numpy", "_pytest", "pytest", "jax", "functorch", "sympy")  # not the user's
_FLAGS = 0
for _name in __future__.all_feature_names:
    _FLAGS |= getattr(__future__, _name).compiler_flag


@dataclass(frozen=True)
class MutationTarget:
    """A function to mutate.

    Attributes:
        function: a Python function, or Triton's JITFunction.
        kind: "python" or "triton".
        name: qualified.
        file, line: where its source begins.
        source: from its `def` on, without indentation.
        alike: other functions of the same code: what a decorator makes of each function that it wraps.
    """

    function: Any
    kind: str
    name: str
    file: str
    line: int
    source: str
    alike: tuple[Any, ...] = ()

    def edits(self) -> list[Edit]:
        """Every edit of it."""
        return triton_edits(self.source) if self.kind == "triton" else python_edits(self.source)

    def replace(self, edit: Edit, others: Iterable[Any] = ()) -> None:
        """Put the mutant in place, for whoever calls the function, for the rest of this process.

        Args:
            edit: of this function.
            others: all targets, of which some may be kernels that call this one.

        Raises:
            SyntaxError, ValueError: the mutated source is no function that can stand for it.
        """
        mutated = edit.applied(self.source)
        if self.kind == "triton":
            triton_source.replace(self.function, mutated, [t.function for t in others if t.kind == "triton"])
        else:
            code = recompiled(self.function.__code__, mutated, self.line)
            for function in (self.function, *self.alike):
                function.__code__ = code


def with_mutant(code: CodeType, name: str, source: str, first_line: int) -> CodeType:
    """A code in which a function of this qualified name, itself or one inside, has another source; else as it is.

    Args:
        code: of a function.
        name, source, first_line: of the function to replace: its `def` and body, and where it begins.
    """
    if code.co_qualname == name:
        last = max(line for _, _, line in code.co_lines() if line is not None)
        # A code begins at its first decorator.
        return recompiled(code, source, first_line) if code.co_firstlineno <= first_line <= last else code
    if not name.startswith(f"{code.co_qualname}."):
        return code
    constants = code.co_consts
    inner = tuple(with_mutant(c, name, source, first_line) if isinstance(c, CodeType) else c for c in constants)
    return code if all(map(operator.is_, inner, constants)) else code.replace(co_consts=inner)


def recompiled(old: CodeType, source: str, first_line: int) -> CodeType:
    """Code of a function with another source, to be put in its place.

    Args:
        old: whose names of the enclosing scopes it keeps.
        source: its `def` and body.
        first_line: of the `def` in its file.

    Raises:
        ValueError: it uses other names of enclosing scopes than the function.
    """
    tree = ast.parse(source)
    (definition,) = tree.body
    assert isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef))
    definition.decorator_list = []
    ast.increment_lineno(tree, first_line - 1)
    if old.co_freevars:
        arguments = ast.arguments([], [ast.arg(n) for n in old.co_freevars], None, [], [], None, [])
        factory = ast.FunctionDef("_enclosing", arguments, [definition], [], None, None)
        if "type_params" in ast.FunctionDef._fields:
            factory.type_params = []  # type: ignore[attr-defined]
        tree = ast.fix_missing_locations(ast.Module([factory], []))
    flags = old.co_flags & _FLAGS
    code = _inner(compile(tree, old.co_filename, "exec", flags=flags, dont_inherit=True), old.co_name)
    if code is None or code.co_freevars != old.co_freevars:
        raise ValueError("other names of the enclosing scopes than before")
    return code.replace(co_qualname=old.co_qualname)


def _inner(code: CodeType, name: str) -> CodeType | None:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_name == name:
                return constant
            if inner := _inner(constant, name):
                return inner
    return None


def functions_of(run: Callable[[], Any], without: Callable[[], Any] | None = None) -> list[MutationTarget]:
    """Functions that a call runs, of Python and of Triton, frameworks' own apart.

    Args:
        run: forward and backward of the op.
        without: what must not change: functions that it runs too are left out.
    """
    run()  # what is imported and built at the first call is none of the op's
    codes, kernels = _recorded(run)
    shared = set(_recorded(without)[0]) if without is not None else set()
    apart = frameworks()
    users = {
        code
        for code in codes
        if code not in shared and not code.co_name.startswith("<") and is_users(Path(code.co_filename), apart)
    }
    # Asked once for all: the collector goes through every object of the process.
    functions = defaultdict[CodeType, list[FunctionType]](list)
    for f in gc.get_referrers(*users):
        if isinstance(f, FunctionType) and f.__code__ in users:
            functions[f.__code__].append(f)
    targets = [_python(*alike) for alike in functions.values()]
    every = dict.fromkeys(f for kernel in kernels for f in triton_source.functions_of(kernel))
    targets += [_triton(function) for function in every]
    return sorted((t for t in targets if t is not None), key=lambda t: (t.file, t.line))


def named(words: Iterable[str]) -> list[MutationTarget]:
    """Functions by name, as `package.module:Class.backward`; UsageError if there is none."""
    import importlib

    targets = []
    for word in words:
        module, _, path = word.partition(":")
        try:
            value: Any = importlib.import_module(module)
            for part in path.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"`functions` names {word!r}, expected package.module:function ({error})") from None
        value = inspect.unwrap(getattr(value, "__func__", value))
        target = _python(value) if isinstance(value, FunctionType) else None
        if target is None and triton_source.is_kernel(value):
            target = _triton(value)
        if target is None:
            raise UsageError(f"`functions` names {word!r}, which has no source in Python or Triton")
        targets.append(target)
    return targets


def _recorded(run: Callable[[], Any]) -> tuple[list[CodeType], list[Any]]:
    codes: dict[CodeType, None] = {}
    kernels: dict[int, Any] = {}

    def seen(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            codes.setdefault(frame.f_code)

    def launched(launch: Any, proceed: Callable[..., Any]) -> Any:
        kernels.setdefault(id(launch.function), launch.function)
        return proceed()

    before = sys.getprofile()
    with around_launches(launched):
        sys.setprofile(seen)
        try:
            run()
        finally:
            sys.setprofile(before)
    return list(codes), list(kernels.values())


def frameworks() -> list[Path]:
    """Folders of the frameworks that are imported."""
    return [Path(file).parent for n in _FRAMEWORKS if (file := getattr(sys.modules.get(n), "__file__", None))]


def is_users(path: Path, frameworks: Sequence[Path]) -> bool:
    """Whether a file is neither a framework's nor Python's own; of this package only shipped ops are."""
    if not path.is_file():
        return False
    library = Path(inspect.__file__).parent
    if library in path.parents and "site-packages" not in path.parts:
        return False
    package = Path(__file__).parents[1]
    if package in path.parents:
        return package / "ops" in path.parents
    return not any(folder in path.parents for folder in frameworks)


def _python(function: FunctionType, *alike: FunctionType) -> MutationTarget | None:
    """The target of a function and others of its code; None where it has no source of its own."""
    code = function.__code__
    with suppress(OSError, SyntaxError, IndentationError):
        lines, first = inspect.getsourcelines(code)
        text = textwrap.dedent("".join(lines))
        (definition,) = ast.parse(text).body
        if isinstance(definition, ast.FunctionDef):
            skipped = definition.lineno - 1  # decorators
            text = "".join(text.splitlines(keepends=True)[skipped:])
            # Of the code: a wrapper bears the name of whichever function it was made of.
            name, line = code.co_qualname, first + skipped
            return MutationTarget(function, "python", name, code.co_filename, line, text, alike)
    return None


def _triton(function: Any) -> MutationTarget:
    file, line, source = triton_source.source_of(function)
    return MutationTarget(function, "triton", function.__name__, file, line, source)
