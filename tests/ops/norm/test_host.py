"""The C++ path of eager norms on CPU tensors: a function of the tests stands for the driver and computes by torch.

What it is handed, pointers and numbers, is all that it computes from, so that a wrong key, order or size shows.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import extensions
import pytest
import torch
from host_stand_in import StandIn, driver_as_triton, like
from norm_cases import Case, make_inputs, run
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from retrograd import ops
from retrograd.errors import NativeBuildError, UsageError
from retrograd.ops.norm import custom_op, dispatch, host, launch_cache, torch_impl
from retrograd.ops.norm.arguments import BackwardTensors, NormTensors, WantedGrads, WantedOutput
from retrograd.ops.norm.host import recipes
from retrograd.ops.norm.launch_cache import CompiledLaunch, KeptBackward
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.types import Impl
from retrograd.runtime import disk_cache
from retrograd.runtime.cpp import extension, host_path

pytest.importorskip("triton")
SHAPE = (6, 32)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, in a cache of its own."""
    return extensions.built_once(host.path.library.build, tmp_path_factory.mktemp("cache"))


class Driver(StandIn):
    """Norms whose launches the stand-in of the driver computes by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = self.backwards = 0  # of the ordinary path

    def norm_fwd(self, tensors: NormTensors, spec: NormSpec, wanted: WantedOutput) -> Any:
        """torch_impl.norm_fwd, kept as a launch of triton/launch.py is."""
        self.forwards += 1
        outs = torch_impl.norm_fwd(tensors, spec, wanted)
        x, weight, bias, residual = tensors
        own_s = wanted.store_s and (residual is not None or wanted.s_dtype != x.dtype)
        outs = outs._replace(s=outs.s if own_s else None)
        inputs = (x, residual, weight, bias)
        key = launch_cache.forward_key(tensors, outs, spec, wanted)
        views = [like(t) for t in (*inputs, *outs)]

        def kernel(addresses: list[Any]) -> None:
            x, residual, weight, bias, *places = [t and t(a) for t, a in zip(views, addresses, strict=True)]
            results = torch_impl.norm_fwd(NormTensors(x, weight, bias, residual), spec, wanted)
            for place, result in zip(places, results, strict=True):
                if place is not None:
                    place.copy_(result)

        handle = self.handle([*inputs, *outs], (7, spec.eps, -3), kernel)
        launch_cache.keep(_aligned(key, inputs), CompiledLaunch(handle, (7, spec.eps, -3)))
        return outs

    def norm_bwd(self, tensors: BackwardTensors, spec: NormSpec, wanted: WantedGrads) -> Any:
        """torch_impl.norm_bwd, kept; its kernel leaves the sums in the first part, its finalizer adds up the parts."""
        self.backwards += 1
        assert wanted.into_weight is wanted.into_bias is None
        outs = torch_impl.norm_bwd(tensors, spec, wanted)
        heads, n, parts = wanted.heads, tensors.s.shape[1], 3
        exact = wanted._replace(weight=wanted.weight and torch.float32, bias=wanted.bias and torch.float32)
        sums = [None if t is None else torch.empty(parts, heads * n) for t in (outs.weight, outs.bias)]
        rows = [outs.x, None if outs.residual is outs.x else outs.residual]
        passed = (*tensors, *rows, *sums)
        views = [like(t) for t in passed]

        def kernel(addresses: list[Any]) -> None:
            *read, x, residual, weight_sums, bias_sums = [t and t(a) for t, a in zip(views, addresses, strict=True)]
            grads = torch_impl.norm_bwd(BackwardTensors(*read), spec, exact)
            for place, result in ((x, grads.x), (residual, grads.residual)):
                if place is not None:
                    place.copy_(result)
            for place, result in ((weight_sums, grads.weight), (bias_sums, grads.bias)):
                if place is not None:
                    place.zero_()[0] = result.flatten()

        handle = self.handle(list(passed), (spec.weight_offset,), kernel)
        finalizer = None
        if any(t is not None for t in sums):
            last = [*sums, outs.weight, outs.bias]
            shapes = [like(t) for t in last]

            def add_up(addresses: list[Any]) -> None:
                views = [t and t(a) for t, a in zip(shapes, addresses, strict=True)]
                for held, place in zip(views[:2], views[2:], strict=True):
                    if held is not None:
                        place.copy_(held.sum(dim=0).view(place.shape))

            finalizer = CompiledLaunch(self.handle(last, (parts,), add_up), (parts,))
        grad_out, s, weight, mean, rstd, grad_s = tensors
        key = launch_cache.backward_key(tensors, wanted, spec)
        kept = KeptBackward(handle, (spec.weight_offset,), parts, finalizer)
        launch_cache.keep(_aligned(key, (s, grad_out, weight, grad_s, mean, rstd)), kept)
        return outs


def _aligned(key: Any, tensors: tuple[Any, ...]) -> Any:
    return key if all(t is None or t.data_ptr() % 16 == 0 for t in tensors) else None


@pytest.fixture
def driver(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Norms with impl="triton" take the C++ path on CPU tensors."""
    made, ordinary = Driver(), dispatch.functions
    double = (made.norm_fwd, made.norm_bwd)
    monkeypatch.setattr(dispatch, "functions", lambda impl: double if impl is Impl.TRITON else ordinary(impl))
    dispatch.resolve.cache_clear()
    held = dict(launch_cache.FORWARD), dict(launch_cache.BACKWARD)
    launch_cache.FORWARD.clear()
    launch_cache.BACKWARD.clear()
    module = host.path.library.load(built)
    module.clear()
    module.use_cpu(made.address)
    recipes.connect(module, made.norm_bwd)
    monkeypatch.setattr(host.path, "entry", module.apply)
    yield made
    module.clear()
    recipes.disconnect()
    dispatch.resolve.cache_clear()
    for dictionary, before in zip((launch_cache.FORWARD, launch_cache.BACKWARD), held, strict=True):
        dictionary.clear()
        dictionary.update(before)


