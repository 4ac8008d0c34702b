"""The only reader of os.environ. Standard library only.

Variables: TRITON_INTERPRET (Triton's own: "1" runs kernels in its interpreter on CPU tensors) and CI
(set by continuous integration: no live progress).
"""

from __future__ import annotations

import os
import sys


def interpreting() -> bool:
    """Whether Triton kernels of this process run in Triton's interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def request_interpreter() -> bool:
    """Ask for Triton's interpreter in this process; False if triton was imported without it (then it is too late).

    Triton reads the variable while it is imported, so only a command or a conftest may call this, at its start.
    """
    if interpreting():
        return True
    if "triton" in sys.modules:
        return False
    os.environ["TRITON_INTERPRET"] = "1"
    return True


def in_ci() -> bool:
    """Whether a continuous-integration system runs this process."""
    return bool(os.environ.get("CI"))
