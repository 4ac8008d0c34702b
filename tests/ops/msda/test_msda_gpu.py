"""Deformable attention on a GPU with real kernels: sizes that take too long on a CPU, hot pixels, the same bits."""

from __future__ import annotations

import pytest
import torch
from msda_cases import arguments, assert_within_budget, make_inputs, run, truth

from retrograd.ops import ms_deform_attn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: real kernels at real sizes"),
]

PYRAMID = [(64, 48), (32, 24), (16, 12), (8, 6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("deterministic", [True, False], ids=["fixed-order", "atomics"])
def test_real_sizes(dtype, deterministic, mode):
    case = make_inputs(
        PYRAMID, dtype, "cuda", beside=torch.float32, queries=500, heads=8, points=4, channels=32,
        align_corners=mode["align_corners"],
    )  # fmt: skip
    got = run(case, **mode, impl="triton", deterministic=deterministic)
    assert_within_budget(got, truth(case, **mode), case)


@pytest.mark.parametrize("place", ["anywhere", "one pixel"])
def test_the_same_bits_every_time(place):
    case = make_inputs(PYRAMID, torch.bfloat16, "cuda", beside=torch.float32, queries=2000, heads=8, channels=32)
    if place == "one pixel":
        case["sampling_locations"].fill_(0.4)
    want = run(case, impl="triton", deterministic=True)
    for _ in range(20):
        got = run(case, impl="triton", deterministic=True)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_more_than_2_31_elements(much_memory):
    """The last pixel of the last head of a value of 4.3 GB, found with offsets of 64 bits."""
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB")
    h, w, heads, channels = 4096, 2049, 8, 32
    value = torch.zeros(1, h * w, heads, channels, dtype=torch.float16, device="cuda")
    value[0, -1, -1] = 3.0
    locations = torch.ones(1, 1, heads, 1, 1, 2, device="cuda")
    out = ms_deform_attn(
        value, [(h, w)], locations, torch.ones(1, 1, heads, 1, 1, device="cuda"), align_corners=True, impl="triton"
    )
    assert value.numel() > 2**31
    assert (out[0, 0, -1] == 3).all()
    assert not out[0, 0, :-1].any()


def test_sizes_in_a_tensor_wait_for_nobody():
    case = make_inputs(PYRAMID, device="cuda", queries=50)
    case["spatial_shapes"] = torch.tensor(PYRAMID, device="cuda")
    want = ms_deform_attn(*arguments(case), impl="triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = ms_deform_attn(*arguments(case), impl="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)