def in_python(function: Callable[[], Any]) -> Any:
    """The result without the C++ path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.path, "entry", None)
        patch.setattr(launch_cache, "on_keep", None)
        return function()


def assert_same(got: Any, want: Any) -> None:
    """Equal bits, shapes, dtypes, and whether there is a gradient."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (tensor is None) == (got[name] is None), name
        if tensor is not None:
            assert got[name].dtype == tensor.dtype, name
            assert got[name].stride() == tensor.stride(), name
            assert torch.equal(got[name], tensor), name


def both(driver: Driver, case: Case, norm: str, **options: Any) -> int:
    """Compare the two paths, once the first call has been made; the number of launches of the second call."""
    want = in_python(lambda: run(case, norm, impl="triton", **options))
    assert_same(run(case, norm, impl="triton", **options), want)
    assert driver.launches == []
    ordinary = driver.forwards, driver.backwards
    for _ in range(2):
        driver.launches.clear()
        assert_same(run(case, norm, impl="triton", **options), want)
    assert (driver.forwards, driver.backwards) == ordinary
    return len(driver.launches)


OPTIONS = {
    "plain": {},
    "prenorm": {"prenorm": True},
    "eps": {"eps": 1e-2},
    "offset": {"weight_offset": 1.0},
    "parts": {"dw_parts": 4},
    "out-fp32": {"out_dtype": torch.float32},
    "stream-fp32": {"residual_dtype": torch.float32, "prenorm": True},
    "stream-fp32-unseen": {"residual_dtype": torch.float32},
}
GIVEN = ["", "weight", "bias", "weight bias", "weight bias residual", "residual"]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("given", GIVEN)
def test_same_results(given: str, options: dict[str, Any], norm: str, driver: Driver) -> None:
    if "weight_offset" in options and "weight" not in given:
        pytest.skip("refused")
    case = make_inputs(SHAPE, torch.bfloat16, given=given)
    assert both(driver, case, norm, **options) == 2 + ("weight" in given or "bias" in given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_mixed_dtypes(dtype: torch.dtype, norm: str, driver: Driver) -> None:
    case = make_inputs(SHAPE, torch.bfloat16, vector_dtype=dtype, stream_dtype=dtype)
    assert both(driver, case, norm, prenorm=True) == 3


@pytest.mark.parametrize("shape", [(32,), (2, 3, 32), (2, 1, 3, 32), (1, 32), (5, 1)], ids=str)
def test_dimensions(shape: tuple[int, ...], norm: str, driver: Driver) -> None:
    assert both(driver, make_inputs(shape, torch.float32), norm, prenorm=True) == 3


@pytest.mark.parametrize("heads", [1, 4])
def test_heads(heads: int, norm: str, driver: Driver) -> None:
    assert both(driver, make_inputs((3, heads, 32), heads=True), norm) == 3


def test_shapes_of_equal_rows_share_a_launch(driver: Driver) -> None:
    x = torch.randn(6, 32)
    ops.rms_norm(x, impl="triton")
    y = ops.rms_norm(x.view(2, 3, 32), impl="triton")
    assert len(driver.launches) == 1
    assert torch.equal(y.view(6, 32), in_python(lambda: ops.rms_norm(x, impl="triton")))


def test_rows_further_apart(norm: str, driver: Driver) -> None:
    case = make_inputs((2, 3, 64), given="weight")
    case = {name: t[..., :32] if t.dim() > 1 else t[:32] for name, t in case.items()}
    assert both(driver, case, norm) == 3
    copied = {name: t.transpose(0, 1) for name, t in case.items() if t.dim() > 1}
    driver.launches.clear()
    run(copied, norm, impl="triton")
    run(copied, norm, impl="triton")
    assert driver.launches == []  # [..., N] has no rows at one distance here


FROZEN = [names for count in range(4) for names in itertools.combinations(("x", "weight", "bias", "residual"), count)]


@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("frozen", FROZEN, ids="-".join)
def test_frozen(frozen: tuple[str, ...], prenorm: bool, norm: str, driver: Driver) -> None:
    if prenorm and {"x", "residual"} <= set(frozen):
        pytest.skip("s has no gradient")
    case = make_inputs(SHAPE, torch.bfloat16)
    args = {name: case[name] for name in ("x", "weight", "bias", "residual")}
    with_vectors = not {"weight", "bias"} <= set(frozen)
    if {"x", "weight", "residual"} <= set(frozen):  # the gradient of the bias alone is no kernel
        want = in_python(lambda: run(case, norm, impl="triton", frozen=frozen))
        run(case, norm, impl="triton", frozen=frozen)
        assert_same(run(case, norm, impl="triton", frozen=frozen), want)
        assert len(driver.launches) == 1
        return
    assert len(args) == 4
    assert both(driver, case, norm, prenorm=prenorm, frozen=frozen) == 2 + with_vectors


def leaves(case: Case) -> Case:
    """The inputs as leaves of their own."""
    return {name: case[name].detach().requires_grad_() for name in ("x", "weight", "bias", "residual") if name in case}


@pytest.mark.parametrize("used", ["y", "s"])
def test_one_output_is_used(used: str, norm: str, driver: Driver) -> None:
    case = make_inputs(SHAPE, torch.bfloat16, stream_dtype=torch.float32)

    def grads() -> Case:
        args = leaves(case)
        y, s = getattr(ops, norm)(**args, prenorm=True, impl="triton")
        torch.autograd.backward(*((y, case["grad_y"]) if used == "y" else (s, case["grad_s"])))
        return {name: t.grad for name, t in args.items()}

    want = in_python(grads)
    grads()
    assert_same(grads(), want)
    assert len(driver.launches) == (3 if used == "y" else 1)


def test_without_gradients(norm: str, driver: Driver) -> None:
    case = make_inputs(SHAPE)
    args = leaves(case)
    with torch.no_grad():
        want = getattr(ops, norm)(**args, impl="triton")
        got = getattr(ops, norm)(**args, impl="triton")
    assert torch.equal(got, want)
    assert got.grad_fn is None
    assert not got.requires_grad
    assert len(driver.launches) == 1


def test_s_is_x_without_a_residual(driver: Driver) -> None:
    x = torch.randn(SHAPE, requires_grad=True)
    for _ in range(2):
        _, s = ops.rms_norm(x, prenorm=True, impl="triton")
        assert s is x
    assert len(driver.launches) == 1


def test_parameters_and_autocast(driver: Driver) -> None:
    x, weight = torch.randn(SHAPE), torch.nn.Parameter(torch.randn(32))
    with torch.autocast("cpu", torch.bfloat16):
        want, got = (ops.rms_norm(x, weight, impl="triton") for _ in range(2))
    assert torch.equal(got, want)
    assert got.dtype == torch.float32
    assert len(driver.launches) == 1


def test_second_derivative_is_refused(norm: str, driver: Driver) -> None:
    case = make_inputs(SHAPE, given="weight")
    messages = []
    for entry in (None, host.path.entry, host.path.entry):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host.path, "entry", entry)
            args = leaves(case)
            y = getattr(ops, norm)(**args, impl="triton")
            grads = torch.autograd.grad(y, list(args.values()), case["grad_y"], create_graph=True)
            assert all(g.requires_grad for g in grads)
            with pytest.raises(RuntimeError, match="cannot be differentiated again") as caught:
                torch.autograd.grad(grads[0].sum(), args["x"])
            messages.append(str(caught.value))
    assert len(set(messages)) == 1
    assert driver.launches


