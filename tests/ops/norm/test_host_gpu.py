"""The C++ path of eager norms on a GPU: the bits of the Python path, whatever comes after a call that was remembered."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import extensions
import pytest
import torch
from norm_cases import Case, make_inputs, run
from torch.utils.checkpoint import checkpoint

from retrograd import ops
from retrograd.ops.norm import host, launch_cache
from retrograd.ops.norm.triton import backward_launch, launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: only compiled kernels are held"),
]
SHAPE = (64, 512)


@pytest.fixture(scope="session")
def built() -> None:
    """The library, in the user's cache."""
    extensions.built(host.path.library.build)


@pytest.fixture
def python(built: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The C++ path, with nothing remembered; names of the launches that go through Python."""
    before, seen = host.path.entry, []
    for module, name in itertools.product((launch, backward_launch), ("launch", "relaunch")):
        stock = getattr(module, name)

        def counted(*args: Any, name: str = name, stock: Callable[..., Any] = stock, **options: Any) -> Any:
            seen.append(name)
            return stock(*args, **options)

        monkeypatch.setattr(module, name, counted)
    forget()
    host.on()
    yield seen
    host.off()
    host.path.entry = before
    forget()


def forget() -> None:
    """What a new process starts with."""
    launch_cache.FORWARD.clear()
    launch_cache.BACKWARD.clear()
    host.path.library.load(host.path.library.find()).clear()


def in_python(function: Callable[[], Any]) -> Any:
    """The result without the C++ path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.path, "entry", None)
        return function()


def assert_same(got: Any, want: Any) -> None:
    """Equal bits, shapes, dtypes, strides, and whether there is a gradient."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (tensor is None) == (got[name] is None), name
        if tensor is not None:
            assert (got[name].dtype, got[name].stride()) == (tensor.dtype, tensor.stride()), name
            assert torch.equal(got[name], tensor), name


def another(case: Case, seed: int = 1) -> Case:
    """The case with other values, in memory of its own and contiguous."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return {
        name: torch.randn(t.shape, generator=generator, device="cuda", dtype=torch.float32).to(t.dtype)
        for name, t in case.items()
    }


def both(python: list[str], case: Case, norm: str, through_python: int = 0, **options: Any) -> None:
    """Compare the two paths on data that comes after a remembered call, three times over."""
    run(case, norm, **options)
    cases = [another(case, seed) for seed in (1, 2, 3)]
    python.clear()
    got = [run(c, norm, **options) for c in cases]
    assert len(python) == 3 * through_python, python
    for c, result in zip(cases, got, strict=True):
        assert_same(result, in_python(lambda c=c: run(c, norm, **options)))


OPTIONS = {
    "plain": {},
    "prenorm": {"prenorm": True},
    "named": {"impl": "triton"},
    "eps-0": {"eps": 0.0},
    "offset": {"weight_offset": 1.0},
    "parts": {"dw_parts": 5},
    "out-fp32": {"out_dtype": torch.float32},
    "stream-fp32": {"residual_dtype": torch.float32, "prenorm": True},
    "stream-fp32-unseen": {"residual_dtype": torch.float32},
}
GIVEN = ["", "weight", "bias", "weight bias", "weight bias residual", "residual"]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("given", GIVEN)
def test_same_bits(given: str, options: dict[str, Any], norm: str, python: list[str]) -> None:
    if "weight_offset" in options and "weight" not in given:
        pytest.skip("refused")
    both(python, make_inputs(SHAPE, torch.bfloat16, "cuda", given=given), norm, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_mixed_dtypes(dtype: torch.dtype, norm: str, python: list[str]) -> None:
    case = make_inputs(SHAPE, torch.bfloat16, "cuda", vector_dtype=dtype, stream_dtype=dtype)
    both(python, case, norm, prenorm=True)


SHAPES = [
    (512,), (1, 512), (2, 3, 512), (2, 1, 3, 96), (1, 1), (5, 1), (7, 3), (33, 511), (4096, 64), (3, 4096), (512, 4096),
    (16, 8192), (300, 1000), (65, 2560),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, ...], norm: str, python: list[str]) -> None:
    both(python, make_inputs(shape, torch.bfloat16, "cuda"), norm)


@pytest.mark.parametrize("shape", [(0, 64), (8, 0), (24, 20000), (2, 65536), (2, 131072)], ids=str)
def test_shapes_that_may_stay_in_python(shape: tuple[int, ...], norm: str, python: list[str]) -> None:
    case = make_inputs(shape, torch.bfloat16, "cuda")
    for _ in range(2):
        assert_same(run(case, norm), in_python(lambda: run(case, norm)))


@pytest.mark.parametrize("heads", [1, 6])
def test_heads(heads: int, norm: str, python: list[str]) -> None:
    both(python, make_inputs((32, heads, 128), torch.bfloat16, "cuda", heads=True), norm)


def test_many_shapes_at_once(norm: str, python: list[str]) -> None:
    cases = [make_inputs((m, n), torch.bfloat16, "cuda") for m in (1, 8, 130) for n in (64, 520, 1024)]
    want = in_python(lambda: [run(case, norm) for case in cases])
    for _ in range(2):
        python.clear()
        got = [run(case, norm) for case in cases]
    assert python == []
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize(
    "frozen",
    [("x",), ("weight",), ("bias",), ("residual",), ("weight", "bias"), ("x", "residual"), ("x", "weight", "bias")],
    ids="-".join,
)
def test_frozen(frozen: tuple[str, ...], norm: str, python: list[str]) -> None:
    both(python, make_inputs(SHAPE, torch.bfloat16, "cuda"), norm, frozen=frozen)


