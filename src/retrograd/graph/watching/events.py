"""Events of a backend: a graph was compiled, a graph ran."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from retrograd.compat.registry import Part, require
from retrograd.errors import GraphError, UnsupportedVersionError, UsageError


@dataclass
class Compiled:
    """A graph that a framework compiled.

    `family` tells graphs that stand for each other (the forward of one function, say) from others; a new graph is
    compared with the last one of its family. `recorded` is the framework's own key. `frames` are the user's lines.
    """

    role: str
    format: str
    text: str
    name: str = ""
    family: str = ""
    recorded: str = ""
    seconds: float | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    digest: str = ""  # what stands for the graph where the framework gives no text


@dataclass
class Executed:
    """A graph that was executed, by the framework's key."""

    recorded: str


Event = Compiled | Executed


class WatchBackend:
    """A framework that is watched: the module that the user has imported, which no backend does."""

    name: str
    module: str
    part: Part  # how it behaves as known
    tells = True  # whether graphs are told before they run; else they are known when the step is over

    def start(self, tell: Callable[[Compiled], Any]) -> None:
        """Hook in; `tell` is called as soon as a graph is known, before it runs where the framework allows that.

        Raises:
            UsageError: the module is not imported.
            GraphError: it does not behave as known; says what differs, on which versions it ran, and the alternative.
        """
        if self.module not in sys.modules:
            raise UsageError(
                f"`backend` is {self.name!r}, but {self.module} is not imported; import it before retrograd.graph.watch"
            )
        try:
            require(self.part)
        except UnsupportedVersionError as error:
            raise GraphError(str(error)) from None
        self._tell = tell
        self._hook()

    def version(self) -> str:
        """The framework's version."""
        return str(sys.modules[self.module].__version__)

    def drain(self) -> list[Event]:
        """What happened since the last call, in order."""
        raise NotImplementedError

    def stop(self) -> None:
        """Unhook; safe to call twice."""
        raise NotImplementedError

    def _hook(self) -> None:
        raise NotImplementedError
