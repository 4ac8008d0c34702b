"""What is special to the C++ deformable attention: its ways to read pixels, threads, 16-bit rows, strides, building.

Values, borders of cells and autograd are tested with every implementation through the fixture `impl`.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import extensions
import pytest
import torch
from msda_cases import INPUTS, Case, arguments, assert_within_budget, make_inputs, run, truth

from retrograd.errors import NativeBuildError
from retrograd.ops import ms_deform_attn
from retrograd.ops.msda import cpu, dispatch, torch_impl
from retrograd.ops.msda.arguments import Levels, MsdaInputs, MsdaSpec, NeededGrads
from retrograd.ops.msda.cpu import launch
from retrograd.ops.msda.shapes import flat
from retrograd.ops.types import Impl
from retrograd.runtime.cpp import build

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
HALVES = DTYPES[2:]
CPU = torch.device("cpu")

NO_COMPILER = extensions.why_no_compiler()
pytestmark = pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))


def both_ways(module: Any, case: Case, spec: MsdaSpec | None = None) -> list[torch.Tensor]:
    """Output and gradients by the two functions of an implementation."""
    spec = spec or MsdaSpec((case["attention_weights"].shape[-1],) * len(case["spatial_shapes"]))
    levels = Levels(tuple(case["spatial_shapes"]))
    inputs = flat(MsdaInputs(case["value"], levels, case["sampling_locations"], case["attention_weights"]))
    needed = NeededGrads(value=True, locations=True, weights=True)
    return [module.msda_fwd(inputs, spec), *module.msda_bwd(case["grad_out"], inputs, spec, needed)[:3]]


def at_the_centre(value: torch.Tensor, weights: torch.Tensor) -> Case:
    """[Q] weights of queries that all look at the middle of one pixel with [C] channels."""
    queries = len(weights)
    return {
        "value": value.view(1, 1, 1, -1),
        "spatial_shapes": [(1, 1)],
        "sampling_locations": torch.full((1, queries, 1, 1, 1, 2), 0.5),
        "attention_weights": weights.view(1, queries, 1, 1, 1),
        "grad_out": value.expand(queries, -1).reshape(1, queries, 1, -1),
    }


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same numbers, NaN where there is NaN."""
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(3.5), want.nan_to_num(3.5))


