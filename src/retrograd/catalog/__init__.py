"""Op specs by name: those shipped with retrograd, and those in a person's own module or file."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from retrograd.check.spec import OpSpec
from retrograd.errors import MissingExtraError, SpecError, UsageError

__all__ = ["SHIPPED", "msda_names", "norm_names", "resolve"]

_NORM_VARIANTS = (
    "",
    "bias",
    "residual",
    "mixed",
    "no_weight",
    "bias_alone",
    "offset",
    "heads",
    "float32_out",
    "parts",
    "atomic",
)
_TRITON_ONLY = ("parts", "atomic")


def norm_names() -> dict[str, tuple[str, str, str]]:
    """(norm, variant, implementation) by shipped name: rms_norm_heads_cpu is ("rms_norm", "heads", "cpu")."""
    return {
        "_".join(filter(None, parts)): parts
        for parts in itertools.product(("rms_norm", "layer_norm"), _NORM_VARIANTS, ("", "cpu", "torch"))
        if not (parts[1] in _TRITON_ONLY and parts[2])
    }


_MSDA_VARIANTS = ("", "border", "aligned", "border_aligned", "points", "mixed", "deterministic", "fused", "fused_boxes")


def msda_names() -> dict[str, tuple[str, str]]:
    """(variant, implementation) by shipped name: ms_deform_attn_border_cpu is ("border", "cpu")."""
    return {
        "_".join(filter(None, ("ms_deform_attn", *parts))): parts
        for parts in itertools.product(_MSDA_VARIANTS, ("", "cpu", "torch"))
        if not (parts[0] == "deterministic" and parts[1])
    }


SHIPPED = {name: f"retrograd.catalog.norm:{name}" for name in norm_names()} | {
    name: f"retrograd.catalog.msda:{name}" for name in msda_names()
}

_FORMS = "a shipped name, 'package.module:name' or 'path/file.py:name'"
_OURS = str(Path(__file__).resolve().parents[1])
_serial = itertools.count(1)


def resolve(target: str) -> OpSpec:
    """The op spec that a target names.

    Args:
        target: a shipped name ("rms_norm"), "package.module:name" or "path/file.py:name". The name is an
            OpSpec, or a function without arguments that returns one.

    Raises:
        UsageError: there is no such shipped name, module, file or name in it.
        SpecError: the module raises while it is imported, or the name is something else.
        MissingExtraError: the module needs torch, which is not installed.
    """
    place, _, name = SHIPPED.get(target, target).rpartition(":")
    if not place or not name:
        raise UsageError(f"unknown target {target!r}{_near(target, SHIPPED)}; expected {_FORMS}{_colon(target)}")
    module = _from_file(Path(place)) if _is_path(place) else _from_import(place, target)
    if not hasattr(module, name):
        # Ready specs first, since one of them is most likely meant.
        public = [k for k in vars(module) if not k.startswith("_")]
        specs = [k for k in public if isinstance(getattr(module, k), OpSpec)]
        listed = f"; it has the specs {', '.join(specs)}" if specs else ""
        raise UsageError(f"{place!r} has no {name!r}{_near(name, specs or public)}{listed}")
    return _as_spec(getattr(module, name), name, place)


def _near(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _colon(target: str) -> str:
    if _is_path(target.rstrip(":")) or "." in target:
        return f" (add the name of the spec: {target.rstrip(':')}:NAME)"
    return f"; shipped: {', '.join(SHIPPED)}"


def _is_path(place: str) -> bool:
    return place.endswith(".py") or os.sep in place or "/" in place


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        beside = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UsageError(f"there is no file {str(path)!r}{_near(str(path), beside)}")
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
        with _on_path(path.parent):
            _guard(lambda: loader.exec_module(module), str(path), path)
    except BaseException:
        sys.modules.pop(module.__name__, None)
        raise
    return module


def _from_import(name: str, target: str) -> ModuleType:
    # The current folder counts, as with `python -m`; an installed `retrograd` script would not see it.
    with _on_path(Path.cwd()):
        try:
            found = importlib.util.find_spec(name)
        except Exception as error:  # finding a submodule imports its parents, which may raise anything
            missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
            absent = missing is not None and (name == missing or name.startswith(f"{missing}."))
            origin = None
        else:
            absent, origin = found is None, found.origin if found else None
        if absent:
            raise UsageError(f"unknown target {target!r}: there is no module {name!r}; expected {_FORMS}")
        # A parent that failed fails again here, where its error is told with its line.
        return _guard(lambda: importlib.import_module(name), name, Path(origin) if origin else None)


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        # The imported code may have changed the list; take out our entry only.
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


def _guard(action: Callable[[], Any], what: str, path: Path | None) -> Any:
    """Run a person's code; what it raises becomes one message with the line of their file."""
    try:
        return action()
    except (KeyboardInterrupt, MissingExtraError):
        raise
    except BaseException as error:  # SystemExit too: a script without a main guard must not end the command
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            raise MissingExtraError("torch", "torch", f"{what!r}") from None
        kind = "" if isinstance(error, (SpecError, UsageError)) else f"{type(error).__name__}: "
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise SpecError(f"{_line_of(error, what, path)}: {kind}{text}".rstrip(": ")) from None


def _line_of(error: BaseException, what: str, path: Path | None) -> str:
    """ "file:line" of the innermost line in the target's folder, else of the innermost not ours."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    theirs = [f for f in frames if not f[0].startswith(("<frozen", _OURS)) and "importlib" not in f[0]]
    # What they call in a library raises there, but the mistake is where they call it.
    near = [f for f in theirs if path is not None and _inside(f[0], path.parent)]
    chosen = near or theirs
    return f"{chosen[-1][0]}:{chosen[-1][1]}" if chosen else f"cannot import {what}"


def _inside(file: str, folder: Path) -> bool:
    return file.startswith(f"{folder}{os.sep}") and "site-packages" not in file.removeprefix(str(folder))


def _as_spec(value: Any, name: str, place: str) -> OpSpec:
    if isinstance(value, OpSpec):
        return value
    wrap = f"wrap it: rg.op({name}, inputs=...)"
    if not callable(value):
        raise SpecError(f"{name!r} in {place!r} is {type(value).__name__}, expected an op spec; make one with rg.op")
    if isinstance(value, type) or not _takes_nothing(value):
        raise SpecError(f"{name!r} in {place!r} is a {_kind(value)}, not an op spec; {wrap}")
    made = _guard(value, f"{place}:{name}", Path(place).resolve() if _is_path(place) else None)
    if not isinstance(made, OpSpec):
        raise SpecError(f"{name!r} in {place!r} returned {type(made).__name__}, expected an op spec; {wrap}")
    return made


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return "class"
    return "function" if inspect.isroutine(value) else type(value).__name__


def _takes_nothing(value: Callable[..., Any]) -> bool:
    try:
        return not inspect.signature(value).parameters
    except (TypeError, ValueError):
        return False
