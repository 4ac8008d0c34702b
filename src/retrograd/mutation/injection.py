"""A mutant in a process of the user's tests: put in place when the file of its function has been imported.

Without a mutant the files that are imported are noted: what the tests say depends on them.

Imports nothing that takes time: it is called at the start of each Python process of the tests.
"""

from __future__ import annotations

import gc
import importlib.machinery
import json
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from retrograd.core.import_hook import AfterImport


def begin(options: str) -> None:
    """Wait for the file; called by our `sitecustomize`.

    Args:
        options: JSON: file, name, kind, line and `edited` source of the function; `applied`, a file to leave as a sign;
            or `imported`, a file to write the names of those that are imported to.
    """
    job = json.loads(options)
    _watch(importlib.machinery.SourceFileLoader, job)
    # pytest imports files of tests by a loader of its own, which rewrites their assertions.
    name, hook = "_pytest.assertion.rewrite", "AssertionRewritingHook"

    def rewriting(_: str) -> None:
        if hasattr(sys.modules[name], hook):
            _watch(getattr(sys.modules[name], hook), job)

    sys.meta_path.insert(0, AfterImport((name,), rewriting))


def _watch(loader_class: Any, job: dict[str, Any]) -> None:
    """Have a loader put the mutant in place when it has executed the file."""
    execute = loader_class.exec_module

    def exec_module(loader: Any, module: ModuleType) -> None:
        execute(loader, module)
        file = Path(getattr(module, "__file__", None) or "").resolve()
        if "imported" in job:
            with Path(job["imported"]).open("a", encoding="utf-8") as names:  # several processes may
                names.write(f"{file}\n")
        elif file == Path(job["file"]).resolve():
            _apply(job)

    loader_class.exec_module = exec_module


def _apply(job: dict[str, Any]) -> None:
    """Put the mutant in place of all that is made of its source, and where functions yet to be made have their code.

    A name leads to a decorator's wrapper or to what it wraps, and to no function inside of another.
    """
    from retrograd.compat import triton_source
    from retrograd.mutation.functions import with_mutant

    file, line, edited = Path(job["file"]).resolve(), job["line"], job["edited"]
    if job["kind"] == "triton":
        kernels = [k for k in triton_source.kernels() if _stands_at(triton_source.source_of(k)[:2], file, line)]
        for kernel in kernels:
            triton_source.replace(kernel, edited, ())
        changed = bool(kernels)
    else:
        changed = False
        for function in [f for f in gc.get_objects() if type(f) is FunctionType]:
            old = function.__code__
            if Path(old.co_filename).name == file.name and Path(old.co_filename).resolve() == file:
                function.__code__ = with_mutant(old, job["name"], edited, line)
                changed |= function.__code__ is not old
    if changed:
        Path(job["applied"]).touch()


def _stands_at(place: tuple[str, int], file: Path, line: int) -> bool:
    return place[1] == line and Path(place[0]).resolve() == file
