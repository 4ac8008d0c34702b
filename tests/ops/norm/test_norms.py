"""Both norms against their definition in float64, on every implementation.

Widths 1 and 2 are degenerate rows, 63, 64 and 65 surround a power of two (masked and full tiles), 129 needs the
next tile size and 2000 a wide one; row counts 0, 1, 7 and 33 give no, one, a partial and several row tiles.
"""

from __future__ import annotations

import pytest
import torch
from norm_cases import Case, check, make_inputs, run

from retrograd import ops

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 129], ids=lambda n: f"N{n}")
@pytest.mark.parametrize("m", [0, 1, 7, 33], ids=lambda m: f"M{m}")
def test_shapes(m: int, n: int, norm: str, impl: str, device: str) -> None:
    check(make_inputs((m, n), device=device), norm, impl=impl, prenorm=True)


@pytest.mark.parametrize("dtype", [SINGLE, BFLOAT, HALF], ids=str)
@pytest.mark.parametrize("shape", [(33, 65), (64, 2000)], ids=["M33-N65", "M64-N2000"])
def test_dtypes(shape: tuple[int, int], dtype: torch.dtype, norm: str, impl: str, device: str) -> None:
    check(make_inputs(shape, dtype, device), norm, impl=impl)


@pytest.mark.parametrize("shape", [(65,), (2, 1, 3, 65), (3, 0, 5), (4, 0), (0,)], ids=str)
def test_leading_dimensions_and_empty_inputs(shape: tuple[int, ...], norm: str, impl: str, device: str) -> None:
    check(make_inputs(shape, device=device), norm, impl=impl, prenorm=True)


@pytest.mark.parametrize("given", ["", "weight", "bias", "residual", "weight residual"], ids=lambda g: g or "x")
def test_optional_arguments(given: str, norm: str, impl: str, device: str) -> None:
    check(make_inputs((7, 65), device=device, given=given), norm, impl=impl)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "residual", "x weight", "weight bias", "bias residual"])
def test_any_subset_of_gradients(wanted: str, norm: str, impl: str, device: str) -> None:
    frozen = tuple(name for name in ("x", "weight", "bias", "residual") if name not in wanted.split())
    check(make_inputs((7, 3, 65), device=device), norm, impl=impl, frozen=frozen)


