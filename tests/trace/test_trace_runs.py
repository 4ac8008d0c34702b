"""Recorded runs of a small transformer that differ in one thing: that thing is named, and its consequences are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffed
import pytest
import torch
from diffed import Instead, run, ten_bits
from torch import nn

from retrograd import trace
from retrograd.errors import UsageError
from retrograd.trace import Trace, diff
from retrograd.trace.diffing.schema import TraceDiff

LINES = (Path(__file__).parent / "diffed.py").read_text().splitlines()


def _line(said: str) -> str:
    """ "diffed.py:12" of the line with this comment."""
    return f"diffed.py:{1 + next(k for k, line in enumerate(LINES) if line.endswith(said))}"


@pytest.fixture(scope="module")
def plain() -> Trace:
    return run()


@pytest.fixture(scope="module")
def still() -> Trace:
    """Without dropout."""
    return run(training=False)


def _first(found: TraceDiff) -> tuple[str, str, str]:
    cause = found.causes[0]
    seen = cause.b or cause.a
    assert seen is not None
    return cause.kind, seen.name, Path(seen.place).name


@pytest.mark.parametrize("level", ["full", "fast"])
def test_the_same_run_twice(level: str) -> None:
    found = diff(run(level=level), run(level=level))
    assert found
    assert found.mode == "bitwise"
    assert found.carried == 0


def _attention(*, level: str, inserted: bool) -> Trace:
    """A layer of torch's own, whose projections are transposed views that level fast has no digest of."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    x = torch.randn(2, 5, 16)
    with trace.record(layer, level=level) as recorder, torch.autocast("cpu", torch.bfloat16):
        out = layer(x).float()
        (torch.sin(out) if inserted else out).square().mean().backward()
    return recorder.trace


@pytest.mark.parametrize("levels", [("fast", "full"), ("full", "fast")], ids="-".join)
def test_runs_recorded_at_different_levels(levels: tuple[str, str]) -> None:
    """What one level leaves out is no difference, and what differs is found as ever."""
    a, same, other = (
        _attention(level=level, inserted=inserted)
        for level, inserted in ((levels[0], False), (levels[1], False), (levels[1], True))
    )
    assert diff(a, same).causes == ()
    assert [_first(diff(a, other))[:2]] == [("inserted", "aten.sin.default")]


def test_one_inserted_operator_and_nothing_else(plain: Trace) -> None:
    def insert(net: nn.Sequential) -> None:
        net[2].extra = torch.sin

    found = diff(plain, run(insert))
    assert [_first(found)] == [("inserted", "aten.sin.default", _line("# the extra line"))]
    assert len(found.causes) == 1
    assert found.causes[0].count == 2  # steps
    assert "its backward: aten.cos.default" in found.causes[0].others
    assert diff(run(insert), plain).causes[0].kind == "missing"


def test_an_inserted_operator_that_changes_no_value(plain: Trace) -> None:
    def insert(net: nn.Sequential) -> None:
        net[1].extra = torch.clone

    found = diff(plain, run(insert))
    assert [c.kind for c in found.causes] == ["inserted"]
    assert found.carried == 0


def test_another_seed_is_the_first_random_operator(plain: Trace) -> None:
    found = diff(plain, run(seed=1))
    assert len(found.causes) == 1
    kind, name, _ = _first(found)
    assert (kind, name) == ("random", "aten.bernoulli_.float")
    assert found.causes[0].b.module == "1.drop"


