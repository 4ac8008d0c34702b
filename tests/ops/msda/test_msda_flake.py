"""The flaky gradient test that this library began with: how often it fails is computed, and what mends it is shown.

A public library holds its gradient against grid_sample with grids 2 p - 1 at 768000 random coordinates, atol 1e-3,
rtol 1e-2, and fails in one run of twelve. docs/flaky-msda-gradient.md explains it; benchmarks/flake_msda.py computes it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from msda_cases import DEVICE, assert_within_budget, defined, run, truth

RUNS = 600


def _load() -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "flake_msda.py"
    spec = importlib.util.spec_from_file_location("flake_msda", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


flake = _load()
MODES = list(flake.MODES)


@pytest.fixture(scope="module")
def drawn() -> dict[str, int]:
    """How many of the runs fail, by mode."""
    return dict(zip(MODES, flake.failures(tuple(flake.MODES.values()), RUNS), strict=True))


@pytest.mark.parametrize(
    ("name", "change", "percent"),
    [
        ("border, align_corners=False", dict(inner_edge=True), 8.36),
        ("border, align_corners=True", dict(inner_edge=True), 9.53),
        ("zeros, align_corners=False", dict(inner_edge=True), 8.16),
        ("zeros, align_corners=True", dict(inner_edge=True), 6.37),
        ("border, align_corners=False", {}, 8.16),
        ("border, align_corners=True", {}, 7.44),
        ("border, align_corners=False", dict(draw=flake.cpu_uniform), 0),
        ("border, align_corners=False", dict(draw=flake.cpu_uniform, inner_edge=True), 4.47),
        ("zeros, align_corners=False", dict(reference=flake.in_double, sides=flake.UNEVEN_SIDES), 55.58),
        ("zeros, align_corners=False", dict(reference=flake.direct, sides=flake.UNEVEN_SIDES), 0),
    ],
)
def test_the_probability_is_known(name: str, change: dict[str, Any], percent: float) -> None:
    """Of the test as it was written (its kernel takes the inner side at the edge), of ours, and of likely mends."""
    case = flake.replace(flake.MODES[name], **change)
    assert 100 * flake.chance(case) == pytest.approx(percent, abs=0.005)


@pytest.mark.parametrize("name", MODES)
def test_runs_fail_as_often_as_computed(name: str, drawn: dict[str, int]) -> None:
    """The exact 99 % interval; other seeds than these would leave it in at most one case of a hundred."""
    low, high = flake.interval(drawn[name], RUNS)
    assert low <= flake.chance(flake.MODES[name]) <= high


def test_points_away_from_kinks_never_disagree() -> None:
    """Against grid_sample and against float64, in levels that are powers of two and in others."""
    assert flake.safe_disagreements(1) == 0
    shares = np.floor(flake.safe_points(0, 8, False, 1000) * 8 + 0.5)
    assert set(shares) == set(range(9))  # every cell is visited, the halves at the edges too


def test_the_interval_is_that_of_clopper_and_pearson() -> None:
    """Values of scipy.stats.binomtest(k, n).proportion_ci(0.95)."""
    assert flake.interval(5, 100, 0.95) == pytest.approx((0.016432, 0.112835), abs=1e-6)
    assert flake.interval(0, 20, 0.95) == pytest.approx((0, 0.168433), abs=1e-6)


@pytest.mark.parametrize(("seed", "fails"), [(13, True), (0, False)], ids=["fails", "passes"])
def test_in_full(seed: int, fails: bool) -> None:
    """All 768000 gradients: what is predicted is off and nothing else, and with kernel's positions nothing is."""
    case, bits = flake.Case(border=True), flake.drawn(seed)
    predicted = flake.disagreements(case, bits)
    assert bool(predicted) == fails
    grads = flake.in_full(case, bits)
    off = [flake.beyond(got, usual) for got, usual in zip(grads.got, grads.usual, strict=True)]
    assert off == [[], predicted, []]  # value, locations, weights
    aware = [flake.beyond(got, aware) for got, aware in zip(grads.got, grads.aware, strict=True)]
    assert aware == [[], [], []]


@pytest.mark.parametrize("side", flake.SIDES)
@pytest.mark.parametrize("name", MODES)
def test_every_number_beside_a_kink(name: str, side: int, impl: str) -> None:
    """Around each kink every number the generator can give: grid_sample leaves our cell exactly where predicted.

    The float64 reference in float32's cells is within the rounding error of float32 at every one of them.
    """
    case = flake.MODES[name]
    p = _beside_kinks(name, side)
    data = _along_x(p, side)
    mode = dict(padding_mode="border" if case.border else "zeros", align_corners=case.aligned)
    got = run({k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in data.items()}, **mode, impl=impl)
    got = {key: tensor.cpu() for key, tensor in got.items()}
    off = ~torch.isclose(got["sampling_locations"], _usual(data, mode), flake.RTOL, flake.ATOL)
    assert off[..., 0].flatten().tolist() == case.disagree(p, side).tolist()
    assert not off[..., 1].any()
    assert_within_budget(got, truth(data, **mode), data)


def test_float64_alone_is_no_mend() -> None:
    """With levels that are no power of two, float64 positions leave float32's cell at points that differ as predicted."""
    case = flake.Case(reference=flake.in_double)
    p = np.unique(flake.cuda_uniform(flake._beside_kinks(100, False, 2**32)))
    p = p[case.disagree(p, 100)][::16]
    data = _along_x(p, 100)
    exact = {key: tensor.double() if isinstance(tensor, torch.Tensor) else tensor for key, tensor in data.items()}
    got = run(data)["sampling_locations"]
    off = ~torch.isclose(got, defined(exact)["sampling_locations"].float(), flake.RTOL, flake.ATOL)
    assert off[..., 0].all()
    assert_within_budget({"sampling_locations": got}, truth(data), data)


@functools.cache
def _beside_kinks(name: str, side: int) -> np.ndarray:
    """All points that disagree, and 64 others."""
    case = flake.MODES[name]
    p = np.unique(flake.cuda_uniform(flake._beside_kinks(side, case.aligned, 2**32)))
    differs = case.disagree(p, side)
    others = np.flatnonzero(~differs)
    return np.concatenate([p[differs], p[others[:: len(others) // 64]]])


def _along_x(p: np.ndarray, side: int) -> dict[str, Any]:
    """A query for each p_x at p_y = 0.3, one level and head."""
    generator = torch.Generator().manual_seed(side)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    across = torch.from_numpy(p)
    return {
        "value": normal(1, side * side, 1, 8),
        "spatial_shapes": [(side, side)],
        "sampling_locations": torch.stack([across, torch.full_like(across, 0.3)], -1).view(1, -1, 1, 1, 1, 2),
        "attention_weights": torch.ones(1, len(p), 1, 1, 1),
        "grad_out": normal(1, len(p), 1, 8),
    }


def _usual(data: dict[str, Any], mode: dict[str, Any]) -> torch.Tensor:
    """The gradient of the locations by grid_sample with grids 2 p - 1."""
    locations = data["sampling_locations"].clone().requires_grad_()
    levels = tuple(data["spatial_shapes"])
    out = flake.by_grid_sample(data["value"], levels, locations, data["attention_weights"], **mode)
    return torch.autograd.grad(out, locations, data["grad_out"])[0]