def test_create_graph_hands_out_the_gradients(norm: str, driver: Driver) -> None:
    case = make_inputs(SHAPE)

    def grads() -> Case:
        args = leaves(case)
        y = getattr(ops, norm)(**args, impl="triton")
        made = torch.autograd.grad(y, list(args.values()), case["grad_y"], create_graph=True)
        return dict(zip(args, (g.detach() for g in made), strict=True))

    want = in_python(grads)
    grads()
    driver.launches.clear()
    assert_same(grads(), want)
    assert len(driver.launches) == 3


def test_backward_twice(driver: Driver) -> None:
    x = torch.randn(SHAPE, requires_grad=True)
    ops.rms_norm(x, impl="triton").sum().backward()
    y = ops.rms_norm(x, impl="triton")
    g = torch.ones_like(y)
    first = torch.autograd.grad(y, x, g, retain_graph=True)
    second = torch.autograd.grad(y, x, g)
    assert torch.equal(first[0], second[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, g)


@pytest.mark.parametrize("name", ["x", "weight"])
def test_a_saved_tensor_that_changed(name: str, driver: Driver) -> None:
    args = {"x": torch.randn(SHAPE, requires_grad=True), "weight": torch.randn(32, requires_grad=True)}
    ops.rms_norm(**args, impl="triton")
    y = ops.rms_norm(**args, impl="triton")
    assert driver.launches
    with torch.no_grad():
        args[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_results_may_be_changed_in_place(driver: Driver) -> None:
    x = torch.randn(2, 3, 32, requires_grad=True)
    for _ in range(2):
        y = ops.rms_norm(x, impl="triton")
        y.mul_(2)
        y.sum().backward()
    assert driver.launches


def test_saved_tensor_hooks(norm: str, driver: Driver) -> None:
    case = make_inputs(SHAPE)

    def grads() -> tuple[Case, list[Any]]:
        args, packed = leaves(case), []

        def pack(t: torch.Tensor) -> torch.Tensor:
            packed.append((t.dtype, t.shape))
            return t.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = getattr(ops, norm)(**args, impl="triton")
        y.backward(case["grad_y"])
        return {name: t.grad for name, t in args.items()}, packed

    want, kept = in_python(grads)
    grads()
    driver.launches.clear()
    got, packed = grads()
    assert_same(got, want)
    assert packed == kept
    assert len(driver.launches) == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool, norm: str, driver: Driver) -> None:
    case = make_inputs(SHAPE)

    def grads() -> Case:
        args = leaves(case)

        def block(*tensors: torch.Tensor) -> torch.Tensor:
            return getattr(ops, norm)(*tensors, impl="triton") * 2

        checkpoint(block, *args.values(), use_reentrant=reentrant).backward(case["grad_y"])
        return {name: t.grad for name, t in args.items()}

    want = in_python(grads)
    for _ in range(2):  # in the first round the forward may go through Python and its repetition through C++
        assert_same(grads(), want)
    assert driver.launches


def test_anomaly_mode(driver: Driver) -> None:
    x = torch.randn(SHAPE, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        for _ in range(2):
            y = ops.rms_norm(x, impl="triton")
            y.sum().backward()
    assert "traceback_" in y.grad_fn.metadata
    assert driver.launches


def test_node_as_python_sees_it(driver: Driver) -> None:
    x, seen = torch.randn(SHAPE, requires_grad=True), []
    ops.rms_norm(x, impl="triton").sum().backward()
    y = ops.rms_norm(x, impl="triton")
    assert y.grad_fn.name() == "NormFunctionBackward"
    assert [node and node.name() for node, _ in y.grad_fn.next_functions] == [
        "torch::autograd::AccumulateGrad", None, None, None,
    ]  # fmt: skip
    y.grad_fn.register_hook(lambda given, taken: seen.append((len(given), len(taken))))
    y.sum().backward()
    assert seen == [(4, 1)]
    assert driver.launches


def test_nothing_is_left_alive(driver: Driver) -> None:
    for _ in range(2):
        x = torch.randn(SHAPE, requires_grad=True) * 1
        alive = weakref.ref(x)
        y, s = ops.rms_norm(x, residual=torch.ones(SHAPE), prenorm=True, impl="triton")
        del x, y, s
        assert alive() is None
    assert driver.launches


def test_a_gradient_of_another_layout_is_learned(norm: str, driver: Driver) -> None:
    case = make_inputs(SHAPE)
    both(driver, case, norm)
    case["grad_y"] = case["grad_y"][:1].expand(SHAPE)
    want = in_python(lambda: run(case, norm, impl="triton"))
    for expected in (1, 3):
        driver.launches.clear()
        assert_same(run(case, norm, impl="triton"), want)
        assert len(driver.launches) == expected


def test_an_unaligned_gradient_goes_through_python(norm: str, driver: Driver) -> None:
    case = make_inputs(SHAPE)
    both(driver, case, norm)
    case["grad_y"] = torch.empty(6 * 32 + 1)[1:].view(SHAPE).copy_(case["grad_y"])
    want = in_python(lambda: run(case, norm, impl="triton"))
    for _ in range(2):
        driver.launches.clear()
        assert_same(run(case, norm, impl="triton"), want)
        assert len(driver.launches) == 1


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _FunctionMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Tensor(torch.Tensor):
    pass


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


REFUSED = {
    "unaligned": lambda x: ops.rms_norm(_unaligned(x), impl="triton"),
    "subclass": lambda x: ops.rms_norm(x.as_subclass(_Tensor), impl="triton"),
    "atomic": lambda x: ops.rms_norm(x, impl="triton", deterministic=False),
    "torch": lambda x: ops.rms_norm(x, impl="torch"),
    "negative": lambda x: ops.rms_norm(torch._neg_view(x), impl="triton"),
    "integer-eps": lambda x: ops.rms_norm(x, eps=1, impl="triton"),
    "other-rows": lambda x: ops.rms_norm(x[:3], impl="triton"),
    "float64": lambda x: ops.rms_norm(x.double(), impl="torch"),
    "main-grad": lambda x: ops.rms_norm(x, accumulate_main_grad=True, impl="triton"),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_left_to_python(call: Callable[[torch.Tensor], Any], driver: Driver) -> None:
    x = torch.randn(SHAPE)
    ops.rms_norm(x, impl="triton")
    ops.rms_norm(x, impl="triton")
    assert len(driver.launches) == 1
    call(x)
    assert len(driver.launches) == 1


@pytest.mark.parametrize("mode", [_Mode, _FunctionMode, forward_ad.dual_level])
def test_left_to_python_where_somebody_watches(mode: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(SHAPE)
    ops.rms_norm(x, impl="triton")
    monkeypatch.setattr(custom_op, "norm", lambda tensors, *_: (tensors[0], None))
    with mode() as level:
        watched = forward_ad.make_dual(x, torch.ones_like(x)) if mode is forward_ad.dual_level else x
        try:
            ops.rms_norm(watched, impl="triton")
        except (NotImplementedError, RuntimeError):
            assert mode is forward_ad.dual_level, level
    assert driver.launches == []


def test_left_to_python_inside_a_transform(driver: Driver) -> None:
    x = torch.randn(SHAPE)
    ops.rms_norm(x, impl="triton")
    refusal = ""
    try:
        torch.func.vmap(lambda row: ops.rms_norm(row, impl="triton"))(x[None])
    except Exception as error:
        refusal = str(error)
    assert driver.launches == [], refusal


def test_left_to_python_with_a_launch_hook(driver: Driver) -> None:
    import triton

    x, calls = torch.randn(SHAPE), triton.knobs.runtime.launch_enter_hook.calls
    ops.rms_norm(x, impl="triton")
    calls.append(print)
    try:
        ops.rms_norm(x, impl="triton")
    finally:
        calls.remove(print)
    assert driver.launches == []
    ops.rms_norm(x, impl="triton")
    assert len(driver.launches) == 1


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"weight": torch.ones(1, 32)}, ValueError),
        ({"weight": torch.ones(31)}, ValueError),
        ({"residual": torch.ones(1, 32)}, ValueError),
        ({"eps": -1.0}, ValueError),
        ({"eps": "small"}, TypeError),
        ({"weight_offset": 1.0}, ValueError),
        ({"dw_parts": True}, ValueError),
        ({"impl": "triton "}, ValueError),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_as_ever(wrong: dict[str, Any], error: type[Exception], driver: Driver) -> None:
    x = torch.randn(SHAPE)
    for weight in (None, torch.ones(32)):
        for _ in range(2):
            ops.rms_norm(x, weight, impl="triton")
    with pytest.raises(error):
        ops.rms_norm(x, **({"impl": "triton"} | wrong))
    with pytest.raises(TypeError, match="NoneType"):
        ops.rms_norm(None)


def test_a_launch_that_fails(driver: Driver) -> None:
    x = torch.randn(SHAPE)
    ops.rms_norm(x, impl="triton")
    driver.code = 719
    with pytest.raises(RuntimeError, match="driver error 719"):
        ops.rms_norm(x, impl="triton")


def test_errors_of_the_python_backward_keep_their_type(driver: Driver) -> None:
    case = make_inputs(SHAPE)
    both(driver, case, "rms_norm")
    case["grad_y"] = case["grad_y"][:1].expand(SHAPE)

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_impl, "norm_bwd", broken)
        with pytest.raises(KeyError, match="lost"):
            run(case, "rms_norm", impl="triton")


def test_compile_sees_no_extension(driver: Driver) -> None:
    x = torch.randn(SHAPE)
    ops.rms_norm(x, impl="torch")
    graph = torch.compile(lambda t: ops.rms_norm(t, impl="torch"), backend="eager", fullgraph=True)
    assert torch.allclose(graph(x), ops.rms_norm(x, impl="torch"))


def test_other_threads(driver: Driver) -> None:
    case = make_inputs(SHAPE)
    both(driver, case, "layer_norm")
    want = in_python(lambda: run(case, "layer_norm", impl="triton"))
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: run(case, "layer_norm", impl="triton"), range(40)):
            assert_same(got, want)


