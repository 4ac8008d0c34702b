"""LayerNorm where it differs from RMSNorm: means that dwarf the spread, constant rows, its own default eps."""

from __future__ import annotations

import pytest
import torch
from norm_cases import EPS, check, make_inputs, run

from retrograd.ops import layer_norm


@pytest.mark.parametrize("mean", [100.0, 1000.0, -1000.0])
@pytest.mark.parametrize("shape", [(7, 65), (16, 1000)], ids=["M7-N65", "M16-N1000"])
def test_large_mean(shape: tuple[int, int], mean: float, impl: str, device: str) -> None:
    case = make_inputs(shape, device=device, given="weight bias")
    case["x"] = case["x"] + mean
    check(case, "layer_norm", impl=impl)


def test_variance_survives_a_large_mean(impl: str, device: str) -> None:
    # E[s^2] - E[s]^2 in float32 loses 2^-24 (mean / spread)^2, here 6e-2; the centred sum loses none of it.
    case = make_inputs((8, 1000), device=device, given="")
    case["x"] = case["x"] + 1000.0
    got = run(case, "layer_norm", impl=impl)["y"].double()
    spread = got.square().mean(dim=-1)
    assert float((spread - 1).abs().max()) < 2.0**-24 * 1000**2 / 16


def test_constant_rows(impl: str, device: str) -> None:
    case = make_inputs((4, 65), device=device, given="weight bias")
    case["x"] = torch.tensor([0.0, 1.0, -3.0, 0.1], device=device)[:, None].expand(4, 65)
    check(case, "layer_norm", impl=impl, eps=1e-5)


def test_rows_of_one_element_are_their_bias(impl: str, device: str) -> None:
    case = make_inputs((7, 1), device=device, given="weight bias")
    got = run(case, "layer_norm", impl=impl)
    assert torch.equal(got["y"], case["bias"].expand(7, 1))
    # g - mean(g) with g = grad_y * weight: nothing is left, or the rounding of one product where a compiler fuses the
    # other with the subtraction.
    product = (case["grad_y"].double() * case["weight"].double()).abs()
    assert bool((got["x"].double().abs() <= 2.0**-24 * product / EPS**0.5).all())


def test_default_eps_is_1e_5(impl: str, device: str) -> None:
    x = torch.linspace(-1e-3, 1e-3, 8, device=device)[None]
    assert torch.equal(layer_norm(x, impl=impl), layer_norm(x, eps=1e-5, impl=impl))
    assert not torch.equal(layer_norm(x, impl=impl), layer_norm(x, eps=1e-6, impl=impl))


def test_wrong_arguments_are_refused_as_for_rms_norm() -> None:
    with pytest.raises(ValueError, match=r"`weight` has shape \(4,\), expected \(8,\)"):
        layer_norm(torch.zeros(4, 8), torch.ones(4))
