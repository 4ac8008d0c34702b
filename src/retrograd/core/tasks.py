"""Tasks of a campaign: cases that begin and end, what came of each, and the processes that do them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

WALL = 10  # times its seconds of CPU time that a case may last by the clock: twenty processes on two cores get a tenth


class Begin(NamedTuple):
    """A case begins, which may take so many seconds of CPU time instead of those that all may."""

    case: str
    limit: float | None = None


class End(NamedTuple):
    """A case has ended with a value that JSON can hold; one that was never begun is a note of the work to itself."""

    case: str
    value: Any


@dataclass(frozen=True)
class Outcome:
    """What came of a case: "done" with a value, "crashed" or "timed out" with the end of what its process printed."""

    state: str
    value: Any = None
    text: str = ""
    seconds: float = 0.0


# Takes the argument of a task and the outcomes of the cases that are there already.
Work = Callable[[Any, Mapping[str, Outcome]], Iterator[Begin | End]]
# Makes the work, in the process that is to do it.
Prepare = Callable[[], Work]


@dataclass(frozen=True)
class Task:
    """A task by a name of its own within the campaign; the argument pickles where the work is done elsewhere."""

    name: str
    argument: Any = None


@dataclass(frozen=True)
class WorkerOptions:
    """Processes that work.

    Attributes:
        jobs: how many at once on this machine.
        timeout: seconds of CPU time that a case may take, all threads of its process together: a busy machine makes
            no case longer. One that computes nothing ends after `WALL` times as many of the clock.
        startup: seconds until a process has prepared itself, and between two cases.
        recycle: cases after which a process is replaced by a new one, once its task is through.
        start: "fork", which shares what is imported, or "spawn", for processes that use a GPU.
        devices: GPUs by number; each is seen by one process alone, so that there are no more processes than these.
        cluster: address of a Dask scheduler, whose workers do all of it; "" for this machine.
    """

    jobs: int = 1
    timeout: float = 300.0
    startup: float = 300.0
    recycle: int = 1
    start: str = "fork"
    devices: tuple[str, ...] = ()
    cluster: str = ""
