"""The clustered forward of wide rows: its plans, its machine code where NVRTC is there, its results on a GPU."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from norm_cases import Case, check, make_inputs, run
from wide_cases import SHARED_LIMIT, gpu_test, narrow_loads, needs_nvrtc

from retrograd.ops.norm.arguments import NormTensors, WantedOutput
from retrograd.ops.norm.cuda import backward, fits_wide, inputs, norm_fwd_wide, plan_wide
from retrograd.ops.norm.cuda import forward as wide
from retrograd.ops.norm.cuda.inputs import HEADER
from retrograd.ops.norm.spec import NormSpec
from retrograd.runtime.cuda import nvrtc

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# One CTA; slices of a power of two, of another number of columns, the last shorter than the others; a large cluster.
WIDTHS = (16392, 32768, 32776, 40960, 50000, 65536, 131072, 262144)
# x, residual, weight, bias, y, s
DTYPES = {
    "rms": (BF16, None, BF16, None, BF16, BF16),
    "rms-fp16": (F16, None, F16, None, F16, F16),
    "rms-fp32": (F32, None, F32, None, F32, F32),
    "ln": (BF16, None, BF16, BF16, BF16, BF16),
    "rms-residual": (BF16, BF16, BF16, None, BF16, BF16),
    "ln-residual": (BF16, BF16, BF16, BF16, BF16, BF16),
    "ln-fp32": (F32, None, F32, F32, F32, F32),
    "ln-stream-fp32": (BF16, F32, F32, F32, BF16, F32),
    "rms-no-weight": (BF16, None, None, None, BF16, BF16),
}
# Widths where later pieces of weight and bias come into the places of x.
HELD = {"ln": (32768, 65536, 131072), "ln-fp32": (16384, 32768, 40960, 65536)}


def _kind(name: str) -> wide.ForwardKind:
    return wide.ForwardKind(*DTYPES[name], centered=name.startswith("ln"), own_s=DTYPES[name][1] is not None)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("name", DTYPES)
def test_plan_covers_the_row_and_fits(name: str, n: int) -> None:
    plan = plan_wide(n, _kind(name))
    slice_n = 64 * -(-n // (64 * plan.cluster))
    assert plan.cluster * slice_n >= n
    assert plan.resident * (plan.shared_bytes + 6 * 1024) <= SHARED_LIMIT
    assert plan.resident * plan.threads <= 2048
    assert plan.batch >= 1


def test_weight_and_bias_come_into_places_of_x_where_they_fit() -> None:
    for name, widths in HELD.items():
        assert all(plan_wide(n, _kind(name)).hold for n in widths)
    assert not plan_wide(65536, _kind("rms")).hold
    for other in ("ln-residual", "ln-stream-fp32"):
        assert not any(plan_wide(n, _kind(other)).hold for n in WIDTHS)
    for n in (16384, 40960, 65544):  # too few pieces; not the same number for each thread
        assert not plan_wide(n, _kind("ln")).hold


def test_a_row_that_does_not_fit_names_the_mend() -> None:
    with pytest.raises(ValueError, match="shared memory of a cluster of 2; use impl='triton'"):
        plan_wide(262144, _kind("ln"), cluster=2)
    with pytest.raises(ValueError, match="a row of 4194304 columns does not fit into the shared memory of any cluster"):
        plan_wide(1 << 22, _kind("rms"))


def test_rows_that_no_cluster_holds_are_known() -> None:
    assert fits_wide(1 << 20, BF16, None)
    assert not fits_wide(1 << 21, BF16, None)
    assert not fits_wide(1 << 20, BF16, F32)


@pytest.mark.dealt(4)
@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize(
    ("name", "n"),
    [*zip(DTYPES, itertools.cycle(WIDTHS), strict=False), *((name, n) for name in HELD for n in HELD[name])],
)
def test_machine_code_does_not_spill(name: str, n: int, arch: str) -> None:
    kind = _kind(name)
    plan = plan_wide(n, kind, int(arch.removeprefix("sm_")))
    options = wide.options_of(n, kind, plan)
    cubin = nvrtc.compile_cubin(wide.SOURCE, (f"--gpu-architecture={arch}", *options), (HEADER,))
    narrow = narrow_loads(cubin)
    # Beside a residual of four bytes an element, a thread takes 8 bytes of x.
    assert not narrow or "stream" in name, narrow


@pytest.mark.parametrize("source", [wide.SOURCE, backward.SOURCE], ids=lambda source: source.stem)
@pytest.mark.parametrize("pdl", [True, False])
def test_what_is_compiled_and_loaded(source: Path, pdl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the GPU in question, by the name that the file declares, and launched early where the driver can."""
    monkeypatch.setattr(inputs, "arch_of", lambda index: 100 if index == 3 else 90)
    monkeypatch.setattr(inputs.driver, "has_pdl", lambda arch: pdl and arch == 100)
    monkeypatch.setattr(inputs.nvrtc, "compile_cubin", lambda *given: given)
    monkeypatch.setattr(inputs.driver, "load", lambda *given, **how: (given, how))
    (cubin, name, index), how = inputs.load(source, ("-DN=8",), 3, cluster=4, threads=256, shared_bytes=64)
    assert cubin == (source, ("--gpu-architecture=sm_100", "-DN=8"), (HEADER,))
    assert re.findall(r'extern "C" __global__ .*\) (\w+)\(', source.read_text()) == [name]
    assert (index, how) == (3, dict(cluster=4, threads=256, shared_bytes=64, pdl=pdl))


