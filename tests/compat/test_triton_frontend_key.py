"""Keys of kernels: they differ wherever Triton's frontend could make other code, and there is none where nobody can tell."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from retrograd.compat import triton_frontend_key
from retrograd.compat.registry import status

KERNEL = """
import triton
import triton.language as tl
import {module}

FACTOR = tl.constexpr({factor})
TABLE = {table}


@triton.JITFunction
def scaled(x):
    return x {operator} FACTOR


@triton.JITFunction
def kernel(x_ptr, N: tl.constexpr, MODE: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + at, scaled(tl.load(x_ptr + at)) + {module}.OFFSET{more})
"""


@pytest.fixture
def keyed(tmp_path, monkeypatch):
    """A function that writes a kernel with these parts into files and gives its key."""

    def load(name, text):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        module = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location(name, path))
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    def key(name="first", mode="fast", offset="1.0", debug=False, operator="*", factor="2.0", table="()", more=""):
        load(f"of_{name}", f"import triton.language as tl\nOFFSET = tl.constexpr({offset})\n")
        parts = dict(operator=operator, factor=factor, table=table, more=more, module=f"of_{name}")
        module = load(name, KERNEL.format(**parts))
        signature = dict(x_ptr="*fp32", N="constexpr", MODE="constexpr")
        source = SimpleNamespace(fn=module.kernel, signature=signature, constants={(1,): 16, (2,): mode}, attrs={})
        return triton_frontend_key.frontend_key(source, "sm_90", SimpleNamespace(debug=debug))

    return key


def test_this_triton_has_keys():
    assert status(triton_frontend_key.KEY).state == "works"


def test_equal_kernels_have_one_key(keyed):
    assert keyed() is not None
    assert keyed() == keyed()


@pytest.mark.parametrize(
    "change",
    [
        dict(factor="3.0"), dict(operator="/"), dict(offset="2.0"), dict(name="second"), dict(debug=True),
        dict(mode="slow"), dict(mode=1), dict(more=" + MODE"), dict(factor="'2.0'"),
    ],
    ids=str,
)  # fmt: skip
def test_whatever_a_kernel_reads_changes_its_key(keyed, change):
    assert keyed(**change) is not None
    assert keyed(**change) != keyed()


def test_numbers_and_words_that_look_alike_have_keys_of_their_own(keyed):
    assert len({keyed(mode=mode) for mode in ("1", 1, 1.0, True)}) == 4


def test_what_has_no_text_of_its_own_has_no_key(keyed):
    assert keyed(mode=object()) is None
    assert keyed(table="{}", more=" + TABLE") is None
