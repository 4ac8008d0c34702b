"""Builds in the background: extensions that a process compiles beside what it does, and takes when they are there.

The compiler is a process of its own that outlives this one. It holds the lock of the library with whoever started it,
so that processes that want the same one wait for it, and go on where it was killed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from retrograd.errors import NativeBuildError
from retrograd.runtime import disk_cache
from retrograd.runtime.cpp import build as native
from retrograd.runtime.cpp.extension import Extension, check_headers

# A full disk or too little memory fails too, and passes: a failure keeps others from trying for a day.
_REMEMBERED_S = 24 * 3600
_ERROR_BYTES = 2000
_NICENESS = 10
# $1: a folder of its own, $2: the library, $3: where a failure is kept; then the command. A killed compiler is none.
_SCRIPT = """
folder=$1 library=$2 failure=$3; shift 3
"$@" -o "$folder/library" >"$folder/output" 2>&1; code=$?
if [ $code -eq 0 ]; then mv -f "$folder/library" "$library"
elif [ $code -lt 128 ]; then mv -f "$folder/output" "$failure"; fi
rm -rf "$folder"
"""


class BackgroundBuild:
    """One extension on its way into the user's cache.

    Args:
        extension: what to compile.
        title: what it is, for the line on stderr.
        switch: how a person turns it off, for the same line.
    """

    def __init__(self, extension: Extension, title: str, switch: str) -> None:
        self.reason = f"{title} is being compiled in the background"  # why there is no library; "" if there is
        self.tried = False  # whether this process has started the compiler
        self._extension, self._title, self._switch = extension, title, switch
        self._thread = threading.Thread(target=self._run, name=f"build-{extension.label}", daemon=True)
        self._thread.start()

    def running(self) -> bool:
        """Whether it is not decided yet; cheap enough for each call of an op."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Return when it is decided."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self.reason = self._build()
        except (NativeBuildError, OSError) as error:
            self.reason = str(error)

    def _build(self) -> str:
        """Why there is no library; "" if there is."""
        folder = disk_cache.folder("native")
        if folder != disk_cache.user_folder("native"):
            return f"{disk_cache.user_folder('native')} cannot be written; set XDG_CACHE_HOME to a folder that can"
        check_headers()
        compiler = native.find_compiler()
        library = folder / self._extension.file_name()
        failure = library.with_suffix(f".{_identity(compiler)}.failed")
        with disk_cache.locked(library) as lock:
            if library.exists():
                return ""
            if failure.exists() and time.time() - failure.stat().st_mtime < _REMEMBERED_S:
                return _told(failure)
            sys.stderr.write(
                f"retrograd: compiling {self._title} in the background, once, in about half a minute, into {library}; "
                f"until then Python does its work ({self._switch} turns it off)\n"
            )
            self.tried = True
            self._compile(library, failure, [*compiler, *self._extension.flags(), str(self._extension.source)], lock)
            return "" if library.exists() else _told(failure)

    def _compile(self, library: Path, failure: Path, command: list[str], lock: int | None) -> None:
        prefix = f"building-{library.stem}-"
        for left in library.parent.glob(f"{prefix}*") if lock is not None else ():
            shutil.rmtree(left, ignore_errors=True)  # of one that was killed: the lock is ours
        folder = tempfile.mkdtemp(dir=library.parent, prefix=prefix)
        script = ["sh", "-c", _SCRIPT, "sh", folder, str(library), str(failure), *command]
        quiet = subprocess.DEVNULL
        # A session of its own: an interrupt or the end of a terminal is not for the compiler.
        process = subprocess.Popen(
            script, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )  # fmt: skip
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
        process.wait()


def _identity(compiler: list[str]) -> str:
    """A name of the compiler that another version of it has not, without running it."""
    path = Path(shutil.which(compiler[0]) or compiler[0]).resolve()
    facts = path.stat()
    text = "\0".join([*compiler, str(path), str(facts.st_size), str(facts.st_mtime_ns)])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _told(failure: Path) -> str:
    if not failure.exists():
        return "the compiler was killed"
    with failure.open("rb") as file:
        output = file.read(_ERROR_BYTES).decode(errors="replace").strip()
    return f"it did not compile (remove {failure} to have it tried again before a day has passed):\n{output}"
