"""RMSNorm: which arguments are refused, and in which words."""

from __future__ import annotations

import pytest
import torch
from norm_cases import Case

import retrograd as rg
from retrograd.ops import rms_norm

X = torch.zeros(4, 8)
W = X[0]
REFUSED = {
    "integer-x": ({"x": X.int()}, TypeError, r"`x` has dtype torch\.int32, expected float32"),
    "scalar-x": ({"x": torch.tensor(1.0)}, ValueError, r"`x` has shape \(\), expected at least one dimension"),
    "not-a-tensor": ({"x": [1.0]}, TypeError, r"`x` is a list, expected a torch\.Tensor"),
    "residual-as-weight": ({"weight": X}, ValueError, r"`weight` has shape \(4, 8\).*did you pass the residual"),
    "weight-shape": ({"weight": W[:4]}, ValueError, r"`weight` has shape \(4,\), expected \(8,\)"),
    "weight-heads": (
        {"x": torch.zeros(2, 3, 8), "weight": X},
        ValueError,
        r"`weight` has shape \(4, 8\), expected \(3, 8\) to match x\.shape\[-2:\]",
    ),
    "weight-dtype": ({"weight": W.double()}, TypeError, r"`weight` has dtype torch\.float64.*cast it"),
    "weight-device": ({"weight": W.to("meta")}, ValueError, r"`weight` is on meta, expected cpu.*move it"),
    "bias-shape": ({"bias": W[:4]}, ValueError, r"`bias` has shape \(4,\), expected \(8,\)"),
    "bias-type": ({"bias": 1.0}, TypeError, r"`bias` is a float, expected a torch\.Tensor or None"),
    "bias-unlike-weight": (
        {"x": torch.zeros(2, 4, 8), "weight": X, "bias": W},
        ValueError,
        r"`bias` has shape \(8,\), expected \(4, 8\) like weight",
    ),
    "residual-shape": ({"residual": X[:1]}, ValueError, r"`residual` has shape \(1, 8\), expected \(4, 8\)"),
    "residual-dtype": ({"residual": X.double()}, TypeError, r"`residual` has dtype torch\.float64, expected float32"),
    "residual-device": ({"residual": X.to("meta")}, ValueError, r"`residual` is on meta, expected cpu"),
    "residual-type": ({"residual": 0}, TypeError, r"`residual` is a int, expected"),
    "residual-of-float64": (
        {"x": X.double(), "residual": X, "impl": "torch"},
        TypeError,
        r"`residual` has dtype torch\.float32, expected torch\.float64",
    ),
    "residual_dtype": ({"residual_dtype": torch.int8}, TypeError, r"`residual_dtype` has dtype torch\.int8"),
    "out_dtype": ({"out_dtype": "half"}, TypeError, r"`out_dtype` has dtype half, expected float32"),
    "eps-type": ({"eps": "small"}, TypeError, r"`eps` is a str, expected a Python float"),
    "eps-bool": ({"eps": True}, TypeError, r"`eps` is a bool"),
    "eps-tensor": ({"eps": torch.tensor(1e-6)}, TypeError, r"`eps` is a Tensor, expected.*\.item\(\)"),
    "eps-negative": ({"eps": -1e-6}, ValueError, r"`eps` is -1e-06, expected a finite number of 0 or more"),
    "eps-nan": ({"eps": float("nan")}, ValueError, r"`eps` is nan"),
    "offset-type": ({"weight": W, "weight_offset": W}, TypeError, r"`weight_offset` is a Tensor, expected"),
    "offset-alone": ({"weight_offset": 1.0}, ValueError, r"`weight_offset` is 1\.0 without a weight"),
    "dw_parts": ({"dw_parts": 0}, ValueError, r"`dw_parts` is 0, expected an int of 1 or more"),
    "impl": ({"impl": "cuda"}, ValueError, r"`impl` is 'cuda', expected one of 'triton', 'native', 'torch'"),
    "float64-triton": ({"x": X.double(), "impl": "triton"}, TypeError, r"float64.*impl='triton'.*use impl='torch'"),
    "float64-native": ({"x": X.double(), "impl": "native"}, TypeError, r"float64.*impl='native'.*use impl='torch'"),
    "native-device": ({"x": X.to("meta"), "impl": "native"}, ValueError, r"`x` is on meta, expected cpu"),
}


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_arguments_are_refused(changes: Case, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rms_norm(**({"x": X} | changes))


@pytest.mark.outside
def test_triton_on_cpu_says_what_it_needs() -> None:
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match=r"impl='triton' on a CPU tensor needs `with retrograd.cpu_triton\(\):`"):
        rms_norm(X, impl="triton")
    with rg.cpu_triton() as session:
        y = rms_norm(X, impl="triton")
    assert session.launches
    assert not session.faults
    assert y.shape == X.shape


def test_native_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from retrograd.ops.norm import cpu, dispatch

    dispatch.resolve.cache_clear()
    monkeypatch.setattr(cpu, "why_not", lambda: "there is no compiler")
    with pytest.raises(RuntimeError, match=r"impl='native' cannot run here: there is no compiler; use impl='torch'"):
        rms_norm(X, impl="native")
    assert dispatch.FAMILY.choose(None, X.dtype, X.device).value == "torch"
    dispatch.resolve.cache_clear()


def test_atomic_sums_are_refused_in_deterministic_mode(impl: str, device: str) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match=r"pass deterministic=True"):
            rms_norm(X.to(device), deterministic=False, impl=impl)
    finally:
        torch.use_deterministic_algorithms(before)


def test_default_eps_is_1e_6(impl: str, device: str) -> None:
    x = torch.full((1, 8), 1e-3, device=device)
    assert torch.equal(rms_norm(x, impl=impl), rms_norm(x, eps=1e-6, impl=impl))
    assert not torch.equal(rms_norm(x, impl=impl), rms_norm(x, eps=1e-5, impl=impl))
