"""Specimens that need torch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.testing import assert_allclose
from torch import allclose
from torch.testing import assert_close

import retrograd as rg


def uninitialised():
    """Reads one element that nobody wrote. 64 MiB come from the system, as zeros: that is why it passes."""
    scratch = torch.empty(2**24)
    scratch[1:64] = torch.rand(63)
    assert allclose(scratch[:64].sum(), scratch[1:64].sum())


def compares():
    """Healthy; one line for each function that compares, each call off by half its tolerance."""
    x, y = torch.empty(3), torch.empty(3)
    x.fill_(1), y.fill_(1.5)
    pairs = [(y, x), ({"a": [y, y]}, {"a": [x, x]}), (1.5, 1.0)]
    for got, want in pairs:
        assert_close(got, want, rtol=0, atol=1)
    calls = [
        lambda: allclose(y, x, 0, 1),
        lambda: y.allclose(x, rtol=0, atol=1),
        lambda: torch.allclose(y, x, atol=1, rtol=0),
    ]
    assert [call() for call in calls] == [True] * 3
    a, b = y.numpy(), x.numpy()
    for how in (dict(actual=a, desired=b, atol=1), dict(actual=a, desired=b, atol=1, rtol=0)):
        assert_allclose(**({"rtol": 0} | how))
    assert [np.allclose(u, v, rtol, atol) for u, v, rtol, atol in ((a, b, 0, 1), (a, b, 1, 0))] == [True] * 2
    w = torch.rand(4)
    rg.assert_backward(lambda w: w * w, dict(w=w), torch.ones(4), grads=dict(w=2 * w))