# ---- Building and switching


def test_name_changes_with_what_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {host.path.library.file_name()}
    abi = torch.compiled_with_cxx11_abi()
    for target, value in (
        ("torch.__version__", "9.9"),
        ("torch.version.git_version", "abc"),
        ("platform.machine", lambda: "pdp11"),
        ("sysconfig.get_config_var", lambda _: "cpython-399"),
        ("torch.compiled_with_cxx11_abi", lambda: not abi),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, value)
            names.add(host.path.library.file_name())
    names.add(dataclasses.replace(host.path.library, headers=()).file_name())
    assert len(names) == 7


def test_a_library_that_is_there_is_not_built_again(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(built.parents[2]))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert host.build() == built
    assert host.path.library.find() == built
    with pytest.raises(NativeBuildError, match="CXX is 'no-such-compiler'"):
        host.path.library.build(again=True)


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeBuildError, match=r"no C\+\+ compiler found on PATH .*install one"):
        host.build()


def test_no_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(extension, "_torch_root", lambda: tmp_path)
        with pytest.raises(NativeBuildError, match=r"torch's C\+\+ headers are missing"):
            host.build()
    monkeypatch.setattr(extension.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(NativeBuildError, match=r"install them, for example apt-get install python3"):
        extension.check_headers()


def test_a_broken_library(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    with pytest.raises(NativeBuildError, match=r"build\(again=True\)"):
        host.path.library.load(broken)


@pytest.fixture
def undecided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process with an empty cache, not interpreting."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RETROGRAD_HOST", raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(host.path, "entry", host.path.first)
    monkeypatch.setattr(host.path, "reason", "undecided")
    monkeypatch.setattr(host.path, "background", None)


class Building:
    """Stands for a build in the background."""

    def __init__(self, *_: object) -> None:
        self.reason, self.tried, self.over = "it is being compiled", True, False

    def running(self) -> bool:
        return not self.over


def test_python_serves_until_it_is_built(
    undecided: None, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_path, "BackgroundBuild", Building)
    monkeypatch.setattr(type(host.path.library), "build", lambda *_, **__: pytest.fail("waited for"))
    taken: list[Path] = []
    monkeypatch.setattr(host.path, "on", lambda: taken.append(host.path.library.find()))
    assert host.path.first(torch.ones(2, 2)) is NotImplemented
    assert (host.path.background, host.path.entry) == (None, host.path.first)  # no tensor on CUDA yet
    for _ in range(2):
        host.path.decide()
        assert host.path.entry == host.path.first
        assert host.path.first(torch.ones(2, 2)) is NotImplemented
    assert "being compiled" in host.why_not()
    assert not taken
    shutil.copy(built, disk_cache.folder("native"))
    host.path.decide()
    assert not taken  # the lock is still held by whoever builds it
    host.path.background.over = True
    host.path.decide()
    assert taken == [host.path.library.find()]


@pytest.mark.parametrize("tried", [True, False], ids=["here", "earlier"])
def test_a_build_that_fails_is_told_where_it_was_tried(
    tried: bool, undecided: None, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(host_path, "BackgroundBuild", Building)
    host.path.decide()
    host.path.background.reason, host.path.background.tried, host.path.background.over = (
        "it did not compile",
        tried,
        True,
    )
    host.path.decide()
    assert host.path.entry is None
    assert host.why_not() == "it did not compile"
    assert ["it did not compile" in str(w.message) for w in recwarn] == [True] * tried


def test_one_thread_decides(undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Building] = []

    class Counted(Building):
        def __init__(self, *_: object) -> None:
            super().__init__()
            begun.append(self)

    monkeypatch.setattr(host_path, "BackgroundBuild", Counted)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: host.path.decide(), range(64)))
    assert len(begun) == 1


def test_not_built_and_asked_for(undecided: None) -> None:
    with pytest.raises(NativeBuildError, match="RETROGRAD_HOST=build"):
        host.on()


def test_switched_off(undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETROGRAD_HOST", "off")
    monkeypatch.setattr(type(host.path.library), "find", lambda _: pytest.fail("looked for"))
    host.path.decide()
    assert host.path.entry is None
    assert "off" in host.why_not()


def test_building_that_fails_warns(undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETROGRAD_HOST", "build")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(UserWarning, match="no-such-compiler"):
        host.path.decide()
    assert host.path.entry is None


def test_unknown_switch(undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETROGRAD_HOST", "yes")
    with pytest.raises(UsageError, match="expected one of 'auto', 'build', 'off'"):
        host.path.decide()


def test_the_driver_is_handed_what_triton_hands_it(built: Path, tmp_path: Path) -> None:
    done = driver_as_triton("norm", tmp_path, built)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["3", "2", "2", "3"]
