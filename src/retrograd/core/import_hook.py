"""Import hook: calls back when the program has imported a module, which is not imported for it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls back once after each of the named modules was imported for the first time."""

    def __init__(self, names: Sequence[str], then: Callable[[str], None]) -> None:
        self._waiting, self._then = set(names), then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that calls back."""
        if name not in self._waiting:
            return None
        self._waiting.discard(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._then(name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def with_modules(names: Sequence[str], change: Callable[[str, Any], Callable[[], None] | None]) -> Generator[None]:
    """Change modules that are loaded or come to be, and undo it at the end."""
    undo: list[Callable[[], None]] = []

    def begin(name: str) -> None:
        if name in sys.modules and (end := change(name, sys.modules[name])) is not None:
            undo.append(end)

    later = AfterImport([name for name in names if name not in sys.modules], begin)
    for name in names:
        begin(name)
    sys.meta_path.insert(0, later)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.meta_path.remove(later)
        for end in reversed(undo):
            end()
