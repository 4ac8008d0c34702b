"""Threads that a program starts where a GPU is pretended: they hear of it as the thread does that starts them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_PASSING = ("threading", "concurrent.futures", "concurrent.futures.thread", __name__)
_OWN = "retrograd."


@contextlib.contextmanager
def hearing_threads(*contexts: Callable[[], contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    """Have threads that are started inside run in these contexts: modes of torch are each thread's own.

    Those that this library starts are left alone: it enters what it needs, and its self-tests want none.
    """
    stock = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if not _starter(sys._getframe(1)).startswith(_OWN):
            run = thread.run

            def inside() -> None:
                vars(thread).pop("run", None)  # which would keep the thread for ever
                with contextlib.ExitStack() as stack:
                    for context in contexts:
                        stack.enter_context(context())
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
