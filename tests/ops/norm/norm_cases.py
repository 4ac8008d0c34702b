"""Inputs for tests of the norms, their truth in float64 and the error that each element may have."""

from __future__ import annotations

import math
from typing import Any

import torch

from retrograd import ops
from retrograd.ops.norm import layer_norm_reference, rms_norm_reference

INPUTS = ("x", "weight", "bias", "residual")
REFERENCE = {"rms_norm": rms_norm_reference, "layer_norm": layer_norm_reference}
EPS = 1e-6
Case = dict[str, Any]


def make_inputs(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    given: str = "weight bias residual",
    vector_dtype: torch.dtype | None = None,
    stream_dtype: torch.dtype | None = None,
    heads: bool = False,
) -> Case:
    """Inputs on which each term of the backward matters: the gradient correlates with x, the weight has signs.

    Args:
        vector_dtype: of weight and bias where it is not that of x.
        stream_dtype: of residual and of the gradient of s.
        heads: vectors of the last two dimensions of `shape`.
    """
    generator = torch.Generator().manual_seed(7)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    n = shape[-1]
    vector = shape[-2:] if heads else (n,)
    x = normal(*shape)
    weight = 1 + 0.2 * normal(*vector)
    weight[..., : n // 8] *= -1
    weight[..., n // 8 : n // 6] = 0
    made = {"x": x, "weight": weight, "bias": 0.3 * normal(*vector), "residual": 0.5 * normal(*shape)}
    dtypes = {"weight": vector_dtype, "bias": vector_dtype, "residual": stream_dtype}
    kept = {name: made[name].to(dtypes.get(name) or dtype).to(device) for name in ("x", *given.split())}
    kept["grad_y"] = (x + 0.5 * normal(*shape)).to(dtype).to(device)
    kept["grad_s"] = normal(*shape).to(stream_dtype or dtype).to(device)
    return kept


def stored_s(case: Case, s_dtype: torch.dtype | None = None) -> torch.Tensor:
    """What is normalised: x, or the sum rounded to the dtype it is stored in."""
    x, residual = case["x"], case.get("residual")
    inner = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = x.to(inner) if residual is None else x.to(inner) + residual.to(inner)
    return total.to(s_dtype or (x if residual is None else residual).dtype)


def truth(
    case: Case, norm: str, *, prenorm: bool = False, eps: float = EPS, weight_offset: float = 0.0, **options: Any
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For each result its float64 value and the sum of magnitudes that float32 rounding errors scale with."""
    s = stored_s(case, options.get("residual_dtype"))
    n, shape = s.shape[-1], s.shape
    s64 = s.double().detach().requires_grad_()
    vectors = {name: case[name].double().detach().requires_grad_() for name in ("weight", "bias") if name in case}
    y, s_out = REFERENCE[norm](s64, **vectors, eps=eps, weight_offset=weight_offset)
    total = (y * case["grad_y"].double()).sum()
    if prenorm:
        total = total + (s_out * case["grad_s"].double()).sum()
    total.backward()

    with torch.no_grad():
        grad = case["grad_y"].double()
        mean = s64.mean(dim=-1, keepdim=True) if norm == "layer_norm" else torch.zeros_like(s64[..., :1])
        rstd = ((s64 - mean).square().mean(dim=-1, keepdim=True) + eps).rsqrt()
        ones = torch.ones(n, dtype=torch.float64, device=s.device)
        weight = (vectors["weight"] + weight_offset).abs() if "weight" in vectors else ones
        # The mean is subtracted after it was rounded, and a sum is rounded in proportion to the magnitudes added, which
        # do not cancel as the mean does: errors scale with both terms, not with their difference.
        mean_size = s64.abs().mean(dim=-1, keepdim=True) if norm == "layer_norm" else 0
        h, g = (s64.abs() + mean_size) * rstd, grad.abs() * weight
        y_size = h * weight + (vectors["bias"].abs() if "bias" in vectors else 0)
        projection = (g * h).mean(dim=-1, keepdim=True)
        ds_size = rstd * (g + h * projection + (g.mean(dim=-1, keepdim=True) if norm == "layer_norm" else 0))
        if prenorm:
            ds_size = ds_size + case["grad_s"].double().abs()
        out = {"y": (y.detach(), y_size), "x": (s64.grad, ds_size)}
        out["s"] = (s64.detach(), torch.zeros_like(s64))
        out["residual"] = out["x"]
        for name, size in (("weight", grad.abs() * h), ("bias", grad.abs())):
            if name in vectors:
                rows = tuple(range(len(shape) - vectors[name].dim()))
                out[name] = (vectors[name].grad, size.sum(dim=rows) if rows else size)
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
    assert got.shape == value.shape, name
    error = (got.double() - value).abs()
    # `not <=` rather than `>`: a NaN has to fail.
    bad = ~(error <= budget)
    assert not bad.any(), f"{name}: {int(bad.sum())} elements over budget, worst {(error / budget).max():.3g} times"


def run(case: Case, norm: str, *, prenorm: bool = False, frozen: tuple[str, ...] = (), **options: Any) -> Case:
    """Values and gradients; arguments named in `frozen` require no gradient."""
    args = {name: case[name].detach() for name in INPUTS if name in case}
    for name, tensor in args.items():
        tensor.requires_grad_(name not in frozen)
    out = getattr(ops, norm)(**args, prenorm=prenorm, **({"eps": EPS} | options))
    roots = list(out) if prenorm else [out]
    grads = [case["grad_y"], case["grad_s"]][: len(roots)]
    torch.autograd.backward(roots, grads)
    got = {"y": roots[0].detach()} | {name: tensor.grad for name, tensor in args.items()}
    return got | ({"s": roots[1].detach()} if prenorm else {})


def check(case: Case, norm: str, *, prenorm: bool = False, frozen: tuple[str, ...] = (), **options: Any) -> None:
    """Run and hold every result to its budget; dtypes follow the inputs, a frozen argument has no gradient."""
    got = run(case, norm, prenorm=prenorm, frozen=frozen, **options)
    want = truth(case, norm, prenorm=prenorm, **{k: v for k, v in options.items() if k not in _NO_MATHS})
    n, m = case["x"].shape[-1], math.prod(case["x"].shape[:-1])
    dtypes = {"y": options.get("out_dtype") or case["x"].dtype}
    dtypes["s"] = options.get("residual_dtype") or case.get("residual", case["x"]).dtype
    for name, tensor in got.items():
        if name in frozen:
            assert tensor is None, name
            continue
        assert tensor.dtype == (dtypes[name] if name in dtypes else case[name].dtype), name
        assert_within_budget(name, tensor, want[name], m, n)


_NO_MATHS = ("impl", "deterministic", "dw_parts", "out_dtype")
