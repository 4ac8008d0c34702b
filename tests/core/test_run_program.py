"""A person's program runs as Python runs it: the same output, exit code and traceback, in a process and in ours."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from retrograd.core.run_program import command_of, run
from retrograd.errors import RetrogradError, UsageError

USAGE = "`retrograd x -- train.py`"
RUNNER = (
    "import sys; from contextlib import nullcontext; from retrograd.core.run_program import *; del sys.path[0]; "
    "sys.exit(run(command_of(sys.argv[1:], 'x'), nullcontext()))"
)
SHOW = "import sys\nprint(__name__, sys.argv, sys.path[0])\n"
PROGRAMS = {
    "script": ["prog.py", "a", "-b"],
    "folder": ["sub/prog.py", "a"],
    "module": ["-m", "package.prog", "a"],
    "package": ["-m", "package"],
    "code": ["-c", SHOW, "a"],
    "fails": ["fails.py"],
    "fails in a module": ["-m", "package.fails"],
    "fails in code": ["-c", "1 / 0"],
    "exits": ["-c", "raise SystemExit(5)"],
    "exits with nothing": ["-c", "import sys; sys.exit()"],
    "exits with a text": ["-c", "import sys; sys.exit('no data')"],
    "own hook": ["-c", "import sys; sys.excepthook = lambda k, e, t: print(k.__name__, t.tb_lineno); 1 / 0"],
    "syntax": ["syntax.py"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("prog.py", "sub/prog.py", "package/prog.py", "package/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SHOW)
    (tmp_path / "package/__init__.py").touch()
    for name in ("fails.py", "package/fails.py"):
        (tmp_path / name).write_text("def f():\n    raise ValueError('inside')\n\n\nf()\n")
    (tmp_path / "syntax.py").write_text("x = (\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_does_what_python_does(folder, name):
    own, ours = (
        subprocess.run([sys.executable, *how, *PROGRAMS[name]], capture_output=True, text=True, check=False)
        for how in ([], ["-c", RUNNER, "python3"])
    )
    assert (ours.returncode, ours.stdout) == (own.returncode, own.stdout)
    # runpy names paths in full and puts its own frames above; nothing of ours is there.
    assert _said(ours.stderr, folder) == _said(own.stderr, folder)
    assert "retrograd" not in ours.stderr


def _said(text: str, folder: Path) -> list[str]:
    lines = re.sub(rf"{re.escape(str(folder))}/", "", text).splitlines()
    return [line for line in lines if "runpy" not in line]


def test_the_watcher_sees_how_it_ends_and_all_is_put_back(folder, capsys):
    seen: list[BaseException | None] = []

    @contextmanager
    def watcher():
        try:
            yield
        except BaseException as error:
            seen.append(error)
            raise
        seen.append(None)

    before = sys.argv, list(sys.path)
    assert run(["prog.py"], watcher()) == 0
    assert run(["fails.py"], watcher()) == 1
    assert run(["-c", "raise SystemExit(3)"], watcher()) == 3
    assert (sys.argv, list(sys.path)) == before
    assert [type(error).__name__ for error in seen] == ["NoneType", "ValueError", "SystemExit"]
    assert "run_program.py" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "RetrogradError"])
def test_what_ends_us_too(kind):
    with pytest.raises((KeyboardInterrupt, RetrogradError)):
        run(["-c", f"from retrograd.errors import RetrogradError\nraise {kind}('x')"], nullcontext())


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ([], f"there is no program; expected {USAGE}"),
        (["python3.11"], f"there is no program; expected {USAGE}"),
        (["-m"], f"-m needs what to run after it; expected {USAGE}"),
        (["nowhere.py"], "there is no file 'nowhere.py'; expected a script, -m MODULE or -c CODE"),
    ],
)
def test_what_is_no_program(folder, program, message):
    with pytest.raises(UsageError) as error:
        command_of(program, USAGE)
    assert str(error.value) == message


def test_only_python_itself_is_left_out(folder):
    (folder / "python_train.py").touch()
    assert command_of(["python_train.py", "a"], USAGE) == ["python_train.py", "a"]
    assert command_of(["/usr/bin/python3.12", "python_train.py"], USAGE) == ["python_train.py"]
