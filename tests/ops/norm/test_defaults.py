"""Norms compute the same bits whatever dtype and device torch gives to tensors that name none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from norm_cases import make_inputs, run

from retrograd.ops.norm.arguments import BackwardTensors, NormTensors, WantedGrads, WantedOutput
from retrograd.ops.norm.dispatch import functions
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.types import Impl

Defaults = Callable[[], AbstractContextManager[None]]
# Mixed dtypes take the scratch of forward and backward, float32 alone the sums in float64, bfloat16 alone those in
# float32; heads have vectors of two dimensions; without a weight native makes ones.
CASES = {
    "mixed": dict(dtype=torch.bfloat16, vector_dtype=torch.float16, stream_dtype=torch.float32),
    "float32": dict(dtype=torch.float32, heads=True),
    "bfloat16": dict(dtype=torch.bfloat16),
    "no-weight": dict(dtype=torch.float32, given="bias residual"),
    "alone": dict(dtype=torch.float16, given=""),
}


def assert_same(got: list[Any], want: list[Any]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert (a.dtype, a.device) == (b.dtype, b.device)
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_the_op(name: str, norm: str, impl: str, device: str, other_defaults: Defaults) -> None:
    case = make_inputs((37, 4, 65), device=device, **CASES[name])
    options = dict(prenorm="residual" in case, weight_offset=1.0 if "weight" in case else 0.0, impl=impl)
    want = run(case, norm, **options)
    with other_defaults():
        got = run(case, norm, **options)
    assert_same(list(got.values()), list(want.values()))


# Triton adds to contiguous tensors only.
@pytest.mark.parametrize("impl", ["native", "torch"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_added_to_gradients_with_gaps(dtype: torch.dtype, impl: str, device: str, other_defaults: Defaults) -> None:
    """The sums go by a tensor of their own where the one to add to is not contiguous."""
    case = make_inputs((37, 65), dtype, device)
    forward, backward = functions(Impl(impl))
    spec = NormSpec(True, 1e-6)

    def both() -> list[Any]:
        tensors = NormTensors(x=case["x"], weight=case["weight"], bias=case["bias"], residual=case["residual"])
        y, s, mean, rstd = forward(tensors, spec, WantedOutput(out_dtype=dtype, s_dtype=dtype))
        into = [torch.ones(130, dtype=torch.float32, device=device)[::2] for _ in range(2)]
        wanted = WantedGrads(x=dtype, weight=dtype, bias=dtype, residual=dtype, into_weight=into[0], into_bias=into[1])
        saved = BackwardTensors(
            grad_out=case["grad_y"], s=s, weight=case["weight"], mean=mean, rstd=rstd, grad_s=case["grad_s"]
        )
        return [y, s, mean, rstd, *backward(saved, spec, wanted), *into]

    want = both()
    with other_defaults():
        got = both()
    assert_same(got, want)
