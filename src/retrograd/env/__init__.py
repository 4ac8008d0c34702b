"""What a bug report needs to know about this machine: `retrograd env` or `python -m retrograd.env`, with --json.

`versions` and `collect` are what reports embed; `survey` is the whole, of this process as it is now. `packages`,
`machine`, `compilers`, `caches`, `variables` need no torch; `flags` reads what changes numbers in torch; `hazards` says
which of it may surprise; `text` shows it.
"""

from __future__ import annotations

import platform
from importlib import metadata
from importlib.util import find_spec
from typing import Any

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


def survey(with_torch: bool = True) -> dict[str, Any]:
    """Everything that `retrograd env --json` prints; see `retrograd.env.whole`.

    Args:
        with_torch: read the flags of torch, which imports it.
    """
    from retrograd.env.whole import survey as whole

    return whole(with_torch)


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
