"""Bytecode in the user's cache, where none may be written beside packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import subprocess, sys
from retrograd import config
config.keep_bytecode("imported")
import imported
subprocess.run([sys.executable, "-c", "import imported.part"], check=True)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "site" / "imported"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text("")
    return folder


def kept(package: Path, **variables: str) -> list[str]:
    """Where there is bytecode of the package after a process has imported it, and one that this has started."""
    cache = package.parents[1]
    paths = {"PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path]), "XDG_CACHE_HOME": str(cache)}
    subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | paths | variables, check=True)
    files = sorted(path for path in cache.rglob("*.pyc") if path.parent.name in ("imported", "__pycache__"))
    return [path.relative_to(cache).parts[0] for path in files]


def test_it_is_kept_where_python_writes_none(package):
    assert kept(package, PYTHONDONTWRITEBYTECODE="1") == ["retrograd", "retrograd"]


def test_nothing_changes_where_python_may_write_it(package):
    assert kept(package, PYTHONDONTWRITEBYTECODE="") == ["site", "site"]


def test_nothing_changes_where_there_is_some(package):
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(package / "__init__.py")], check=True)
    assert kept(package, PYTHONDONTWRITEBYTECODE="1") == ["site"]


def test_nothing_changes_where_the_user_has_chosen_a_folder(package):
    chosen = str(package.parents[1] / "mine")
    assert set(kept(package, PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=chosen)) == {"mine"}
