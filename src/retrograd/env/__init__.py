"""What a bug report needs to know about this machine: `python -m retrograd.env [--json]`."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from importlib.util import find_spec

from retrograd import config

_PACKAGES = ("retrograd", "torch", "triton", "numpy")


def collect() -> dict[str, str]:
    """Versions, devices and the variables that matter; torch is imported only if it is installed."""
    facts = {"python": platform.python_version(), "platform": platform.platform()}
    facts |= versions()
    facts["devices"] = _devices() if find_spec("torch") else "cpu"
    facts["TRITON_INTERPRET"] = "1" if config.interpreting() else "0"
    facts["CI"] = "yes" if config.in_ci() else "no"
    return facts


def versions() -> dict[str, str]:
    """Versions of the packages that matter; none is imported."""
    return {name: _version(name) for name in _PACKAGES}


def as_text(facts: dict[str, str]) -> str:
    """One aligned line a fact."""
    width = max(map(len, facts), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in facts.items())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        # A checkout on PYTHONPATH has no metadata, yet is there.
        return "not installed" if package != "retrograd" else "unknown (not installed as a package)"


def _devices() -> str:
    try:
        import torch
    except (ImportError, OSError) as error:
        # A torch that does not load is what the reader of this output is looking for.
        return f"torch does not import: {error}"
    names = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    return ", ".join(["cpu", *names])


if __name__ == "__main__":
    found = collect()
    print(json.dumps(found, indent=1) if "--json" in sys.argv[1:] else as_text(found))
