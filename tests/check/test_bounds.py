"""The bounds stage: memory outside the tensors, by guard bands and by the addresses of executed kernels."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from specimens import with_backward

import retrograd as rg
from retrograd.check import cpu_kernels
from retrograd.check.guard_bands import BAND, HUGE, NAN, PLAIN, SIDES, Bands


def _load(name):
    path = Path(__file__).resolve().parent.parent / "mutants" / f"{name}.py"
    found = importlib.util.spec_from_file_location(f"{name}_mutants", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


mutants = _load("bounds")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU kernels run there")
KINDS = {
    "OB01": ("read", "grad x depends on memory outside input `x` (after its end)"),
    "OB02": ("read", "grad x depends on memory outside input `x` (after its end)"),
    "OB03": ("write", "the backward writes outside a float32 tensor"),
    "OB04": ("read", "grad x depends on memory outside grad_out of output 0 (before its start)"),
}
ADDRESSES = {
    "OB05": ("address-read", "unmasked_load_kernel: element 1 of `x_ptr` and 62 others: program 0 reads"),
    "OB06": ("address-write", "one_too_many_kernel: element 4 of `dx_ptr`: program 0 writes"),
    "OB08": ("address-write", "unmasked_store_kernel: element 1 of `dx_ptr` and 62 others: program 0 writes"),
    "OB07": ("address-read", "first_left_kernel: element -1 of `x_ptr`: program 0 reads"),
    "OB09": ("address-write", "far_kernel: element 2199023255552 of `dx_ptr` and 61 others: program 0 writes"),
}


def bounds(spec, **options):
    return rg.verify(spec, only=["bounds"], **{"level": "quick", **options})


def square(backward, forward=lambda x: x * x):
    """An op whose gradient is `backward` of dy and x."""

    return rg.op(with_backward(forward, backward), lambda x: x * x, dict(x=rg.tensor("M", "N")), name="square")


@pytest.mark.parametrize("name", KINDS)
def test_mutant_is_found_and_named(name):
    (finding,) = bounds(mutants.MUTANTS[name]).findings
    kind, says = KINDS[name]
    assert finding.kind == kind
    assert finding.what.startswith(says)


def test_last_bits_that_repeats_do_not_show_are_no_read(monkeypatch):
    from retrograd.check.stages import bounds as stage

    monkeypatch.setattr(stage, "_noisy", lambda trial: False)  # memory begins at the same places in each repeat
    factors = itertools.cycle([1.0, 1 - 2**-24])
    assert bounds(square(lambda dy, x: 2 * dy * x * next(factors)))
    wrong = itertools.cycle([1.0, 1 - 2**-12])
    assert bounds(square(lambda dy, x: 2 * dy * x * next(wrong))).findings[0].kind == "read"


@without_gpu
def test_tensors_without_a_storage_elsewhere_in_the_process_do_no_harm():
    sparse = torch.eye(3).to_sparse()
    assert bounds(_load("triton_bounds").OB05).findings
    assert sparse.is_sparse


@without_gpu
@pytest.mark.parametrize("name", ADDRESSES)
def test_kernel_is_found_and_named(name):
    (finding,) = bounds(getattr(_load("triton_bounds"), name)).findings
    kind, says = ADDRESSES[name]
    assert finding.kind == kind
    assert says in finding.what
    line = finding.what.partition("triton_bounds.py:")[2]
    number, _, source = line.partition("; ")[0].partition(": ")
    text = (Path(__file__).resolve().parent.parent / "mutants" / "triton_bounds.py").read_text()
    assert text.splitlines()[int(number) - 1].strip().startswith(source)


@without_gpu
@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_kernel_with_masks_is_left_alone(level):
    assert bounds(_load("triton_bounds").HEALTHY["masked"], level=level)


@without_gpu
def test_the_shipped_norm_is_left_alone():
    from retrograd.catalog import resolve

    assert bounds(resolve("rms_norm"), dtypes=["float32", "bfloat16"])


@without_gpu
def test_pointers_that_a_kernel_finds_in_a_table_are_no_wild_addresses():
    import triton
    import triton.language as tl

    def kernel(table_ptr, out_ptr, N: tl.constexpr):
        pointer = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
        tl.store(out_ptr + tl.arange(0, N), tl.load(pointer + tl.arange(0, N)))

    kernel.__globals__["tl"] = tl
    jitted = triton.jit(kernel)
    held = torch.arange(64.0)
    table, out = torch.tensor([held.data_ptr()]), torch.empty(64)
    with cpu_kernels.session() as session:
        jitted[(1,)](table, out, N=64)
    assert session.launches
    assert not session.faults
    assert torch.equal(out, held)


def test_a_read_of_the_gap_between_rows_is_found():
    def wide(dy, x):
        n = x.shape[-1]
        padded = x.as_strided((x.shape[0] - 1, n + 1), (x.stride(0), 1)) if x.stride(0) > n else x
        return 2 * x * dy + padded.sum() * 0

    (finding,) = bounds(square(wide)).findings
    assert "outside input `x` (between its rows)" in finding.what
    assert finding.where.endswith("smallest: M=2 N=1 x:rows")


@pytest.mark.parametrize("whose", ["x", "grad_out"])
def test_a_write_to_what_the_op_was_given_is_found(whose):
    def writes(dy, x):
        t = x if whose == "x" else dy
        mutants.beside(t, t.numel() + 2, 3).fill_(7.5)
        return 2 * x * dy

    finding = bounds(square(writes)).findings[0]
    assert finding.kind == "write"
    assert finding.tensor == whose
    assert "3 elements after its end (the nearest 3 away)" in finding.what


def test_a_write_in_the_forward_is_told_as_such():
    def forward(x):
        mutants.beside(x, -1, 1).fill_(7.5)
        return x * x

    report = bounds(square(lambda dy, x: 2 * x * dy, forward))
    assert report.findings[0].what == "the forward writes outside input `x`: 1 element before its start"


def test_huge_values_that_end_as_nan_are_told_from_nan():
    def lost(dy, x):
        tail = mutants.beside(x, x.numel(), 1) * 1e30
        return 2 * x * dy + (tail - tail)

    assert bounds(square(lost)).findings[0].kind == "read"


def test_room_that_an_op_allocates_for_itself_is_its_own():
    def roomy(dy, x):
        room = torch.empty(4 * x.numel() + 64, dtype=x.dtype)
        mutants.beside(room, 0, room.numel()).fill_(1.0)
        dx = room[16 : 16 + x.numel()].view(x.shape)
        mutants.beside(room[16:], -16, room.numel())[:] = 3.0
        return dx.copy_(2 * x * dy)

    assert bounds(square(roomy), level="full")


def test_an_index_is_read_outside_without_leaving_the_table():
    def gather(table, index):
        count = index.numel()
        more = mutants.beside(index, 0, count + 1) if count else index
        return table[more][:count] + table[more][count:]

    inputs = dict(table=rg.tensor("V", "N"), index=rg.tensor("M", dtype="int64", low=0, high="V"))
    spec = rg.op(gather, lambda table, index: table[index], inputs, sizes=dict(V=(2, 64), M=(1, 64)))
    (finding,) = bounds(spec).findings
    assert "outside input `index` (after its end)" in finding.what


def test_noise_from_run_to_run_is_no_read():
    assert bounds(square(lambda dy, x: 2 * x * dy * (1 + torch.rand(()) * 1e-7)))


@pytest.mark.outside
def test_an_op_that_refuses_a_larger_allocation_is_not_accused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the interpreter copies storages, bands and all

    def whole(x):
        if x.untyped_storage().nbytes() != x.numel() * x.element_size():
            raise ValueError("x has to own its memory")
        return x * x

    report = bounds(rg.op(whole, None, dict(x=rg.tensor("M", "N"))))
    assert report
    assert "x has to own its memory" in report.stage("bounds").notes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int32, torch.bool])
@pytest.mark.parametrize("layout", ["contiguous", "rows", "expanded", "transposed", "scalar", "windows"])
def test_place_keeps_values_and_strides_and_fills_the_rest(dtype, layout):
    t = (torch.randn(5, 7) > 0).to(dtype) if not dtype.is_floating_point else torch.randn(5, 7).to(dtype)
    t = {
        "contiguous": t,
        "rows": t[:, :4],
        "expanded": t[:1].expand(5, 7),
        "transposed": t.t(),
        "scalar": t[0, 0],
        "windows": t.flatten().unfold(0, 5, 3),  # two of them share two elements
    }[layout]
    bands = Bands(HUGE)
    placed = bands.place(t, "x", "x")
    assert torch.equal(placed, t)
    assert placed.stride() == t.stride()
    assert not placed._is_view()
    (guard,) = bands.guards
    assert guard.first * t.element_size() >= BAND
    assert sum(b - a for a, b in guard.spans()) == torch.unique(_addresses(placed)).numel() * t.element_size()
    assert not guard.overwritten()
    for place in (-1, guard.extent):
        guard.flat[guard.first + place] = torch.tensor(2 if dtype not in (torch.bool,) else False).to(dtype)
        assert guard.overwritten() == [place]
        assert guard.side(place) == SIDES[place > 0]
        guard.flat[guard.first + place] = _undisturbed(guard, place)


def _undisturbed(guard, place):
    return guard.flat[guard.first + (place - 1 if place < 0 else place + 1)].clone()


def _addresses(t):
    places = torch.zeros(t.shape, dtype=torch.int64)
    for dim, (n, s) in enumerate(zip(t.shape, t.stride(), strict=True)):
        shape = [1] * t.ndim
        shape[dim] = n
        places = places + torch.arange(n).view(shape) * s
    return places


def test_bands_differ_between_fills_and_on_the_named_side_only():
    t = torch.randn(4)
    held = {fill: Bands(fill).place(t, "x", "x") for fill in (NAN, HUGE, PLAIN)}
    after = {fill: mutants.beside(p, 4, 1)[0].item() for fill, p in held.items()}
    assert after[NAN] != after[NAN]
    assert after[HUGE] > 1e37
    assert after[PLAIN] == 1
    one_side = Bands(NAN, ("x", SIDES[:1])).place(t, "x", "x")
    assert mutants.beside(one_side, -1, 1).isnan()
    assert mutants.beside(one_side, 4, 1) == 1
