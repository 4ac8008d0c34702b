"""RMSNorm against its definition in float64, on both implementations.

Widths 1 and 2 are degenerate rows, 63, 64 and 65 surround a power of two (masked and full tiles), 129 needs the
next tile size and 2000 a wide one; row counts 0, 1, 7 and 33 give no, one, a partial and several row tiles.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from retrograd.ops import rms_norm
from retrograd.ops.norm.plan import plan_backward, plan_forward
from retrograd.ops.norm.reference import rms_norm_reference

EPS = 1e-6
Case = dict[str, Any]


def make_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, *, given: str = "weight bias residual"
) -> Case:
    """Inputs on which each term of the backward matters: the gradient correlates with x, the weight has signs."""
    generator = torch.Generator().manual_seed(7)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    n = shape[-1]
    x = normal(*shape)
    weight = 1 + 0.2 * normal(n)
    weight[: n // 8] *= -1
    made = {"x": x, "weight": weight, "bias": 0.3 * normal(n), "residual": 0.5 * normal(*shape)}
    kept = {name: made[name].to(dtype).to(device) for name in ("x", *given.split())}
    kept["grad_y"] = (x + 0.5 * normal(*shape)).to(dtype).to(device)
    kept["grad_s"] = normal(*shape).to(dtype).to(device)
    return kept


def truth(case: Case, *, prenorm: bool, eps: float = EPS) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For each result its float64 value and the sum of magnitudes that float32 rounding errors scale with.

    The reference is given s rounded to the input dtype, as stored; its gradient is that of x and of residual.
    """
    x = case["x"]
    inner = torch.float64 if case["x"].dtype == torch.float64 else torch.float32
    s = x if "residual" not in case else (x.to(inner) + case["residual"].to(inner)).to(x.dtype)
    n, m = x.shape[-1], math.prod(x.shape[:-1])
    s64 = s.double().detach().requires_grad_()
    vectors = {name: case[name].double().detach().requires_grad_() for name in ("weight", "bias") if name in case}
    y, s_out = rms_norm_reference(s64, **vectors, eps=eps)
    total = (y * case["grad_y"].double()).sum()
    if prenorm:
        total = total + (s_out * case["grad_s"].double()).sum()
    total.backward()

    with torch.no_grad():
        rows, grad = s64.detach().reshape(m, n), case["grad_y"].double().reshape(m, n)
        rstd = (rows.square().mean(dim=1, keepdim=True) + eps).rsqrt()
        weight = vectors["weight"].detach() if "weight" in vectors else torch.ones(n, dtype=s64.dtype, device=s.device)
        h, g = (rows * rstd).abs(), (grad * weight).abs()
        # |y| before cancellation against the bias, and |rstd| (|g| + |h| mean |g h|) for the gradient.
        y_size = h * weight.abs() + (vectors["bias"].detach().abs() if "bias" in vectors else 0)
        ds_size = rstd * (g + h * (g * h).mean(dim=1, keepdim=True))
        if prenorm:
            ds_size = ds_size + case["grad_s"].double().abs().reshape(m, n)
        out = {"y": (y.detach(), y_size.reshape(x.shape)), "x": (s64.grad, ds_size.reshape(x.shape))}
        if prenorm:
            out["s"] = (s64.detach(), torch.zeros_like(s64))
        if "residual" in case:
            out["residual"] = out["x"]
        if "weight" in case:
            out["weight"] = (vectors["weight"].grad, (grad.abs() * h).sum(dim=0))
        if "bias" in case:
            out["bias"] = (vectors["bias"].grad, grad.abs().sum(dim=0))
    return out


def assert_within_budget(name: str, got: torch.Tensor, want: tuple[torch.Tensor, torch.Tensor], m: int, n: int) -> None:
    """Hold each element to |error| <= u |value| + c 2^-24 size.

    u is the rounding unit of the output dtype, spent once on storing. Inside, float32 operations cost 2^-24 each:
    c counts about 16 elementwise steps and those inside a thread or vector lane, plus log2 N levels of a row's
    reduction tree; sums over rows add their M terms one after another in the worst case. The last term is half the
    distance between subnormals.
    """
    value, size = want
    steps = 16 + math.ceil(math.log2(max(n, 1))) + (m if name in ("weight", "bias") else 0)
    info = torch.finfo(got.dtype)
    inner = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps / 2
    budget = info.eps / 2 * value.abs() + steps * inner * size + info.smallest_normal * info.eps
    assert got.shape == value.shape
    error = (got.double() - value).abs()
    # `not <=` rather than `>`: a NaN has to fail.
    bad = ~(error <= budget)
    assert not bad.any(), f"{name}: {int(bad.sum())} elements over budget, worst {(error / budget).max():.3g} times"


