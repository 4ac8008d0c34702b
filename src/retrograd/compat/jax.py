"""JAX's compilations: what it writes, logs and times, by undocumented options and events. Loads no JAX."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from retrograd.compat.registry import part

EXPLAIN, DUMP = "jax_explain_cache_misses", "jax_dump_ir_to"
_COMPILE = "/jax/core/compile/"
_BACKEND = _COMPILE + "backend_compile_duration"
_FILE = re.compile(r"jax_ir(\d+)_(?:jit_)?(.*)_compile\.mlir\Z")
_FUNCTION = re.compile(r"(?:jit|pmap)\((.*)\)\Z")


def set_options(folder: str) -> dict[str, Any]:
    """Have modules dumped into a folder and cache misses explained in the log; the options as they were."""
    config = sys.modules["jax"].config
    before = {name: config.values[name] for name in (EXPLAIN, DUMP)}
    put_back({EXPLAIN: True, DUMP: folder})
    return before


def put_back(options: dict[str, Any]) -> None:
    for name, value in options.items():
        sys.modules["jax"].config.update(name, value)


def module_name(file: str) -> str | None:
    """The function whose module a dumped file has; None if it is another file."""
    match = _FILE.match(file)
    return match[2] if match else None


def is_own(name: str, text: str) -> bool:
    """Is a module of a function of JAX itself, which the program called eagerly?

    Some file of JAX has a function of this name, and no source line of the module stands in a function of this name.
    """
    if f'loc("{name}"(' in text or f'.{name}"(' in text:
        return False
    files = [vars(module) for key, module in sys.modules.copy().items() if key.startswith("jax.")]
    return any(callable(names.get(name)) for names in files)


def on_compile_time(spent: Callable[[str, float, bool], None]) -> None:
    """Call `spent(function, seconds, is_last)` for each phase of a compilation; for good, JAX 0.10 forgets none."""

    def listen(event: str, seconds: float, **about: Any) -> None:
        if event.startswith(_COMPILE):
            name = str(about.get("fun_name", ""))
            match = _FUNCTION.match(name)
            spent(match[1] if match else name, seconds, event == _BACKEND)

    sys.modules["jax"].monitoring.register_event_duration_secs_listener(listen)


def register_dialects(registry: Any) -> None:
    """Make the dialects of JAX's StableHLO known to an MLIR registry."""
    from jaxlib.mlir._mlir_libs._jax_mlir_ext import register_dialects

    register_dialects(registry)


@part(
    "jax.compilations",
    "watches what JAX compiles",
    "modules in files can be compared all the same: `retrograd graph diff A B`",
    names=("jax.config.values", EXPLAIN, DUMP, f"jax.monitoring events {_COMPILE}*"),
    refuses=True,
)
def PART() -> str:
    """Set the options and put them back. Nothing is compiled: that would choose a device before the program does."""
    if "jax" not in sys.modules:
        return ""
    config = sys.modules["jax"].config
    missing = [name for name in (EXPLAIN, DUMP) if name not in config.values]
    if missing:
        return f"has no option {', '.join(missing)}"
    before = set_options("folder")
    try:
        now = {name: config.values[name] for name in before}
    finally:
        put_back(before)
    return "" if now == {EXPLAIN: True, DUMP: "folder"} else f"its options are {now} after they were set"


@part(
    "jax.dialects",
    "reads StableHLO",
    "HLO text is read without jaxlib: dump it with --xla_dump_hlo_as_text",
    names=("jaxlib.mlir._mlir_libs._jax_mlir_ext.register_dialects",),
    refuses=True,
)
def DIALECTS() -> str:
    from jaxlib.mlir import ir

    registry, context = ir.DialectRegistry(), ir.Context()
    register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    with context:
        module = ir.Module.parse("func.func @f() { return }")
    return "" if "func.func" in str(module) else "functions in MLIR are not read"