# Whole vectors, a vector and a rest, chunks of 4 + 2 + 1 vectors; with 2 queries pixels are read where they are (or
# widened one by one), with 16 float32 still is and 16-bit pixels are copied, with 64 all are.
@pytest.mark.parametrize("channels", [1, 7, 13, 32, 60])
@pytest.mark.parametrize("queries", [2, 16, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_way_to_read_pixels(dtype: torch.dtype, queries: int, channels: int) -> None:
    options = dict(beside=torch.float32) if dtype in HALVES else {}
    case = make_inputs(dtype=dtype, device="cpu", queries=queries, channels=channels, batch=1, heads=2, **options)
    for mode in (dict(), dict(padding_mode="border")):
        assert_within_budget(run(case, **mode, impl="native"), truth(case, **mode), case)


@pytest.fixture
def threads() -> Iterator[Any]:
    """Sets the number of threads; the old one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 3), (2, 4)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_bits(
    dtype: torch.dtype, batch: int, heads: int, threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More threads than heads, too: then a forward is split into queries."""
    monkeypatch.setattr(launch, "_SERIAL_ELEMENTS", 0)
    case = make_inputs(dtype=dtype, device="cpu", batch=batch, heads=heads, queries=67, channels=20)
    found = []
    for count in (1, 2, 3, 5):
        threads(count)
        found.append(both_ways(cpu, case))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_split_forward_uses_its_threads(threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would say nothing."""
    made = []
    stock = launch._Call
    monkeypatch.setattr(launch, "_SERIAL_ELEMENTS", 0)
    monkeypatch.setattr(launch, "_Call", lambda **fields: made.append(fields) or stock(**fields))
    threads(5)
    both_ways(cpu, make_inputs(device="cpu", batch=1, heads=2))
    assert [(call["threads"], call["parts"]) for call in made] == [(5, 3), (2, 1)]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bit_rows_are_read_and_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """Every pattern of 16 bits, times weights that make ties and numbers beside them, overflow and subnormals."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    weights = torch.tensor([1.0, 1 + 2.0**-11, 1 + 2.0**-8, 1 + 2.0**-9 + 2.0**-20, 0.99997, 1e-3, 1e30])
    out = both_ways(cpu, at_the_centre(every, weights))[0]
    assert_same(out[0, :, 0], (every.float() * weights[:, None]).to(dtype))
    # A sum that float32 holds exactly: its one rounding is that to 16 bits.
    grad_value = both_ways(cpu, at_the_centre(every, torch.tensor([1.0, 2.0**-9])))[1]
    assert_same(grad_value[0, 0, 0], (every.float() * (1 + 2.0**-9)).to(dtype))


def test_grad_value_is_rounded_once() -> None:
    """In bfloat16 a sum of ones stops at 256."""
    case = at_the_centre(torch.ones(3, dtype=torch.bfloat16), torch.ones(300))
    assert (both_ways(cpu, case)[1] == 300).all()


@pytest.mark.parametrize("queries", [2, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_and_expanded_tensors(dtype: torch.dtype, queries: int) -> None:
    """Heads cut out of a wider projection, pixels first, one image for all; nothing of what lies between is read."""
    case = make_inputs(dtype=dtype, device="cpu", queries=queries)
    want = both_ways(cpu, case)
    for name in ("value", "grad_out"):
        dense = case[name]
        wide = torch.cat([dense, torch.full_like(dense, math.nan)], dim=-1)[..., : dense.shape[-1]]
        first = dense.transpose(0, 1).contiguous().transpose(0, 1)
        apart = dense.repeat_interleave(2, -1)[..., ::2]
        for laid in (wide, first, apart):
            assert not laid.is_contiguous()
            got = both_ways(cpu, case | {name: laid})
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), name
    one = case["grad_out"][:1, :1].expand_as(case["grad_out"])
    for a, b in zip(
        both_ways(cpu, case | {"grad_out": one}),
        both_ways(cpu, case | {"grad_out": one.contiguous()}),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_views_that_torch_negates() -> None:
    case = make_inputs(device="cpu")
    want = both_ways(cpu, case)
    for name in (*INPUTS, "grad_out"):
        negative = torch.complex(torch.zeros_like(case[name]), -case[name]).conj().imag
        assert negative.is_neg()
        got = both_ways(cpu, case | {name: negative})
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), name


@pytest.mark.parametrize("size", ["batch", "queries", "heads", "points", "channels"])
def test_without_elements_results_are_zeros_of_the_right_kind(size: str) -> None:
    case = make_inputs(dtype=torch.bfloat16, beside=torch.float32, device="cpu", **{size: 0})
    inputs = MsdaInputs(case["value"], Levels(None), case["sampling_locations"], case["attention_weights"])
    like = (case["grad_out"], *flat(inputs).tensors())
    for got, tensor in zip(both_ways(cpu, case), like, strict=True):
        assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype)
        assert not got.any()


@pytest.mark.parametrize("border", [False, True], ids=["zeros", "border"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_goes_where_it_goes_in_torch(dtype: torch.dtype, border: bool) -> None:
    case = make_inputs(dtype=dtype, device="cpu", queries=16)
    generator = torch.Generator().manual_seed(1)
    for name in ("value", "attention_weights", "grad_out"):
        hit = torch.rand(case[name].shape, generator=generator) < 0.002
        case[name] = case[name].masked_fill(hit, math.nan)
    case["attention_weights"][0, 0, 0, 0, 0] = math.inf
    case["sampling_locations"][0, 0, 0, 0, 0] = -99.0
    spec = MsdaSpec((3,) * 4, border=border)
    for got, want in zip(both_ways(cpu, case, spec), both_ways(torch_impl, case, spec), strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert got.isnan().any()
        assert not got.isnan().all()


@pytest.mark.parametrize("flags", [("-mno-f16c",), ("-mno-avx",)], ids=lambda f: f[0][5:])
def test_older_processors(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if "avx" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("-mno-avx is a flag for x86")
    library = build.load(launch._SOURCE, build.FLAGS + flags)
    monkeypatch.setattr(build, "load", lambda source: library)
    for dtype in DTYPES:
        case = make_inputs(dtype=dtype, device="cpu", channels=13)
        assert_within_budget(run(case, impl="native"), truth(case), case)
    test_16_bit_rows_are_read_and_rounded_as_torch_does(torch.float16)


def test_denormals_survive_loading_and_running() -> None:
    code = (
        "import torch; from retrograd.ops import ms_deform_attn; "
        "ms_deform_attn(torch.ones(1, 4096, 8, 8), [(64, 64)], torch.rand(1, 500, 8, 1, 4, 2), "
        "torch.ones(1, 500, 8, 1, 4), impl='native'); "
        "print((torch.full((99999,), 1e-40) * 1 > 0).all().item(), 1e-310 * 1 > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


# ---- which calls take it ------------------------------------------------------------------------------------------


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing could be compiled; what was found out before is forgotten, and afterwards again."""
    forget = (build.why_not, build.load, dispatch.resolve)
    monkeypatch.setenv("CXX", "no-such-compiler")
    for function in forget:
        function.cache_clear()
    yield
    for function in forget:
        function.cache_clear()


def test_it_is_the_choice_for_the_cpu() -> None:
    for dtype in DTYPES:
        assert dispatch.FAMILY.choose(None, dtype, CPU) is Impl.NATIVE
    case = make_inputs(device="cpu")
    want, got = run(case, impl="native"), run(case)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_without_a_compiler_torch_is_the_choice_and_native_says_why(no_compiler: None) -> None:
    assert cpu.why_not() is not None
    assert dispatch.FAMILY.choose(None, torch.float32, CPU) is Impl.TORCH
    case = make_inputs(device="cpu")
    assert torch.equal(ms_deform_attn(*arguments(case)), ms_deform_attn(*arguments(case), impl="torch"))
    with pytest.raises(
        RuntimeError, match=r"impl='native' cannot run here: CXX is 'no-such-compiler'.*use impl='torch'"
    ):
        ms_deform_attn(*arguments(case), impl="native")
    with pytest.raises(NativeBuildError, match="no-such-compiler"):
        both_ways(cpu, case)


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`value` is on cuda:0, expected cpu for impl='native'"):
        dispatch.FAMILY.choose("native", torch.float32, torch.device("cuda:0"))


def test_a_dtype_without_a_number_is_refused() -> None:
    case = make_inputs(device="cpu")
    case["value"], case["grad_out"] = case["value"].to(torch.complex64), case["grad_out"].to(torch.complex64)
    with pytest.raises(TypeError, match=r"impl='native' got torch.complex64, expected torch.float64, torch.float32"):
        both_ways(cpu, case)


def test_importing_compiles_nothing(tmp_path: Path) -> None:
    code = "import retrograd.ops, retrograd.ops.msda.cpu"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not list(tmp_path.rglob("*.so"))