def run(case: Case, *, prenorm: bool = False, frozen: tuple[str, ...] = (), **options: Any) -> dict[str, Any]:
    """Values and gradients of `rms_norm`; arguments named in `frozen` require no gradient."""
    args = {name: case[name].detach() for name in ("x", "weight", "bias", "residual") if name in case}
    for name, tensor in args.items():
        tensor.requires_grad_(name not in frozen)
    out = rms_norm(**args, prenorm=prenorm, **options)
    y, s = out if prenorm else (out, None)
    torch.autograd.backward(
        [y, s] if prenorm else [y], [case["grad_y"], case["grad_s"]] if prenorm else [case["grad_y"]]
    )
    got = {"y": y.detach()} | {name: tensor.grad for name, tensor in args.items()}
    return got | ({"s": s.detach()} if prenorm else {})


def check(case: Case, *, prenorm: bool = False, eps: float = EPS, frozen: tuple[str, ...] = (), **options: Any) -> None:
    """Run and hold every result to its budget; a frozen argument has no gradient."""
    got = run(case, prenorm=prenorm, frozen=frozen, eps=eps, **options)
    want = truth(case, prenorm=prenorm, eps=eps)
    n, m = case["x"].shape[-1], math.prod(case["x"].shape[:-1])
    for name, tensor in got.items():
        if name in frozen:
            assert tensor is None, name
            continue
        assert tensor.dtype == (case["x"] if name in ("y", "s") else case[name]).dtype, name
        assert_within_budget(name, tensor, want[name], m, n)


@pytest.fixture(params=["triton", "torch"])
def impl(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 129], ids=lambda n: f"N{n}")
@pytest.mark.parametrize("m", [0, 1, 7, 33], ids=lambda m: f"M{m}")
def test_shapes(m: int, n: int, impl: str, device: str) -> None:
    check(make_inputs((m, n), torch.float32, device), impl=impl, prenorm=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(33, 65), (64, 2000)], ids=["M33-N65", "M64-N2000"])
def test_dtypes(shape: tuple[int, int], dtype: torch.dtype, impl: str, device: str) -> None:
    check(make_inputs(shape, dtype, device), impl=impl)


@pytest.mark.parametrize("shape", [(65,), (2, 1, 3, 65), (3, 0, 5), (4, 0), (0,)], ids=str)
def test_leading_dimensions_and_empty_inputs(shape: tuple[int, ...], impl: str, device: str) -> None:
    check(make_inputs(shape, torch.float32, device), impl=impl, prenorm=True)


@pytest.mark.parametrize("given", ["", "weight", "bias", "residual", "weight residual"], ids=lambda g: g or "x")
def test_optional_arguments(given: str, impl: str, device: str) -> None:
    check(make_inputs((7, 65), torch.float32, device, given=given), impl=impl)


@pytest.mark.parametrize(
    "wanted", ["x", "weight", "bias", "residual", "x weight", "weight bias", "bias residual"], ids=str
)
def test_any_subset_of_gradients(wanted: str, impl: str, device: str) -> None:
    frozen = tuple(name for name in ("x", "weight", "bias", "residual") if name not in wanted.split())
    check(make_inputs((7, 65), torch.float32, device), impl=impl, frozen=frozen)


def test_prenorm_where_only_s_is_used(impl: str, device: str) -> None:
    case = make_inputs((7, 65), torch.float32, device)
    x, residual = case["x"].requires_grad_(), case["residual"].requires_grad_()
    _, s = rms_norm(x, case["weight"], residual=residual, prenorm=True, impl=impl)
    s.backward(case["grad_s"])
    assert torch.equal(x.grad, case["grad_s"])
    assert torch.equal(residual.grad, case["grad_s"])


def test_prenorm_without_residual_returns_x(impl: str, device: str) -> None:
    x = make_inputs((7, 65), torch.float32, device)["x"]
    y, s = rms_norm(x, prenorm=True, impl=impl)
    assert s is x
    assert torch.equal(y, rms_norm(x, impl=impl))