@pytest.mark.parametrize("stream", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("dtype", [BFLOAT, SINGLE], ids=str)
def test_mixed_dtypes(dtype: torch.dtype, stream: torch.dtype, norm: str, impl: str, device: str) -> None:
    case = make_inputs((33, 65), dtype, device, vector_dtype=SINGLE, stream_dtype=stream)
    case["weight"] += 1e-4  # not a bfloat16 value
    check(case, norm, impl=impl, prenorm=True)


@pytest.mark.parametrize("given", ["weight bias", "weight bias residual"])
@pytest.mark.parametrize("prenorm", [False, True], ids=["postnorm", "prenorm"])
@pytest.mark.parametrize("s_dtype", [SINGLE, BFLOAT], ids=str)
def test_residual_and_output_dtypes(
    s_dtype: torch.dtype, prenorm: bool, given: str, norm: str, impl: str, device: str
) -> None:
    x_dtype = BFLOAT if s_dtype == SINGLE else SINGLE
    case = make_inputs((7, 65), x_dtype, device, given=given)
    case["grad_y"], case["grad_s"] = case["grad_y"].to(HALF), case["grad_s"].to(s_dtype)
    check(case, norm, impl=impl, prenorm=prenorm, residual_dtype=s_dtype, out_dtype=HALF)


def test_weight_offset(norm: str, impl: str, device: str) -> None:
    case = make_inputs((33, 65), BFLOAT, device)
    case["weight"] = case["weight"] - 1
    check(case, norm, impl=impl, weight_offset=1.0)


@pytest.mark.parametrize("shape", [(5, 3, 65), (2, 4, 1, 64), (2, 0, 3, 8), (0, 3, 8), (5, 0, 8), (5, 3, 0)], ids=str)
@pytest.mark.parametrize("given", ["weight", "bias", "weight bias residual"])
def test_one_row_of_weights_a_head(given: str, shape: tuple[int, ...], norm: str, impl: str, device: str) -> None:
    check(make_inputs(shape, device=device, given=given, heads=True), norm, impl=impl, weight_offset=0.0)


@pytest.mark.parametrize("wanted", ["bias", "weight", "x"])
def test_gradients_of_heads_alone(wanted: str, norm: str, impl: str, device: str) -> None:
    frozen = tuple(name for name in ("x", "weight", "bias") if name != wanted)
    for heads in (0, 1, 3):
        case = make_inputs((5, heads, 65), device=device, given="weight bias", heads=True)
        check(case, norm, impl=impl, frozen=frozen)


def spread(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of an [M, N] tensor at other strides, NaN between them."""
    nan, (m, n) = float("nan"), tensor.shape
    if layout == "rows":
        return tensor.new_full((m, n + 15), nan)[:, 3 : n + 3].copy_(tensor)
    if layout == "columns":
        return tensor.new_full((m, 2 * n), nan)[:, ::2].copy_(tensor)
    if layout == "transposed":
        return tensor.t().contiguous().t()
    if layout == "offset":
        return torch.cat([tensor.new_full((1,), nan), tensor.reshape(-1)])[1:].view(m, n)
    return (tensor[:1] if layout == "one-row" else tensor[0, 0]).expand(m, n)


@pytest.mark.parametrize("layout", ["rows", "columns", "transposed", "offset", "one-row", "one-value"])
@pytest.mark.parametrize("name", ["x", "residual", "grad_y", "grad_s"])
def test_layouts(name: str, layout: str, norm: str, impl: str, device: str) -> None:
    case = make_inputs((7, 65), device=device)
    case[name] = spread(case[name], layout)
    check(case, norm, impl=impl, prenorm=True)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_layouts_of_vectors(name: str, norm: str, impl: str, device: str) -> None:
    case = make_inputs((7, 65), device=device)
    gapped = torch.full((130,), float("nan"), device=device)[::2]
    case[name] = gapped.copy_(case[name])
    check(case, norm, impl=impl)
    case[name] = case[name][:1].expand(65)
    check(case, norm, impl=impl)


def test_permuted_leading_dimensions(norm: str, impl: str, device: str) -> None:
    case = make_inputs((3, 5, 65), device=device)
    for name in ("x", "residual", "grad_y"):
        case[name] = case[name].transpose(0, 1).contiguous().transpose(0, 1)
    check(case, norm, impl=impl, prenorm=True)


def test_eps_takes_effect_in_both_orders(norm: str, impl: str, device: str) -> None:
    case = make_inputs((7, 65), device=device)
    for eps in (1e-6, 1e-1, 1e-6, 0.0, 1e-1, 0):
        check(case, norm, impl=impl, eps=eps)


def test_rows_of_zeros_and_of_extreme_size(norm: str, impl: str, device: str) -> None:
    case = make_inputs((7, 65), device=device, given="weight")
    case["x"] = case["x"] * torch.tensor([0.0, 1e-8, 1e-4, 1.0, 1e4, 1e8, 1.0], device=device)[:, None]
    check(case, norm, impl=impl)


def test_tiny_rows_without_eps(norm: str, impl: str, device: str) -> None:
    case = make_inputs((3, 65), device=device, given="weight")
    # The mean square of the smallest is 1e-36, near the smallest normal number of float32.
    case["x"] = case["x"] * torch.tensor([1e-18, 1e-12, 1e-6], device=device)[:, None]
    case["grad_y"] = case["grad_y"] * torch.tensor([1e-12, 1e-6, 1.0], device=device)[:, None]
    check(case, norm, impl=impl, eps=0.0)


@pytest.mark.parametrize("parts", [1, 3, 64])
def test_number_of_partial_sums(parts: int, norm: str, impl: str, device: str) -> None:
    check(make_inputs((33, 65), device=device), norm, impl=impl, dw_parts=parts)


def test_sums_in_any_order(norm: str, impl: str, device: str) -> None:
    check(make_inputs((33, 129), BFLOAT, device), norm, impl=impl, deterministic=False)


def test_float64(norm: str, device: str) -> None:
    check(make_inputs((33, 65), torch.float64, device), norm, impl="torch", prenorm=True)
    check(make_inputs((5, 3, 65), torch.float64, device, heads=True), norm, impl="torch", weight_offset=0.5)


def assert_same_bits(got: Case, want: Case) -> None:
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def test_repeated_runs_agree_bitwise(norm: str, impl: str, device: str) -> None:
    case = make_inputs((64, 129), BFLOAT, device)
    first = run(case, norm, impl=impl, prenorm=True)
    for _ in range(2):
        assert_same_bits(run(case, norm, impl=impl, prenorm=True), first)


@pytest.mark.parametrize("n", [65, 1024], ids=lambda n: f"N{n}")
def test_a_row_does_not_depend_on_the_others(n: int, norm: str, impl: str, device: str) -> None:
    case = make_inputs((33, n), BFLOAT, device)
    full = run(case, norm, impl=impl, prenorm=True)
    for rows in (slice(0, 1), slice(17, 18), slice(31, 33), slice(8, 24)):
        part = {name: t if t.dim() == 1 else t[rows] for name, t in case.items()}
        got = run(part, norm, impl=impl, prenorm=True)
        for name in ("y", "s", "x", "residual"):
            assert torch.equal(got[name], full[name][rows]), (name, rows)


def test_inputs_are_left_alone(norm: str, impl: str, device: str) -> None:
    case = make_inputs((33, 65), BFLOAT, device)
    before = {name: tensor.clone() for name, tensor in case.items()}
    run(case, norm, impl=impl, prenorm=True)
    for name, tensor in case.items():
        assert torch.equal(tensor.detach(), before[name]), name


def test_prenorm_without_residual_returns_x(norm: str, impl: str, device: str) -> None:
    x = make_inputs((7, 65), device=device)["x"]
    y, s = getattr(ops, norm)(x, prenorm=True, impl=impl)
    assert s is x
    assert torch.equal(y, getattr(ops, norm)(x, impl=impl))


def test_default_implementation_follows_the_device(norm: str, device: str) -> None:
    from retrograd.ops.norm import cpu

    case = make_inputs((7, 65), device=device)
    chosen = "triton" if device == "cuda" else "native" if cpu.why_not() is None else "torch"
    assert_same_bits(run(case, norm), run(case, norm, impl=chosen))


def test_views_that_torch_negates_when_it_reads_them(norm: str, impl: str, device: str) -> None:
    case = make_inputs((5, 32), device=device, given="weight residual")
    negative = {name: torch.complex(tensor, -tensor).conj().imag for name, tensor in case.items()}
    assert all(tensor.is_neg() for tensor in negative.values())
    want, got = (run(given, norm, prenorm=True, impl=impl) for given in (case, negative))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_low_level_backward_of_such_views(impl: str, device: str) -> None:
    case = make_inputs((5, 32), device=device, given="weight")
    negative = {name: torch.complex(tensor, -tensor).conj().imag for name, tensor in case.items()}
    results = []
    for given in (case, negative):
        _, s, rstd = ops.rms_norm_fwd(given["x"], given["weight"], impl=impl)
        results.append(ops.rms_norm_bwd(given["grad_y"], s, given["weight"], rstd, impl=impl))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True) if a is not None)
