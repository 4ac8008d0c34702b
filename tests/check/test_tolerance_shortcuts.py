"""Shortcuts of the tolerance say what the whole computation says: where all are numbers, and by which factor two differ."""

from __future__ import annotations

import math

import pytest
import torch

from retrograd.check import tolerance

ODD = (math.nan, math.inf, -math.inf, 3.3e38, -1e300)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (7, 48), (4097,), (3, 5, 77)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_moderate_is_every_element_finite_and_far_from_overflow(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(shape, dtype=torch.float64, generator=generator)
    tensors = [plain]
    for place in range(0, plain.numel(), max(plain.numel() // 5, 1)):
        for odd in ODD:
            tensors.append(plain.clone())
            tensors[-1].view(-1)[place] = odd
    for t in (*tensors, *(t.transpose(0, -1) for t in tensors if t.ndim > 1)):
        whole = bool((t.isfinite() & ~tolerance.overflows(t, dtype)).all())
        assert tolerance.moderate(t, dtype) == whole


@pytest.mark.parametrize("odd", [None, *ODD])
@pytest.mark.parametrize("where", ["got", "want"])
def test_the_scale_of_one_tensor_is_that_of_several(odd, where):
    generator = torch.Generator().manual_seed(0)
    want = torch.randn(7, 48, dtype=torch.float64, generator=generator)
    got = (1.01 * want).clone()
    if odd is not None:
        (got if where == "got" else want)[3, 4] = odd
    one, (several,) = tolerance.scale(got, want), tolerance.scales(got[None], want).tolist()
    assert math.isnan(one) == math.isnan(several)
    assert math.isnan(one) or one == pytest.approx(several, rel=1e-12)
    assert math.isnan(tolerance.scale(got, torch.zeros_like(got)))
    assert math.isnan(tolerance.scale(got[0, :8], want[0, :8]))


def test_a_result_stored_in_less_than_wanted_may_be_rounded_to_it():
    want = torch.tensor([1.0, 1024.0], dtype=torch.float64)
    least = torch.full_like(want, 1e-3)
    assert tolerance.as_stored(least, want, torch.float32, "float32") is least
    wider = tolerance.as_stored(least, want, torch.bfloat16, "float32")
    assert wider.tolist() == [pytest.approx(1.01 * 2**-8), pytest.approx(1.01 * 4)]
