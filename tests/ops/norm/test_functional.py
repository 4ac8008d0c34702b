"""The halves without autograd give what the whole gives, in the shapes of their inputs."""

from __future__ import annotations

import math

import pytest
import torch
from norm_cases import make_inputs, run

from retrograd import ops


@pytest.mark.parametrize("heads", [False, True], ids=["shared", "heads"])
@pytest.mark.parametrize("shape", [(7, 65), (2, 3, 65), (2, 0, 5)], ids=str)
def test_halves_make_the_whole(shape: tuple[int, ...], heads: bool, norm: str, impl: str, device: str) -> None:
    if heads and len(shape) == 2:
        pytest.skip("two dimensions have no heads")
    case = make_inputs(
        shape, torch.bfloat16, device, vector_dtype=torch.float32, stream_dtype=torch.float32, heads=heads
    )
    options = {"eps": 1e-6, "weight_offset": 0.5, "impl": impl}
    want = run(case, norm, prenorm=True, **options)
    forward, backward = getattr(ops, f"{norm}_fwd"), getattr(ops, f"{norm}_bwd")
    inputs = [case[name] for name in ("x", "weight", "bias", "residual")]
    y, s, *stats = forward(*inputs, **options)
    assert all(t.shape == shape[:-1] and t.dtype == torch.float32 for t in stats)
    grads = backward(
        *(case["grad_y"], s, case["weight"], *stats, case["grad_s"]),
        x_dtype=torch.bfloat16,
        bias_dtype=torch.float32,
        **options,
    )
    for got, name in zip((y, s, *grads), ("y", "s", "x", "weight", "bias"), strict=True):
        assert got.dtype == want[name].dtype, name
        assert torch.equal(got, want[name]), name


def test_only_what_is_asked_for(norm: str, impl: str, device: str) -> None:
    case = make_inputs((7, 65), device=device)
    forward, backward = getattr(ops, f"{norm}_fwd"), getattr(ops, f"{norm}_bwd")
    stats_name = "store_rstd" if norm == "rms_norm" else "store_stats"
    y, s, *stats = forward(case["x"], impl=impl, **{stats_name: False})
    assert s is case["x"]
    assert all(t is None for t in stats)
    _, _, *stats = forward(case["x"], impl=impl)
    assert backward(y, s, None, *stats, impl=impl)[1:] == (None, None)
    grads = backward(y, s, case["weight"], *stats, impl=impl, need_x=False, need_weight=False)
    assert grads == (None, None, None)


def test_statistics_of_any_strides(norm: str, impl: str, device: str) -> None:
    case = make_inputs((2, 3, 65), device=device)
    forward, backward = getattr(ops, f"{norm}_fwd"), getattr(ops, f"{norm}_bwd")
    _, s, *stats = forward(case["x"], impl=impl)
    want = backward(case["grad_y"], s, case["weight"], *stats, impl=impl)
    for apart in (lambda t: torch.stack([t, t + 1], -1)[..., 0], lambda t: t.t().contiguous().t()):
        got = backward(case["grad_y"], s, case["weight"], *map(apart, stats), impl=impl)
        assert all(torch.equal(a, b) for a, b in zip(got[:2], want[:2], strict=True))


@pytest.mark.parametrize(("eps", "rstd"), [(0.25, 2.0), (0.0, math.inf), (1e-300, math.inf)], ids=str)
def test_rows_without_elements(eps: float, rstd: float, norm: str, impl: str, device: str) -> None:
    x = torch.ones(3, 0, device=device)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # what nobody writes is NaN
    try:
        y, _, *stats = getattr(ops, f"{norm}_fwd")(x, eps=eps, impl=impl)
    finally:
        torch.use_deterministic_algorithms(before)
    assert y.shape == (3, 0)
    assert [t.tolist() for t in stats] == [[0.0] * 3, [rstd] * 3][-len(stats) :]


def test_autograd_does_not_see_them(norm: str, impl: str, device: str) -> None:
    x = torch.randn(3, 8, device=device, requires_grad=True)
    assert not getattr(ops, f"{norm}_fwd")(x, impl=impl)[0].requires_grad


def test_wrong_arguments_are_refused() -> None:
    x, rstd = torch.ones(4, 8), torch.ones(4)
    with pytest.raises(ValueError, match=r"`weight` has shape \(4,\), expected \(8,\)"):
        ops.rms_norm_fwd(x, torch.ones(4))
    with pytest.raises(ValueError, match=r"`grad_out` has shape \(8,\), expected \(4, 8\)"):
        ops.rms_norm_bwd(x[0], x, None, rstd)
    with pytest.raises(ValueError, match=r"`rstd` has shape \(1,\), expected \(4,\) like the rows of s"):
        ops.rms_norm_bwd(x, x, None, rstd[:1])
    with pytest.raises(ValueError, match=r"`mean` has shape \(1,\)"):
        ops.layer_norm_bwd(x, x, None, rstd[:1], rstd)
    with pytest.raises(TypeError, match=r"`rstd` has dtype torch\.float64, expected torch\.float32 beside s"):
        ops.rms_norm_bwd(x, x, None, rstd.double())
    with pytest.raises(TypeError, match=r"`mean` is a float"):
        ops.layer_norm_bwd(x, x, None, 0.5, rstd)
    with pytest.raises(ValueError, match=r"`rstd` is on meta, expected cpu"):
        ops.rms_norm_bwd(x, x, None, rstd.to("meta"))
    with pytest.raises(TypeError, match=r"`s` is a list"):
        ops.rms_norm_bwd(x, [1.0], None, rstd)
