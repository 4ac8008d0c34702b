"""Loader of a person's own module or file for a name in it: what fails in there is told with its line.

Torch-free. Who looks for op specs (`catalog`) and who for anything to call (`flake`) load them alike.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from retrograd.errors import MissingExtraError, RetrogradError, SpecError, UsageError

_OURS = str(Path(__file__).resolve().parents[1])  # the package
_serial = itertools.count(1)
_EXTRAS = {"torch": "torch", "numpy": "torch", "triton": "triton", "scipy": "flake", "pytest": "pytest", "jax": "jax"}


def load(place: str, target: str, expected: str) -> ModuleType:
    """The module at a place.

    Args:
        place: "package.module", or a path: what ends in .py or has a separator.
        target: what the person wrote, for messages.
        expected: the forms it may have, likewise.

    Raises:
        UsageError: there is no such module or file.
        SpecError: it raises while it is imported; the message begins with the line.
        MissingExtraError: it needs torch, which is not installed.
    """
    return _from_file(Path(place)) if is_path(place) else _from_import(place, target, expected)


def require_torch(purpose: str) -> None:
    """Import torch; MissingExtraError if it is not installed."""
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("torch", "torch", purpose) from None


def first_use(module: str, homes: Mapping[str, str], name: str, public: Sequence[str]) -> Any:
    """A public name of a module at its first use (PEP 562).

    Args:
        module: whose name it is.
        homes: the module that has each name, with or without `module` before it.
        name: what is asked for.
        public: what there is, for messages.

    Raises:
        AttributeError: there is no such name.
        MissingExtraError: its home needs a package that is not installed.
    """
    if name not in homes:
        raise AttributeError(f"module {module!r} has no attribute {name!r}; it has {', '.join(public)}")
    home = homes[name] if homes[name].startswith("retrograd.") else f"{module}.{homes[name]}"
    try:
        return getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        raise MissingExtraError(error.name, _EXTRAS[error.name], f"{module}.{name}") from None


def names_at_first_use(
    module: str, homes: Mapping[str, str], public: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a module whose names come by `first_use`."""

    def get(name: str) -> Any:
        value = first_use(module, homes, name, public)
        vars(sys.modules[module])[name] = value  # each further use would take 0.7 to 2 us, a tenth of a norm's forward
        return value

    return get, lambda: sorted(public)


def near(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'this'?" with what is spelt alike, or ""."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def is_path(place: str) -> bool:
    """Whether a place is a path rather than a module's name."""
    return place.endswith(".py") or os.sep in place or "/" in place


def require_file(target: str) -> None:
    """UsageError if a target names a file that is not there; told by commands before they import torch."""
    place = target if target.endswith(".py") else target.rpartition(":")[0]
    path = Path(place)
    if is_path(place) and not path.is_file():
        beside = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UsageError(f"there is no file {str(path)!r}{near(str(path), beside)}")


def _from_file(path: Path) -> ModuleType:
    require_file(str(path))
    path = path.resolve()
    # A name of its own: two files called norm.py must not be taken for each other, nor for a package.
    spec = importlib.util.spec_from_file_location(f"_retrograd_target_{next(_serial)}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{str(path)!r} is not a Python file; expected a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    # Registered first, as the import system does: dataclasses and Triton look their module up by name.
    sys.modules[module.__name__] = module
    try:
        with on_path(path.parent):
            guard(lambda: loader.exec_module(module), str(path), path)
    except BaseException:
        sys.modules.pop(module.__name__, None)
        raise
    return module


def _from_import(name: str, target: str, expected: str) -> ModuleType:
    # The current folder counts, as with `python -m`; an installed `retrograd` script would not see it.
    with on_path(Path.cwd()):
        try:
            spec = importlib.util.find_spec(name)
        except Exception as error:  # finding a submodule imports its parents, which may raise anything
            missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
            absent = missing is not None and (name == missing or name.startswith(f"{missing}."))
            origin = None
        else:
            absent, origin = spec is None, spec.origin if spec else None
        if absent:
            raise UsageError(f"unknown target {target!r}: there is no module {name!r}; expected {expected}")
        # A parent that failed fails again here, where its error is told with its line.
        return guard(lambda: importlib.import_module(name), name, Path(origin) if origin else None)


@contextlib.contextmanager
def on_path(folder: Path) -> Generator[None, None, None]:
    """Inside, modules of a folder are found first."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        # The imported code may have changed the list; take out our entry only.
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


def guard(
    action: Callable[[], Any], place: str, path: Path | None, untold: type[RetrogradError] = MissingExtraError
) -> Any:
    """Run a person's code; what it raises becomes one SpecError with the line of their file, in `path`'s folder if any.

    `place` is named where no line is known; errors of the class `untold` stay as they are. MissingExtraError if torch
    is lacking.
    """
    try:
        return action()
    except (KeyboardInterrupt, untold):
        raise
    except BaseException as error:  # SystemExit too: a script without a main guard must not end the command
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise MissingExtraError("torch", "torch", f"{place!r}") from None
        kind = "" if isinstance(error, (SpecError, UsageError)) else f"{type(error).__name__}: "
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        line, raised = _lines_of(error, place, path)
        raise SpecError(f"{line}: {kind}{text}".rstrip(": ") + raised) from None


def _lines_of(error: BaseException, place: str, path: Path | None) -> tuple[str, str]:
    """ "file:line" of the innermost line in the target's folder, else of the innermost not ours; and where it raised.

    The latter only of a target that imports a library which calls another one: neither is seen from its own line.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}", ""
    frames = [(f.f_code.co_filename, line, _package(f)) for f, line in traceback.walk_tb(error.__traceback__)]
    theirs = [f for f in frames if not f[0].startswith(("<frozen", _OURS)) and "importlib" not in f[0]]
    # What they call in a library raises there, but the mistake is where they call it.
    near = [f for f in theirs if path is not None and _inside(f[0], path.parent)]
    if not theirs:
        return f"cannot import {place}", ""
    file, line, _ = (near or theirs)[-1]
    between = [f for f in theirs[theirs.index((near or theirs)[-1]) + 1 :] if f[2] != theirs[-1][2]]
    called = f", called at {between[-1][0]}:{between[-1][1]}" if between else ""
    return f"{file}:{line}", f" (raised at {theirs[-1][0]}:{theirs[-1][1]}{called})" if called else ""


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _inside(file: str, folder: Path) -> bool:
    return file.startswith(f"{folder}{os.sep}") and "site-packages" not in file.removeprefix(str(folder))