def test_tf32_in_one_product(plain: Trace, still: Trace) -> None:
    def rounded(func: Any, bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return func(bias, ten_bits(x), ten_bits(w))

    found = diff(still, run(training=False, under=Instead("aten.addmm.default", rounded)))
    assert _first(found)[:2] == ("product", "aten.addmm.default")
    assert found.causes[0].b.module == "1.qkv"
    assert "TF32" in found.causes[0].why
    assert {c.kind for c in found.causes} == {"product"}


@pytest.mark.parametrize("change", ["order", "last bit"])
def test_an_operator_that_is_not_deterministic(plain: Trace, change: str) -> None:
    """The second run adds the same numbers in another order, or is off by the last bit of one element."""

    def other(func: Any, into: torch.Tensor, dim: int, at: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if change == "order":
            return func(into, dim, at.flip(0), x.flip(dim))
        out = func(into, dim, at, x)
        out[0, 0, 0] = torch.nextafter(out[0, 0, 0], torch.tensor(9.0))
        return out

    found = diff(plain, run(under=Instead("aten.index_add.default", other)))
    assert _first(found) == ("nondeterministic", "aten.index_add.default", _line("# the pooling line"))
    assert len(found.causes) == 1


def test_another_dtype_is_within_the_attainable_error(still: Trace) -> None:
    found = diff(still, run(training=False, dtype=torch.bfloat16))
    assert found.mode == "attainable"
    assert not found.causes
    assert found.within > len(still.ops) // 2
    assert not diff(still, run(training=False, dtype=torch.bfloat16), "bitwise")


@pytest.mark.parametrize("level", ["full", "fast"])
def test_an_optimizer_that_makes_steps_of_noise_is_not_accused(level: str) -> None:
    """AdamW moves a bias whose gradient is 0 but for rounding by its full rate, in whatever direction."""
    found = diff(
        *(
            run(training=False, dtype=dtype, level=level, fused=True, steps=3)
            for dtype in (torch.float32, torch.bfloat16)
        )
    )
    assert not found.causes


def _accurately(func: Any, *args: Any, **kwargs: Any) -> Any:
    """As another library's kernel: right, with other last bits."""
    up = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    return func(*up, **kwargs).float()


def test_another_device_is_within_the_attainable_error(still: Trace) -> None:
    found = diff(still, diffed.elsewhere(run(training=False, under=Instead("aten.addmm.default", _accurately))))
    assert found.mode == "attainable"
    assert not found.causes
    assert found.within
    assert diff(still, run(training=False, under=Instead("aten.addmm.default", _accurately))).causes


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_autocast_is_within_it_and_hides_nothing(still: Trace, wrong: bool) -> None:
    def halved(func: Any, x: torch.Tensor, **more: Any) -> torch.Tensor:
        return func(x, **more) * (0.5 if wrong else 1)

    with torch.autocast("cpu", torch.bfloat16):
        other = run(training=False, under=Instead("aten.gelu.default", halved, 1))
    found = diff(still, other)
    assert found.mode == "attainable"
    assert any("casts and views only one" in note for note in found.notes)
    assert [(c.kind, c.b and c.b.name, c.b and c.b.module) for c in found.causes] == [
        ("operator", "aten.gelu.default", "2")
    ] * wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_wrong_operator_is_found_beyond_it(still: Trace, dtype: torch.dtype) -> None:
    """The third layer norm, of block 2, as without its eps and with a wrong variance: a third too large."""

    def wrong(func: Any, *args: Any) -> Any:
        out, mean, inverse = func(*args)
        return out * 1.3, mean, inverse

    other = diffed.elsewhere(
        run(training=False, dtype=dtype, under=Instead("aten.native_layer_norm.default", wrong, 1))
    )
    found = diff(still, other)
    assert found.mode == "attainable"
    assert _first(found)[:2] == ("operator", "aten.native_layer_norm.default")
    assert found.causes[0].b.module == "2.norm"


def test_other_parameters_came_in_from_outside(plain: Trace) -> None:
    def other(net: nn.Sequential) -> None:
        with torch.no_grad():
            net[1].wide.weight[0, 0] += 1

    found = diff(plain, run(other))
    assert [c.kind for c in found.causes] == ["outside"]
    assert found.causes[0].what.startswith("1.wide.weight, ")


def test_a_gradient_that_was_there_before_is_told_as_such() -> None:
    layer = nn.Linear(3, 2)
    traces = []
    for _ in range(2):  # the second backward adds to the gradients of the first, as does the third
        layer(torch.ones(1, 3)).sum().backward()
        with trace.record(layer) as recorder:
            layer(torch.ones(1, 3)).sum().backward()
        traces.append(recorder.trace)
    (cause,) = diff(*traces).causes
    assert cause.kind == "outside"
    assert "the gradient that the new one is added to" in cause.why
    assert "zero_grad" in cause.advice


def test_modules_in_a_wrapper_are_the_same_modules(plain: Trace) -> None:
    def wrap(found: Trace) -> Trace:
        from dataclasses import replace

        return Trace([replace(op, module=f"_orig_mod.{op.module}") for op in found.ops], found.level)

    assert diff(plain, wrap(run()))


def test_ranks_and_versions_are_told(plain: Trace) -> None:
    other = Trace(plain.ops, plain.level, 3, {**plain.meta, "torch": "1.0"})
    found = diff(plain, other)
    assert found
    assert "ranks: 0 in A, 3 in B" in found.notes
    assert f"torch: {torch.__version__} in A, 1.0 in B" in found.notes


# Twice.


def _step() -> tuple[nn.Sequential, Callable[[nn.Sequential], None]]:
    net, tokens = diffed.model(), torch.arange(24).view(3, 8)

    def step(net: nn.Sequential) -> None:
        net.zero_grad()
        nn.functional.cross_entropy(net(tokens).flatten(0, 1), torch.arange(9)).backward()

    return net, step


def test_twice_says_that_a_step_is_deterministic_and_leaves_everything_as_it_was() -> None:
    net, step = _step()
    before, generator = [p.clone() for p in net.parameters()], torch.get_rng_state()
    found = trace.twice(step, net)
    assert found
    assert found.matched > 100
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def test_twice_names_operator_and_line() -> None:
    net, step = _step()
    calls = []

    def shifting(x: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        return x + 2.0**-20 * len(calls) * torch.ones(())

    net[2].extra = shifting
    found = trace.twice(step, net)
    assert len(found.causes) == 1
    assert found.causes[0].b.module == "2"
    assert re.search(r"\* torch\.ones", found.causes[0].first.code)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(step=3), "`step` is int, expected a function"),
        (dict(step=print, model=3), "`model` is a int, expected a torch.nn.Module"),
        (dict(step=print, state=[3]), "`state` has a int"),
        (dict(step=print, level="names"), "`level` is 'names', expected 'full' or 'fast'"),
        (dict(step=lambda: None), "`a` has no operators"),
    ],
    ids=["step", "model", "state", "level", "nothing"],
)
def test_twice_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trace.twice(**arguments)
