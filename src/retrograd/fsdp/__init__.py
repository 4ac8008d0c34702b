"""Sharded data parallelism: the collectives of a run in the same order at every step and on every rank.

`record_collectives` records and verifies them; `diff` compares logs; `retrograd.fsdp.xla` repairs gradient buckets of
torch_xla 2.9. Names come when they are first used (PEP 562), and torch with those that need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrograd.fsdp.attribution import naming as naming
    from retrograd.fsdp.checking import assert_same_order as assert_same_order
    from retrograd.fsdp.comparing import diff as diff
    from retrograd.fsdp.record import Collective as Collective
    from retrograd.fsdp.record import Log as Log
    from retrograd.fsdp.recording import CollectiveLog as CollectiveLog
    from retrograd.fsdp.recording import StepChangedWarning as StepChangedWarning
    from retrograd.fsdp.recording import record_collectives as record_collectives

_HOMES = {
    "Collective": "record",
    "CollectiveLog": "recording",
    "Log": "record",
    "StepChangedWarning": "recording",
    "assert_same_order": "checking",
    "diff": "comparing",
    "naming": "attribution",
    "record_collectives": "recording",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"retrograd.fsdp.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'retrograd.fsdp' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")


def __dir__() -> list[str]:
    return sorted(__all__)
