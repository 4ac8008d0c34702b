"""Events of a backend: a graph was compiled, a graph ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from retrograd.compat.registry import Part, require
from retrograd.errors import GraphError, UnsupportedVersionError


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


class WatchBackend(Protocol):
    """A framework that is watched. Made by `enable` functions; never imports what the user has not."""

    name: str
    tells: bool  # whether graphs are told before they run; else they are known when the step is over

    def start(self, tell: Callable[[Compiled], Any]) -> None:
        """Hook in; `tell` is called as soon as a graph is known, before it runs where the framework allows that."""

    def drain(self) -> list[Event]:
        """What happened since the last call, in order."""
        ...

    def stop(self) -> None:
        """Unhook; safe to call twice."""

    def version(self) -> str:
        """The framework's version."""
        ...


def require_for_watching(part: Part) -> None:
    """Refuse where a framework does not behave as known.

    Raises:
        GraphError: says what differs, on which versions it ran, and the alternative.
    """
    try:
        require(part)
    except UnsupportedVersionError as error:
        raise GraphError(str(error)) from None
