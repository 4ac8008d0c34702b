"""What a wrong tensor is said to look like: the rule for its elements, and the mistake that gives its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from specimens import with_backward
from torch import Tensor

from retrograd.check.diagnosis.elements import describe
from retrograd.check.runner import verify
from retrograd.check.spec import OpSpec, op, tensor
from retrograd.check.tolerance import lower_precision_noise

M, N = 13, 10
ROWS, COLS = torch.meshgrid(torch.arange(M), torch.arange(N), indexing="ij")
RULES = [
    (ROWS >= 0, "every element"),
    (ROWS < 0, ""),
    (ROWS == 4, "M = 4"),
    (ROWS == 0, "M = 0 (the first)"),
    (COLS == N - 1, "N = 9 (the last)"),
    (ROWS >= 12, "M = 12 (the last)"),
    (COLS >= 8, "N >= 8 (what is left after whole blocks of 8)"),
    (COLS >= 5, "N >= 5"),
    (COLS < 3, "N < 3"),
    ((COLS >= 3) & (COLS < 7), "3 <= N <= 6"),
    (COLS % 3 == 1, "N % 3 = 1"),
    (COLS != 5, "N != 5"),
    ((ROWS == 2) & (COLS >= 5), "M = 2 (the first), N >= 5".replace(" (the first)", "")),
    (ROWS > COLS, "M > N"),
    (ROWS == COLS, "M = N"),
    (((ROWS + 2 * COLS) % 5 == 0) & (ROWS > 9), "6 of 30 elements where M >= 10"),
    ((torch.rand(M, N, generator=torch.Generator().manual_seed(0)) < 0.25) & (COLS != 5), "32 of 130 elements"),
    (
        (torch.rand(M, N, generator=torch.Generator().manual_seed(0)) < 0.9) & (COLS != 5),
        "106 of 117 elements where N != 5",
    ),
]


@pytest.mark.parametrize(("wrong", "said"), RULES, ids=[said or "none" for _, said in RULES])
def test_rule_for_the_elements(wrong: Tensor, said: str) -> None:
    assert describe(wrong, ["M", "N"]) == said


def test_a_number_has_no_rule() -> None:
    assert describe(torch.tensor(True), []) == "every element"


class _Scaled(torch.autograd.Function):
    """y = scale * x * sum over rows of tanh(x w); the gradient is what `broken` makes of the right one."""

    @staticmethod
    def forward(ctx: Any, broken: Callable[..., Any], x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.broken = broken
        return formula(x, w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return (None, *ctx.broken(g, x, w))


def formula(x: Tensor, w: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return torch.tanh(centred * w)


def right(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(formula(*leaves), leaves, g)  # type: ignore[return-value]


def without_the_mean(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    t = torch.tanh((x - x.mean(-1, keepdim=True)) * w)
    return g * (1 - t * t) * w, right(g, x, w)[1]


def lost_rows(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    kept = x.shape[0] // 4 * 4
    return right(g, x, w)[0], right(g[:kept], x[:kept], w)[1]


def low(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    noise = 1 + 2**-9 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).clamp(-3, 3)
    return right(g, x, w)[0] * noise, right(g, x, w)[1]


BROKEN: dict[str, tuple[Callable[..., Any], str]] = {
    "sign": (lambda g, x, w: (-right(g, x, w)[0], right(g, x, w)[1]), "the right one with the other sign"),
    "size": (lambda g, x, w: (x.shape[1] * right(g, x, w)[0], right(g, x, w)[1]), "N (48) times the right one"),
    "zero": (lambda g, x, w: (torch.zeros_like(x), right(g, x, w)[1]), "zero everywhere"),
    "mean": (without_the_mean, "what comes back through mean (test_diagnosis.py:"),
    "rows": (lost_rows, "what belongs to axis 0 of grad_out >= 4"),
    "rolled": (lambda g, x, w: (right(g, x, w)[0].roll(1, 0), right(g, x, w)[1]), "moved by +1 along axis 0"),
    "factor": (lambda g, x, w: (right(g, x, w)[0] / w, right(g, x, w)[1]), "w is forgotten as a factor"),
    "other": (lambda g, x, w: (g, right(g, x, w)[1]), "grad_out itself"),
    "ones": (lambda g, x, w: right(torch.ones_like(g), x, w), "grad_out is taken for ones"),
    "weight": (lambda g, x, w: (right(g, x, w + 1)[0], right(g, x, w)[1]), "computed with 1 added to w"),
    "noise": (low, "as if bfloat16 were used"),
}


def spec(broken: Callable[..., Any], name: str) -> OpSpec:
    inputs = dict(x=tensor("M", "N"), w=tensor("N"))
    return op(lambda x, w: _Scaled.apply(broken, x, w), formula, inputs, dtypes=["float32"], name=name)


@pytest.mark.parametrize("name", BROKEN)
def test_the_mistake_is_named(name: str) -> None:
    broken, said = BROKEN[name]
    report = verify(spec(broken, name), level="quick", only=["oracle"])
    assert report.verdict == "finding"
    assert said in report.findings[0].looks_like
    assert report.findings[0].elements


def test_the_mistake_is_named_where_half_of_a_gradient_is_0() -> None:
    def squared(x: Tensor) -> Tensor:
        return torch.relu(x - 0.5).square()

    halved = with_backward(squared, lambda g, x: g * torch.relu(x - 0.5))
    report = verify(op(halved, squared, dict(x=tensor("M", "N"))), level="quick", only=["oracle"])
    assert report.findings[0].looks_like == "1/2 times the right one"


def test_a_mistake_like_no_other_is_not_named() -> None:
    def odd(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        dx, dw = right(g, x, w)
        return dx + 0.3 * torch.sin(7 * x), dw

    report = verify(spec(odd, "odd"), level="quick", only=["oracle"])
    assert report.verdict == "finding"
    assert not report.findings[0].looks_like


def test_a_right_op_is_left_alone() -> None:
    assert verify(spec(right, "right"), level="quick", only=["oracle"])


def test_memory_that_was_never_written_is_no_rule_of_counts() -> None:
    """A huge number in one place fits many sums of parts; none of them is what happened."""

    def lost(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        dx, dw = right(g, x, w)
        dw[3] = 8.2e13
        return dx, dw

    found = verify(spec(lost, "lost"), level="quick", only=["oracle"]).findings[0]
    assert not found.looks_like
    assert found.elements == "N = 3"


def test_errors_of_a_lower_precision_are_named_where_they_are_noise() -> None:
    want = torch.randn(40, 30, dtype=torch.float64)
    rounded = want.to(torch.bfloat16).double()
    assert "as if bfloat16 were used" in lower_precision_noise(rounded, want)
    few = torch.where(torch.arange(1200).reshape(40, 30) % 100 == 0, want + 0.03, want)
    assert not lower_precision_noise(few, want)  # twelve elements are wrong, the others right
    assert not lower_precision_noise(rounded[0], want[0])  # of thirty a pattern could not be seen


def test_numbers_that_a_part_of_the_gradient_has_not_are_no_fault_of_the_check() -> None:
    def softplus(x: Tensor) -> Tensor:
        return torch.log1p(torch.exp(-x))  # its slope is NaN below -710, also for an element that nobody asks for

    # Where x is large the two numbers cancel, and -exp(-x) is lost.
    backward = with_backward(softplus, lambda g, x: g * (torch.sigmoid(x) - 1))
    soft = op(backward, softplus, dict(x=tensor("M", "N")), dtypes=["float64"], name="softplus")
    reports = [verify(soft, level="quick", only=["extremes"], seed=seed) for seed in range(3)]
    assert [report.verdict for report in reports] == ["proved", "finding", "proved"]
    assert [finding.kind for finding in reports[1].findings] == ["wrong-value"]


def test_a_wrong_value_where_a_size_is_0_is_compared_with_known_mistakes() -> None:
    def row_sums(x: Tensor, b: Tensor) -> Tensor:
        return x.sum(1, keepdim=True) + b

    def backward(g: Tensor, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return g.sum(1, keepdim=True).expand(x.shape), g.sum(0) * (1 if x.shape[1] else 2)

    sums = op(with_backward(row_sums, backward), row_sums, dict(x=tensor("M", "N"), b=tensor(3)), dtypes=["float32"])
    (found,) = verify(sums, level="quick", only=["shapes"]).findings
    assert (found.tensor, found.looks_like) == ("grad b", "2 times the right one")
