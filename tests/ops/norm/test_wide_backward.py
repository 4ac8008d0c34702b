"""The clustered backward of wide rows: its plans, its machine code where NVRTC is there, its results on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from norm_cases import Case, check, make_inputs, run, truth
from wide_cases import SHARED_LIMIT, gpu_test, narrow_loads, needs_nvrtc

from retrograd.ops.norm.arguments import BackwardTensors
from retrograd.ops.norm.cuda import norm_bwd_wide
from retrograd.ops.norm.cuda.backward import SOURCE, BackwardKind, options_of, shared_bytes
from retrograd.ops.norm.cuda.inputs import HEADER
from retrograd.ops.norm.functional import rms_norm_bwd
from retrograd.ops.norm.plan import plan_clusters
from retrograd.ops.norm.spec import NormSpec
from retrograd.runtime.cuda import nvrtc

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# One CTA with all pieces but one or two; two; four; eight; both numbers of threads.
WIDTHS = (12288, 14336, 16384, 20480, 32768, 57344, 65536, 131072)
# s, grad_out, weight, grad
DTYPES = {
    "bf16": (BF16, BF16, BF16, BF16),
    "fp16": (F16, F16, F16, F16),
    "fp32": (F32, F32, F32, F32),
    "fp32-weight": (BF16, BF16, F32, BF16),
    "fp32-stream": (F32, BF16, F32, BF16),
    "fp32-grad": (BF16, BF16, BF16, F32),
    "no-weight": (BF16, BF16, None, BF16),
}


def _kind(name: str, centered: bool, sums: bool = True) -> BackwardKind:
    return BackwardKind(*DTYPES[name], centered, sums, sums and centered, True)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("name", DTYPES)
def test_plan_covers_the_row_and_fits(name: str, n: int) -> None:
    kind = _kind(name, True)
    itemsize = max(kind.s.itemsize, kind.grad_out.itemsize, kind.grad.itemsize)
    plan = plan_clusters(n, itemsize)
    if plan is None:
        assert itemsize == 4
        assert n > 65536
        return
    threads, piece = 32 * plan.num_warps, 16 // itemsize
    assert plan.slices * plan.slice_n == n
    assert plan.slice_n % (threads * piece) == 0
    assert plan.slice_n // threads <= 64  # sums of so many columns are in a thread's registers
    assert plan.num_stages >= 3
    words = 4 * 8 * plan.slices * plan.num_warps
    assert shared_bytes(n, kind, plan) + words + 2048 <= SHARED_LIMIT


@pytest.mark.parametrize("n", [8, 4096, 8192, 8200, 12296, 40000, 524288])
def test_rows_that_do_not_fall_into_whole_pieces_have_no_plan(n: int) -> None:
    assert plan_clusters(n, 2) is None


@pytest.mark.dealt(4)
@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "ln"])
@pytest.mark.parametrize(
    ("name", "n"),
    [*((name, 65536) for name in DTYPES), *((name, n) for name, n in zip(itertools.cycle(DTYPES), WIDTHS))],
)
def test_machine_code_does_not_spill(name: str, n: int, centered: bool, arch: str) -> None:
    kind = _kind(name, centered)
    itemsize = max(kind.s.itemsize, kind.grad_out.itemsize, kind.grad.itemsize)
    plan = plan_clusters(n, itemsize)
    if plan is None:
        plan = plan_clusters(65536, itemsize)
        n = 65536
    assert plan is not None
    options = (f"--gpu-architecture={arch}", *options_of(n, kind, plan))
    narrow = narrow_loads(nvrtc.compile_cubin(SOURCE, options, (HEADER,)))
    # Statistics of a row are single numbers; beside elements of four bytes a thread takes 8 bytes of two.
    assert all(" LDG.E.CONSTANT " in line for line in narrow) or itemsize == 4, narrow


def by_torch(tensors, spec, plan, *, dtype, weight_sum, bias_sum):
    """What norm_bwd_wide returns, from three clusters, in float64."""
    grad_out, s, weight, mean, rstd, _ = tensors
    s, g, rstd = s.double(), grad_out.double(), rstd.double()[:, None]
    h = (s if mean is None else s - mean.double()[:, None]) * rstd
    sums = [
        torch.stack([part[i::3].sum(0) for i in range(3)]).float() if wanted else None
        for part, wanted in ((g * h, weight_sum), (g, bias_sum))
    ]
    if weight is not None:
        g = g * (weight.double() + spec.weight_offset)
    grad = g - h * (g * h).mean(1, keepdim=True) - (0 if mean is None else g.mean(1, keepdim=True))
    return (grad * rstd).to(dtype), *sums


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    "frozen",
    [(), ("weight", "bias"), ("x",), ("x", "weight"), ("bias", "residual")],
    ids=lambda v: "-".join(v) or "none",
)
def test_what_the_kernel_leaves_becomes_the_gradients(
    norm: str, frozen: tuple[str, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from retrograd.ops.norm import cuda
    from retrograd.ops.norm.triton import clusters

    calls = []
    monkeypatch.setattr(clusters, "has_clusters", lambda _: True)
    monkeypatch.setattr(clusters, "forward_by_clusters", lambda *_: False)
    monkeypatch.setattr(cuda, "norm_bwd_wide", lambda *args, **kw: calls.append(kw) or by_torch(*args, **kw))
    check(make_inputs((7, 16384), F32, device), norm, frozen=frozen, impl="triton")
    assert calls == [dict(dtype=F32, weight_sum="weight" not in frozen, bias_sum="bias" not in frozen)]


def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Widths that the clustered kernel is launched for, from now on."""
    from retrograd.ops.norm import cuda

    seen: list[int] = []
    real = cuda.norm_bwd_wide

    def noted(tensors: BackwardTensors, *args: object, **kwargs: object) -> object:
        seen.append(tensors.s.shape[1])
        return real(tensors, *args, **kwargs)

    monkeypatch.setattr(cuda, "norm_bwd_wide", noted)
    return seen


