"""Norms in float8: each element rounded once, scales that fit, a backward that is the usual one."""

from __future__ import annotations

import math

import pytest
import torch
from norm_cases import EPS, Case, make_inputs, stored_s, truth

import retrograd as rg
from retrograd import ops
from retrograd.codegen import target_named
from retrograd.ops.norm.quantization import LARGEST, LEAST_SCALE
from retrograd.runtime.triton.planned_gpu import planning

SCALES = pytest.mark.parametrize("scale", [None, 0.02], ids=["row", "tensor"])


@pytest.fixture(autouse=True)
def needs_float8(device: str) -> None:
    if device == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")


def forward(case: Case, norm: str, scale: float | None, **options: object) -> ops.norm.Float8Norm:
    inputs = [case.get(name) for name in ("x", "weight", "bias", "residual")]
    given = None if scale is None else torch.tensor(scale, device=case["x"].device)
    return getattr(ops, f"{norm}_float8_fwd")(*inputs, **({"scale": given, "eps": EPS} | options))


def spacing(scaled: torch.Tensor) -> torch.Tensor:
    """Distance of float8 numbers around `scaled`: 2^-3 of the power of two below it, at least 2^-9."""
    exponent = torch.frexp(scaled.abs().clamp_min(2.0**-6)).exponent - 1
    return torch.exp2((exponent - 3).double())


def float32_error(case: Case, norm: str) -> torch.Tensor:
    """What y may be off by in float32, as `assert_within_budget` counts it, and by the scale and its reciprocal."""
    n = case["x"].shape[-1]
    value, size = truth(case, norm)["y"]
    return (16 + math.ceil(math.log2(n))) * 2.0**-24 * size + 4 * 2.0**-24 * value.abs()


@SCALES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(7, 64), (2, 3, 1000), (3, 77), (4, 5120), (2, 33333)], ids=str)
def test_each_element_is_rounded_once(
    shape: tuple[int, ...], dtype: torch.dtype, scale: float | None, norm: str, impl: str, device: str
) -> None:
    case = make_inputs(shape, dtype, device)
    got = forward(case, norm, scale, impl=impl)
    value = truth(case, norm)["y"][0]
    assert got.y.dtype == torch.float8_e4m3fn
    assert got.y.shape == shape
    assert got.y.is_contiguous()
    assert got.scale.shape == ((*shape[:-1], 1) if scale is None else ())
    step = got.scale.double()
    scaled = (value / step).clamp(-LARGEST, LARGEST)
    budget = spacing(scaled) / 2 + float32_error(case, norm) / step
    error = (got.y.double() - scaled).abs()
    assert not (~(error <= budget)).any(), f"worst {(error / budget).max():.3g} times"
    floor = (scaled - scaled.to(torch.float8_e4m3fn).double()).norm()  # of the float64 value, rounded once
    assert error.norm() <= 1.01 * floor


def test_a_row_reaches_the_largest_number(norm: str, impl: str, device: str) -> None:
    case = make_inputs((9, 1000), torch.bfloat16, device)
    got = forward(case, norm, None, impl=impl)
    assert torch.equal(got.y.float().abs().amax(-1), torch.full((9,), LARGEST, device=device))
    want = truth(case, norm)["y"][0].abs().amax(-1, keepdim=True) / LARGEST
    assert ((got.scale.double() - want).abs() <= float32_error(case, norm).amax(-1, keepdim=True) / LARGEST).all()


@pytest.mark.parametrize("scale", [0.02, 1e-3])
def test_amax_is_that_of_y_before_rounding(scale: float, norm: str, impl: str, device: str) -> None:
    case = make_inputs((9, 1000), torch.bfloat16, device)
    got = forward(case, norm, scale, impl=impl)
    inputs = [case[name] for name in ("x", "weight", "bias", "residual")]
    y = getattr(ops, norm)(*inputs, eps=EPS, out_dtype=torch.float32, impl=impl)
    error = float32_error(case, norm).max()
    assert got.amax is not None
    assert got.amax.shape == ()
    assert (got.amax.double() - truth(case, norm)["y"][0].abs().max()).abs() <= error
    beyond = y.abs() > LARGEST * scale
    assert beyond.any() == (scale < 0.01)
    assert torch.equal(got.y.float()[beyond], y[beyond].sign() * LARGEST)


@SCALES
def test_a_row_does_not_depend_on_others(scale: float | None, norm: str, impl: str, device: str) -> None:
    case = make_inputs((300, 256), torch.bfloat16, device)
    whole = forward(case, norm, scale, impl=impl)
    case |= {name: case[name][41:44] for name in ("x", "residual")}
    some = forward(case, norm, scale, impl=impl)
    assert torch.equal(some.y.view(torch.uint8), whole.y[41:44].view(torch.uint8))
    if scale is None:
        assert torch.equal(some.scale, whole.scale[41:44])


