"""The grids on which quack and Liger test their norms, run on ours through functions with their signatures.

Sizes, dtypes and options are theirs, inputs and bounds are not: every element is held to the budget of `norm_cases`,
which is tighter than the tolerance of either. Wide or many rows need a GPU; the CPU runs a part of each grid on each
implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from norm_cases import INPUTS, Case, assert_within_budget, truth

from retrograd import ops

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="sizes for a CUDA device")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Narrow and aligned, then 760 and 1128: not multiples of 64, 1128 beside a power of two.
QUACK_NARROW = [192, 256, 512, 760, 1024, 1128, 2048, 4096]
QUACK_WIDE = [8192, 16384, 32768, 65536, 131072, 262144]
QUACK_ROWS = [1, 37, 199, 8192]
# float64 truths of more elements than this do not fit beside each other on most devices.
MOST_ELEMENTS = 2**26


def quack_rmsnorm(
    x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6, prenorm=False,
    weight_offset=0.0, impl=None,
):  # fmt: skip
    """quack.rmsnorm."""
    return ops.rms_norm(
        x, weight, bias, residual, eps=eps, prenorm=prenorm, residual_dtype=residual_dtype, out_dtype=out_dtype,
        weight_offset=weight_offset, impl=impl,
    )  # fmt: skip


def quack_layernorm(x, weight, bias=None, eps=1e-6, impl=None):
    """quack's layernorm, with a backward, any number of dimensions and any dtype of weight."""
    return ops.layer_norm(x, weight, bias, eps=eps, impl=impl)


def liger_rms_norm(x, weight, eps, offset=0.0, casting_mode="llama", in_place=True, impl=None):
    """LigerRMSNormFunction.apply. `in_place` lets Liger overwrite grad_out, which we never do."""
    if casting_mode == "none":
        raise ValueError("casting_mode 'none' computes in 16 bits, which is not offered; use 'gemma'")
    out_dtype = torch.promote_types(x.dtype, weight.dtype) if casting_mode == "llama" else None
    return ops.rms_norm(x, weight, eps=eps, weight_offset=offset, out_dtype=out_dtype, impl=impl)


def liger_fused_add_rms_norm(x, residual, weight, eps, offset=0.0, casting_mode="llama", in_place=False, impl=None):
    """LigerFusedAddRMSNormFunction.apply: y and the sum."""
    assert casting_mode != "none"
    return ops.rms_norm(x, weight, residual=residual, eps=eps, weight_offset=offset, prenorm=True, impl=impl)


def liger_layer_norm(x, weight, bias, eps, impl=None):
    """LigerLayerNormFunction.apply."""
    return ops.layer_norm(x, weight, bias, eps=eps, impl=impl)


def make_case(shape, dtype, device, given="weight", vector_dtype=None, stream_dtype=None, heads=False) -> Case:
    """Inputs as those of `norm_cases`, made where they are used."""
    generator = torch.Generator(device).manual_seed(7)

    def normal(*size):
        return torch.randn(size, generator=generator, device=device)

    vector = shape[-2:] if heads else shape[-1:]
    x = normal(*shape)
    made = {"weight": 1 + 0.4 * normal(*vector), "bias": 0.3 * normal(*vector), "residual": 0.5 * normal(*shape)}
    dtypes = {"weight": vector_dtype, "bias": vector_dtype, "residual": stream_dtype}
    case = {"x": x.to(dtype)} | {name: made[name].to(dtypes[name] or dtype) for name in given.split()}
    case["grad_y"] = (x + 0.5 * normal(*shape)).to(dtype)
    case["grad_s"] = normal(*shape).to(stream_dtype or dtype)
    return case


def results(function: Callable, case: Case) -> Case:
    """What `function` of the inputs by name gives, with the gradients of all of them."""
    leaves = {name: case[name].detach().clone().requires_grad_() for name in INPUTS if name in case}
    out = function(**leaves)
    roots = out if isinstance(out, tuple) else (out,)
    grads = torch.autograd.grad(roots, list(leaves.values()), [case["grad_y"], case["grad_s"]][: len(roots)])
    named = dict(zip(("y", "s"), (root.detach() for root in roots), strict=False))
    return named | dict(zip(leaves, grads, strict=True))


def hold(got: Case, case: Case, norm: str, **options) -> None:
    """Every result within its budget and in the dtype of its input."""
    want = truth(case, norm, prenorm="s" in got, **options)
    for name, tensor in got.items():
        if name in case:
            assert tensor.dtype == case[name].dtype, name
        assert_within_budget(name, tensor, want[name], math.prod(case["x"].shape[:-1]), case["x"].shape[-1])


