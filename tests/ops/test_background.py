"""Extensions compiled in the background: one process of many compiles, no other waits, nothing is left half written."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import extensions
import pytest

from retrograd.runtime import disk_cache
from retrograd.runtime.cpp import background
from retrograd.runtime.cpp import build as native
from retrograd.runtime.cpp.background import BackgroundBuild
from retrograd.runtime.cpp.extension import Extension

_REAL = extensions.why_no_compiler() is None
_SOURCE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "small"};
PyMODINIT_FUNC PyInit_small() { return PyModule_Create(&definition); }
"""
# Writes its arguments down, waits until it may go on, and makes the library, or fails.
_COMPILER = """#!/bin/sh
echo "$$" >>{folder}/started
while [ ! -e {folder}/go ]; do sleep 0.01; done
if [ -e {folder}/broken ]; then echo "small.cpp:1: error: no such thing"; exit 1; fi
for last; do :; done
echo library >"$last"
"""


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extension:
    """A source in an empty cache, and a compiler that makes files of one line when the test lets it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiler = tmp_path / "compiler"
    compiler.write_text(_COMPILER.format(folder=shlex.quote(str(tmp_path))))
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(background, "check_headers", lambda: None)
    source = tmp_path / "small.cpp"
    source.write_text(_SOURCE)
    return Extension(source, "small", "small", "build()")


def begin(extension: Extension) -> BackgroundBuild:
    """A build that has begun."""
    return BackgroundBuild(extension, "a small thing", "SMALL=off")


def until(happened: Any) -> None:
    """Return when it has happened; only a hang reaches the limit."""
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end, "nothing happened in a minute"
        time.sleep(0.01)


def kept(tmp_path: Path) -> list[str]:
    """Names in the cache, but for locks."""
    return sorted(path.name for path in (tmp_path / "cache/retrograd/native").iterdir() if path.suffix != ".lock")


def started(tmp_path: Path) -> list[int]:
    """Processes of the compiler that began."""
    path = tmp_path / "started"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_goes_on_while_it_compiles(extension: Extension, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build = begin(extension)
    until(lambda: started(tmp_path))
    assert build.running()
    assert "in the background" in build.reason
    assert extension.find() is None  # nothing of that name before it is whole
    (tmp_path / "go").touch()
    build.wait()
    assert not build.running()
    assert build.reason == ""
    assert kept(tmp_path) == [extension.file_name()]
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert all(word in said for word in ("a small thing", "SMALL=off", str(extension.find())))


def test_of_several_that_want_it_one_compiles(
    extension: Extension, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    builds = [begin(extension) for _ in range(4)]
    until(lambda: started(tmp_path))
    (tmp_path / "go").touch()
    for build in builds:
        build.wait()
    assert [build.reason for build in builds] == [""] * 4
    assert sum(build.tried for build in builds) == 1
    assert len(started(tmp_path)) == 1
    assert capfd.readouterr().err.count("\n") == 1


def test_a_build_that_is_waited_for_takes_what_another_compiles(extension: Extension, tmp_path: Path) -> None:
    build = begin(extension)
    until(lambda: started(tmp_path))
    (tmp_path / "go").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "compile_library", lambda *_: pytest.fail("compiled twice"))
        assert extension.build() == extension.find()
    build.wait()


_PROGRAM = """
import sys
from pathlib import Path
from retrograd.runtime.cpp import background
from retrograd.runtime.cpp.extension import Extension
background.check_headers = lambda: None
build = background.BackgroundBuild(Extension(Path(sys.argv[1]), "small", "small", "build()"), "a small thing", "SMALL=off")
if sys.argv[2] == "stay":
    build.wait()
    print(repr(build.reason))
else:
    while not Path(sys.argv[2]).exists():
        pass
"""


def program(extension: Extension, what: str) -> subprocess.Popen[str]:
    """Another process that begins a build; it stays until that is over, or ends when a file is there."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _PROGRAM, str(extension.source), what]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


def test_processes_take_turns_and_may_end(extension: Extension, tmp_path: Path) -> None:
    first = program(extension, str(tmp_path / "started"))
    out, err = first.communicate(timeout=60)  # it ends while its compiler waits, and nobody holds it up
    assert (first.returncode, out, err.count("\n")) == (0, "", 1)
    assert "Traceback" not in err
    second = program(extension, "stay")
    assert kept(tmp_path) != [extension.file_name()]
    (tmp_path / "go").touch()
    out, err = second.communicate(timeout=60)
    assert (second.returncode, out.strip(), err) == (0, "''", "")
    assert len(started(tmp_path)) == 1
    assert kept(tmp_path) == [extension.file_name()]


def test_a_killed_compiler_is_no_failure(extension: Extension, tmp_path: Path) -> None:
    first = begin(extension)
    until(lambda: started(tmp_path))
    group = os.getpgid(started(tmp_path)[0])
    assert group != os.getpgid(0)  # an interrupt of this program is not for the compiler
    os.killpg(group, signal.SIGKILL)
    first.wait()
    assert first.reason == "the compiler was killed"
    left = kept(tmp_path)
    assert len(left) == 1
    assert left[0].startswith("building-")
    (tmp_path / "go").touch()
    second = begin(extension)
    second.wait()
    assert second.reason == ""
    assert kept(tmp_path) == [extension.file_name()]


def test_a_failure_is_remembered_for_a_day(
    extension: Extension, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("broken", "go"):
        (tmp_path / name).touch()
    reasons = []
    for tried in (True, False):
        build = begin(extension)
        build.wait()
        reasons.append(build.reason)
        assert build.tried == tried
    assert reasons[0] == reasons[1]
    assert "error: no such thing" in reasons[0]
    assert capfd.readouterr().err.count("\n") == 1
    assert len(started(tmp_path)) == 1
    (tmp_path / "broken").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background.time, "time", lambda stock=time.time: stock() + 25 * 3600)
        build = begin(extension)
        build.wait()
    assert build.reason == ""


@pytest.mark.parametrize("change", ["source", "torch", "compiler"])
def test_a_failure_is_of_one_source_torch_and_compiler(
    change: str, extension: Extension, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("broken", "go"):
        (tmp_path / name).touch()
    begin(extension).wait()
    if change == "source":
        extension.source.write_text("// mended\n" + _SOURCE)
    elif change == "torch":
        monkeypatch.setattr("torch.__version__", "9.9")
    else:
        with (tmp_path / "compiler").open("a") as file:
            file.write("# another version\n")
    build = begin(extension)
    build.wait()
    assert build.tried


def test_no_compiler(extension: Extension, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    build = begin(extension)
    build.wait()
    assert "no-such-compiler" in build.reason
    assert not build.tried
    assert kept(tmp_path) == []


def test_no_shell(extension: Extension, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    build = begin(extension)
    build.wait()
    assert "'sh'" in build.reason


def test_a_cache_that_cannot_be_written(extension: Extension, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    build = begin(extension)
    build.wait()
    assert "set XDG_CACHE_HOME" in build.reason


def test_without_locks(extension: Extension, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "fcntl", None)
    (tmp_path / "go").touch()
    builds = [begin(extension) for _ in range(2)]
    for build in builds:
        build.wait()
    assert [build.reason for build in builds] == ["", ""]
    assert kept(tmp_path) == [extension.file_name()]


@pytest.mark.skipif(not _REAL, reason="there is no C++ compiler")
def test_the_users_compiler(extension: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    build = begin(extension)
    build.wait()
    assert build.reason == ""
    assert extension.load(extension.build()).__name__ == "small"
