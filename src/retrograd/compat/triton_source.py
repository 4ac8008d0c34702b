"""Source of Triton's kernels: read, and replaced in place, so that whoever imported the kernel launches the other."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

from retrograd.compat.registry import part, works
from retrograd.compat.triton_frontend_key import user_functions


def is_kernel(value: Any) -> bool:
    """Whether it is a function that Triton compiles."""
    jit = sys.modules.get("triton.runtime.jit")
    return jit is not None and isinstance(value, jit.JITFunction)


def kernels() -> list[Any]:
    """All functions for Triton to compile that exist in this process."""
    jit = sys.modules.get("triton.runtime.jit")
    return [] if jit is None else [k for k in gc.get_objects() if issubclass(type(k), jit.JITFunction)]


def functions_of(kernel: Any) -> list[Any]:
    """A kernel and all functions of Triton that it calls, Triton's own apart; none where sources cannot be replaced."""
    return list(_reached(kernel, {})) if works(SOURCE) else []


def _reached(function: Any, seen: dict[int, Any]) -> Iterator[Any]:
    if id(function) in seen or not is_kernel(function):
        return
    seen[id(function)] = function
    yield function
    for other in user_functions(function):
        yield from _reached(other, seen)


def line_refused(error: BaseException) -> str:
    """ "file:line" that Triton's frontend refuses, by its error, which counts from the `def`; "" if not known."""
    place = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        generator = frame.f_locals.get("self")
        file, begin = (getattr(generator, name, None) for name in ("file_name", "begin_line"))
        line = getattr(getattr(error, "node", None), "lineno", None)
        if file and isinstance(begin, int) and line:
            place = f"{file}:{begin + line}"
    return place


def source_of(function: Any) -> tuple[str, int, str]:
    """File, first line of the `def`, and its text without decorators and indentation."""
    decorators = 0
    for line in function.raw_src:
        if line.lstrip().startswith("def "):
            break
        decorators += 1
    return function.fn.__code__.co_filename, function.starting_line_number + decorators, function.src


def replace(function: Any, source: str, callers: Iterable[Any]) -> None:
    """Give a kernel another source, for all who hold it; what was compiled of it and of its callers is forgotten."""
    function._unsafe_update_src(source)
    forget((function, *callers))


def forget(kernels: Iterable[Any]) -> None:
    """Have kernels compiled anew at their next launch."""
    for kernel in kernels:
        kernel.hash = None
        kernel.device_caches.clear()


@part(
    "triton.source",
    "puts a mutated kernel in the place of a kernel",
    "kernels of Triton are not mutated",
    names=("JITFunction._unsafe_update_src", "JITFunction.hash", "JITFunction.device_caches", "JITFunction.src"),
)  # fmt: skip
def SOURCE() -> str:
    from retrograd.compat.triton_probe import scaling_kernel

    file, line, source = source_of(scaling_kernel)
    if not (file.endswith("triton_probe.py") and line > 1 and source.startswith("def scaling_kernel(")):
        return f"the source of a kernel is not where it was: {file}:{line} {source[:40]!r}"
    # A key has values that functions called read, unless these have a key already: the second is the one that stays.
    first = scaling_kernel.cache_key
    forget((scaling_kernel,))
    before = scaling_kernel.cache_key
    if not first:
        return "a kernel has no key"
    try:
        replace(scaling_kernel, f"{source.rstrip()}\n    pass\n", ())
        changed = scaling_kernel.cache_key
    finally:
        replace(scaling_kernel, source, ())
    if changed == before:
        return "the key of a kernel does not follow its source"
    return "" if scaling_kernel.cache_key == before else "the key of a kernel does not come back with its source"
