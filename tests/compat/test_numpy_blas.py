"""The part that has NumPy's matrices multiplied by one thread: it works here, notices what differs, restores."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from retrograd.compat import numpy_blas, registry

pytestmark = pytest.mark.usefixtures("untested_parts")


class _Library:
    """A stand-in for OpenBLAS with two threads; `deaf` keeps them whatever is asked for."""

    def __init__(self, deaf: bool = False) -> None:
        self.threads, self.deaf = 2, deaf

    def __getitem__(self, name: str):
        return (lambda: self.threads) if name == numpy_blas._GET else self._set

    def _set(self, count: int) -> None:
        self.threads = self.threads if self.deaf else count


def test_this_numpy_behaves_as_known():
    assert registry.status(numpy_blas.PART).difference == ""


def test_one_thread_inside_and_as_before_after_an_exception(monkeypatch):
    library = _Library()
    monkeypatch.setattr(numpy_blas, "_openblas", lambda: library)
    inside = []

    def fail():
        with numpy_blas.one_thread():
            inside.append(library.threads)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == [1]
    assert library.threads == 2


def test_a_library_that_does_not_listen_is_noticed(monkeypatch):
    monkeypatch.setattr(numpy_blas, "_openblas", lambda: _Library(deaf=True))
    assert "there are 2" in registry.status(numpy_blas.PART).difference


def test_another_library_is_left_alone(monkeypatch):
    numpy_blas._openblas.cache_clear()
    monkeypatch.setattr(numpy_blas.ctypes, "CDLL", lambda path: SimpleNamespace())
    try:
        with numpy_blas.one_thread():
            assert numpy_blas._openblas() is None
    finally:
        numpy_blas._openblas.cache_clear()
