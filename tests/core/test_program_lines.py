"""Lines of a person's program, told from those of Python, frameworks and ours."""

from __future__ import annotations

import contextlib
import os
import sys
from types import SimpleNamespace

import pytest
import torch

import retrograd
from retrograd.core.program_lines import PACKAGES, folders, innermost, is_library, is_program


@pytest.mark.parametrize(
    "file",
    ["/home/me/train.py", f"/opt/env/lib{PACKAGES}transformers{os.sep}trainer.py", "<stdin>"],
)
def test_lines_of_a_person_and_of_other_libraries(file):
    assert is_program(file)


@pytest.mark.parametrize(
    "file",
    [
        contextlib.__file__,
        retrograd.__file__,
        torch.nn.functional.__file__,
        f"/opt/env/lib{PACKAGES}triton{os.sep}runtime{os.sep}jit.py",
        f"/tmp/torchinductor_me{os.sep}ab{os.sep}cab.py",
        "<frozen runpy>",
        "<eval_with_key>.3",
    ],
)
def test_lines_that_nobody_wrote_for_this_program(file):
    assert not is_program(file)


def test_a_folder_behind_a_link_has_both_names(tmp_path):
    (tmp_path / "python").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "python")
    file = tmp_path / "link" / "os.py"
    assert set(folders(str(file))) == {f"{tmp_path}/link/", f"{(tmp_path / 'python').resolve()}/"}


def test_the_innermost_line_is_the_one_that_asks():
    assert innermost(sys._getframe()).endswith("(test_the_innermost_line_is_the_one_that_asks)")
    assert innermost(None) == ""


def test_paths_of_another_machine():
    assert is_library("/data/env/site-packages/jax/_src/pjit.py")
    assert not is_library("/home/me/jaxed/train.py")


def test_lines_of_a_triton_that_was_built_from_a_checkout(monkeypatch, tmp_path):
    folder = tmp_path / "python" / "triton"
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__file__=str(folder / "__init__.py")))
    assert not is_program(str(folder / "runtime" / "jit.py"))
    assert is_program(str(folder.parent / "tutorials" / "01-vector-add.py"))
