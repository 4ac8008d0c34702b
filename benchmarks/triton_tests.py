"""Triton's own tests of its language, without a GPU: pytest inside of `retrograd.cpu_triton`.

    git clone https://github.com/triton-lang/triton; git -C triton checkout 565c0852
    cd triton/python/test/unit; pip install pytest pytest-timeout
    python .../benchmarks/triton_tests.py --timeout 60 -q language/test_core.py language/test_tensor_descriptor.py

Arguments are pytest's. A test that looks at machine code, which is not made, has compared its numbers before: such are
counted as skipped, "looks at ptx". Any other suite of somebody's Triton kernels can be run so.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

import retrograd as rg
from retrograd.compat.triton_ttir import LaunchedKernel


class _OnlyTtir(dict[str, str]):
    def __missing__(self, key: str) -> str:
        pytest.skip(f"looks at {key}")


class Faults:
    """Faults of the kernels of each test, which are no failures: Triton's tests read what they do not compare."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.found: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._session.forget_faults()
        try:
            return (yield)
        finally:
            self.found += [f"{item.nodeid}: {fault.text()}" for fault in self._session.faults if not fault.is_mild]
            self._session.launches.clear()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(f"{len(self.found)} faults of memory and races")
        for text in self.found:
            terminalreporter.write_line(text)


def main() -> int:
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(rg.cpu_triton())
        asm = property(lambda kernel: _OnlyTtir(ttir=kernel.text))
        stack.enter_context(mock.patch.object(LaunchedKernel, "asm", asm))
        return int(pytest.main([*sys.argv[1:], "-p", "no:retrograd"], plugins=[Faults(session)]))


if __name__ == "__main__":
    sys.exit(main())