def test_without_gradients(norm: str, python: list[str]) -> None:
    case = make_inputs(SHAPE, torch.bfloat16, "cuda", given="weight")
    args = (case["x"], case["weight"])
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            want = in_python(lambda: getattr(ops, norm)(*args))
            python.clear()
            assert torch.equal(getattr(ops, norm)(*args), want)
            assert python == []


def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The values one element further in memory, at an address that 16 does not divide."""
    return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def rows_of_wider(tensor: torch.Tensor) -> torch.Tensor:
    """The values as part of longer rows."""
    wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 8), float("nan"))
    return wide[..., : tensor.shape[-1]].copy_(tensor)


def columns_first(tensor: torch.Tensor) -> torch.Tensor:
    """The values with neighbours in a column next to each other."""
    return tensor.t().contiguous().t()


def one_row(tensor: torch.Tensor) -> torch.Tensor:
    """The first row again and again, without taking memory."""
    return tensor[:1].expand_as(tensor)


@pytest.mark.parametrize("change", [off_by_one, rows_of_wider, columns_first, one_row])
@pytest.mark.parametrize("name", ["x", "residual", "grad_y", "grad_s"])
def test_other_layouts(name: str, change: Callable[[Any], Any], norm: str, python: list[str]) -> None:
    case = make_inputs(SHAPE, torch.bfloat16, "cuda")
    for _ in range(2):
        run(case, norm, prenorm=True)
    for seed in (1, 2):
        other = another(case, seed)
        other[name] = change(other[name])
        assert_same(run(other, norm, prenorm=True), in_python(lambda other=other: run(other, norm, prenorm=True)))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_unaligned_vectors(name: str, norm: str, python: list[str]) -> None:
    case = make_inputs(SHAPE, torch.bfloat16, "cuda")
    for _ in range(2):
        run(case, norm)
    case[name] = off_by_one(case[name])
    assert_same(run(case, norm), in_python(lambda: run(case, norm)))


def test_another_stream(norm: str, python: list[str]) -> None:
    case = make_inputs(SHAPE, torch.bfloat16, "cuda")
    second = another(case)
    want = in_python(lambda: run(second, norm))
    for _ in range(2):
        run(case, norm)
    torch.cuda.synchronize()
    python.clear()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)  # a kernel on any other stream would not wait and read what was there before
        for name, tensor in case.items():
            tensor.copy_(second[name])
        got = run(case, norm)
    torch.cuda.synchronize()
    assert python == []
    assert_same(got, want)


def test_captured_in_a_graph(norm: str, python: list[str]) -> None:
    case = make_inputs(SHAPE, torch.bfloat16, "cuda")
    second = another(case)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(case, norm)
    torch.cuda.current_stream().wait_stream(side)
    python.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(case, norm)
    assert python == []
    for name, tensor in case.items():
        tensor.copy_(second[name])
    graph.replay()
    torch.cuda.synchronize()
    assert_same(got, in_python(lambda: run(second, norm)))


def test_checkpoint(norm: str, python: list[str]) -> None:
    case = make_inputs(SHAPE, torch.bfloat16, "cuda", given="weight")

    def grads() -> Case:
        args = {name: case[name].detach().requires_grad_() for name in ("x", "weight")}
        y = checkpoint(lambda *t: getattr(ops, norm)(*t) * 2, *args.values(), use_reentrant=False)
        y.backward(case["grad_y"])
        return {name: t.grad for name, t in args.items()}

    want = in_python(grads)
    for _ in range(2):
        assert_same(grads(), want)
    python.clear()
    assert_same(grads(), want)
    assert python == []


def test_second_derivative_is_refused(norm: str, python: list[str]) -> None:
    for _ in range(3):
        x = torch.randn(SHAPE, device="cuda", requires_grad=True)
        y = getattr(ops, norm)(x)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            grad.sum().backward()


def test_threads(norm: str, python: list[str]) -> None:
    case = make_inputs(SHAPE, torch.bfloat16, "cuda")
    run(case, norm)
    cases = [another(case, seed) for seed in range(16)]
    want = in_python(lambda: [run(c, norm) for c in cases])
    with ThreadPoolExecutor(4) as pool:
        for got, expected in zip(pool.map(lambda c: run(c, norm), cases), want, strict=True):
            assert_same(got, expected)


def test_a_launch_hook_is_called(norm: str, python: list[str]) -> None:
    import triton

    case, seen = make_inputs(SHAPE, torch.bfloat16, "cuda"), []
    for _ in range(2):
        run(case, norm)

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        run(case, norm)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert any("fwd" in name for name in seen)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices in one process")
def test_another_device(norm: str, python: list[str]) -> None:
    case = make_inputs(SHAPE, torch.bfloat16, "cuda")
    want = {name: t.cpu() for name, t in in_python(lambda: run(case, norm, dw_parts=4)).items()}
    second = {name: t.to("cuda:1") for name, t in case.items()}
    for current in (0, 1, 1, 0, 1):
        with torch.cuda.device(current):
            for inputs in (case, second):
                got = run(inputs, norm, dw_parts=4)
                assert_same({name: t.cpu() for name, t in got.items()}, want)


def test_outputs_are_freed(norm: str, python: list[str]) -> None:
    case = make_inputs((1024, 1024), torch.bfloat16, "cuda", given="weight")
    # Autograd's own thread may hold the gradients of a call for a moment after it has returned.
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(3):
            run(case, norm)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(10):
            run(case, norm)
        assert torch.cuda.memory_allocated() == before
