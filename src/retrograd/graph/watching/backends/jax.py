"""JAX: the modules that are lowered, why the tracing cache missed, and seconds.

Modules come from jax_dump_ir_to (StableHLO), reasons from the log of jax_explain_cache_misses, seconds from
jax.monitoring. A module that JAX makes of one operation outside of jit is no graph of the program and only counted.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrograd.errors import GraphError, UsageError
from retrograd.graph.watching import jax_cache_misses
from retrograd.graph.watching.events import Compiled, Event

_OPTIONS = {"jax_explain_cache_misses": True, "jax_dump_ir_to": None}
_COMPILE = "/jax/core/compile/"
_BACKEND = _COMPILE + "backend_compile_duration"
_FILE = re.compile(r"jax_ir(\d+)_(?:jit_)?(.*)_compile\.mlir\Z")
_FUNCTION = re.compile(r"(?:jit|pmap)\((.*)\)\Z")
_SMALL = 12  # lines of a module of one operation


class _Ear(logging.Handler):
    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._tell = hear

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


class Jax:
    """Sets JAX's options while it is started, and puts them back."""

    name = "jax"
    tells = False

    def __init__(self) -> None:
        self._ear = _Ear(self._hear)
        self._before: dict[str, Any] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._misses: list[jax_cache_misses.Miss] = []
        self._spent: dict[str, list[float]] = {}
        self._running: dict[str, float] = {}
        self._listening = False
        self._shared: Any = None
        self.small = 0  # modules of single operations

    def version(self) -> str:
        """JAX's version."""
        return str(sys.modules["jax"].__version__)

    def start(self, tell: Callable[[Compiled], Any]) -> None:
        """Set the options; UsageError without JAX, GraphError where it lacks one."""
        if "jax" not in sys.modules:
            raise UsageError("`backend` is 'jax', but jax is not imported; import it before retrograd.graph.watch")
        jax = sys.modules["jax"]
        for name in _OPTIONS:
            if name not in jax.config.values:
                raise GraphError(
                    f"jax {self.version()} has no option {name}, which retrograd.graph.watch needs; it knows jax 0.10. "
                    "Modules in files can be compared all the same: `retrograd graph diff A B`"
                )
        self._folder = tempfile.TemporaryDirectory(prefix="retrograd-graphs-")
        self._before = {name: jax.config.values[name] for name in _OPTIONS}
        for name, value in _OPTIONS.items():
            jax.config.update(name, self._folder.name if value is None else value)
        self._listen()
        logger = logging.getLogger("jax")
        logger.addHandler(self._ear)
        # The explanations are ours to tell, once and beside the graph.
        self._shared, logger.propagate = logger.propagate, False

    def stop(self) -> None:
        """Put the options back."""
        if self._folder is None:
            return
        self._listening = False
        logger = logging.getLogger("jax")
        logger.removeHandler(self._ear)
        logger.propagate = self._shared
        for name, value in self._before.items():
            sys.modules["jax"].config.update(name, value)
        self._folder.cleanup()
        self._folder = None

    def drain(self) -> list[Event]:
        """The modules compiled since the last call; their files are removed."""
        if self._folder is None:
            return []
        made: list[Event] = []
        for path in sorted(Path(self._folder.name).glob("jax_ir*_compile.mlir")):
            found = _FILE.match(path.name)
            text = path.read_text(encoding="utf-8", errors="replace")
            path.unlink()
            if found:
                made += self._module(found[2], text)
        self._misses.clear()
        self._spent.clear()
        return made

    def _module(self, name: str, text: str) -> list[Event]:
        seconds = self._spent.get(name, [])
        spent = seconds.pop(0) if seconds else None
        if len(text.splitlines()) <= _SMALL and _is_operation(name):
            self.small += 1
            return []
        at = next((i for i, miss in enumerate(self._misses) if miss.function == name), None)
        miss = self._misses.pop(at) if at is not None else None
        why = f"cache miss at {miss.where}: {miss.why}" if miss else ""
        return [Compiled("module", "stablehlo", text, name, name, seconds=spent, reason=why)]

    def _hear(self, message: str) -> None:
        if miss := jax_cache_misses.read(message):
            self._misses.append(miss)

    def _listen(self) -> None:
        import jax.monitoring as monitoring

        self._listening = True

        # Older versions of JAX cannot take a listener away: a stopped one hears nothing.
        def hear(event: str, seconds: float, **about: Any) -> None:
            if self._listening and event.startswith(_COMPILE):
                name = str(about.get("fun_name", ""))
                found = _FUNCTION.match(name)
                name = found[1] if found else name
                self._running[name] = self._running.get(name, 0.0) + seconds
                if event == _BACKEND:
                    self._spent.setdefault(name, []).append(self._running.pop(name))

        monitoring.register_event_duration_secs_listener(hear)


def _is_operation(name: str) -> bool:
    """Is this the name of an operation of JAX itself, compiled because it was called outside of jit?"""
    jax = sys.modules["jax"]
    return any(hasattr(module, name) for module in (jax.lax, jax.numpy))
