"""Exceptions about what Triton needs around it: told from those of an op, whatever their text says."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels of Triton")

import torch

import retrograd as rg
from retrograd.compat import registry, triton_toolchain

driver = import_module("triton.runtime.driver")
build = import_module("triton.runtime.build")
NO_DRIVER = "0 active drivers ([]). There should only be one."


def raised(function, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*args)
    return caught.value


def test_it_works_here():
    assert registry.status(triton_toolchain.PART).state == "works"


@pytest.fixture
def no_driver(monkeypatch):
    """Triton's backends find no GPU."""
    for backend in driver.backends.values():
        monkeypatch.setattr(backend.driver, "is_active", staticmethod(lambda: False))
    monkeypatch.delenv("TRITON_DEFAULT_BACKEND", raising=False)


def test_a_missing_driver_is_triton_s(no_driver):
    assert triton_toolchain.failure(raised(driver._create_driver)) == f"RuntimeError: {NO_DRIVER}"


def test_a_compiler_that_fails_is_triton_s(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CC", "/bin/false")
    failure = triton_toolchain.failure(raised(build._build, "launcher", "launcher.c", str(tmp_path), [], [], [], []))
    assert failure == "/bin/false ended with exit code 1; what it says stands on stderr"


def test_the_same_words_from_elsewhere_are_not():
    def op():
        raise RuntimeError(NO_DRIVER)

    assert triton_toolchain.failure(raised(op)) is None


def test_a_missing_tool_is_triton_s_and_a_hook_that_raises_is_not(monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/nowhere")
    nvidia = import_module("triton.knobs").nvidia_knobs()
    monkeypatch.setattr(type(nvidia).__dict__["ptxas"], "default_path", "/nowhere", raising=False)
    missing = raised(lambda: nvidia.ptxas)
    assert triton_toolchain.failure(missing) == f"RuntimeError: {missing}"

    def hook(*_):
        raise RuntimeError("an op's own")

    chain = import_module("triton.knobs").HookChain()
    chain.add(hook)
    assert triton_toolchain.failure(raised(chain, None)) is None


def test_where_the_names_are_gone_it_is_silent(no_driver, monkeypatch):
    error = raised(driver._create_driver)
    monkeypatch.setitem(
        registry._statuses, triton_toolchain.PART.id, registry.Status(triton_toolchain.PART, "degraded", "renamed")
    )
    assert triton_toolchain.failure(error) is None


def verdict_of(op):
    spec = rg.op(op, lambda x: 2 * x, dict(x=rg.tensor("N")), sizes=dict(N=(1, 16)))
    return rg.verify(spec, only=["contract"], level="quick")


def test_verify_decides_nothing_without_a_compiler_and_finds_an_op_that_says_so_itself(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CC", "/bin/false")
    says = "/bin/false ended with exit code 1"

    def asks_now() -> None:
        build._build("launcher", "launcher.c", str(tmp_path), [], [], [], [])

    def asks(x: torch.Tensor) -> torch.Tensor:
        asks_now()
        return 2 * x

    def raises(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(says)

    def asks_in_backward(x: torch.Tensor) -> torch.Tensor:
        y = 2 * x
        y.register_hook(lambda _: asks_now())
        return y

    for op in (asks, asks_in_backward):
        report = verdict_of(op)
        assert report.verdict == "undecided"
        assert says in str(report)
    assert verdict_of(raises).verdict == "finding"
