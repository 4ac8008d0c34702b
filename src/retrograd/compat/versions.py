"""Tested versions: the one list of the framework releases that the suite ran on; every message is made from it.

No framework is imported here. A version newer than the newest tested is not refused: it is noted once, and what rests
on private names is tested for behaviour where it is used (`retrograd.compat.registry`).
"""

from __future__ import annotations

import re
import sys
import warnings
from functools import cache
from importlib import metadata

# Minor releases, oldest first: the suite ran on each of them (docs/versioning.md says which part of it, and where).
TESTED: dict[str, tuple[str, ...]] = {
    "torch": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    "triton": ("3.6", "3.7", "3.8", "3.9"),
    "jax": ("0.10", "0.12"),
    "torch_xla": ("2.9",),
    "numpy": ("2.4", "2.5"),
}
# What parts of `retrograd.compat` ran on where they do not say it themselves: releases on which all of their tests ran.
PARTS_RAN = TESTED | {"torch": ("2.11", "2.13", "2.15")}
_DISTRIBUTIONS = {"torch_xla": "torch-xla"}


class UntestedVersionWarning(UserWarning):
    """A framework is newer than the newest release that retrograd was tested with."""


def minor(version: str) -> tuple[int, ...]:
    """Major and minor number of a version string: "2.15.0+cu130" is (2, 15)."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])


def installed(package: str) -> str:
    """Version of an installed framework by its import name, read without importing it; "" if there is none."""
    # A build that was never installed has no metadata, and says its version once it is imported.
    return _distributed(package) or str(getattr(sys.modules.get(package), "__version__", ""))


@cache
def _distributed(package: str) -> str:
    try:
        return metadata.version(_DISTRIBUTIONS.get(package, package))
    except metadata.PackageNotFoundError:
        return ""


def tested(package: str) -> str:
    """The tested versions in words: "2.11 to 2.15", or "2.9" where it is one."""
    versions = TESTED[package]
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"


def is_newer(package: str, version: str | None = None) -> bool:
    """Whether a framework (by default the installed one) is newer than the newest tested."""
    version = installed(package) if version is None else version
    return bool(version) and minor(version) > minor(TESTED[package][-1])


@cache
def note_if_newer(package: str) -> None:
    """Warn, once a process, that a framework is newer than the newest tested."""
    if is_newer(package):
        warnings.warn(
            f"{package} {installed(package)} is newer than the releases retrograd was tested with ({tested(package)}); "
            "`retrograd env` shows what behaves differently",
            UntestedVersionWarning,
            stacklevel=3,
        )
