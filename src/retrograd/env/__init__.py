"""Environment: what a bug report needs to know about this machine and process, by `retrograd env` or `survey()`.

`versions` and `collect` are what reports embed. `facts` imports no framework; `torch_flags` reads a torch handed over;
`hazards` says which of it may surprise; `text` shows it. `python -m retrograd.env [--json]` needs no click.
"""

from __future__ import annotations

import platform
import sys
import warnings
from dataclasses import asdict
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from retrograd import config
from retrograd.env import facts

if TYPE_CHECKING:
    from retrograd.compat.registry import Part

SCHEMA = "retrograd.env/1"


def versions() -> dict[str, str]:
    """Versions of the packages that matter; none is imported."""
    known = {name: facts.package_version(name) or "not installed" for name in ("torch", "triton", "numpy")}
    # A checkout on PYTHONPATH has no metadata, yet is there.
    return {"retrograd": facts.package_version("retrograd") or "unknown (not installed as a package)", **known}


def collect() -> dict[str, str]:
    """Versions, devices and the variables that matter; torch is imported only if it is installed."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **versions(),
        "devices": _devices(),
        "TRITON_INTERPRET": "1" if config.interpreting() else "0",
        "CI": "yes" if config.in_ci() else "no",
    }


def survey(with_torch: bool = True, self_test: bool = False) -> dict[str, Any]:
    """The record that `retrograd env --json` prints: strings, numbers, true, false and None in dicts and lists.

    Args:
        with_torch: read torch's flags, which imports it; no context is made on a GPU.
        self_test: run the self-test of each part of the compatibility table whose framework is installed.

    Returns:
        schema; python, packages (version or None); machine; gpus; torch ("imported", "not asked for", "not installed",
        or why it does not import); toolkits and flags (None unless it is imported); compilers; variables that are set;
        settings of ours with their sources; caches; compatibility (parts that rest on private names of a framework);
        hazards (where, what).
    """
    from retrograd.env import torch_flags
    from retrograd.env.hazards import hazards

    torch, state = _torch() if with_torch else (None, "not asked for")
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "python": {"version": platform.python_version(), "path": sys.executable},
        "packages": facts.packages(),
        "machine": facts.machine(),
        "gpus": facts.gpus(),
        "torch": state,
        "toolkits": torch_flags.toolkits(torch) if torch else None,
        "compilers": facts.compilers(),
        "flags": torch_flags.flags(torch) if torch else None,
        "variables": facts.variables(),
        "settings": [asdict(setting) for setting in config.settings()],
        "caches": facts.caches(),
        "compatibility": compatibility(torch is not None, self_test),
    }
    return {**record, "hazards": hazards(record)}


def compatibility(with_torch: bool = True, self_test: bool = False) -> list[dict[str, Any]]:
    """Parts of retrograd that rest on private names of a framework, with what became of each in this process.

    A part is tested where it is first used; `self_test` tests all whose framework is installed, which imports it.
    Without `with_torch` parts are left out whose files import it.
    """
    from retrograd.compat import registry, versions

    failed = registry.load_parts(with_torch)
    if self_test:
        with warnings.catch_warnings():
            # That a framework is newer than tested is among the hazards.
            warnings.simplefilter("ignore", versions.UntestedVersionWarning)
            for each in registry.statuses():
                registry.status(each.part)
    rows = [_row(each.part, each.state, each.difference) for each in registry.statuses()]
    otherwise = "what needs this file is refused"
    broken = [registry.Part(name, "torch", "", (), (), otherwise, lambda: "") for name in failed if with_torch]
    return rows + [_row(part, "refused", f"it does not import: {failed[part.id]}") for part in broken]


def _row(part: Part, state: str, difference: str) -> dict[str, Any]:
    from retrograd.compat import versions

    installed = versions.installed(part.package)
    return {
        "part": part.id,
        "package": part.package,
        "purpose": part.purpose,
        "installed": installed or None,
        "ran": list(part.ran),
        "newer": versions.is_newer(part.package),
        "state": state if installed else "not installed",
        "difference": difference,
        "otherwise": part.otherwise,
    }


def _torch() -> tuple[ModuleType | None, str]:
    # A module of None is how an import is blocked; find_spec would raise for it.
    blocked = "torch" in sys.modules and not sys.modules["torch"]
    if blocked or ("torch" not in sys.modules and find_spec("torch") is None):
        return None, "not installed"
    try:
        import torch
    except (ImportError, OSError) as error:
        # A torch that does not load is what the reader of this output is looking for.
        return None, f"does not import: {error}"
    return torch, "imported"


def _devices() -> str:
    torch, state = _torch()
    if torch is None:
        return "cpu" if state == "not installed" else f"torch {state}"
    try:
        names = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    except RuntimeError as error:  # a child that was forked after CUDA began, for one, may not ask
        return f"cpu (CUDA is not asked: {str(error).splitlines()[0]})"
    return ", ".join(["cpu", *names])
