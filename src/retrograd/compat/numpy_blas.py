"""BLAS of NumPy: its products of matrices by one thread."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

from retrograd.compat.registry import part, works

_MODULE = "numpy._core._multiarray_umath"
_SET, _GET = (f"scipy_openblas_{verb}_num_threads64_" for verb in ("set", "get"))


@cache
def _openblas() -> Any:
    """The OpenBLAS that NumPy's wheels have; None where NumPy was built with another library."""
    library = ctypes.CDLL(import_module(_MODULE).__file__)
    return library if hasattr(library, _SET) and hasattr(library, _GET) else None


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, products of small matrices do not wait for other threads, which costs 1000 times the product."""
    library = _openblas() if works(PART) else None
    if library is None:
        yield
        return
    before = library[_GET]()
    library[_SET](1)
    try:
        yield
    finally:
        library[_SET](before)


@part(
    "numpy.blas",
    "multiplies the small matrices of kernels by one thread",
    "products take NumPy's own number of threads, which is slower on a busy machine",
    names=(_MODULE, _SET, _GET),
)
def PART() -> str:
    library = _openblas()
    if library is None:
        return ""
    before = library[_GET]()
    try:
        library[_SET](1)
        after = library[_GET]()
    finally:
        library[_SET](before)
    return "" if after == 1 else f"after one thread is asked for there are {after}"
