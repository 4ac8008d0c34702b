"""Sources that results of mutants depend on: files of the op, its reference and its spec, and what these import."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from retrograd.check.calling import Call
from retrograd.check.spec import OpSpec
from retrograd.mutation.candidates import AnyTarget
from retrograd.mutation.functions import frameworks, is_users


def campaign_of(spec: OpSpec, targets: Iterable[AnyTarget], options: Sequence[Any]) -> str:
    """Digest of all that the result of a mutant depends on and its id does not say.

    Args:
        spec: as it was described.
        targets: what is mutated.
        options: seed, level and whatever else was chosen.

    Functions that stand in no file have another digest each time.
    """
    functions = [f.fn if isinstance(f, Call) else f for f in (spec.fn, spec.reference) if f is not None]
    modules = [sys.modules.get(str(getattr(inspect.unwrap(f), "__module__", ""))) for f in functions]
    modules += [m for m in list(sys.modules.values()) if any(v is spec for v in _values(m))]
    files = _files_of([m for m in modules if m is not None]) | {Path(t.file) for t in targets if t.file}
    digest = hashlib.sha256(repr((versions(), *map(str, options))).encode())
    digest.update(re.sub(r" at 0x[0-9a-f]+", "", repr(spec)).encode())
    digest.update(digest_of(files).encode())
    if any(m is not None and m.__name__ == "__main__" and not getattr(m, "__file__", None) for m in modules):
        digest.update(os.urandom(16))
    return digest.hexdigest()[:16]


def digest_of(files: Iterable[Path]) -> str:
    """A digest of the names of files and of what they contain, wherever they lie."""
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: (path.name, path)):
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()[:16]


@cache
def versions() -> tuple[str, ...]:
    """Ours, and those of Python and the frameworks."""
    known = [f"python {sys.version}"]
    for name in ("retrograd", "torch", "triton", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            known.append(f"{name} {metadata.version(name)}")
    return tuple(known)


def _values(module: Any) -> list[Any]:
    try:
        return list(vars(module).values())
    except TypeError:
        return []


def _files_of(modules: Iterable[ModuleType]) -> set[Path]:
    """Files of modules, and of all that their global names come from, frameworks apart."""
    apart, files, waiting = frameworks(), dict[str, Path | None](), list(modules)
    while waiting:
        module = waiting.pop()
        file = getattr(module, "__file__", None)
        if module.__name__ in files or not isinstance(file, str):
            continue
        files[module.__name__] = Path(file) if is_users(Path(file), apart) else None
        if files[module.__name__]:
            owners = (v if isinstance(v, ModuleType) else _owner(v) for v in _values(module))
            waiting += [owner for owner in owners if owner is not None]
    return {path for path in files.values() if path}


def _owner(value: Any) -> ModuleType | None:
    with suppress(Exception):  # what answers for a name may be anything
        return sys.modules.get(str(value.__module__))
    return None