def weights(dtype):
    return {"given": ""} if dtype is None else {"vector_dtype": dtype}


def eps_of(n: int) -> float:
    """Both values that quack tests, each at about half of the widths."""
    return 1e-5 if n % 3 else 1e-6


@pytest.mark.dealt(3)
@pytest.mark.parametrize("weight_dtype", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [192, 760, 1128, 4096])
@pytest.mark.parametrize("m", [1, 37])
def test_quack_rmsnorm(m, n, dtype, weight_dtype, device, impl):
    case = make_case((m, n), dtype, device, **weights(weight_dtype))
    hold(results(lambda **t: quack_rmsnorm(**t, eps=eps_of(n), impl=impl), case), case, "rms_norm", eps=eps_of(n))


@pytest.mark.parametrize("weight_dtype", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "n"),
    [(m, n) for n in QUACK_NARROW + QUACK_WIDE for m in QUACK_ROWS if m * n <= MOST_ELEMENTS],
    ids=lambda v: str(v),
)
class TestQuackRmsnormWide:
    pytestmark = gpu

    def test_rmsnorm(self, m, n, dtype, weight_dtype):
        case = make_case((m, n), dtype, "cuda", **weights(weight_dtype))
        hold(results(lambda **t: quack_rmsnorm(**t, eps=eps_of(n)), case), case, "rms_norm", eps=eps_of(n))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "n", [256, 760, 1128, 4096, *(pytest.param(n, marks=gpu) for n in [512, 1024, 2048, *QUACK_WIDE])]
)
@pytest.mark.parametrize("m", [1, 37])
def test_quack_layernorm(m, n, dtype, device):
    case = make_case((m, n), dtype, device, vector_dtype=torch.float32)
    hold(results(lambda **t: quack_layernorm(**t, eps=eps_of(n)), case), case, "layer_norm", eps=eps_of(n))


