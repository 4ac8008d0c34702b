"""Launching again past Triton's look at the arguments: the same bits as a launch that looks, whatever has changed.

Triton compiles for dtypes, for which arguments are None, for addresses that 16 divides and for the sizes it is told. A
held launch that is used where one of these differs reads or writes the wrong memory. Every second call has data and
results of its own, so that nothing stale can pass for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from norm_cases import Case, make_inputs, run

from retrograd.ops.norm import launch_cache
from retrograd.ops.norm.arguments import BackwardTensors, NormTensors, WantedGrads, WantedOutput
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.norm.triton import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: only compiled kernels are held"),
]

M, N = 64, 512
MANY = 1024  # rows, whose partial sums a second kernel adds up
EVERYTHING = "weight bias residual"
# The forward and the backward. What adds up its partial sums is launched again where that is.
ALL = 2
Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Hold no launch before and after."""
    forget_launches()
    yield
    forget_launches()


@pytest.fixture
def relaunched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The devices on which held launches were used."""
    used: list[int] = []
    relaunch = launch.relaunch

    def counted(handle: Any, args: Any, device_index: int) -> None:
        used.append(device_index)
        relaunch(handle, args, device_index)

    monkeypatch.setattr(launch, "relaunch", counted)
    return used


def forget_launches() -> None:
    """What a new process starts with."""
    launch_cache.FORWARD.clear()
    launch_cache.BACKWARD.clear()


def another(case: Case, seed: int = 1) -> Case:
    """The case with other values, in memory of its own and contiguous."""
    generator = torch.Generator(case["x"].device).manual_seed(seed)
    return {
        name: torch.randn(t.shape, generator=generator, device=t.device, dtype=torch.float32).to(t.dtype)
        for name, t in case.items()
    }


def results(norm: str, case: Case, statistics: Change | None = None, **options: Any) -> list[torch.Tensor | None]:
    """Everything that forward and backward return; `statistics` moves mean and rstd elsewhere in between."""
    keys = {"eps": 1e-6, "weight_offset": 0.0, "parts": None} | options
    out_dtype = keys.pop("out_dtype", case["x"].dtype)
    into = {name: keys.pop(name) for name in ("into_weight", "into_bias") if name in keys}
    spec = NormSpec(centered=norm == "layer_norm", deterministic=True, **keys)
    x, weight, bias, residual = (case.get(name) for name in ("x", *EVERYTHING.split()))
    s_dtype = (x if residual is None else residual).dtype
    tensors = NormTensors(x, weight, bias, residual)
    y, s, mean, rstd = launch.norm_fwd(tensors, spec, WantedOutput(out_dtype=out_dtype, s_dtype=s_dtype))
    moved = [t if t is None or statistics is None else statistics(t) for t in (mean, rstd)]
    saved = BackwardTensors(
        grad_out=case["grad_y"], s=x if s is None else s, weight=weight, mean=moved[0], rstd=moved[1],
        grad_s=case.get("grad_s"),
    )  # fmt: skip
    dtypes = {name: None if t is None else t.dtype for name, t in tensors._asdict().items()}
    heads = weight.shape[0] if weight is not None and weight.dim() == 2 else 1
    grads = launch.norm_bwd(saved, spec, WantedGrads(**dtypes, heads=heads, **into))
    return [y, s, mean, rstd, *grads]


def assert_same(got: list[torch.Tensor | None], want: list[torch.Tensor | None]) -> None:
    """Equal bits in every tensor."""
    assert [None if t is None else (t.shape, t.dtype) for t in got] == [
        None if t is None else (t.shape, t.dtype) for t in want
    ]
    different = [
        place for place, (a, b) in enumerate(zip(got, want, strict=True)) if a is not None and not torch.equal(a, b)
    ]
    assert different == []


def assert_after(norm: str, first: Case, second: Case, relaunched: list[int], expected: int, **options: Any) -> None:
    """Hold `second`, run when `first` has been, to the bits of `second` run alone, and `first` to its own."""
    before = results(norm, first)
    assert relaunched == []
    got = results(norm, second, **options)
    assert len(relaunched) == expected
    after = results(norm, first)
    assert len(relaunched) == expected + ALL
    forget_launches()
    assert_same(got, results(norm, second, **options))
    assert len(relaunched) == expected + ALL  # that one looked at its arguments
    assert_same(after, before)


def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The values one element further in memory, at an address that 16 does not divide."""
    moved = tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape)
    assert moved.data_ptr() % 16
    return moved.copy_(tensor)


