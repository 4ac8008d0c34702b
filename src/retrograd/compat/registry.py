"""Parts: which private names of a framework are used, the versions that were run, and what happens where they differ.

A file of this room that touches private names declares a `Part`, by the decorator `part` on its self-test, and asks
`works(PART)` (an option: the stock behaviour is kept, with a note) or `require(PART)` (a refusal that names the
alternative) before it uses them. The self-test compares behaviour and goes through the same code as production, so that
a renamed name, another order of arguments and another result are all one answer: "it does not work here, because". No
framework is imported here.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from retrograd.compat import versions
from retrograd.errors import UnsupportedVersionError


@dataclass(frozen=True)
class Part:
    """One mechanism that rests on private names."""

    id: str  # framework and mechanism, "triton.launch"
    package: str  # import name of the framework, a key of `versions.TESTED`
    purpose: str  # what it is for, in words: "counts launches of Triton kernels"
    names: tuple[str, ...]  # the private names, as one would search for them
    ran: tuple[str, ...]  # minor versions on which the self-test and the tests of this part ran
    otherwise: str  # what happens where the self-test fails, in words that name the alternative
    # "" where the names behave as known, else what is different; exceptions count as different
    self_test: Callable[[], str]
    # whether what needs the part is refused then; else it goes on with the stock behaviour and a note
    refuses: bool = False


@dataclass(frozen=True)
class Status:
    """What became of a part on this machine; "not used" where nothing has asked yet."""

    part: Part
    state: Literal["works", "degraded", "refused", "not used", "not installed"]
    difference: str = ""

    @property
    def note(self) -> str:
        """One sentence for a report; "" where all is as known."""
        if self.state not in ("degraded", "refused"):
            return ""
        part = self.part
        return (
            f"{part.package} {versions.installed(part.package)} behaves differently where retrograd {part.purpose} "
            f"({self.difference}; ran on {', '.join(part.ran)}): {part.otherwise}"
        )


_FRAMEWORK_AT_TOP = re.compile(r"^(?:import|from) (?:torch|triton|jax)\b", re.M)


def _being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))  # of importlib, as `importlib._bootstrap` sets it


def in_fresh_thread(self_test: Callable[[], str]) -> Callable[[], str]:
    """The self-test as a thread of its own runs it, where no mode, backward or inference mode of the caller is on."""

    @functools.wraps(self_test)
    def run() -> str:
        # While the caller still imports a framework, a thread would wait for that import for ever, and the import for
        # it. Nothing of the program has run then, so nothing is on that could disturb the test.
        if any(_being_imported(name) for name in versions.TESTED):
            return self_test()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self_test).result()

    return run


_parts: dict[str, Part] = {}
_statuses: dict[str, Status] = {}


def part(
    id: str, purpose: str, otherwise: str, *, names: tuple[str, ...], ran: tuple[str, ...] = (), refuses: bool = False
) -> Callable[[Callable[[], str]], Part]:
    """Decorator that makes a self-test a part of `retrograd env`'s table; arguments as in `Part`."""
    package = id.partition(".")[0]
    tested = ran or versions.PARTS_RAN[package]

    def declare(self_test: Callable[[], str]) -> Part:
        _parts[id] = Part(id, package, purpose, names, tested, otherwise, self_test, refuses)
        return _parts[id]

    return declare


def status(part: Part) -> Status:
    """Run the self-test of a part, once a process."""
    known = _statuses.get(part.id)
    if known is not None:
        return known
    if not versions.installed(part.package):
        return Status(part, "not installed")
    versions.note_if_newer(part.package)
    try:
        difference = part.self_test()
    except Exception as error:  # a name that is gone shows itself as any exception
        difference = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    state = "works" if not difference else "refused" if part.refuses else "degraded"
    return _statuses.setdefault(part.id, Status(part, state, difference))


def works(part: Part) -> bool:
    """Whether the private names of a part behave as known on this machine."""
    return status(part).state == "works"


def require(part: Part) -> None:
    """Refuse where the private names of a part do not behave as known.

    Raises:
        UnsupportedVersionError: says what differs, on which versions it ran, and the alternative.
    """
    state = status(part)
    if state.state == "not installed":
        raise UnsupportedVersionError(f"{part.package} is not installed; retrograd {part.purpose} with it")
    if state.note:
        raise UnsupportedVersionError(state.note)


def load_parts(frameworks: bool = True) -> dict[str, str]:
    """Import the files of this room that declare parts.

    Args:
        frameworks: also import those that import a framework at their top, and with it the framework.

    Returns:
        Files that do not import, by module, and why: a framework is not there, or has lost a name.
    """
    failed: dict[str, str] = {}
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        if file == Path(__file__) or "compat.registry import" not in source:
            continue
        if not frameworks and _FRAMEWORK_AT_TOP.search(source):
            continue
        path = file.relative_to(Path(__file__).parent).with_suffix("").as_posix().removesuffix("/__init__")
        name = f"{__package__}.{path.replace('/', '.')}"
        try:
            import_module(name)
        except ImportError as error:
            failed[name] = str(error)
    return failed


def statuses() -> list[Status]:
    """All declared parts in the order of their ids, with what is known of them; runs no self-test."""
    return [_statuses.get(name, Status(_parts[name], "not used")) for name in sorted(_parts)]
