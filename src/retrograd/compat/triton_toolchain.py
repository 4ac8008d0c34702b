"""Toolchain of Triton: what an exception says of a driver, C compiler or assembler that is not there, not of an op."""

from __future__ import annotations

import subprocess
import traceback
from importlib import import_module
from unittest import mock

from retrograd.compat.registry import part, works

_DRIVER = ("triton.runtime.driver", "_create_driver")  # chooses among GPUs
_BUILD = "triton.runtime.build"  # launchers by the C compiler
_KNOBS = "triton.knobs"  # where tools are, and hooks of launches, which are other people's


def failure(error: BaseException) -> str | None:
    """What Triton misses to run any kernel; None where the exception is about something else."""
    if not _reaches(error) or not works(PART):
        return None
    if isinstance(error, subprocess.CalledProcessError):
        # Its command has the name of a temporary folder, another one each time; what it wrote is on stderr.
        program = error.cmd[0] if isinstance(error.cmd, list) else str(error.cmd).partition(" ")[0]
        return f"{program} ended with exit code {error.returncode}; what it says stands on stderr"
    return f"{type(error).__name__}: {error}"


def _reaches(error: BaseException) -> bool:
    """Whether it comes from where Triton looks for its surroundings, or from what it has called there."""
    frames = [(f.f_globals.get("__name__"), f.f_code.co_name) for f, _ in traceback.walk_tb(error.__traceback__)]
    looked = any(frame == _DRIVER or frame[0] == _BUILD for frame in frames)
    return looked or (bool(frames) and frames[-1][0] == _KNOBS)


@part(
    "triton.toolchain",
    "tells an exception about Triton's driver or compilers from one of the op",
    "what Triton raises without a driver or a C compiler counts as the op's own exception",
    names=("triton.runtime.driver._create_driver", "triton.runtime.build", "triton.knobs"),
)
def PART() -> str:
    """No backend at all."""
    for name in (_BUILD, _KNOBS):
        import_module(name)
    # `triton.runtime` has an object of this name in the module's place.
    module = import_module(_DRIVER[0])
    with mock.patch.object(module, "backends", {}):
        try:
            getattr(module, _DRIVER[1])()
        except Exception as error:
            return "" if _reaches(error) else "a missing driver is told elsewhere"
    return "no backend is no error"