def rows_of_wider(columns: int) -> Change:
    """The values as part of rows that are `columns` longer."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.new_full((tensor.shape[0], tensor.shape[1] + columns), float("nan"))
        return wide[:, : tensor.shape[1]].copy_(tensor)

    return change


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    """The values with a gap after each."""
    return torch.stack([tensor, torch.full_like(tensor, float("nan"))], dim=-1)[..., 0]


def columns_first(tensor: torch.Tensor) -> torch.Tensor:
    """The values with neighbours in a column next to each other."""
    return tensor.t().contiguous().t()


def one_row(tensor: torch.Tensor) -> torch.Tensor:
    """The first row again and again, without taking memory."""
    return tensor[:1].expand_as(tensor)


@pytest.fixture(params=[(M, torch.bfloat16), (M, torch.float32), (MANY, torch.bfloat16)], ids=str)
def first(request: pytest.FixtureRequest) -> Case:
    """The call whose launch is held."""
    rows, dtype = request.param
    return make_inputs((rows, N), dtype, "cuda")


def test_other_data(first: Case, norm: str, relaunched: list[int]) -> None:
    assert_after(norm, first, another(first), relaunched, ALL)


# A backward does not read the bias. A forward that was given something unaligned can leave aligned statistics behind.
@pytest.mark.parametrize(
    ("name", "expected"),
    [("x", 1), ("weight", 0), ("bias", 1), ("residual", 1), ("grad_y", 1), ("grad_s", 1)],
)
def test_unaligned(name: str, expected: int, first: Case, norm: str, relaunched: list[int]) -> None:
    second = another(first)
    second[name] = off_by_one(second[name])
    assert_after(norm, first, second, relaunched, expected)


def test_unaligned_s(norm: str, relaunched: list[int]) -> None:
    first = make_inputs((M, N), torch.bfloat16, "cuda", given="weight bias")  # s is x itself
    second = another(first)
    second["x"] = off_by_one(second["x"])
    assert_after(norm, first, second, relaunched, 0)


def test_unaligned_statistics(first: Case, norm: str, relaunched: list[int]) -> None:
    assert_after(norm, first, another(first), relaunched, 1, statistics=off_by_one)


@pytest.mark.parametrize("which", ["mean", "rstd"])
def test_one_unaligned_statistic(which: str, first: Case, relaunched: list[int]) -> None:
    order = iter(("mean", "rstd"))

    def move(statistic: torch.Tensor) -> torch.Tensor:
        return off_by_one(statistic) if next(order) == which else statistic

    second = another(first)
    results("layer_norm", first)
    got = results("layer_norm", second, statistics=move)
    assert len(relaunched) == 1
    forget_launches()
    order = iter(("mean", "rstd"))
    assert_same(got, results("layer_norm", second, statistics=move))


LAYOUTS = {
    "rows-8-further": rows_of_wider(8),
    "rows-1-further": rows_of_wider(1),
    "every-second": every_second,
    "columns-first": columns_first,
    "one-row": one_row,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["x", "residual", "grad_y", "grad_s"])
def test_other_strides(name: str, layout: str, first: Case, norm: str, relaunched: list[int]) -> None:
    second = another(first)
    second[name] = LAYOUTS[layout](second[name])
    assert_after(norm, first, second, relaunched, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_that_stay_are_held_unless_they_need_a_copy(
    layout: str, first: Case, norm: str, relaunched: list[int]
) -> None:
    cases = [another(first, seed) for seed in (1, 2)]
    for case in cases:
        case |= {name: LAYOUTS[layout](case[name]) for name in ("x", "residual", "grad_y", "grad_s")}
    results(norm, cases[0])
    got = results(norm, cases[1])
    assert len(relaunched) == (0 if layout in ("every-second", "columns-first") else ALL)
    forget_launches()
    assert_same(got, results(norm, cases[1]))


def test_weight_with_gaps(first: Case, norm: str, relaunched: list[int]) -> None:
    second = another(first)
    second["weight"] = every_second(second["weight"])
    assert_after(norm, first, second, relaunched, 0)


def test_bias_with_gaps(first: Case, norm: str, relaunched: list[int]) -> None:
    second = another(first)
    second["bias"] = every_second(second["bias"])
    assert_after(norm, first, second, relaunched, 1)


@pytest.mark.parametrize(
    "options",
    [{"eps": 1e-2}, {"eps": 0.0}, {"weight_offset": 1.0}, {"parts": 3}],
    ids=str,
)
def test_other_options(options: dict[str, Any], first: Case, norm: str, relaunched: list[int]) -> None:
    assert_after(norm, first, another(first), relaunched, 0, **options)


def test_other_dtype_of_y(norm: str, relaunched: list[int]) -> None:
    first = make_inputs((M, N), torch.bfloat16, "cuda")
    assert_after(norm, first, another(first), relaunched, 1, out_dtype=torch.float32)


# The gradients of weight and bias take the dtypes of weight and bias, so the backward is another one as well.
@pytest.mark.parametrize("name", ["weight", "bias", "residual", "x", "grad_y"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype: torch.dtype, name: str, norm: str, relaunched: list[int]) -> None:
    first = make_inputs((M, N), torch.bfloat16, "cuda")
    second = another(first)
    second[name] = second[name].to(dtype)
    assert_after(norm, first, second, relaunched, 1 if name == "grad_y" else 0)


@pytest.mark.parametrize("name", ["weight", "bias", "residual", "grad_s"])
def test_one_tensor_less(name: str, first: Case, norm: str, relaunched: list[int]) -> None:
    second = another(first)
    del second[name]
    assert_after(norm, first, second, relaunched, 1 if name == "grad_s" else 0)


@pytest.mark.parametrize("rows", [1, 63, 65, 128, 4096])
def test_other_number_of_rows(rows: int, first: Case, norm: str, relaunched: list[int]) -> None:
    second = another(make_inputs((rows, N), first["x"].dtype, "cuda"))
    assert_after(norm, first, second, relaunched, 0)


@pytest.mark.parametrize("n", [511, 504, 1024])
def test_other_number_of_columns(n: int, first: Case, norm: str, relaunched: list[int]) -> None:
    second = another(make_inputs((len(first["x"]), n), first["x"].dtype, "cuda"))
    assert_after(norm, first, second, relaunched, 0)


def test_heads_are_not_rows(norm: str, relaunched: list[int]) -> None:
    first = make_inputs((M, N), torch.bfloat16, "cuda", given="weight bias")
    heads = {name: first[name].expand(4, N) for name in ("weight", "bias")}
    assert_after(norm, first, another(first | heads), relaunched, 0)


@pytest.mark.parametrize("unaligned", [False, True], ids=["aligned", "unaligned"])
def test_sums_added_elsewhere(unaligned: bool, first: Case, norm: str, relaunched: list[int]) -> None:
    second = another(first)

    def buffers() -> dict[str, torch.Tensor]:
        made = {f"into_{name}": torch.ones(N, device="cuda") for name in ("weight", "bias")}
        return {k: off_by_one(v) for k, v in made.items()} if unaligned else made

    results(norm, first)
    sums = []
    for expected in (1, 1 if unaligned else ALL):
        into = buffers()
        relaunched.clear()
        results(norm, second, **into)
        assert len(relaunched) == expected
        sums.append(list(into.values()))
    forget_launches()
    into = buffers()
    results(norm, second, **into)
    for got in sums:
        assert_same(got, list(into.values()))


def test_another_stream(first: Case, norm: str, relaunched: list[int]) -> None:
    second = another(first)
    want = results(norm, second)
    case = another(first, seed=2)
    results(norm, case)
    torch.cuda.synchronize()
    relaunched.clear()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # a kernel on any other stream would not wait and read what was there before
        for name, tensor in case.items():
            tensor.copy_(second[name])
        got = results(norm, case)
    torch.cuda.synchronize()
    assert len(relaunched) == ALL
    assert_same(got, want)


def test_captured_in_a_graph(first: Case, norm: str, relaunched: list[int]) -> None:
    case, second = another(first), another(first, seed=2)
    results(norm, case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = results(norm, case)
    assert len(relaunched) == ALL
    for name, tensor in case.items():
        tensor.copy_(second[name])
    graph.replay()
    torch.cuda.synchronize()
    forget_launches()
    assert_same(got, results(norm, second))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices in one process")
def test_another_device(first: Case, norm: str, relaunched: list[int]) -> None:
    want = [None if t is None else t.cpu() for t in results(norm, first, parts=4)]
    second = {name: t.to("cuda:1") for name, t in first.items()}
    for current in (0, 1, 1, 0):
        with torch.cuda.device(current):
            got = results(norm, second, parts=4)
        assert all(t is None or t.device.index == 1 for t in got)
        assert_same([None if t is None else t.cpu() for t in got], want)
    assert relaunched == [1] * ALL


def test_through_autograd(first: Case, norm: str, relaunched: list[int]) -> None:
    cases = [another(first, seed) for seed in (1, 2, 3)]
    cases[2]["grad_y"] = one_row(cases[2]["grad_y"])
    kept = [run(case, norm, prenorm=True, impl="triton") for case in (first, *cases)]
    assert len(relaunched) == 2 * ALL + 1
    for case, got in zip(cases, kept[1:], strict=True):
        forget_launches()
        want = run(case, norm, prenorm=True, impl="triton")
        assert all(torch.equal(got[name], want[name]) for name in want)