@gpu_test
@pytest.mark.parametrize("rows", [1, 3, 257])
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_gradients(norm: str, n: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = planned(monkeypatch)
    check(make_inputs((rows, n), BF16, "cuda", given="weight bias" if norm == "layer_norm" else "weight"), norm)
    check(make_inputs((rows, n), BF16, "cuda", given="residual weight"), norm)
    assert seen == [n, n]


@gpu_test
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(F32, {}), (F16, {}), (BF16, dict(vector_dtype=F32)), (F32, dict(vector_dtype=BF16))],
    ids=["fp32", "fp16", "fp32-weight", "bf16-weight"],
)
@pytest.mark.parametrize("n", [16384, 32768, 65536])
def test_dtypes(norm: str, n: int, dtype: torch.dtype, options: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = planned(monkeypatch)
    check(make_inputs((133, n), dtype, "cuda", given="weight bias", **options), norm)
    check(make_inputs((133, n), dtype, "cuda", given=""), norm)
    check(make_inputs((133, n), dtype, "cuda", given="weight"), norm, weight_offset=1.0)
    check(make_inputs((133, n), dtype, "cuda", given="weight bias", **options), norm, frozen=("weight", "bias"))
    assert seen == [n] * 4


@gpu_test
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_gradients_in_wider_dtypes_than_the_inputs(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = planned(monkeypatch)
    case = make_inputs((65, 32768), BF16, "cuda", given="weight bias")
    check(case | {"grad_y": case["grad_y"].float()}, norm, out_dtype=F32)
    assert seen == [32768]


@gpu_test
def test_what_it_does_not_take_goes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = planned(monkeypatch)
    check(make_inputs((9, 40000), BF16, "cuda"), "layer_norm")
    check(make_inputs((9, 16384), BF16, "cuda"), "layer_norm", prenorm=True)
    check(make_inputs((9, 16384), BF16, "cuda", given="weight"), "rms_norm", dw_parts=3)
    assert seen == []


@gpu_test
@pytest.mark.parametrize("n", [16384, 131072])
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_a_row_has_the_same_bits_in_every_batch_and_every_time(norm: str, n: int) -> None:
    case = make_inputs((601, n), BF16, "cuda", given="weight bias" if norm == "layer_norm" else "weight")
    whole = run(case, norm)
    for _ in range(5):
        again = run(case, norm)
        assert all(torch.equal(whole[name], again[name]) for name in whole)
    for row in (0, 17, 600):
        one = {k: v if k in ("weight", "bias") else v[row : row + 1] for k, v in case.items()}
        assert torch.equal(run(one, norm)["x"][0], whole["x"][row])


@gpu_test
def test_rows_at_a_distance_unaligned_rows_and_repeated_rows() -> None:
    case = make_inputs((33, 65536), BF16, "cuda", given="weight")
    want = run(case, "rms_norm")
    spaced = torch.zeros(33, 2, 65536, dtype=BF16, device="cuda")
    spaced[:, 1] = case["grad_y"]
    shifted = torch.empty(33 * 65536 + 1, dtype=BF16, device="cuda")[1:].view(33, 65536).copy_(case["grad_y"])
    for grad in (spaced[:, 1], shifted):
        got = run(case | {"grad_y": grad}, "rms_norm")
        assert all(torch.equal(got[name], want[name]) for name in want)
    same = case | {"grad_y": case["grad_y"][:1].expand(33, -1)}
    plain = case | {"grad_y": same["grad_y"].contiguous()}
    assert torch.equal(run(same, "rms_norm")["x"], run(plain, "rms_norm")["x"])


@gpu_test
def test_infinities_and_nans_stay_in_their_rows_and_columns() -> None:
    case = make_inputs((300, 65536), BF16, "cuda", given="weight")
    case["grad_y"][7, 40000], case["grad_y"][11, 3] = float("inf"), float("nan")
    got = run(case, "rms_norm")
    rows = got["x"].isfinite().all(1)
    assert rows.logical_not().nonzero().flatten().tolist() == [7, 11]
    assert got["weight"].isfinite().logical_not().nonzero().flatten().tolist() == [3, 40000]


@gpu_test
def test_on_a_side_stream_and_in_a_graph() -> None:
    case = make_inputs((165, 65536), BF16, "cuda", given="weight")
    rstd = truth(case, "rms_norm")["x"][0].new_ones(165).float()
    args = (case["grad_y"], case["x"], case["weight"], rstd)

    def backward() -> list[torch.Tensor]:
        return [t for t in rms_norm_bwd(*args) if t is not None]

    want = backward()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = backward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = backward()
    graph.replay()
    torch.cuda.synchronize()
    for made in (aside, captured):
        assert all(torch.equal(a, b) for a, b in zip(made, want, strict=True))


def test_a_cpu_tensor_is_refused() -> None:
    x, plan = torch.zeros(2, 16384), plan_clusters(16384, 4)
    assert plan is not None
    tensors = BackwardTensors(grad_out=x, s=x, weight=None, mean=None, rstd=x[:, 0])
    with pytest.raises(RuntimeError, match=r"tensor on cpu, expected a GPU of compute capability 9\.0"):
        norm_bwd_wide(tensors, NormSpec(False, 1e-6), plan, dtype=F32, weight_sum=True, bias_sum=False)
