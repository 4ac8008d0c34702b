"""Norms of other libraries, told by what they compute: replaced right, or left with the reason."""

from __future__ import annotations

import copy

import pytest
import torch

from retrograd import patch
from retrograd.patch import recognition

N = 24


class Rms(torch.nn.Module):
    """An RMSNorm of 50 lines of options, of which each class of a library has one."""

    def __init__(self, offset=0.0, wide_weight=False, to_weight=False, eps_outside=False, centred=False, noise=0.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((N,), 1.0 - offset))
        self.eps = 1e-3
        self.options = (offset, wide_weight, to_weight, eps_outside, centred, noise)

    def forward(self, x):
        offset, wide_weight, to_weight, eps_outside, centred, noise = self.options
        wide = x.float()
        if centred:
            wide = wide - wide.mean(-1, keepdim=True)
        mean = wide.square().mean(-1, keepdim=True)
        rstd = 1 / (mean.sqrt() + self.eps) if eps_outside else torch.rsqrt(mean + self.eps)
        y = wide * rstd * (1 + noise)
        if wide_weight:
            return (y * (offset + self.weight.float())).to(x.dtype)
        if to_weight:
            return self.weight * y.to(self.weight.dtype)
        return (offset + self.weight) * y.to(x.dtype)


class RmsNorm(Rms):
    """Told apart by its name: Rms itself is none that anybody would look for."""


@pytest.mark.parametrize(
    ("options", "like"),
    [
        (dict(), patch.RmsLike("eps", 0.0, True)),
        (dict(offset=1.0), patch.RmsLike("eps", 1.0, True)),
        (dict(wide_weight=True), patch.RmsLike("eps", 0.0, False)),
        (dict(offset=1.0, wide_weight=True), patch.RmsLike("eps", 1.0, False)),
        (dict(to_weight=True), patch.RmsLike("eps", 0.0, "weight")),
        (dict(centred=True), patch.LayerLike("eps", 0.0, True)),
        (dict(centred=True, wide_weight=True), patch.LayerLike("eps", 0.0, False)),
    ],
)
def test_readings_are_told_apart(options, like):
    assert recognition.recognise(RmsNorm(**options)) == like
    assert not recognition.differs(RmsNorm(**options), like)


class Gated(Rms):
    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * torch.nn.functional.silu(gate))


class ChannelsFirst(torch.nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class ChannelsFirstOfImages(torch.nn.LayerNorm):
    """Of rows [B, L, N] a LayerNorm, of images [B, N, H, W] another thing."""

    def forward(self, x):
        return super().forward(x.transpose(1, -1)).transpose(1, -1) if x.dim() == 4 else super().forward(x)


class NoGradientOfWeight(Rms):
    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)) * self.weight.detach() + 0 * (
            self.weight
        )


class Clamped(Rms):
    def forward(self, x):
        return super().forward(x.clamp(-50, 50))


class Buffered(Rms):
    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.ones(N))

    def forward(self, x):
        return super().forward(x) * self.running


class Weightless(torch.nn.Module):
    eps = 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def batch_norm():
    return torch.nn.BatchNorm1d(N)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Rms(eps_outside=True), "y is "),  # of rows whose scale is sqrt(eps)
        (lambda: Rms(noise=2e-5), "y is "),
        (lambda: ChannelsFirst(N), "raises RuntimeError"),
        (lambda: ChannelsFirstOfImages(N), "y of x [1, 24, 1, 24] is "),
        (NoGradientOfWeight, "the gradient of weight is -0, ours"),
        (Clamped, "y is "),  # of rows whose scale is 100
        (Gated, "its forward takes more than x: gate"),
        (Buffered, "it has `running` beside weight and bias"),
        (Weightless, "it has no weight that tells the length of a row"),
        (batch_norm, "it is neither an RMSNorm nor a LayerNorm"),
        (lambda: torch.nn.LayerNorm((4, N)), "its `weight` has 2 dimensions"),
    ],
)
def test_what_is_something_else_is_left_with_the_reason(make, reason):
    said = recognition.recognise(make())
    assert isinstance(said, str)
    assert reason in said


def test_the_module_that_is_tried_stays_as_it_is():
    norm = RmsNorm(offset=1.0)
    norm.register_forward_hook(lambda *_: pytest.fail("hooks are not of the computation"))
    before, state = copy.deepcopy(norm.state_dict()), torch.random.get_rng_state()
    recognition.recognise(norm)
    assert norm.weight.grad is None
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_a_norm_that_is_on_no_device_yet():
    with torch.device("meta"):
        norm = RmsNorm()
    assert recognition.recognise(norm) == patch.RmsLike("eps", 0.0, True)


def test_a_wrong_reading_is_refused_and_the_right_one_named():
    model = torch.nn.Sequential(RmsNorm(offset=1.0), torch.nn.LayerNorm(N))
    with pytest.raises(
        ValueError,
        match=r"`0`, a RmsNorm, is not what `also` says, .*weight_offset=0.0.*: y is .*; "
        r"RmsLike\(eps='eps', weight_offset=1.0, promotes=True\) gives the same",
    ):
        patch.norms(model, {RmsNorm: patch.RmsLike("eps")})
    assert type(model[1]) is torch.nn.LayerNorm


def test_a_name_that_no_module_has_is_refused():
    model = torch.nn.Sequential(RmsNorm())
    with pytest.raises(ValueError, match=r"`also` names 'RMSNorm', and no module .*, such as RmsNorm"):
        patch.norms(model, {"RMSNorm": patch.RmsLike("eps")})


def test_modules_of_other_attributes_are_tried_themselves():
    model = torch.nn.Sequential(RmsNorm(), RmsNorm(), RmsNorm(noise=2e-5), Gated())
    model.add_module("gated_norm", type("GatedNorm", (Gated,), {})())
    handle = patch.norms(model)
    assert handle.names == ("0", "1")
    assert sorted(handle.left) == ["2", "gated_norm"]


def test_recognition_can_be_left_out():
    assert patch.norms(torch.nn.Sequential(RmsNorm()), recognise=False).names == ()