@pytest.mark.parametrize("layout", ["row-strided", "transposed", "expanded-rows", "offset"])
def test_layouts_of_x(layout: str, impl: str, device: str) -> None:
    case = make_inputs((33, 65), torch.float32, device)
    x = case["x"]
    if layout == "row-strided":
        case["x"] = torch.full((33, 80), float("nan"), device=device)[:, 3:68].copy_(x)
    elif layout == "transposed":
        case["x"] = x.t().contiguous().t()
    elif layout == "expanded-rows":
        case["x"] = x[:1].expand(33, 65)
    else:
        case["x"] = torch.cat([x.new_full((1,), float("nan")), x.reshape(-1)])[1:].view(33, 65)
    check(case, impl=impl)


@pytest.mark.parametrize("layout", ["row-strided", "transposed", "expanded-rows", "expanded-all"])
def test_layouts_of_grad_out(layout: str, impl: str, device: str) -> None:
    case = make_inputs((33, 65), torch.float32, device)
    grad = case["grad_y"]
    if layout == "row-strided":
        case["grad_y"] = torch.full((33, 80), float("nan"), device=device)[:, 3:68].copy_(grad)
    elif layout == "transposed":
        case["grad_y"] = grad.t().contiguous().t()
    elif layout == "expanded-rows":
        case["grad_y"] = grad[:1].expand(33, 65)
    else:
        case["grad_y"] = grad[0, 0].expand(33, 65)
    check(case, impl=impl)


def test_weight_of_another_dtype(impl: str, device: str) -> None:
    case = make_inputs((33, 65), torch.bfloat16, device)
    case["weight"] = case["weight"].float() + 1e-4
    check(case, impl=impl)


