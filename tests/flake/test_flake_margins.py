"""err / tol of every kind of comparison, as the library that compares would judge it."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from retrograd.flake import run
from retrograd.flake.margins import MarginRecorder

SPECIMENS = Path(__file__).parent / "specimens"


def note(got, want, rtol=0.0, atol=1.0, equal_nan=False):
    recorder = MarginRecorder()
    recorder._note("f", got, want, rtol, atol, equal_nan)
    assert recorder.unrecorded == 0
    (margin,) = recorder.take()
    assert recorder.take() == ()
    return margin


def test_worst_rest_and_place():
    m = note(torch.tensor([[1.0, 2.25], [3.5, 7.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert (m.worst, m.rest, m.wrong, m.total, m.index, m.got, m.want) == (3.0, 0.5, 1, 4, (1, 1), 7.0, 4.0)
    assert m.dtype == "float32"
    assert Path(m.site.rpartition(":")[0]).name == "test_flake_margins.py"


@pytest.mark.parametrize(
    ("got", "want", "rtol", "atol", "nan", "worst"),
    [
        (1.0, 1.0, 0, 0, False, 0.0),
        (1.0, 2.0, 0, 0, False, math.inf),
        (1.5, 1.0, 0.25, 0.25, False, 1.0),
        (math.nan, math.nan, 1, 1, False, math.inf),
        (math.nan, math.nan, 1, 1, True, 0.0),
        (math.nan, 1.0, 1, 1, True, math.inf),
        (math.inf, math.inf, 0, 0, False, 0.0),
        (math.inf, -math.inf, 1, 1, False, math.inf),
        (3, 5, 0, 4, False, 0.5),
        (3 + 4j, 0j, 0, 10, False, 0.5),
        (True, True, 0, 0, False, 0.0),
    ],
)
@pytest.mark.parametrize("kind", [lambda v: v, np.array, torch.tensor], ids=["number", "numpy", "torch"])
def test_the_margin_agrees_with_isclose(got, want, rtol, atol, nan, worst, kind):
    m = note(kind(got), kind(want), rtol, atol, nan)
    assert m.worst == worst
    assert (m.worst <= 1) == bool(np.isclose(got, want, rtol, atol, nan))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tolerance_in_units_of_the_last_place(dtype):
    eps = torch.finfo(dtype).eps
    m = note(torch.tensor([2.0], dtype=dtype), torch.tensor([4.0], dtype=torch.float64), atol=eps)
    assert (m.ulps, m.dtype) == (0.25, str(dtype).removeprefix("torch."))


def test_digests_tell_bits_apart():
    x = torch.rand(10)
    same, other = note(x, x.clone()), note(x.nextafter(torch.tensor(2.0)), x)
    assert same.got_bits == same.want_bits == other.want_bits != other.got_bits


def test_calls_at_one_line_are_one_margin():
    recorder = MarginRecorder()
    for error in (0.5, 3.0, 0.25):
        recorder._note("f", 1 + error, 1.0, 0.0, 1.0, False)
    (m,) = recorder.take()
    assert (m.calls, m.worst, m.rest, m.wrong, m.total) == (3, 3.0, 0.5, 1, 3)


@pytest.mark.parametrize(
    ("got", "want"), [(torch.empty(3, device="meta"), torch.empty(3)), ("a", "b"), ([1, 2, 3], [1, 2]), (None, 1)]
)
def test_what_cannot_be_measured_is_counted_and_changes_nothing(got, want):
    recorder = MarginRecorder()
    recorder._note("f", got, want, 0.0, 1.0, False)
    assert recorder.unrecorded == 1
    assert recorder.take() == ()


def test_empty_tensors():
    assert note(torch.empty(0, 3), torch.empty(0, 3)).total == 0


def test_every_comparison_of_a_test_is_seen():
    (found,) = run(str(SPECIMENS / "torch_flaky.py:compares"), seeds=1, repeats=1).flakes
    margins = found.runs[0].margins
    # Fresh memory is used too, and written before it is read: the look at uninitialised memory leaves it alone.
    assert (found.verdict, found.reasons) == ("steady", ())
    assert [run.fill for run in found.runs] == ["", "control", "control", "nan", "nan"]
    calls: Counter[str] = Counter()
    for m in margins:
        calls[m.call] += m.calls
    assert calls == {
        "torch.testing.assert_close": 4,
        "torch.allclose": 3,
        "numpy.testing.assert_allclose": 2,
        "numpy.allclose": 2,
        "retrograd.assert_backward": 1,
    }
    assert {m.worst for m in margins if m.call != "retrograd.assert_backward"} == {0.5}
    (backward,) = [m for m in margins if m.call == "retrograd.assert_backward"]
    assert backward.worst <= 1
    assert all("torch_flaky.py" in m.site for m in margins)


def test_a_comparison_that_checks_nothing_is_no_margin():
    """The test asserts that two things differ; a margin of 1000 there is no failure and no tail."""
    (found,) = run(str(SPECIMENS / "flaky.py:asserts_a_difference"), seeds=25, repeats=1).flakes
    assert found.verdict == "steady"
    assert found.tail is not None
    assert found.tail.supported
    assert found.tail.high < 0.01


def test_a_compared_tensor_can_be_resized():
    x = torch.ones(6, dtype=torch.float64)
    assert note(x, torch.ones(6, dtype=torch.float64)).worst == 0
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().size() == 0
