"""Gradients of complex numbers below modes: kernels of torch that mark a conjugation themselves find it resolved."""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import retrograd as rg
from retrograd.check.guard_bands import HUGE, Bands
from retrograd.check.stages.poison import Fill
from retrograd.trace import record
from retrograd.trace.operator_mode import OperatorMode


class Plain(TorchDispatchMode):
    """As torch has it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "poison": lambda: Fill(None),
    "bounds": lambda: Bands(HUGE),
    "operators": lambda: OperatorMode(lambda func, args, kwargs: func(*args, **kwargs)),
    "trace by the tape": record,
    "trace in Python": lambda: record(engine="python"),
    "cpu_triton": rg.cpu_triton,
}


def gradients() -> list[torch.Tensor]:
    """Of a least squares solution and its size, whose backward marks conjugations inside of operators."""
    a, b = (torch.randn(2, 5, n, dtype=torch.complex128, generator=torch.Generator().manual_seed(n)) for n in (3, 2))
    inputs = [a.requires_grad_(), b.requires_grad_()]
    x = torch.linalg.lstsq(a, b).solution
    return list(torch.autograd.grad([x, x.abs()], inputs, [(1 + 0.5j) * torch.ones_like(x), torch.ones_like(x.abs())]))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_what_they_are_without_it(mode):
    if mode == "cpu_triton":
        pytest.importorskip("triton")
    want = gradients()
    with MODES[mode]():
        got = gradients()
    torch.testing.assert_close(got, want)  # LAPACK's last bits depend on where memory lies


def test_torch_itself_reads_the_numbers_below_the_mark():
    """If this fails torch has mended it, and `resolved` may go."""
    with Plain():
        got = gradients()
    assert not all(torch.allclose(g, w) for g, w in zip(got, gradients(), strict=True))


# Modes whose operators nobody reads the results of, or of self-tests.
EXEMPT = {"_Count", "_RandomOperators", "_Nodes", "_Seen", "_Resolving"}


def test_every_mode_that_runs_operators_resolves_them():
    modes = {}
    for path in (Path(__file__).resolve().parents[2] / "src").rglob("*.py"):
        for node in (each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.ClassDef)):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__torch_dispatch__":
                    passes_on = "super().__torch_dispatch__" in ast.unparse(method)
                    modes[node.name] = passes_on or "resolved" in map(ast.unparse, method.decorator_list)
    assert {name for name, resolves in modes.items() if not resolves} == EXEMPT