@pytest.mark.parametrize("stream_dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("prenorm", [True, False], ids=["prenorm", "no-prenorm"])
@pytest.mark.parametrize("m", [32, pytest.param(8192, marks=gpu)])
def test_quack_residual(m, prenorm, stream_dtype, device, impl):
    case = make_case(
        (m, 1024), torch.float16, device, "weight bias residual", vector_dtype=torch.float32, stream_dtype=stream_dtype
    )
    got = results(lambda **t: quack_rmsnorm(**t, prenorm=prenorm, impl=impl), case)
    assert ("s" in got) == prenorm
    hold(got, case, "rms_norm")


def test_quack_residual_only_the_sum_has_a_gradient(device, impl):
    case = make_case((32, 1024), torch.float16, device, "weight residual", vector_dtype=torch.float32)
    leaves = [case[name].requires_grad_() for name in ("x", "weight", "residual")]
    _, s = quack_rmsnorm(*leaves[:2], residual=leaves[2], prenorm=True, impl=impl)
    dx, dw, dr = torch.autograd.grad(s, leaves, case["grad_s"], allow_unused=True)
    assert torch.equal(dx, case["grad_s"])
    assert torch.equal(dr, case["grad_s"])
    assert dw is None or not dw.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quack_options(dtype, device, impl):
    options = dict(residual_dtype=torch.float32, out_dtype=torch.bfloat16, weight_offset=1.0, eps=1e-5)
    case = make_case((37, 760), dtype, device, vector_dtype=torch.float32, stream_dtype=torch.float32)
    case["weight"] -= 1
    got = results(lambda **t: quack_rmsnorm(**t, **options, prenorm=True, impl=impl), case)
    assert (got["y"].dtype, got["s"].dtype) == (torch.bfloat16, torch.float32)
    case["grad_y"] = case["grad_y"].to(torch.bfloat16)  # autograd casts it to the dtype of y
    hold(got, case, "rms_norm", eps=1e-5, weight_offset=1.0, residual_dtype=torch.float32)


@pytest.mark.parametrize("shape", [(2, 5, 4, 64), pytest.param((4, 2048, 32, 128), marks=gpu)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quack_weight_of_each_head(shape, dtype, device, impl):
    case = make_case(shape, dtype, device, vector_dtype=torch.float32, heads=True)
    hold(results(lambda **t: quack_rmsnorm(**t, impl=impl), case), case, "rms_norm")


@pytest.mark.parametrize("shape", [(2, 16, 576), pytest.param((8, 4096, 576), marks=gpu)], ids=str)
def test_quack_strided_rows(shape, device, impl):
    case = make_case((*shape[:2], 512), torch.bfloat16, device, vector_dtype=torch.float32)
    wide = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
    wide[..., :512] = case["x"]
    x = wide[..., :512].detach().requires_grad_()
    assert not x.is_contiguous()
    weight = case["weight"].requires_grad_()
    y = quack_rmsnorm(x, weight, eps=1e-5, impl=impl)
    dx, dw = torch.autograd.grad(y, (x, weight), case["grad_y"])
    hold({"y": y.detach(), "x": dx, "weight": dw}, case, "rms_norm", eps=1e-5)


@pytest.mark.parametrize("prenorm", [True, False], ids=["prenorm", "no-prenorm"])
def test_quack_under_compile(prenorm, device):
    torch.compiler.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    function = torch.compile(quack_rmsnorm, fullgraph=True, backend=backend)
    case = make_case((32, 1024), torch.float16, device, "weight residual", vector_dtype=torch.float32)
    impl = None if device == "cuda" else "torch"
    hold(results(lambda **t: function(**t, prenorm=prenorm, impl=impl), case), case, "rms_norm")


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 60 * 2**30,
    reason="five tensors of more than 2**31 bfloat16 elements",
)
def test_quack_more_than_2_31_elements(much_memory):
    m, n = 32768, 131072
    generator = torch.Generator("cuda").manual_seed(7)
    x, grad_y = (torch.randn(m, n, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(2))
    weight = torch.randn(n, device="cuda", generator=generator).requires_grad_()
    y = quack_rmsnorm(x.requires_grad_(), weight, eps=1e-5)
    dx, dw = torch.autograd.grad(y, (x, weight), grad_y)
    rows = torch.tensor([0, 1, m // 2 - 1, m // 2, m - 2, m - 1], device="cuda")  # offsets on both sides of 2**31
    case = {"x": x.detach()[rows], "weight": weight.detach(), "grad_y": grad_y[rows]}
    hold({"y": y.detach()[rows], "x": dx[rows]}, case, "rms_norm", eps=1e-5)
    want, size = torch.zeros((2, n), dtype=torch.float64, device="cuda")
    for chunk in range(0, m, 512):
        s, g = x.detach()[chunk : chunk + 512].double(), grad_y[chunk : chunk + 512].double()
        terms = g * s * (s.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        want += terms.sum(0)
        size += terms.abs().sum(0)
    assert_within_budget("weight", dw, (want, size), m, n)


LIGER_SHAPES = [(2, 16, 512), (5, 123, 123), (3, 41, 213)]
LIGER_LARGE = [(2, 128, 512), (4, 256, 1024), (8, 512, 2048), (16, 1024, 4096), (3, 423, 213), (7, 341, 234),
               (9, 236, 345)]  # fmt: skip
LIGER_GRID = [*LIGER_SHAPES, *(pytest.param(shape, marks=gpu) for shape in LIGER_LARGE)]


@pytest.mark.dealt(3)
@pytest.mark.parametrize(("mode", "offset"), [("llama", 0.0), ("gemma", 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", LIGER_GRID, ids=str)
@pytest.mark.parametrize("fused_add", [False, True], ids=["plain", "fused-add"])
def test_liger_rms_norm(shape, dtype, mode, offset, fused_add, device, impl):
    case = make_case(shape, dtype, device, "weight residual" if fused_add else "weight")
    case["weight"] -= offset
    function = liger_fused_add_rms_norm if fused_add else liger_rms_norm
    before = case["grad_y"].clone()
    got = results(lambda **t: function(**t, eps=1e-6, offset=offset, casting_mode=mode, impl=impl), case)
    assert torch.equal(case["grad_y"], before)  # Liger's in_place=True overwrites it
    hold(got, case, "rms_norm", weight_offset=offset)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["llama", "gemma"])
def test_liger_casting_modes_give_the_dtypes_of_the_models(mode, weight_dtype, device):
    x = torch.ones(2, 64, dtype=torch.bfloat16, device=device)
    y = liger_rms_norm(x, torch.ones(64, dtype=weight_dtype, device=device), 1e-6, casting_mode=mode)
    assert y.dtype == (weight_dtype if mode == "llama" else torch.bfloat16)
    with pytest.raises(ValueError, match="16 bits"):
        liger_rms_norm(x, x[0], 1e-6, casting_mode="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 8, 64), (4, 16, 128), (1, 1, 1023), (3, 7, 256)], ids=str)
def test_liger_layer_norm(shape, dtype, device, impl):
    case = make_case(shape, dtype, device, "weight bias")
    hold(results(lambda **t: liger_layer_norm(**t, eps=1e-6, impl=impl), case), case, "layer_norm", eps=1e-6)
