"""A mutant in a process of the user's tests: put in place when the file of its function has been imported.

Without a mutant the files that are imported are noted: what the tests say depends on them.

Imports nothing that takes time: it is called at the start of each Python process of the tests.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
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
            _apply(job, module)

    loader_class.exec_module = exec_module


def _apply(job: dict[str, Any], module: ModuleType) -> None:
    from retrograd.compat import triton_source
    from retrograd.mutation.functions import recompiled

    value: Any = module
    for name in job["name"].split("."):
        value = inspect.getattr_static(value, name, None) if isinstance(value, type) else getattr(value, name, None)
    if job["kind"] == "triton":
        while value is not None and not hasattr(value, "raw_src"):
            value = getattr(value, "fn", None)  # of an Autotuner or Heuristics
    elif value is not None:
        value = inspect.unwrap(getattr(value, "__func__", value))
    if value is None:
        return
    if job["kind"] == "triton":
        triton_source.replace(value, job["edited"], ())
    else:
        value.__code__ = recompiled(value, job["edited"], job["line"])
    Path(job["applied"]).touch()
