"""Triton's interpreter: repairs it needs to give a GPU's results, and speed-ups that change none.

`prepare` replaces private names of `triton.runtime.interpreter`, once a process. Without the repairs kernels are not
interpreted for this library; without the speed-ups they are, by Triton's own code. Nothing happens at import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from retrograd import config
from retrograd.compat.registry import Part, register, status, works
from retrograd.compat.triton_interpreter import self_test
from retrograd.compat.triton_interpreter.fast_paths import quicken
from retrograd.compat.triton_interpreter.operation_hooks import record_operations
from retrograd.compat.triton_interpreter.patches import Patches
from retrograd.compat.triton_interpreter.repairs import refuse_broken_loops, repair
from retrograd.compat.triton_launch import KernelLaunch, Proceed, around_launches, from_now_on
from retrograd.errors import InterpreterError, RetrogradError

RAN = ("3.6", "3.7", "3.8", "3.9")
TRITON = "triton.runtime.interpreter"

REPAIRS = register(
    Part(
        id="triton.interpreter.repairs",
        package="triton",
        purpose="repairs bfloat16, NaN and chained comparisons of its interpreter",
        names=("_convert_float", "InterpreterBuilder", "ReduceOps", "ScanOps", "FunctionRewriter"),
        ran=RAN,
        otherwise="kernels cannot be interpreted; run on a GPU without TRITON_INTERPRET, or install a Triton that ran",
        self_test=lambda: _apply("repairs", repair, self_test.of_repairs),
        refuses=True,
    )
)
SPEED_UPS = register(
    Part(
        id="triton.interpreter.speed",
        package="triton",
        purpose="shortens what its interpreter does at each operation",
        names=("_patch_lang", "_patch_builtin", "_implicit_cvt", "GridExecutor", "TritonSemantic", "block_type"),
        ran=RAN,
        otherwise="kernels are interpreted by Triton's own code, 3 to 5 times as slowly",
        self_test=lambda: _apply("speed", _speed_ups, self_test.of_speed_ups),
    )
)
_state: dict[str, Patches] = {}
_waits = False


def prepare() -> None:
    """Repair Triton's interpreter, and make it faster, if this process interprets kernels; else do nothing.

    Raises:
        RetrogradError: Triton was imported before TRITON_INTERPRET was set.
        InterpreterError: this version of Triton cannot be repaired, or Triton before 3.7 meets NumPy 2.4 or later.
    """
    if not config.interpreting() or "repairs" in _state:
        return
    import triton
    import triton.language as tl
    from triton.runtime import interpreter as module

    if not isinstance(tl.sum, getattr(module, "InterpretedFunction", ())):
        raise RetrogradError(
            "TRITON_INTERPRET=1 was set after triton had been imported, so Triton's own functions are already "
            "bound to the compiler; set it in the environment before the first `import triton`"
        )
    if reason := refuse_broken_loops(triton.__version__):
        raise InterpreterError(reason)
    if not works(REPAIRS):
        raise InterpreterError(status(REPAIRS).note)
    works(SPEED_UPS)


def prepare_at_first_launch() -> None:
    """Have the first kernel that is interpreted `prepare`, or raise what that raises: others need no interpreter."""
    global _waits
    if config.interpreting() and not _waits:
        _waits = True
        from_now_on(_install)


@contextmanager
def while_interpreting(install: Callable[[Patches, Any], None]) -> Iterator[None]:
    """Replace more of the interpreter for a time, from the first kernel on that is interpreted meanwhile.

    Those who entered first install first, so that what they replace lies below; all is put back at the end.

    Args:
        install: given where to note its replacements, and `triton.runtime.interpreter`.
    """
    entry = _Replacement(install)
    if not config.interpreting():
        yield
        return
    _replacements.append(entry)
    try:
        with around_launches(_install):
            yield
    finally:
        _replacements[:] = [other for other in _replacements if other is not entry]
        entry.patches.undo()


class _Replacement:
    def __init__(self, install: Callable[[Patches, Any], None]) -> None:
        self.install, self.patches, self.installed = install, Patches(), False


_replacements: list[_Replacement] = []


def _install(launch: KernelLaunch, proceed: Proceed) -> Any:
    if launch.interpreted and not launch.warmup:
        prepare()
        for entry in _replacements:
            if not entry.installed:
                entry.installed = True
                entry.install(entry.patches, sys.modules[TRITON])
    return proceed()


def _speed_ups(patches: Patches, module: Any, tl: Any) -> None:
    quicken(patches, module, tl)
    record_operations(patches, module, tl)


def _apply(name: str, replace: Callable[[Patches, Any, Any], None], compare: Callable[..., str]) -> str:
    """Replace names of the interpreter, and put them back if that is not what is known to work."""
    import triton.language as tl
    from triton.runtime import interpreter as module

    patches = Patches()
    try:
        difference = compare(lambda: replace(patches, module, tl), patches)
    except BaseException:
        patches.undo()
        raise
    if difference:
        patches.undo()
    else:
        _state[name] = patches
    module.InterpretedFunction.rewritten_fn.clear()
    return difference
