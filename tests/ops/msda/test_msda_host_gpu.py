"""The C++ path of eager deformable attention on a GPU: the bits of the Python path, whatever comes after a first call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import extensions
import pytest
import torch
from msda_cases import INPUTS, Case, arguments, assert_within_budget, make_inputs, run, truth
from torch.utils.checkpoint import checkpoint

from retrograd.ops import ms_deform_attn, ms_deform_attn_fused
from retrograd.ops.msda import dispatch, host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: only compiled kernels are told"),
]
LEVELS = [(32, 24), (16, 12), (8, 6), (4, 3)]
SIZES = dict(heads=8, channels=32, points=4)
IMPLS = [None, "triton"]
if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
    IMPLS.append("cuda")


@pytest.fixture(scope="session")
def built() -> None:
    """The library, in the user's cache."""
    extensions.built(host.path.library.build)


@pytest.fixture
def python(built: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The C++ path, with nothing told; names of the functions that Python runs."""
    before, seen = host.path.entry, []
    for name in ("triton", "cuda"):
        module = dispatch.FAMILY.module(next(i for i in dispatch.FAMILY.impls if i.value == name))
        for function in ("msda_fwd", "msda_bwd"):
            stock = getattr(module, function)

            def counted(*args: Any, label: str = function, stock: Callable[..., Any] = stock) -> Any:
                seen.append(label)
                return stock(*args)

            monkeypatch.setattr(module, function, counted)
    forget()
    host.on()
    yield seen
    host.off()
    host.path.entry = before
    forget()


def forget() -> None:
    """What a new process starts with."""
    for cached in (dispatch.resolve, dispatch.functions, dispatch._by_sizes):
        cached.cache_clear()
    if host.path.module is not None:
        host.path.module.clear()


def in_python(function: Callable[[], Any]) -> Any:
    """The result without the C++ path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.path, "entry", None)
        return function()


def gpu_case(dtype: torch.dtype = torch.bfloat16, *, queries: int = 300, seed: int = 7, **options: Any) -> Case:
    beside = options.pop("beside", torch.float32)
    return make_inputs(LEVELS, dtype, "cuda", queries=queries, beside=beside, seed=seed, **SIZES, **options)


def another(case: Case, seed: int = 1) -> Case:
    """Other numbers in tensors of the same kind."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return case | {
        name: torch.rand(t.shape, generator=generator, device="cuda").to(t.dtype)
        for name, t in case.items()
        if isinstance(t, torch.Tensor) and name != "spatial_shapes"
    }


def assert_same(got: Any, want: Any) -> None:
    """Equal bits, shapes, dtypes, strides."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].stride()) == (tensor.dtype, tensor.stride()), name
        assert torch.equal(got[name], tensor), name


def in_cpp(python: list[str], case: Case, runs: int = 2, **options: Any) -> None:
    """Have a call learned, and see that those after it run without Python's functions."""
    for _ in range(runs):
        run(case, **options)
    python.clear()
    run(case, **options)
    assert python == []


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("dtype", "beside"), [(torch.float32, None), (torch.bfloat16, torch.float32), (torch.half, None)]
)
@pytest.mark.parametrize("queries", [300, 1020], ids=["decoder", "encoder"])
def test_same_bits(
    queries: int, dtype: Any, beside: Any, impl: str | None, mode: dict[str, Any], python: list[str]
) -> None:
    # Triton's fixed order sorts in Python; there only what has a fixed order anyway is compared.
    sorts = impl != "triton" and "cuda" in IMPLS
    options = mode | dict(impl=impl, deterministic=sorts)
    case = gpu_case(dtype, queries=queries, beside=beside, align_corners=mode["align_corners"])
    in_cpp(python, case, **options)
    for seed in (1, 2):
        other = another(case, seed)
        got, want = run(other, **options), in_python(lambda other=other: run(other, **options))
        if not sorts:
            del got["value"], want["value"]
        assert_same(got, want)
    assert len(python) == 4  # those of Python's path


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [300, 1020], ids=["decoder", "encoder"])
def test_atomics_within_budget(queries: int, dtype: Any, impl: str | None, python: list[str]) -> None:
    case = gpu_case(dtype, queries=queries)
    in_cpp(python, case, impl=impl, deterministic=False)
    got = run(case, impl=impl, deterministic=False)
    assert python == []
    assert_within_budget(got, truth(case), case)


