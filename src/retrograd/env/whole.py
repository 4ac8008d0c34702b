"""All facts about a machine and this process in one record, `retrograd.env/1`."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from retrograd import config
from retrograd.env.caches import caches
from retrograd.env.compilers import compilers
from retrograd.env.devices import gpus, toolkits
from retrograd.env.flags import flags
from retrograd.env.hazards import hazards
from retrograd.env.machine import cpu_count, cpu_model, last_level_cache_bytes, memory_bytes
from retrograd.env.packages import packages
from retrograd.env.variables import variables

SCHEMA = "retrograd.env/1"


def survey(with_torch: bool = True) -> dict[str, Any]:
    """The record: strings, numbers, true, false and None in dicts and lists.

    Args:
        with_torch: read torch's flags, which imports it; no context is made on a GPU.

    Returns:
        schema; python, packages (version or None); machine; gpus; torch ("imported", "not asked for", "not installed",
        or why it does not import); toolkits and flags (None unless it is imported); compilers; variables that are set;
        settings of ours with their sources; caches; hazards (where, what).
    """
    torch, state = _torch() if with_torch else (None, "not asked for")
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "python": {"version": platform.python_version(), "path": sys.executable},
        "packages": packages(),
        "machine": _machine(),
        "gpus": gpus(),
        "torch": state,
        "toolkits": toolkits(torch) if torch else None,
        "compilers": compilers(),
        "flags": flags(torch) if torch else None,
        "variables": variables(),
        "settings": [asdict(setting) for setting in config.settings()],
        "caches": caches(),
    }
    return {**facts, "hazards": hazards(facts)}


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "cpu": cpu_model(),
        "cpus": cpu_count(),
        "memory_bytes": memory_bytes(),
        "cache_bytes": last_level_cache_bytes(),
    }


def _torch() -> tuple[ModuleType | None, str]:
    if sys.modules.get("torch", ...) is None or ("torch" not in sys.modules and find_spec("torch") is None):
        return None, "not installed"
    try:
        import torch
    except (ImportError, OSError) as error:
        # A torch that does not load is what the reader of this output is looking for.
        return None, f"does not import: {error}"
    return torch, "imported"
