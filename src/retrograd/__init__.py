"""retrograd: backward passes that are right, fast and the same every time.

Importing this package loads neither torch nor triton: names come when they are first used (PEP 562).
PYTEST_DONT_REWRITE: pytest would warn that who runs it is imported already, which -W error makes an error.
"""

# Names come when they are first used.
# pyright: reportUnsupportedDunderAll=false

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from retrograd.core.notebook import Shown

if TYPE_CHECKING:
    from retrograd import errors as errors
    from retrograd import flake as flake
    from retrograd import fsdp as fsdp
    from retrograd import graph as graph
    from retrograd import nn as nn
    from retrograd import ops as ops
    from retrograd import patch as patch
    from retrograd import report as report
    from retrograd import testing as testing
    from retrograd import trace as trace
    from retrograd.check.asserts import assert_backward as assert_backward
    from retrograd.check.runner import verify as verify
    from retrograd.check.schema import Report as Report
    from retrograd.check.spec import op as op
    from retrograd.check.spec import size as size
    from retrograd.check.spec import tensor as tensor
    from retrograd.flake.in_process import flake_rate as flake_rate
    from retrograd.mutation.runner import mutate as mutate
    from retrograd.report import write as write
    from retrograd.ttir.launch import cpu_triton as cpu_triton

_HOMES = {
    "op": "retrograd.check.spec",
    "size": "retrograd.check.spec",
    "tensor": "retrograd.check.spec",
    "verify": "retrograd.check.runner",
    "assert_backward": "retrograd.check.asserts",
    "flake_rate": "retrograd.flake.in_process",
    "mutate": "retrograd.mutation.runner",
    "Report": "retrograd.check.schema",
    "write": "retrograd.report",
    "cpu_triton": "retrograd.ttir.launch",
}

_ROOMS = ("errors", "flake", "fsdp", "graph", "nn", "ops", "patch", "report", "testing", "trace")

__all__ = sorted([*_HOMES, *_ROOMS, "__version__"])


def _html(record: Any) -> str:
    from retrograd.report import to_notebook

    return to_notebook(record)


def _text(record: Any) -> str:
    from retrograd.report import to_text

    return to_text(record).rstrip("\n")


def _show(record: Any) -> None:
    from retrograd.report.display import display

    display(record)


# Records stand below the renderers, so the package tells them of these.
Shown.renderer, Shown.printer, Shown.viewer = _html, _text, _show


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("retrograd")
        except PackageNotFoundError:  # run from a source tree that is only on PYTHONPATH
            return "0+uninstalled"
    if name in _ROOMS:
        return importlib.import_module(f"retrograd.{name}")
    from retrograd.core.loading import first_use

    return first_use("retrograd", _HOMES, name, __all__)


def __dir__() -> list[str]:
    return sorted(__all__)
