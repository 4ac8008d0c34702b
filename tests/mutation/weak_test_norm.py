"""A test that many have: the weight is all ones."""

from __future__ import annotations

import torch
from norm_op import norm, reference


def test_backward():
    torch.manual_seed(0)
    x, w, dy = torch.randn(4, 64), torch.ones(64), torch.randn(4, 64)
    leaves = [x.requires_grad_(), w.requires_grad_()]
    got, want = (torch.autograd.grad(fn(x, w, 1e-5), leaves, dy) for fn in (norm, reference))
    torch.testing.assert_close(got, want)
