"""Deformable attention computes the same bits whatever dtype and device torch gives to tensors that name none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from msda_cases import INPUTS, LEVELS, arguments, make_inputs, run

from retrograd.ops import ms_deform_attn_fused
from retrograd.ops.msda import ms_deform_attn_reference
from retrograd.ops.msda.arguments import Levels, MsdaInputs, MsdaSpec, NeededGrads
from retrograd.ops.msda.cpu import launch
from retrograd.ops.msda.dispatch import functions
from retrograd.ops.msda.shapes import flat
from retrograd.ops.types import Impl

Defaults = Callable[[], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def _no_kept_tables() -> None:
    """Tables of levels that native keeps would hide how they are made."""
    launch._known_level_arrays.cache_clear()


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.device) == (b.dtype, b.device)
        assert torch.equal(a, b)


# Sizes in a list are known to the host, those in a tensor are read (CPU) or stay where they are (CUDA).
@pytest.mark.parametrize("listed", [True, False], ids=["list", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_op(dtype: torch.dtype, listed: bool, impl: str, device: str, other_defaults: Defaults) -> None:
    case = make_inputs(dtype=dtype, device=device, beside=torch.float32)
    if not listed:
        case["spatial_shapes"] = torch.tensor(LEVELS, device=device)
    with other_defaults():
        got = run(case, impl=impl, deterministic=True)
    want = run(case, impl=impl, deterministic=True)
    assert_same(list(got.values()), list(want.values()))


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
def test_the_fused_op(boxes: bool, impl: str, device: str, other_defaults: Defaults) -> None:
    case = make_inputs(device=device)
    generator = torch.Generator().manual_seed(5)
    shape = case["attention_weights"].shape
    reference = torch.rand(*shape[:2], len(LEVELS), 4 if boxes else 2, generator=generator).to(device)
    offsets = torch.randn(*shape, 2, generator=generator).to(device)
    given = [case["value"], reference, offsets, case["attention_weights"].flatten(3)]

    def both() -> list[torch.Tensor]:
        value, *rest = leaves = [t.detach().requires_grad_() for t in given]
        out = ms_deform_attn_fused(value, LEVELS, *rest, deterministic=True, impl=impl)
        return [out, *torch.autograd.grad(out, leaves, case["grad_out"])]

    with other_defaults():
        got = both()
    assert_same(got, both())


def test_the_functions(impl: str, device: str, other_defaults: Defaults) -> None:
    """Without autograd, which leaves a device of `with torch.device(...)` outside of a backward."""
    case = make_inputs(device=device)
    spec = MsdaSpec((3,) * len(LEVELS), deterministic=True)
    levels = Levels(tuple(LEVELS))
    inputs = flat(MsdaInputs(case["value"], levels, case["sampling_locations"], case["attention_weights"]))
    chosen = functions(Impl(impl))

    def both() -> list[torch.Tensor]:
        needed = NeededGrads(value=True, locations=True, weights=True)
        return [chosen.forward(inputs, spec), *chosen.backward(case["grad_out"], inputs, spec, needed)[:3]]

    with other_defaults():
        got = both()
    assert_same(got, both())


def test_the_reference_and_second_derivatives(device: str, other_defaults: Defaults) -> None:
    case = make_inputs(device=device)

    def twice() -> list[torch.Tensor]:
        leaves = {name: case[name].detach().requires_grad_() for name in INPUTS}
        out = ms_deform_attn_reference(*arguments(case | leaves))
        grads = torch.autograd.grad(out, list(leaves.values()), case["grad_out"], create_graph=True)
        return [out, *torch.autograd.grad(grads[0].sin().sum() + grads[1].sum(), list(leaves.values()))]

    with other_defaults():
        got = twice()
    if device == "cuda":  # torch scatters in any order there
        torch.testing.assert_close(got, twice())
    else:
        assert_same(got, twice())
