"""The sets of ops that measure the checker: broken ones, those written after it was frozen (four times), healthy ones."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from retrograd.check.spec import OpSpec

HERE = Path(__file__).resolve().parent
SETS = (
    "mutants", "mutants_second", "mutants_third", "mutants_fourth", "mutants_fifth",
    "healthy", "healthy_third", "healthy_fourth", "healthy_fifth",
)  # fmt: skip


def files(name: str, *, kernels: bool = True) -> list[Path]:
    """The files of a set; those with real Triton kernels (minutes for each op) unless refused."""
    found = sorted((HERE / name).glob("*.py"))
    return [p for p in found if not p.stem.startswith("_") and (kernels or not p.stem.startswith("triton_"))]


def load_module(path: Path) -> ModuleType:
    """A file of a set, run anew by each call: some ops keep state, which is what is wrong with them."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # The files of a set may share a module whose name begins with _, and those of all sets one that stands here.
    sys.path[:0] = [str(path.parent), str(HERE)]
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.path[:2]
    return module


def load(path: Path) -> dict[str, OpSpec]:
    """The ops of a file by name, made anew by each call: its `MUTANTS` or `HEALTHY`."""
    module = load_module(path)
    return module.MUTANTS if hasattr(module, "MUTANTS") else module.HEALTHY


def is_healthy(name: str) -> bool:
    """Whether a set is one of ops that are right."""
    return name.startswith("healthy")


def corpus(name: str) -> dict[str, OpSpec]:
    """The ops of a set by name, in the order of their files."""
    found: dict[str, OpSpec] = {}
    for path in files(name):
        ops = load(path)
        assert not found.keys() & ops.keys(), f"{path.name} names an op of another file"
        found |= ops
    return found


class Found(BaseException):
    """Raised at the first finding; an Exception would be taken for a fault of the checker."""


def stop(kind: str, finding: Any) -> None:
    """A `watch` that ends a verification at its first finding, before that is shrunk."""
    if kind == "finding":
        raise Found(finding.what)
