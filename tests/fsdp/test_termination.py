"""SIGTERM, as launchers send it: what is known is said, and the process ends or goes on as it would have."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from retrograd.fsdp.termination import Termination

pytestmark = pytest.mark.skipif(os.name != "posix", reason="launchers send SIGTERM on POSIX alone")

BEGIN = """
import ctypes, os, signal, threading, time
from retrograd.fsdp.termination import Termination

told = threading.Event()

def say():
    time.sleep(0.3)  # whoever comes second, thread or handler, must not end it meanwhile
    os.write(1, b"said ")
    told.set()

taken = Termination(say)
"""
END = 'os.write(1, b"ready "); '
IN_PYTHON = END + "time.sleep(60)"
# A lock that is taken twice waits in C for ever, whatever signal comes.
IN_C = (
    END + "lock = ctypes.create_string_buffer(64); take = ctypes.CDLL(None).pthread_mutex_lock; take(lock); take(lock)"
)
# Comes back from C to its handler while the thread is saying it.
BACK_FROM_C = """
lock, take = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_timedlock
until = (ctypes.c_long * 2)(*divmod(time.time_ns() + 150_000_000, 1_000_000_000))
os.write(1, b"ready ")
take(lock, until); take(lock, until); time.sleep(60)
"""
HANDLE = """
def own(number, frame):
    os.write(1, b"own ")
    if callable(before):
        before(number, frame)
    told.wait()
    os._exit(3)

before = signal.signal(signal.SIGTERM, own)
"""
FORK = """
taken.start()
if not (child := os.fork()):
    time.sleep(60)
os.kill(child, signal.SIGTERM)
os.write(1, b"child " + str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode() + b" ")
"""


@pytest.mark.parametrize(
    ("program", "output", "code"),
    [
        ("taken.start(); " + IN_PYTHON, "ready said ", -signal.SIGTERM),
        ("taken.start(); " + IN_C, "ready said ", -signal.SIGTERM),
        ("taken.start()\n" + BACK_FROM_C, "ready said ", -signal.SIGTERM),
        (f"{HANDLE}\ntaken.start(); {IN_PYTHON}", "ready own said ", 3),
        (f"taken.start()\n{HANDLE}\n{IN_PYTHON}", "ready own said ", 3),
        ("taken.start(); taken.stop(); " + IN_PYTHON, "ready ", -signal.SIGTERM),
        (f"{FORK}\n{IN_PYTHON}", f"child -{signal.SIGTERM:d} ready said ", -signal.SIGTERM),
    ],
    ids=[
        "in Python",
        "in C",
        "back from C",
        "another's handler",
        "a handler put over it",
        "stopped",
        "a forked process",
    ],
)
def test_it_is_said_once_and_ends_as_ever(program, output, code):
    command = [sys.executable, "-c", BEGIN + program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = ""
        while not said.endswith("ready ") and (letter := process.stdout.read(1)):
            said += letter
        process.terminate()
        said += process.stdout.read()
        assert process.wait(60) == code
    assert sorted(said.split()) == sorted(output.split())  # a thread says it beside the handler


def test_signals_are_left_as_they_were():
    handler, here, there = signal.getsignal(signal.SIGTERM), *socket.socketpair()
    there.setblocking(False)
    with here, there:
        before = signal.set_wakeup_fd(there.fileno())
        try:
            taken = Termination(lambda: None)
            taken.start()  # an event loop listens already
            assert signal.getsignal(signal.SIGTERM) is handler
            taken.stop()
            assert signal.set_wakeup_fd(before) == there.fileno()
            taken.start()
            assert taken.ends is (handler is signal.SIG_DFL)
            taken.stop()
            assert (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(before)) == (handler, before)
        finally:
            signal.set_wakeup_fd(before)