def test_frozen_vectors_allocate_no_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from retrograd.ops.norm.triton import backward

    made: list[torch.Tensor] = []
    allocate = backward.allocate_parts

    def spy(*args: Any) -> torch.Tensor:
        made.append(allocate(*args))
        return made[-1]

    monkeypatch.setattr(backward, "allocate_parts", spy)
    case = make_inputs((33, 65), torch.float32, device)
    check(case, impl="triton", frozen=("weight", "bias"))
    assert made == []
    check(case, impl="triton", frozen=("bias",))
    assert [part.dtype for part in made] == [torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("deterministic", [True, False], ids=["ordered", "atomic"])
@pytest.mark.parametrize("width", [65, 64], ids=lambda n: f"N{n}")
def test_column_loop(width: int, deterministic: bool, dtype: torch.dtype, device: str) -> None:
    from retrograd.ops.norm.triton import rms_norm_bwd, rms_norm_fwd

    case = make_inputs((33, width), dtype, device)
    interpreting = device == "cpu"
    size = case["x"].element_size()
    y, s, rstd = rms_norm_fwd(
        *(case[name] for name in ("x", "weight", "bias", "residual")),
        EPS,
        plan=plan_forward(33, width, size, 2, interpreting, max_tile_n=32),
    )
    grad_x, grad_weight, grad_bias = rms_norm_bwd(
        *(case["grad_y"], s, case["weight"], rstd, case["grad_s"]),
        weight_dtype=dtype,
        bias_dtype=dtype,
        plan=plan_backward(33, width, size, 2, deterministic, interpreting, max_tile_n=32),
    )
    want = truth(case, prenorm=True)
    got = {"y": y, "s": s, "x": grad_x, "weight": grad_weight, "bias": grad_bias}
    for name, tensor in got.items():
        assert_within_budget(name, tensor, want[name], 33, width)


def test_eps_takes_effect_in_both_orders(impl: str, device: str) -> None:
    case = make_inputs((7, 65), torch.float32, device)
    for eps in (1e-6, 1e-1, 1e-6, 0.0, 1e-1):
        check(case, impl=impl, eps=eps)


def test_rows_of_zeros_and_of_extreme_size(impl: str, device: str) -> None:
    case = make_inputs((7, 65), torch.float32, device, given="weight")
    case["x"] = case["x"] * torch.tensor([0.0, 1e-8, 1e-4, 1.0, 1e4, 1e8, 1.0], device=device)[:, None]
    check(case, impl=impl)


def test_atomic_sums(device: str) -> None:
    check(make_inputs((33, 129), torch.bfloat16, device), impl="triton", deterministic=False)


def test_repeated_runs_agree_bitwise(impl: str, device: str) -> None:
    case = make_inputs((64, 129), torch.bfloat16, device)
    first = run(case, impl=impl, prenorm=True)
    for _ in range(2):
        again = run(case, impl=impl, prenorm=True)
        for name, tensor in first.items():
            assert torch.equal(tensor, again[name]), name


def test_float64(device: str) -> None:
    check(make_inputs((33, 65), torch.float64, device), impl="torch")


def test_inputs_are_left_alone(impl: str, device: str) -> None:
    case = make_inputs((33, 65), torch.bfloat16, device)
    before = {name: tensor.clone() for name, tensor in case.items()}
    run(case, impl=impl, prenorm=True)
    for name, tensor in case.items():
        assert torch.equal(tensor.detach(), before[name]), name


def test_default_implementation_follows_the_device(device: str) -> None:
    case = make_inputs((7, 65), torch.float32, device)
    chosen = "triton" if device == "cuda" else "torch"
    assert torch.equal(run(case)["weight"], run(case, impl=chosen)["weight"])


def test_second_derivative_is_refused(impl: str, device: str) -> None:
    x = torch.randn(3, 8, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(rms_norm(x, impl=impl).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


X = torch.zeros(4, 8)
REFUSED = {
    "integer-x": ({"x": X.int()}, TypeError, r"`x` has dtype torch\.int32, expected float32"),
    "scalar-x": (
        {"x": torch.tensor(1.0)},
        ValueError,
        r"`x` has shape \(\), expected at least one dimension",
    ),
    "not-a-tensor": ({"x": [1.0]}, TypeError, r"`x` is a list, expected a torch\.Tensor"),
    "residual-as-weight": (
        {"weight": X},
        ValueError,
        r"`weight` has shape \(4, 8\).*did you pass the residual",
    ),
    "weight-shape": ({"weight": X[0, :4]}, ValueError, r"`weight` has shape \(4,\), expected \(8,\)"),
    "weight-dtype": ({"weight": X[0].double()}, TypeError, r"`weight` has dtype torch\.float64.*cast it"),
    "weight-device": ({"weight": X[0].to("meta")}, ValueError, r"`weight` is on meta, expected cpu.*move it"),
    "bias-shape": ({"bias": X[0, :4]}, ValueError, r"`bias` has shape \(4,\), expected \(8,\)"),
    "bias-type": ({"bias": 1.0}, TypeError, r"`bias` is a float, expected a torch\.Tensor or None"),
    "residual-shape": ({"residual": X[:1]}, ValueError, r"`residual` has shape \(1, 8\), expected \(4, 8\)"),
    "residual-dtype": ({"residual": X.half()}, TypeError, r"`residual` has dtype torch\.float16, expected"),
    "residual-device": ({"residual": X.to("meta")}, ValueError, r"`residual` is on meta, expected cpu"),
    "residual-type": ({"residual": 0}, TypeError, r"`residual` is a int, expected"),
    "eps-type": ({"eps": "small"}, TypeError, r"`eps` is a str, expected a Python float"),
    "eps-bool": ({"eps": True}, TypeError, r"`eps` is a bool"),
    "eps-negative": ({"eps": -1e-6}, ValueError, r"`eps` is -1e-06, expected a finite number of 0 or more"),
    "eps-nan": ({"eps": float("nan")}, ValueError, r"`eps` is nan"),
    "impl": ({"impl": "cuda"}, ValueError, r"`impl` is 'cuda', expected one of 'triton', 'torch'"),
    "float64-triton": ({"x": X.double(), "impl": "triton"}, TypeError, r"float64.*use impl='torch'"),
}


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_arguments_are_refused(changes: Case, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rms_norm(**({"x": X} | changes))


def test_triton_on_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match=r"impl='triton' on a CPU tensor needs TRITON_INTERPRET=1 set before"):
        rms_norm(X, impl="triton")


def test_atomic_sums_are_refused_in_deterministic_mode(impl: str, device: str) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match=r"pass deterministic=True"):
            rms_norm(X.to(device), deterministic=False, impl=impl)
    finally:
        torch.use_deterministic_algorithms(before)
