"""SIGTERM, by which a launcher ends the ranks that are left: what this one knows of the others is said before it ends.

torchrun sends it within 0.1 s of the end of a rank, before a collective fails or a time-out passes. Python calls a
handler between two instructions of its own, which may never come: the main thread waits in C++ for its device. The byte
that a signal writes as it comes (`signal.set_wakeup_fd`) wakes a thread in its stead. No torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

# Seconds for the main thread to come to its handler, after all is said, else it is in C++; and for all to be said,
# where another has begun.
_HANDLED = 1.0


class Termination:
    """Calls `say` once when SIGTERM comes, and then has it end the process as if nobody had taken it.

    Nothing is taken from a program that handles SIGTERM itself, before or after: where its handler stands, it decides
    what ends, and `say` is called beside it. Nothing is done outside the main thread, on Windows, or under an event
    loop that listens for signals.
    """

    _active: Termination | None = None

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say
        self._begun, self._said = threading.Lock(), threading.Event()
        self._pid = os.getpid()
        self._taken: Any = None  # our handler, where it stands
        self._pair: tuple[socket.socket, socket.socket] | None = None

    @property
    def ends(self) -> bool:
        """Whether SIGTERM ends the process: nobody else handles it."""
        return self._taken is not None and signal.getsignal(signal.SIGTERM) is self._taken

    def start(self) -> None:
        """Listen, if this is the main thread."""
        if os.name != "posix" or threading.current_thread() is not threading.main_thread():
            return
        here, there = socket.socketpair()
        there.setblocking(False)
        if (before := signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(before, warn_on_full_buffer=False)  # asyncio's
            here.close()
            there.close()
            return
        self._pair = (here, there)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._taken = self._handle
            signal.signal(signal.SIGTERM, self._taken)
        Termination._active = self
        threading.Thread(target=self._listen, args=(here,), name="retrograd.fsdp.termination", daemon=True).start()

    def stop(self) -> None:
        """Leave signals as they were."""
        if (pair := self._pair) is None:
            return
        if threading.current_thread() is not threading.main_thread():
            self._say = lambda: None  # signals are the main thread's: what stands there does what nobody's would do
            return
        self._pair, Termination._active = None, None
        self._deaf(pair[1].fileno())
        if self.ends:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pair[1].close()  # which ends the thread

    def _deaf(self, ours: int) -> None:
        """Take our end from the signals, unless another's has replaced it."""
        wakes = signal.set_wakeup_fd(-1)
        if wakes not in (ours, -1):
            signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    def _tell(self) -> None:
        """Say it, or wait until the thread, or the handler, that is saying it has done so."""
        if os.getpid() != self._pid:
            return
        if self._begun.acquire(blocking=False):
            try:
                self._say()
            finally:
                self._said.set()
        else:
            self._said.wait(_HANDLED)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._tell()
        finally:
            if self.ends:  # else one that replaced ours has called it, and goes on
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

    def _listen(self, end: socket.socket) -> None:
        with end:
            while numbers := end.recv(16):
                if signal.SIGTERM in numbers:
                    break
            else:
                return
        try:
            self._tell()
        finally:
            time.sleep(_HANDLED)
            if self.ends:
                # signal.signal is the main thread's alone; the C library's is anybody's.
                ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
                os.kill(os.getpid(), signal.SIGTERM)


# A process that is forked has nothing to say, and its signals would wake our thread: SIGTERM ends it as ever. Until it
# is so, the signal waits; Python itself forgets those that come in between.
_masks = threading.local()


def _before_fork() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if Termination._active else None


def _after_fork_there() -> None:
    active, Termination._active = Termination._active, None
    if active is not None and active._pair is not None:
        active._deaf(active._pair[1].fileno())
        if active.ends:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork()


def _after_fork() -> None:
    if (before := _masks.before) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_there)
