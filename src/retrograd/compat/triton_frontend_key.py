"""Keys of kernels: all that Triton's frontend reads of one, so that its code can be kept from process to process.

Triton's own key leaves out values that kernels read from modules, and files; neither may be out of date in a verdict.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Container, Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from retrograd.compat.registry import part, works

_FORMAT = 2  # to be counted up where other passes are run on what the frontend gives


class _Unkeyed(Exception):
    """A kernel reads something that has no text of its own."""


def frontend_key(source: Any, target: Any, options: Any, without: Container[str] = ()) -> str | None:
    """A key of the code that Triton's frontend makes; None where it cannot be told, and the code is not to be kept.

    Args:
        source: an ASTSource: function, signature, constants and attributes.
        target: the GPU, as a GPUTarget.
        options: of the compiler, a dataclass.
        without: names of options that are not in the key.
    """
    return _key(source, target, options, without) if works(KEY) else None


def _key(source: Any, target: Any, options: Any, without: Container[str] = ()) -> str | None:
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars

    function = source.fn
    if function._repr is not None or knobs.compilation.allow_non_constexpr_globals:
        return None
    try:
        facts = [
            *(str(_FORMAT), _compiler(), type(source).__name__, repr(target)),
            *(repr(sorted(settings.items())) for settings in (get_cache_invalidating_env_vars(), knobs.language.knobs)),
            *_function(function, set()),
            repr(list(source.signature.items())),
            *(f"{path}: {_text(value)}" for path, value in sorted(source.constants.items())),
            repr(sorted(source.attrs.items())),
            *(f"{name}={_text(value)}" for name, value in sorted(vars(options).items()) if name not in without),
        ]
    except _Unkeyed:
        return None
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


@functools.cache
def _compiler() -> str:
    """Triton's version, and size and time of the files of its frontend: a checkout changes without its version."""
    import triton

    folder = Path(triton.__file__).parent
    files = [p for name in ("_C", "language", "compiler", "runtime", "backends") for p in (folder / name).rglob("*")]
    stats = [(str(p), p.stat()) for p in sorted(files) if p.suffix in (".py", ".so", ".pyd")]
    return repr((triton.__version__, [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]))


def _function(function: Any, seen: set[int]) -> Iterator[str]:
    """Source and place of a function, and of all that it names: other functions, and values."""
    seen.add(id(function))
    yield f"{function.fn.__code__.co_filename}:{function.starting_line_number} {function._fn_name}"
    yield f"{getattr(function, 'noinline', None)} {''.join(function.raw_src)}{function.src}"
    for parameter in function.signature.parameters.values():
        yield "" if parameter.default is parameter.empty else f"{parameter.name}={_text(parameter.default)}"
    for path, value in _read(function):
        if id(value) not in seen:
            yield from _function(value, seen) if _is_users(value) else (f"{path} {_text(value)}",)


def _read(function: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What a function reads from its module and the enclosing scopes, by name; modules themselves apart."""
    scope = function.get_capture_scope()
    for path in _names(function.src):
        if path[0] not in scope:
            continue
        value = scope[path[0]]
        for name in path[1:]:
            if not isinstance(value, ModuleType):
                break
            value = getattr(value, name, None)
        if not isinstance(value, ModuleType):
            yield path, value


def user_functions(function: Any) -> list[Any]:
    """Functions of Triton that a function names, Triton's own apart."""
    return [value for _, value in _read(function) if _is_users(value)]


@functools.lru_cache(4096)
def _names(source: str) -> tuple[tuple[str, ...], ...]:
    """Names in a function and chains of attributes, each from its beginning."""
    names: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(source)):
        chain: list[str] = []
        while isinstance(node, ast.Attribute):
            chain.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            names.add((node.id, *reversed(chain)))
    return tuple(sorted(names))


def _is_users(value: Any) -> bool:
    """Whether it is a kernel's function that is not Triton's own."""
    from triton.runtime.jit import JITFunction

    return isinstance(value, JITFunction) and not _is_tritons(value)


def _is_tritons(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "triton"


def _text(value: Any) -> str:
    """A value as text that no other has; _Unkeyed where there is none."""
    from triton.language.core import constexpr, dtype
    from triton.runtime.jit import JITCallable

    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    if type(value) in (tuple, list):
        return f"{type(value).__name__}({', '.join(map(_text, value))})"
    if isinstance(value, constexpr):
        return f"constexpr({_text(value.value)})"
    if isinstance(value, dtype):
        return f"dtype({value})"
    known = isinstance(value, (type, FunctionType, JITCallable)) and _is_tritons(value)
    if known or (isinstance(value, (type, BuiltinFunctionType)) and value.__module__ in ("builtins", "math")):
        return f"{value.__module__}.{value.__qualname__}"
    if _is_users(value):
        return f"({' '.join(_function(value, set()))})"
    raise _Unkeyed


@part(
    "triton.frontend_key",
    "keeps the first intermediate code of kernels from process to process",
    "each process compiles them anew",
    names=(
        "JITFunction._repr", "JITFunction._fn_name", "JITFunction.raw_src", "JITFunction.starting_line_number",
        "JITFunction.get_capture_scope", "JITFunction.noinline", "get_cache_invalidating_env_vars", "knobs.language",
        "knobs.compilation.allow_non_constexpr_globals",
    ),
)  # fmt: skip
def KEY() -> str:
    from retrograd.compat.triton_probe import scaling_kernel

    facts = "\n".join(_function(scaling_kernel, set()))
    expected = ("triton_probe.py:", "tl.store(x_ptr", "return x * FACTOR", "('FACTOR',) constexpr(2.0)", "tl', 'load")
    missing = [word for word in expected if word not in facts]
    if missing:
        return f"what a kernel reads has no {', '.join(missing)}"
    keys: list[str | None] = []
    for block in (16, 16, 32):
        source = SimpleNamespace(fn=scaling_kernel, signature={"x_ptr": "*fp32"}, constants={(1,): block}, attrs={})
        keys.append(_key(source, "", SimpleNamespace(debug=False)))
    same = keys[0] is not None and keys[0] == keys[1] != keys[2]
    return "" if same else "keys of equal kernels differ, or of different ones do not"
