"""JAX: the modules that are lowered, why the tracing cache missed, and seconds.

Modules come from jax_dump_ir_to (StableHLO), reasons from the log of jax_explain_cache_misses, seconds from
jax.monitoring. A module that JAX makes of a function of its own, called eagerly, is no graph of the program and only
counted.
"""

# pyright: basic

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrograd.compat import jax as compilations
from retrograd.graph.watching.events import Compiled, Event, WatchBackend

# The log of jax_explain_cache_misses.
_HEAD = re.compile(r"TRACING CACHE MISS at (?P<file>.*?):(?P<line>\d+)(?::\d+)? \((?P<caller>.*)\)")
_FOR = re.compile(r"^\s*for (?P<name>\S+) defined at ", re.MULTILINE)
_NEVER = re.compile(r"^\s*(?P<name>\S+) id=\d+ defined at ", re.MULTILINE)
_NOISE = ("all previously seen cache keys differ", "for ")


class _Ear(logging.Handler):
    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__(logging.DEBUG)
        self._tell = hear

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


class Jax(WatchBackend):
    """Sets JAX's options while it is started, and puts them back."""

    name = module = "jax"
    part = compilations.PART
    tells = False

    def __init__(self) -> None:
        self._ear = _Ear(self._hear)
        self._before: dict[str, Any] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._misses: list[Miss] = []
        self._spent: dict[str, list[float]] = {}
        self._running: dict[str, float] = {}
        self._listening = False
        self._shared: Any = None
        self.eager = 0  # modules of JAX's own functions

    def _hook(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="retrograd-graphs-")
        self._before = compilations.set_options(self._folder.name)
        self._listening = True
        compilations.on_compile_time(self._spend)
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
        compilations.put_back(self._before)
        self._folder.cleanup()
        self._folder = None

    def drain(self) -> list[Event]:
        """The modules compiled since the last call; their files are removed."""
        if self._folder is None:
            return []
        events: list[Event] = []
        for file in sorted(os.listdir(self._folder.name)):  # 10 us less at each step than a glob  # noqa: PTH208
            path, name = Path(self._folder.name, file), compilations.module_name(file)
            text = path.read_text(encoding="utf-8", errors="replace")
            path.unlink()
            if name is not None:
                events += self._module(name, text)
        self._misses.clear()
        self._spent.clear()
        return events

    def _module(self, name: str, text: str) -> list[Event]:
        seconds = self._spent.get(name, [])
        spent = seconds.pop(0) if seconds else None
        at = next((i for i, miss in enumerate(self._misses) if _in_file(miss.function) == name), None)
        miss = self._misses.pop(at) if at is not None else None
        if miss is None and compilations.is_own(name, text):
            self.eager += 1
            return []
        why = f"cache miss at {miss.where}: {miss.why}" if miss else ""
        return [Compiled("module", "stablehlo", text, name, name, seconds=spent, reason=why)]

    def _hear(self, message: str) -> None:
        if miss := read_miss(message):
            self._misses.append(miss)

    def _spend(self, name: str, seconds: float, last: bool) -> None:
        if not self._listening:
            return
        self._running[name] = self._running.get(name, 0.0) + seconds
        if last:
            self._spent.setdefault(name, []).append(self._running.pop(name))


def _in_file(function: str) -> str:
    """The name of a function as the file of its module has it: <lambda> is _lambda."""
    return re.sub(r"[<>]", "_", function).rstrip("_")


@dataclass(frozen=True)
class Miss:
    """One miss of the tracing cache: the function, the line that called it ("train.py:24") and JAX's explanation."""

    function: str
    where: str
    why: str


def read_miss(message: str) -> Miss | None:
    """The miss that a log message tells of; None if it tells of something else."""
    head = _HEAD.search(message)
    if head is None:
        return None
    body = message[head.end() :].lstrip(":").strip("\n")
    where = f"{head['file'].rpartition('/')[2]}:{head['line']}"
    never = _NEVER.search(body)
    if never and "never seen function" in body:
        return Miss(never["name"], where, "never seen function")
    name = _FOR.search(body)
    lines = [line.strip() for line in body.splitlines()]
    words = " ".join(line for line in lines if line and not line.startswith(_NOISE))
    return Miss(name["name"] if name else "", where, words)