@pytest.mark.parametrize("heads", [False, True], ids=["shared", "heads"])
def test_the_backward_is_the_usual_one(heads: bool, norm: str, impl: str, device: str) -> None:
    case = make_inputs(
        (5, 3, 65), torch.bfloat16, device, vector_dtype=torch.float32, stream_dtype=torch.float32, heads=heads
    )
    got = forward(case, norm, None, impl=impl)
    inputs = [case[name] for name in ("x", "weight", "bias", "residual")]
    _, s, *stats = getattr(ops, f"{norm}_fwd")(*inputs, eps=EPS, impl=impl)
    assert torch.equal(got.s, s)
    assert torch.equal(got.s, stored_s(case))
    kept = [t for t in (got.mean, got.rstd) if t is not None]
    assert len(kept) == len(stats)
    # Sums of a row in another order, each within as many roundings as it has levels.
    s64, units = s.double(), (16 + math.ceil(math.log2(65))) * 2.0**-24
    mean = s64.mean(-1) if norm == "layer_norm" else torch.zeros_like(s64[..., 0])
    sizes = [s64.abs().mean(-1), (s64.abs() + mean.abs()[..., None]).square().mean(-1) * stats[-1].double() ** 3]
    for size, one, other in zip(sizes[-len(stats) :], kept, stats, strict=True):
        assert ((one.double() - other.double()).abs() <= 2 * units * size).all()
    assert not got.y.requires_grad
    assert got.amax is None


def test_what_is_not_kept(norm: str, impl: str, device: str) -> None:
    x = make_inputs((5, 65), torch.bfloat16, device)["x"]
    name = "store_rstd" if norm == "rms_norm" else "store_stats"
    got = getattr(ops, f"{norm}_float8_fwd")(x, impl=impl, **{name: False})
    assert got.s is x
    assert got.mean is None
    assert got.rstd is None


@SCALES
def test_rows_at_any_distance(scale: float | None, norm: str, impl: str, device: str) -> None:
    case = make_inputs((8, 96), torch.bfloat16, device)
    want = forward(case, norm, scale, impl=impl)
    wide = torch.zeros(8, 200, dtype=torch.bfloat16, device=device)
    wide[:, 3:99] = case["x"]
    case |= {"x": wide[:, 3:99], "residual": case["residual"].t().contiguous().t()}
    got = forward(case, norm, scale, impl=impl)
    assert torch.equal(got.y.view(torch.uint8), want.y.view(torch.uint8))


def test_values_that_are_not_finite(impl: str, device: str) -> None:
    weight = torch.ones(64, dtype=torch.bfloat16, device=device)
    x = make_inputs((4, 64), torch.bfloat16, device)["x"]
    x[0] = 0
    x[1, 5] = math.nan
    plain = ops.rms_norm_float8_fwd(x, weight, impl=impl)
    assert (plain.y[0].float() == 0).all()
    assert plain.scale[0] == LEAST_SCALE
    assert plain.y[1].float().isnan().all()
    assert plain.scale.isfinite().all()
    weight[7], weight[9] = math.nan, math.inf
    got = ops.rms_norm_float8_fwd(x, weight, impl=impl)
    assert got.y[2, 7].float().isnan()
    assert got.scale[2] == math.inf
    assert got.y[2, 9].float().isnan()
    assert (got.y[2].float() * got.scale[2]).isnan().all()
    weight[9] = 1
    got = ops.rms_norm_float8_fwd(x, weight, impl=impl)
    others = torch.arange(64, device=device) != 7
    assert got.y[2, 7].float().isnan()
    assert not got.y[2, others].float().isnan().any()
    assert torch.equal(got.y[3, others].float(), plain.y[3, others].float())


@SCALES
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 5)], ids=str)
def test_without_elements(shape: tuple[int, ...], scale: float | None, norm: str, impl: str, device: str) -> None:
    got = forward({"x": torch.ones(shape, device=device)}, norm, scale, impl=impl)
    assert got.y.shape == shape
    assert got.rstd is not None
    assert got.rstd.shape == shape[:-1]
    if scale is None:
        assert torch.equal(got.scale, torch.full((*shape[:-1], 1), LEAST_SCALE, device=device))
    else:
        assert got.amax is not None
        assert got.amax == 0


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"scale": 0.5}, TypeError, "`scale` is float, expected a float32 tensor of one element"),
        ({"scale": torch.ones((), dtype=torch.float64)}, TypeError, "`scale` is torch.float64"),
        ({"scale": torch.ones(3)}, ValueError, r"`scale` has shape \(3,\), expected one element"),
        ({"scale": torch.ones((), device="meta")}, ValueError, "`scale` is on meta"),
        ({"x": torch.ones(2, 8, dtype=torch.float64)}, TypeError, "x.float()"),
        ({"eps": -1.0}, ValueError, "`eps` is -1.0"),
    ],
)
def test_wrong_arguments_are_refused(options: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ops.rms_norm_float8_fwd(**({"x": torch.ones(2, 8)} | options))


def test_a_gpu_without_float8_is_refused() -> None:
    with planning(target_named("sm_80")), pytest.raises(ValueError, match="sm_80, which has no float8"):
        ops.rms_norm_float8_fwd(torch.ones(2, 8), impl="triton")


def test_kernels_have_no_race_and_stay_inside() -> None:
    case = make_inputs((7, 77), torch.bfloat16)
    with rg.cpu_triton(seed=1) as session:
        for norm in ("rms_norm", "layer_norm"):
            for scale in (None, 0.02):
                forward(case, norm, scale, impl="triton")
    assert not [*session.faults, *session.undecided], session.report()
    assert {record.kernel for record in session.launches} == {"norm_fwd_float8_kernel"}
