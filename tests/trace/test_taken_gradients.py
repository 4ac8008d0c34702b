"""A gradient that somebody holds is copied by autograd, else taken over: the same bits, and no difference."""

from __future__ import annotations

from collections import Counter

import diffed
import pytest
import torch

from retrograd import trace
from retrograd.trace import diff


@pytest.fixture(scope="module")
def plain() -> trace.Trace:
    return diffed.run()


def held(net: torch.nn.Module) -> None:
    kept: list[torch.Tensor] = []
    for parameter in net.parameters():
        parameter.register_hook(kept.append)


def held_and_changed(net: torch.nn.Module) -> None:
    held(net)
    net[1].narrow.weight.register_hook(lambda grad: grad * 1.25)


def names(run: trace.Trace) -> Counter[str]:
    return Counter(op.name for op in run.ops if op.node == "AccumulateGrad")


@pytest.mark.parametrize("level", ["bitwise", "attainable"])
def test_a_hook_that_keeps_gradients_makes_no_other_run(plain, level):
    other = diffed.run(held)
    assert names(other) != names(plain)
    for pair in ((plain, other), (other, plain)):
        found = diff(*pair, level)
        assert found, found.text()
        assert found.carried == 0


def test_a_hook_that_changes_one_is_told(plain):
    found = diff(plain, diffed.run(held_and_changed), "bitwise")
    assert not found
    assert "aten.mul.Tensor" in found.causes[0].what, found.text()


def test_a_step_that_keeps_them_the_second_time_is_repeated():
    net, x, kept = diffed.model(), torch.arange(12).view(2, 6), []
    runs = []

    def step() -> None:
        runs.append(0)
        handles = [p.register_hook(kept.append) for p in net.parameters()] if len(runs) == 2 else []
        net(x).sum().backward()
        for handle in handles:
            handle.remove()

    assert trace.twice(step, net)
