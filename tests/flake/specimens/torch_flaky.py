"""Specimens that need torch."""

from __future__ import annotations

import torch
from torch.testing import assert_close


def uninitialised():
    """Reads one element that nobody wrote; passes whenever it happens to be finite and small."""
    scratch = torch.empty(64)
    scratch[1:] = torch.rand(63)
    total = scratch[1:].sum() + 0 * scratch[0].clamp(-1, 1)
    assert_close(total, scratch[1:].sum())


def initialised():
    """Healthy: fresh memory is written before it is read."""
    scratch = torch.empty(64)
    scratch[:] = torch.rand(64)
    assert_close(scratch.sum(), scratch.double().sum().float())
