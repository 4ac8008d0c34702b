"""The ordered sum: the kernel is the loop to the bit, and neither depends on where an element lies."""

from __future__ import annotations

import pytest
import torch

from retrograd.errors import UsageError
from retrograd.fsdp.rank_sum import Scale, rank_sum

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SCALES = {"none": Scale(), "by3": Scale("divide", 3), "third": Scale("multiply", 1 / 3)}
# One program and several; rows whose starts are aligned to 16, 8, 4, 2 and 1 elements.
SIZES = [1, 2, 7, 24, 44, 2046, 2047, 2048, 4112, 5001]


@pytest.fixture(params=["loop", "triton"])
def impl(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def rows(ranks, count, dtype, device="cpu"):
    """Summands of very different sizes, so that an order shows in the bits."""
    generator = torch.Generator().manual_seed(ranks * 10007 + count)
    wide = torch.randn(ranks, count, generator=generator) * 2.0 ** torch.randint(
        -6, 7, (ranks, count), generator=generator
    )
    return wide.to(dtype).to(device)


def written_out(received, output_dtype, scale):
    """The definition, one element after another in Python, whose floats are float64."""
    columns = []
    for column in received.float().T:
        total = column[0]
        for value in column[1:]:
            total = total + value
        factor = torch.tensor(scale.value, dtype=F32)
        columns.append({"none": total, "divide": total / factor, "multiply": total * factor}[scale.mode])
    return torch.stack(columns).to(output_dtype)


def summed(received, output_dtype, scale=SCALES["none"], flags=None, impl="loop"):
    output = torch.full((received.shape[1],), 77.0, dtype=output_dtype, device=received.device)
    rank_sum(received, output, scale, flags, impl)
    return output


def assert_same_bits(a, b):
    assert a.dtype == b.dtype
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    assert int((a.view(kind) != b.view(kind)).sum()) == 0


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_is_the_definition(impl, device, ranks, dtype, scale):
    received = rows(ranks, 37, dtype, device)
    for out in {dtype, F32}:
        assert_same_bits(summed(received, out, scale, impl=impl).cpu(), written_out(received.cpu(), out, scale))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("count", SIZES)
def test_kernel_is_the_loop(device, count, dtype):
    pytest.importorskip("triton")
    for ranks in range(1, 9):
        received = rows(ranks, count, dtype, device)
        for out, scale in ((dtype, SCALES["by3"]), (F32, SCALES["third"])):
            assert_same_bits(summed(received, out, scale, impl="triton"), summed(received, out, scale))


def test_another_order_gives_other_bits():
    """Without this the tests above could not fail."""
    received = rows(4, 1000, F32)
    assert (summed(received, F32) != summed(received.flip(0).contiguous(), F32)).any()


def test_bits_do_not_depend_on_the_place(impl, device):
    received = rows(4, 4112, BF16, device)
    whole = summed(received, F32, SCALES["by3"], impl=impl)
    for start, end in ((0, 1), (1, 18), (18, 2066), (2066, 4112)):
        part = summed(received[:, start:end].contiguous(), F32, SCALES["by3"], impl=impl)
        assert_same_bits(part, whole[start:end])


@pytest.mark.parametrize("count", [1, 2049, 5001])
def test_flags_name_the_rows(impl, device, count):
    values = {0: float("nan"), 2: float("inf"), 6: float("-inf")}
    received = rows(7, count, BF16, device)
    for row, value in values.items():
        received[row, count - 1 - row % count] = value
    flags = torch.zeros(7, dtype=torch.int32, device=device)
    summed(received, F32, flags=flags, impl=impl)
    assert flags.tolist() == [int(row in values) for row in range(7)]


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_largest_numbers_are_finite(impl, device, dtype):
    received = torch.full((3, 40), torch.finfo(dtype).max, dtype=dtype, device=device)
    received[1] *= -1
    flags = torch.zeros(3, dtype=torch.int32, device=device)
    assert_same_bits(summed(received, dtype, flags=flags, impl=impl), received[0])
    assert flags.tolist() == [0, 0, 0]


def test_zeros_keep_their_sign_and_subnormals_their_value(impl, device):
    tiny = torch.tensor([[-0.0, 0.0, 1e-45, 3e-45], [-0.0, -0.0, 1e-45, -1e-45]], device=device)
    got = summed(tiny, F32, impl=impl).cpu()
    assert_same_bits(got, torch.tensor([-0.0, 0.0, 2.8e-45, 1.4e-45]))


def test_float64_is_summed_in_float64():
    received = torch.tensor([[1.0], [2.0**-40], [-1.0]], dtype=F64)
    output = torch.empty(1, dtype=F64)
    rank_sum(received, output)
    assert output.item() == 2.0**-40


def test_refusals(device):
    pytest.importorskip("triton")
    x = rows(2, 4, F64, device)
    with pytest.raises(UsageError, match=r"float64, expected float32.*impl='loop'"):
        rank_sum(x, x[0].clone(), impl="triton")
    with pytest.raises(UsageError, match=r"impl='fast', expected 'loop', 'triton'"):
        rank_sum(x, x[0].clone(), impl="fast")
