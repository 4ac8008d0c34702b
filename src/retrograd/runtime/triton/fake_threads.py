"""Threads that a program starts where a GPU is pretended: they hear of it as the thread does that starts them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_PASSING = ("threading", "concurrent.futures", "concurrent.futures.thread", __name__)
_OWN = "retrograd."


@contextlib.contextmanager
def hearing_threads(context: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """Have threads that are started inside run in a context that may be entered often: modes of torch are a thread's.

    Those that this library starts are left alone: it enters what it needs, and its self-tests want none.
    """
    stock = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if not _starter(sys._getframe(1)).startswith(_OWN):
            run = thread.run

            def inside() -> None:
                vars(thread).pop("run", None)  # which would keep the thread for ever
                with context:
                    run()

            thread.run = inside  # type: ignore[method-assign]
        stock(thread)

    threading.Thread.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = stock  # type: ignore[method-assign]


def _starter(frame: FrameType) -> str:
    """The module that starts a thread, behind pools of them."""
    while (name := frame.f_globals.get("__name__", "")) in _PASSING and frame.f_back is not None:
        frame = frame.f_back
    return name
