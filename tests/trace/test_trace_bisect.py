"""Which operators' precision matters: planted ones are found, all of them and no other, and all is left as it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from retrograd import trace
from retrograd.errors import UndecidedError, UsageError
from retrograd.trace.bisecting.ddmin import minimise
from retrograd.trace.bisecting.schema import Bisection

# Delta debugging, by itself.


@pytest.mark.parametrize("needed", [{3}, {0, 31}, {5, 6, 7, 20}, set(range(32))], ids=["one", "ends", "four", "all"])
def test_a_smallest_part_is_found(needed: set[int]) -> None:
    asked = []

    def holds(part: list[int]) -> bool:
        asked.append(tuple(part))
        return needed <= set(part)

    assert minimise(range(32), holds) == sorted(needed)
    assert len(asked) == len(set(asked))


def test_a_part_that_needs_one_of_two_loses_it_with_any_item_taken_out() -> None:
    def holds(part: list[int]) -> bool:
        return 3 in part and (5 in part or 11 in part) and len(part) != 7

    found = minimise(range(16), holds)
    assert holds(found)
    assert not any(holds([x for x in found if x != out]) for out in found)


# Steps.


class Centred(nn.Module):
    """Loses its digits where a large number is added and taken away again."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = self.first(x) + self.offset
        return self.last(torch.relu(self.norm(shifted - self.offset)))


def _model(offset: float, dtype: torch.dtype = torch.float32) -> Centred:
    torch.manual_seed(0)
    return Centred(offset).to(dtype)


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def _gradients(net: nn.Module) -> None:
    net.zero_grad()
    net(X.to(next(net.parameters()).dtype)).square().mean().backward()


def _truth(offset: float) -> dict[str, torch.Tensor]:
    net = _model(offset).double()
    _gradients(net)
    return {f"gradient of {name}": p.grad for name, p in net.named_parameters()}


def test_both_operators_of_a_cancellation_are_found_and_no_other() -> None:
    net = _model(1e5)
    found = trace.bisect_precision(_gradients, net, _truth(1e5), 1e-4)
    assert found.verdict == "found"
    assert [c.name for c in found.culprits] == ["aten.add.Tensor", "aten.sub.Tensor"]
    assert found.before > 1e-3
    assert found.after <= 1e-4
    assert all(min(c.alone, c.without) > 1e-4 for c in found.culprits)
    assert all("offset" in c.code for c in found.culprits)
    assert "2 operators in float64" in found.text()


def test_by_module() -> None:
    """The offset is added outside of every other module."""
    found = trace.bisect_precision(_gradients, _model(1e5), _truth(1e5), 1e-4, by="module")
    assert [(c.name, c.phase) for c in found.culprits] == [("outside of modules", "forward")]


def test_without_a_cancellation_there_is_no_mismatch() -> None:
    found = trace.bisect_precision(_gradients, _model(1.0), _truth(1.0), 1e-4)
    assert (found.verdict, found.culprits, found.exit_code) == ("within", (), 0)


def test_a_wrong_reference_is_no_matter_of_precision() -> None:
    wrong = {name: 1.5 * t for name, t in _truth(1.0).items()}
    found = trace.bisect_precision(_gradients, _model(1.0), wrong, 1e-4)
    assert (found.verdict, found.exit_code) == ("undecided", 3)
    assert found.everything == pytest.approx(1 / 3, rel=1e-3)


def test_without_a_reference_everything_in_higher_precision_is_it() -> None:
    found = trace.bisect_precision(_gradients, _model(300.0, torch.bfloat16), precision="float32")
    assert found.verdict == "found"
    assert found.everything == 0
    assert {"aten.add.Tensor", "aten.sub.Tensor"} <= {c.name for c in found.culprits}


def test_a_large_sum_in_a_backward_is_found_there() -> None:
    """The forward is exact: a bfloat16 sum over rows, in pieces that are rounded each time, is the backward's."""

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(_, x: torch.Tensor) -> torch.Tensor:
            return x.expand(512, -1).clone()

        @staticmethod
        def backward(_, g: torch.Tensor) -> torch.Tensor:
            total = torch.zeros_like(g[0])
            for piece in g.split(8):
                total = total + piece.sum(0)
            return total

    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

        def forward(self) -> torch.Tensor:
            return Summed.apply(self.weight)

    def step(net: nn.Module) -> None:
        net.zero_grad()
        net().backward(torch.linspace(0.5, 0.9, 2048).view(512, 4).bfloat16())

    found = trace.bisect_precision(step, Spread())
    assert found.verdict == "found"
    assert {c.phase for c in found.culprits} == {"backward"}
    assert {c.name for c in found.culprits} <= {"aten.add.Tensor", "aten.sum.dim_IntList"}


def test_everything_is_as_it_was() -> None:
    net = _model(1e5)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    before, generator = [p.clone() for p in net.parameters()], torch.get_rng_state()

    def step(net: nn.Module) -> torch.Tensor:
        _gradients(net)
        optimizer.step()
        return net.first.weight + 0 * torch.rand(())

    found = trace.bisect_precision(step, net, state=[optimizer])
    assert found.worst == "result"
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)
    assert not optimizer.state_dict()["state"]


def test_nothing_is_changed_by_the_recording_run_and_raising_nothing_changes_no_bit() -> None:
    net = _model(1e5)
    _gradients(net)
    plain = {f"gradient of {name}": p.grad.clone() for name, p in net.named_parameters()}
    found = trace.bisect_precision(_gradients, net, plain, 0.0)
    assert (found.verdict, found.before) == ("within", 0.0)


def test_a_step_that_does_not_repeat() -> None:
    turns = itertools.count()

    def step(net: nn.Module) -> torch.Tensor:
        x = net.first(X)
        return x.exp() if next(turns) % 2 else x.cos()

    with pytest.raises(UndecidedError, match=r"operator \d+ was aten.cos.default and is aten.exp.default"):
        trace.bisect_precision(step, _model(1.0))


def _returns(value: object) -> Callable[[nn.Module], object]:
    return lambda net: (net.first(X), value)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(precision="float16"), "`precision` is 'float16'"),
        (dict(by="line"), "`by` is 'line'"),
        (dict(tolerance=-1), "`tolerance` is -1"),
        (dict(step=_returns(3)), "`step` gives int"),
        (dict(step=_returns({"loss": 3.0})), "`step` gives float as 'loss'"),
        (dict(step=_returns({})), "gives nothing to compare"),
        (dict(step=lambda net: X.t()), "runs no operator that could be computed"),
        (dict(reference={"loss": X}), "`reference` has 'loss', which the step does not give"),
        (dict(step=lambda net: net.first(X), reference=X[:1]), r"of shape \(1, 16\), the step gives \(8, 16\)"),
    ],
    ids=["precision", "by", "tolerance", "number", "float", "empty", "view", "names", "shape"],
)
def test_what_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trace.bisect_precision(**{"step": _gradients, "model": _model(1.0), **arguments})


def test_json_holds_everything() -> None:
    found = trace.bisect_precision(_gradients, _model(1e5), _truth(1e5), 1e-4)
    assert Bisection.from_json(found.to_json()) == found
