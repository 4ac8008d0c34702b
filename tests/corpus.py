"""The sets of ops that measure the checker: broken ones, those written after it was frozen, healthy ones."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from retrograd.check.spec import OpSpec

HERE = Path(__file__).resolve().parent
SETS = ("mutants", "mutants_second", "healthy")


def files(name: str, *, kernels: bool = True) -> list[Path]:
    """The files of a set; those with real Triton kernels (minutes for each op) unless refused."""
    found = sorted((HERE / name).glob("*.py"))
    return [p for p in found if not p.stem.startswith("_") and (kernels or not p.stem.startswith("triton_"))]


def load(path: Path) -> dict[str, OpSpec]:
    """The ops of a file by name, made anew by each call: some keep state, which is what is wrong with them."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))  # the files of a set may share a module whose name begins with _
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module.HEALTHY if path.parent.name == "healthy" else module.MUTANTS


def corpus(name: str) -> dict[str, OpSpec]:
    """The ops of a set by name, in the order of their files."""
    found: dict[str, OpSpec] = {}
    for path in files(name):
        ops = load(path)
        assert not found.keys() & ops.keys(), f"{path.name} names an op of another file"
        found |= ops
    return found
