"""Replaced attributes of a framework: noted as they are set, put back in reverse order, fingerprinted by source."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

_ABSENT = object()


class Patches:
    """Attributes that were replaced, with what they were."""

    def __init__(self) -> None:
        self._stock: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute that there is.

        Raises:
            AttributeError: there is none of that name.
        """
        effective = getattr(owner, name)
        self._stock.append((owner, name, owner.__dict__.get(name, _ABSENT), effective))
        setattr(owner, name, value)

    def __len__(self) -> int:
        return len(self._stock)

    def undo(self) -> None:
        """Put everything back."""
        while self._stock:
            owner, name, own, _ = self._stock.pop()
            if own is _ABSENT:
                delattr(owner, name)  # an instance's attribute over its class's
            else:
                setattr(owner, name, own)

    def functions(self) -> dict[str, Any]:
        """Each replaced function of the framework by its name."""
        functions: dict[str, Any] = {}
        for owner, name, _, stock in self._stock:
            stock = getattr(stock, "__func__", stock)
            if not inspect.isfunction(stock) or stock.__module__.startswith("retrograd"):
                continue  # replaced twice, by two parts
            owner_name = getattr(owner, "__name__", type(owner).__name__).rpartition(".")[2]
            functions[f"{owner_name}.{name}"] = stock
        return functions


def fingerprint(function: Any) -> str:
    """Hash of a function's source, whatever its place in the file."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:8]
    except (OSError, TypeError):
        return "?"
