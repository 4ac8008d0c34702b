"""One file a framework. They hook into modules that the program has imported; importing these files imports none."""

# pyright: basic

from __future__ import annotations

import sys
from collections.abc import Sequence

from retrograd.errors import UsageError
from retrograd.graph.watching.events import WatchBackend

# The module whose presence says that the framework is used, by backend.
MODULES = {"compile": "torch", "xla": "torch_xla", "jax": "jax"}
CHOICES = ("auto", *MODULES)


def names(backend: str | Sequence[str]) -> tuple[str, ...]:
    """Which backends an argument means; "auto" are those of frameworks that are imported by now.

    Raises:
        UsageError: there is no such backend, or "auto" finds no framework.
    """
    chosen = (backend,) if isinstance(backend, str) else tuple(backend)
    for name in chosen:
        if name not in CHOICES or (name == "auto" and len(chosen) > 1):
            known = ", ".join(map(repr, CHOICES))
            raise UsageError(f"`backend` is {backend!r}, expected one of {known}, or a list of these without 'auto'")
    if chosen != ("auto",):
        return chosen
    imported = tuple(name for name, module in MODULES.items() if module in sys.modules)
    if not imported:
        raise UsageError(
            "`backend` is 'auto', but none of torch, torch_xla and jax is imported yet; import yours before "
            "retrograd.graph.watch, or name the backend"
        )
    return imported


def make(name: str, **options: object) -> WatchBackend:
    """One backend by name; `options` are those of retrograd.graph.watch that concern it."""
    if name == "xla":
        from retrograd.graph.watching.backends.xla import Xla

        return Xla(**options)  # type: ignore[arg-type]
    if name == "jax":
        from retrograd.graph.watching.backends.jax import Jax

        return Jax()
    from retrograd.graph.watching.backends.compile import Compile

    return Compile()
