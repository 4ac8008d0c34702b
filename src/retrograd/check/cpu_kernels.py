"""Triton kernels of an op on the CPU: executed as a GPU would run them, where the process does not interpret them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import torch

from retrograd import config
from retrograd.compat import versions
from retrograd.core.import_hook import AfterImport

if TYPE_CHECKING:
    from retrograd.ttir.session import Session

_SESSIONS: list[Session] = []


def current() -> Session | None:
    """The session that executes kernels now; None where none does."""
    return _SESSIONS[-1] if _SESSIONS else None


@contextmanager
def executed(device: str) -> Iterator[None]:
    """Have Triton kernels that are launched inside executed on CPU tensors.

    Triton is not imported for it. Nothing happens on other devices, without Triton, and where it interprets kernels.
    """
    if torch.device(device).type != "cpu" or config.interpreting() or not versions.installed("triton"):
        yield
        return
    with ExitStack() as stack:
        if "triton" in sys.modules:
            stack.enter_context(session())
        else:

            def enter(name: str) -> None:
                stack.enter_context(session())

            finder = AfterImport(["triton"], enter)
            sys.meta_path.insert(0, finder)
            stack.callback(_forget, finder)
        yield


def _forget(finder: AfterImport) -> None:
    with suppress(ValueError):
        sys.meta_path.remove(finder)


@contextmanager
def session(seed: int = 0, multiprocessors: int = 132) -> Iterator[Session]:
    """Kernels launched inside are executed by a session of their own."""
    from retrograd.ttir.launch import cpu_triton

    with cpu_triton(seed, multiprocessors, pretend=False, follow_undefined=False) as run:
        _SESSIONS.append(run)
        try:
            yield run
        finally:
            _SESSIONS.remove(run)


def tf32() -> bool:
    """Whether a kernel that was executed multiplied matrices of float32 rounded to tf32."""
    return any(launch.tf32 for run in _SESSIONS for launch in run.launches)


def pretended() -> AbstractContextManager[object]:
    """Inside, torch says that it has a GPU where kernels are executed without it: other people's launchers ask."""
    if not _SESSIONS:
        return nullcontext()
    from retrograd.ttir.launch import pretended

    return pretended()