@pytest.mark.parametrize("frozen", [(), *((n,) for n in INPUTS), INPUTS[1:], INPUTS[:2]], ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_frozen(dtype: Any, frozen: tuple[str, ...], python: list[str]) -> None:
    case = gpu_case(dtype)
    in_cpp(python, case, frozen=frozen, deterministic=True)
    other = another(case)
    got = run(other, frozen=frozen, deterministic=True)
    assert_same(got, in_python(lambda: run(other, frozen=frozen, deterministic=True)))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_levels_on_the_gpu(dtype: Any, kind: torch.dtype, python: list[str]) -> None:
    case = gpu_case(dtype)
    case["spatial_shapes"] = torch.tensor(LEVELS, dtype=kind, device="cuda")
    before = in_python(lambda: run(case, deterministic=True))
    for _ in range(3):
        assert_same(run(case, deterministic=True), before)
    # Other sizes in the same memory are read by the kernels.
    case["spatial_shapes"].copy_(case["spatial_shapes"].flip(1))
    got = run(case, deterministic=True)
    assert_same(got, in_python(lambda: run(case, deterministic=True)))
    assert not torch.equal(got["out"], before["out"])


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
@pytest.mark.parametrize(("dtype", "beside"), [(torch.float32, None), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("impl", [None, "triton"])
def test_fused(impl: str | None, dtype: Any, beside: Any, boxes: bool, python: list[str]) -> None:
    """Backward and all; by atomic additions but where CUDA C++ adds in order, since Triton's order is sorted in Python."""
    ordered = impl is None and "cuda" in IMPLS
    case = gpu_case(dtype, beside=beside)
    tensors = [
        case["value"],
        torch.rand(2, 300, 4, 4 if boxes else 2, device="cuda").to(beside or dtype),
        case["sampling_locations"],
        case["attention_weights"].flatten(3),
    ]

    def call(frozen: int | None = None) -> Any:
        leaves = [t.detach().requires_grad_(place != frozen) for place, t in enumerate(tensors)]
        out = ms_deform_attn_fused(leaves[0], LEVELS, *leaves[1:], deterministic=ordered, impl=impl)
        wanted = {name: leaf for name, leaf in zip("vral", leaves, strict=True) if leaf.requires_grad}
        grads = torch.autograd.grad(out, list(wanted.values()), case["grad_out"])
        found = dict(zip(wanted, grads, strict=True)) | {"o": out.detach()}
        return found if ordered else {name: t for name, t in found.items() if name != "v"}

    for frozen in (None, 0, 1, 2, 3):
        want = in_python(lambda frozen=frozen: call(frozen))
        for _ in range(2):
            assert_same(call(frozen), want)
        python.clear()
        assert_same(call(frozen), want)
        assert python == []


def test_without_gradients(python: list[str]) -> None:
    case = gpu_case()
    want = in_python(lambda: ms_deform_attn(*arguments(case)))
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            ms_deform_attn(*arguments(case))
            python.clear()
            assert torch.equal(ms_deform_attn(*arguments(case)), want)
            assert python == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_stream(dtype: Any, python: list[str]) -> None:
    case = gpu_case(dtype)
    second = another(case)
    want = in_python(lambda: run(second, deterministic=True))
    in_cpp(python, case, deterministic=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)  # a kernel on any other stream would not wait and read what was there before
        for name in (*INPUTS, "grad_out"):
            case[name].copy_(second[name])
        got = run(case, deterministic=True)
    torch.cuda.synchronize()
    assert python == []
    assert_same(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_in_a_graph(dtype: Any, python: list[str]) -> None:
    case = gpu_case(dtype)
    second = another(case)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(case, deterministic=True)
    torch.cuda.current_stream().wait_stream(side)
    python.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(case, deterministic=True)
    assert python == []
    for name in (*INPUTS, "grad_out"):
        case[name].copy_(second[name])
    graph.replay()
    torch.cuda.synchronize()
    assert_same(got, in_python(lambda: run(second, deterministic=True)))


def test_checkpoint(python: list[str]) -> None:
    case = gpu_case()

    def grads() -> Any:
        leaves = [case[name].detach().requires_grad_() for name in INPUTS]

        def block(*t: torch.Tensor) -> torch.Tensor:
            return ms_deform_attn(t[0], LEVELS, *t[1:], deterministic=True) * 2

        checkpoint(block, *leaves, use_reentrant=False).backward(case["grad_out"])
        return {name: leaf.grad for name, leaf in zip(INPUTS, leaves, strict=True)}

    want = in_python(grads)
    for _ in range(2):
        assert_same(grads(), want)
    python.clear()
    assert_same(grads(), want)
    assert python == []


def test_second_derivatives(python: list[str]) -> None:
    case = gpu_case(torch.float32, queries=20)

    def second() -> Any:
        leaves = [case[name].detach().requires_grad_() for name in INPUTS]
        out = ms_deform_attn(leaves[0], LEVELS, *leaves[1:], deterministic=True)
        first = torch.autograd.grad(out, leaves, case["grad_out"], create_graph=True)
        return dict(enumerate(g.detach() for g in (*first[1:], out)))

    want = in_python(second)
    for _ in range(3):
        assert_same(second(), want)


def test_threads(python: list[str]) -> None:
    case = gpu_case()
    run(case, deterministic=True)
    cases = [another(case, seed) for seed in range(16)]
    want = in_python(lambda: [run(c, deterministic=True) for c in cases])
    with ThreadPoolExecutor(4) as pool:
        for got, expected in zip(pool.map(lambda c: run(c, deterministic=True), cases), want, strict=True):
            assert_same(got, expected)


def test_a_launch_hook_is_called(python: list[str]) -> None:
    import triton

    case, seen = gpu_case(torch.float32), []
    in_cpp(python, case, impl="triton")

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        run(case, impl="triton")
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert any("fwd" in name for name in seen)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices in one process")
def test_another_device(python: list[str]) -> None:
    case = gpu_case()
    want = {name: t.cpu() for name, t in in_python(lambda: run(case, deterministic=True)).items()}
    second = {name: t.to("cuda:1") if isinstance(t, torch.Tensor) else t for name, t in case.items()}
    for current in (0, 1, 1, 0, 1):
        with torch.cuda.device(current):
            for inputs in (case, second):
                got = run(inputs, deterministic=True)
                assert_same({name: t.cpu() for name, t in got.items()}, want)


def test_memory_is_freed(python: list[str]) -> None:
    case = gpu_case()
    # Autograd's own thread may hold the gradients of a call for a moment after it has returned.
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(3):
            run(case)
        gc.collect()  # of the tests before
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(10):
            run(case)
        assert torch.cuda.memory_allocated() == before