@gpu_test
@pytest.mark.parametrize("rows", [1, 3, 257])
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_values_and_gradients(norm: str, n: int, rows: int) -> None:
    check(make_inputs((rows, n), BF16, "cuda"), norm, prenorm=True)
    check(make_inputs((rows, n), BF16, "cuda", given="weight"), norm)


@gpu_test
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (F32, {}),
        (F16, {}),
        (BF16, dict(vector_dtype=F32, stream_dtype=F32)),
        (F32, dict(vector_dtype=BF16, stream_dtype=BF16)),
    ],
    ids=["fp32", "fp16", "bf16-with-fp32-stream", "fp32-with-bf16-stream"],
)
def test_dtypes(norm: str, dtype: torch.dtype, options: Case) -> None:
    check(make_inputs((37, 40960), dtype, "cuda", **options), norm, prenorm=True)


@gpu_test
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_a_row_has_the_same_bits_in_every_batch_and_every_time(norm: str) -> None:
    case = make_inputs((301, 65536), BF16, "cuda")
    whole = run(case, norm, prenorm=True)
    again = run(case, norm, prenorm=True)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    for row in (0, 17, 300):
        one = {k: v if k in ("weight", "bias") else v[row : row + 1] for k, v in case.items()}
        alone = run(one, norm, prenorm=True)
        assert all(torch.equal(alone[name][0], whole[name][row]) for name in ("y", "s", "x", "residual"))


@gpu_test
def test_rows_at_a_distance_unaligned_rows_and_repeated_rows() -> None:
    case = make_inputs((33, 40960), BF16, "cuda", given="weight")
    want = run(case, "rms_norm")["y"]
    spaced = torch.zeros(33, 2, 40960, dtype=BF16, device="cuda")
    spaced[:, 1] = case["x"]
    assert torch.equal(run(case | {"x": spaced[:, 1]}, "rms_norm")["y"], want)
    shifted = torch.empty(33 * 40960 + 1, dtype=BF16, device="cuda")[1:].view(33, 40960).copy_(case["x"])
    assert torch.equal(run(case | {"x": shifted}, "rms_norm")["y"], want)
    same = case["x"][:1].expand(33, -1)
    assert torch.equal(run(case | {"x": same}, "rms_norm")["y"], want[:1].expand(33, -1))


@gpu_test
def test_on_a_side_stream_and_in_a_graph() -> None:
    case = make_inputs((65, 65536), BF16, "cuda", given="weight")
    spec = NormSpec(False, 1e-6)
    wanted = WantedOutput(out_dtype=BF16, s_dtype=BF16)
    want = norm_fwd_wide(NormTensors(x=case["x"], weight=case["weight"]), spec, wanted)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = norm_fwd_wide(NormTensors(x=case["x"], weight=case["weight"]), spec, wanted)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = norm_fwd_wide(NormTensors(x=case["x"], weight=case["weight"]), spec, wanted)[0]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(aside, want)
    assert torch.equal(captured, want)


@gpu_test
def test_rows_without_elements() -> None:
    x = torch.ones(3, 0, device="cuda")
    _, _, mean, rstd = norm_fwd_wide(NormTensors(x=x), NormSpec(True, 0.25), WantedOutput(out_dtype=F32, s_dtype=F32))
    assert (mean.tolist(), rstd.tolist()) == ([0.0] * 3, [2.0] * 3)


@gpu_test
def test_what_it_cannot_take_is_said() -> None:
    x = torch.zeros(2, 40964, dtype=BF16, device="cuda")
    with pytest.raises(ValueError, match="`x` has 40964 columns, expected a multiple of 8"):
        norm_fwd_wide(NormTensors(x=x), NormSpec(False, 1e-6), WantedOutput(out_dtype=BF16, s_dtype=BF16))


def test_a_cpu_tensor_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"tensor on cpu, expected a GPU of compute capability 9\.0"):
        norm_fwd_wide(
            NormTensors(x=torch.zeros(2, 40960)), NormSpec(False, 1e-6), WantedOutput(out_dtype=F32, s_dtype=F32)
        )
