"""The machine without any package's help: processor, caches, memory. Standard library only, files of Linux first."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

_CPU = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def cpu_model() -> str:
    """The processor as the kernel names it; what Python knows elsewhere."""
    named = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.M)
    return named[1].strip() if named else platform.processor() or platform.machine() or "unknown"


def cpu_count() -> int:
    """Processors that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def busy_cpus() -> float | None:
    """How many processors other processes have kept busy in the last minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def last_level_cache_bytes() -> int | None:
    """Size of the largest cache of the first processor; None where the system does not say."""
    found = []
    for size in _CPU.glob("index*/size"):
        text = _text(size).strip()
        if fits := re.fullmatch(r"(\d+)([KMG]?)", text):
            found.append(int(fits[1]) * _UNITS.get(fits[2], 1))
    return max(found, default=None)


def memory_bytes() -> int | None:
    """Memory of the machine; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
