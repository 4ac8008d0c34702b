"""Statistics and digests: the same from NumPy and from the kernel; a digest tells what it must."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from retrograd.trace.statistics import collector, cpu
from retrograd.trace.statistics.digest import BLOCK, UNIT


def numbers(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(4001, generator=torch.Generator().manual_seed(0))
    x[3], x[7], x[8], x[9], x[4000] = float("nan"), float("-inf"), 0.0, 1e-7, -0.0
    return x.to(dtype)


def every(dtype: torch.dtype) -> torch.Tensor:
    """Each number of 16 bits, infinities among them."""
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    return x[~x.isnan()]


def powers(dtype: torch.dtype, least: int, greatest: int) -> torch.Tensor:
    """2^k and numbers just below it, of both signs, from the least subnormal number on."""
    up = torch.tensor([2.0**k for k in range(least, greatest + 1)], dtype=dtype)
    below = torch.nextafter(up, torch.zeros_like(up))
    return torch.cat([up, -up[::2], below, -below[::3]])


TENSORS = {
    "float32": numbers(torch.float32),
    "bfloat16": numbers(torch.bfloat16),
    "float16": numbers(torch.float16),
    "float64": numbers(torch.float64),
    "int64": torch.arange(-700, 700),
    "int32": torch.arange(-5000, 900, 3, dtype=torch.int32),
    "uint8": torch.arange(70, dtype=torch.uint8),
    "bool": torch.arange(70) % 3 == 0,
    "complex": torch.view_as_complex(torch.randn(33, 2, generator=torch.Generator().manual_seed(1))).conj(),
    "transposed": torch.arange(64.0 * 70).view(64, 70).t(),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "infinite": torch.full((5,), float("inf")),
    "every-float16": every(torch.float16),
    "powers-bfloat16": powers(torch.bfloat16, -133, 60),
    "powers-float32": powers(torch.float32, -149, 127),
    "powers-float64": powers(torch.float64, -1074, 300),
    "zeros": torch.tensor([0.0, -0.0, 0.0]),
}


def exact(row: cpu.StatisticsRow) -> tuple[object, ...]:
    """All but the root mean square, whose last bits depend on the order of additions."""
    return row[:2] + row[3:]


def test_a_tensor_without_elements_has_no_range_and_nothing_bad():
    low, high, rms, *counts, digest, exponents = cpu.measure(torch.empty(0, 3), histogram=True)
    assert (low, high, rms, counts, exponents) == (None, None, None, [0, 0, 0, 0], cpu.NO_EXPONENTS)
    assert digest == cpu.measure(torch.empty(0))[7]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_dtype_without_a_kernel_is_counted_as_its_numbers_are(dtype, device):
    x = torch.randn(257, generator=torch.Generator().manual_seed(4)).to(dtype)
    rows: list[cpu.StatisticsRow] = []
    requests = collector.StatisticsCollector(histogram=True)
    requests.request(x.to(device), rows.append)
    requests.collect()
    wide = cpu.measure(x.float(), histogram=True)
    assert rows[0][:5] == wide[:5]
    assert rows[0][6] == wide[6]
    assert rows[0][8] == wide[8]


@pytest.mark.parametrize("x", TENSORS.values(), ids=TENSORS)
def test_the_kernel_counts_what_numpy_counts(x, device):
    from retrograd.trace.statistics import collector
    from retrograd.trace.statistics.triton import kernel

    rows: list[cpu.StatisticsRow] = []
    buffers = collector._DeviceBuffers(torch.device(device), kernel, histogram=True)
    for _ in range(2):  # the second time in rows that were used before
        buffers.request(cpu.as_real(x).to(device), rows.append)
        buffers.collect()
    for row in rows:
        assert exact(row) == exact(cpu.measure(x, histogram=True))
        assert row[2] == pytest.approx(cpu.measure(x)[2])
    assert rows[0] == rows[1]


def counted(x: torch.Tensor) -> dict[tuple[int, bool], int]:
    """Elements by exponent and sign, one at a time."""
    numbers = (v for v in cpu.as_real(x).double().reshape(-1).tolist() if v and math.isfinite(v))
    return Counter((min(max(math.frexp(v)[1] - 1, -127), 127), v < 0) for v in numbers)


@pytest.mark.parametrize("x", TENSORS.values(), ids=TENSORS)
def test_exponents_are_those_of_each_element(x):
    found = cpu.measure(x, histogram=True)[8]
    if not cpu.as_real(x).is_floating_point():
        assert found is None
        return
    sides = ((found.positive, False), (found.negative, True))
    held = {(found.least + k, sign): n for counts, sign in sides for k, n in enumerate(counts) if n}
    assert held == counted(x)
    assert not found or ((found.positive[0] or found.negative[0]) and (found.positive[-1] or found.negative[-1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exponents_of_a_tensor_that_is_counted_in_pieces(dtype):
    x = torch.randn(70_001, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[:3] = 0
    whole = cpu.measure(x, histogram=True)[8]
    held = Counter({k: a + b for k, (a, b) in enumerate(zip(whole.positive, whole.negative, strict=True), whole.least)})
    small, large = (cpu.measure(part, histogram=True)[8] for part in (x[:1000], x[1000:]))
    for part in (small, large):
        sums = [a + b for a, b in zip(part.positive, part.negative, strict=True)]
        held.subtract(dict(enumerate(sums, part.least)))
    assert not any(held.values())


def test_exponents_are_counted_where_they_are_wanted():
    assert cpu.measure(numbers(torch.float32))[8] is None


def test_many_tensors_at_once_count_what_each_counts_alone(device):
    from retrograd.trace.statistics import collector
    from retrograd.trace.statistics.triton import kernel

    xs = [cpu.as_real(x).to(device) for x in TENSORS.values()]
    xs += [torch.arange(70_000.0, device=device)[:n] for n in (1, 16, 20_000, 70_000)]
    xs += [torch.arange(70.0, device=device)[1:]]  # its address is no multiple of 16
    alone: list[cpu.StatisticsRow] = []
    together: dict[int, cpu.StatisticsRow] = {}
    buffers = collector._DeviceBuffers(torch.device(device), kernel, histogram=True)
    for x in xs:
        buffers.request(x, alone.append)
    buffers.collect()
    xs = [x.contiguous() for x in xs]
    buffers.request_table(*kernel.grouped(xs), together.update)
    buffers.fold()  # a step ends, another begins
    again: dict[int, cpu.StatisticsRow] = {}
    buffers.request_table(*kernel.grouped(xs[:1]), again.update)
    buffers.collect()
    assert [together[at] for at in range(len(xs))] == alone
    assert again == {0: alone[0]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str)
def test_a_program_takes_several_tiles(dtype, device, monkeypatch):
    from retrograd.trace.statistics import collector
    from retrograd.trace.statistics.triton import kernel

    x = torch.randn(70_002, generator=torch.Generator().manual_seed(3)).mul(50).to(dtype)
    rows: list[cpu.StatisticsRow] = []
    buffers = collector._DeviceBuffers(torch.device(device), kernel, histogram=True)
    buffers.request(x.to(device), lambda _: None)  # makes room for the usual number of programs
    monkeypatch.setattr(kernel, "PROGRAMS", 2)
    for part in (x, x[:-2]):  # the second has no part of a unit at its end
        buffers.request(part.to(device), rows.append)
    buffers.collect()
    assert [exact(row) for row in rows] == [exact(cpu.measure(part, histogram=True)) for part in (x, x[:-2])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str)
@pytest.mark.parametrize("count", [2, 64, 1024, 5000])
def test_a_digest_tells_permutations_signs_and_single_bits(dtype, count):
    # Powers of two differ in few bits: where a weak hash loses.
    x = (2.0 ** (torch.arange(count) % 7)).to(dtype)
    swapped, flipped, twice, longer = x.clone(), x.clone(), x.clone(), torch.cat([x, x[:1] * 0])
    swapped[0], swapped[1] = x[1], x[0]
    flipped[-1] = -flipped[-1]
    twice[0], twice[1] = -twice[0], -twice[1]
    tensors = [x, swapped, flipped, twice, longer, -x, x.flip(0)]
    digests = [cpu.measure(t)[7] for t in tensors]
    assert len(set(digests)) == len({tuple(t.tolist()) for t in tensors}) >= 5  # of two elements some are the same
    assert cpu.measure(x.clone())[7] == digests[0]
    assert all(0 <= d < 1 << 64 for d in digests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_digest_tells_rows_that_changed_places(dtype):
    width = BLOCK * UNIT // dtype.itemsize  # a row is a block
    rows = torch.eye(6, width).to(dtype)  # all sums of rows are alike
    orders = [[0, 1, 2, 3, 4, 5], [1, 0, 2, 3, 4, 5], [0, 2, 1, 3, 4, 5], [5, 1, 2, 3, 4, 0], [1, 2, 0, 4, 5, 3]]
    assert len({cpu.measure(rows[order])[7] for order in orders}) == len(orders)


def test_no_digest_is_shared_by_many_small_tensors():
    seen = {cpu.measure(torch.tensor([a, b], dtype=torch.float32))[7] for a in range(60) for b in range(60)}
    assert len(seen) == 3600


@pytest.mark.parametrize("kernel", [SimpleNamespace(FEW_BYTES=4096), None], ids=["kernel", "none"])
def test_as_much_waits_as_the_smallest_gpu_has_room_for(kernel, monkeypatch):
    memories = [1 << 37, 1 << 34]
    monkeypatch.setattr(collector, "_kernel", lambda: kernel)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(memories))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: SimpleNamespace(total_memory=memories[at]))
    assert collector.table_limits() == ("cuda", 4096 if kernel else 0, 1 << 26)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_memory_that_was_measured_can_be_resized(dtype):
    """FSDP2 frees gathered parameters by resizing their storage, which numpy() would forbid for good."""
    x = torch.ones(6).to(dtype)
    assert cpu.measure(x)[:2] == (1.0, 1.0)
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().size() == 0
