"""The C++ path of eager deformable attention on CPU tensors: a function of the tests stands for the driver."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import extensions
import pytest
import torch
from host_stand_in import StandIn, driver_as_triton, like
from msda_cases import INPUTS, Case, arguments, make_inputs, run
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from retrograd.ops import ms_deform_attn, ms_deform_attn_fused
from retrograd.ops.msda import dispatch, fused, host, torch_impl
from retrograd.ops.msda.arguments import MsdaGrads, MsdaInputs, MsdaSpec, NeededGrads
from retrograd.ops.msda.slots import Slot
from retrograd.ops.types import Impl
from retrograd.runtime.cpp.recipe import Buffer, Recipe, driver_call

pytest.importorskip("triton")
_GRADS = (Slot.GRAD_VALUE, Slot.GRAD_LOCATIONS, Slot.GRAD_WEIGHTS)
_READ = (Slot.VALUE, Slot.LOCATIONS, Slot.WEIGHTS)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, in a cache of its own."""
    return extensions.built_once(host.path.library.build, tmp_path_factory.mktemp("cache"))


class Driver(StandIn):
    """Deformable attention whose launches the stand-in computes by torch: as Triton's kernels, or as those of CUDA C++.

    The second kind takes one struct and works in a buffer that has to be there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forwards = self.backwards = self.recipes = 0
        self.struct = False

    def msda_fwd(self, inputs: MsdaInputs, spec: MsdaSpec) -> torch.Tensor:
        self.forwards += 1
        return _forward(inputs, spec)

    def msda_bwd(self, grad_out: torch.Tensor, inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads) -> Any:
        self.backwards += 1
        return torch_impl.msda_bwd(grad_out, inputs, spec, needed)

    @torch.no_grad()
    def recipe(self, inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads | None = None) -> Recipe | None:
        self.recipes += 1
        value, levels, locations, weights, references = inputs
        if needed is not None and references is not None:
            return self._fused_backward(inputs, spec, needed)
        out = _forward(inputs, spec)
        read = (value, locations, weights)
        if needed is None:
            tensors = (*read, *(() if references is None else (references,)), out)
            slots = (*_READ, *(() if references is None else (Slot.REFERENCES,)), Slot.OUT)
            views = [like(t) for t in tensors]

            def forward(addresses: list[Any]) -> None:
                value, locations, weights, *rest, out = [view(a) for view, a in zip(views, addresses, strict=True)]
                again = MsdaInputs(value, levels, locations, weights, rest[0] if rest else None)
                out.copy_(_forward(again, spec))

            return Recipe((self._call(slots, tensors, forward),))
        grads = torch_impl.msda_bwd(out, inputs, spec, needed)
        # Sums in float32, as additions have them, and a place to work in.
        grads = grads._replace(value=None if grads.value is None else grads.value.float())
        work = torch.zeros(5, dtype=torch.int32)
        present = [(slot, t) for slot, t in zip(_GRADS, grads, strict=False) if t is not None]
        slots = (*_READ, Slot.GRAD_OUT, *(slot for slot, _ in present), Slot.COUNTS)
        tensors = (*read, out, *(t for _, t in present), work)
        views = [like(t) for t in tensors]

        def backward(addresses: list[Any]) -> None:
            value, locations, weights, grad_out, *places, work = [
                view(a) for view, a in zip(views, addresses, strict=True)
            ]
            results = torch_impl.msda_bwd(grad_out, MsdaInputs(value, levels, locations, weights), spec, needed)
            for (slot, _), place in zip(present, places, strict=True):
                if slot is Slot.GRAD_VALUE:
                    assert not place.any()
                place.copy_(results[_GRADS.index(slot)])
            work.fill_(1)

        buffers = [Buffer(Slot.COUNTS, torch.int32, (5,))]
        if needed.value:
            buffers.append(Buffer(Slot.GRAD_VALUE, torch.float32, tuple(value.shape), zeros=True))
        return Recipe((self._call(slots, tensors, backward),), tuple(buffers))

    def _fused_backward(self, inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads) -> Recipe:
        """Locations and weights into buffers, the plain backward of these, and the way back."""
        value, levels, offsets, logits, references = inputs
        plain = fused.sampled(inputs, spec)
        through = fused.needed_of_points(needed)
        inner = self.recipe(plain, spec, through)
        self.recipes -= 1
        assert inner is not None
        made = {Slot.LOCATIONS: plain.locations, Slot.WEIGHTS: plain.weights}
        grads = {Slot.GRAD_LOCATIONS: plain.locations} if through.locations else {}
        grads |= {Slot.GRAD_WEIGHTS: plain.weights} if through.weights else {}
        given = {Slot.VALUE: value, Slot.OFFSETS: offsets, Slot.LOGITS: logits, Slot.REFERENCES: references}
        results = {Slot.GRAD_OFFSETS: offsets, Slot.GRAD_LOGITS: logits, Slot.GRAD_REFERENCES: references}
        results = dict(each for each, need in zip(results.items(), needed[1:], strict=True) if need)

        def there(slots: Any, addresses: list[Any]) -> dict[Slot, torch.Tensor]:
            return {slot: view(at) for (slot, view), at in zip(slots, addresses, strict=True)}

        first = [(slot, like(t)) for slot, t in (given | made).items()]
        last = [(slot, like(t)) for slot, t in (given | made | grads | results).items()]

        def again(at: dict[Slot, torch.Tensor]) -> MsdaInputs:
            return MsdaInputs(at[Slot.VALUE], levels, at[Slot.OFFSETS], at[Slot.LOGITS], at[Slot.REFERENCES])

        def points(addresses: list[Any]) -> None:
            at = there(first, addresses)
            again_made = fused.sampled(again(at), spec)
            at[Slot.LOCATIONS].copy_(again_made.locations)
            at[Slot.WEIGHTS].copy_(again_made.weights)

        def points_bwd(addresses: list[Any]) -> None:
            at = there(last, addresses)
            plain_grads = MsdaGrads(None, at.get(Slot.GRAD_LOCATIONS), at.get(Slot.GRAD_WEIGHTS))
            found = fused.sampled_bwd(plain_grads, at[Slot.WEIGHTS], again(at), spec, needed)
            for slot, grad in zip((Slot.GRAD_OFFSETS, Slot.GRAD_LOGITS, Slot.GRAD_REFERENCES), found[1:], strict=True):
                if slot in at:
                    at[slot].copy_(grad)

        tensors = [*(given | made | grads | results).values()]
        launches = (
            self._call([slot for slot, _ in first], tensors[: len(first)], points),
            *inner.launches,
            self._call([slot for slot, _ in last], tensors, points_bwd),
        )
        buffers = (Buffer(slot, t.dtype, tuple(t.shape)) for slot, t in (made | grads).items())
        return Recipe(launches, (*buffers, *inner.buffers))

    def _call(self, slots: Any, tensors: Any, kernel: Any) -> Any:
        if self.struct or any(t.dtype == torch.int32 for t in tensors):
            return self.struct_call(slots, b"nineteen bytes more", kernel)
        return driver_call(self.handle(tensors, (7, 0.5), kernel), slots, (7, 0.5))


def _forward(inputs: MsdaInputs, spec: MsdaSpec) -> torch.Tensor:
    plain = inputs if inputs.references is None else fused.sampled(inputs, spec)
    return torch_impl.msda_fwd(plain, spec)


@pytest.fixture
def driver(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """impl="triton" and impl="cuda" take the C++ path on CPU tensors."""
    stand_in, ordinary = Driver(), dispatch.functions_for

    def functions_for(impl: Any, *rest: Any) -> Any:
        if impl in (Impl.TRITON, "triton", Impl.CUDA, "cuda"):
            whole = impl in (Impl.TRITON, "triton")
            return dispatch.Functions(stand_in.msda_fwd, stand_in.msda_bwd, whole, recipe=stand_in.recipe)
        return ordinary(impl, *rest)

    monkeypatch.setattr(dispatch, "functions_for", functions_for)
    dispatch.resolve.cache_clear()
    module = host.path.library.load(built)
    module.clear()
    module.use_cpu(stand_in.address)
    host.recipes.connect(module)
    monkeypatch.setattr(host.path, "entry", module.apply)
    monkeypatch.setattr(host.path, "module", module)
    yield stand_in
    module.clear()
    dispatch.resolve.cache_clear()


def in_python(function: Callable[[], Any]) -> Any:
    """The result without the C++ path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.path, "entry", None)
        return function()


def assert_same(got: Any, want: Any) -> None:
    """Equal bits, shapes, dtypes, strides."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].stride()) == (tensor.dtype, tensor.stride()), name
        assert torch.equal(got[name], tensor), name


def both(driver: Driver, call: Callable[..., Any], launches: int = 2) -> None:
    """Compare the two paths: a first call by Python, one whose backward is learned, two that are launches alone."""
    want = in_python(call)
    assert_same(call(), want)
    assert driver.launches == []
    assert_same(call(), want)
    assert len(driver.launches) == 1
    ordinary = driver.forwards, driver.backwards, driver.recipes
    for _ in range(2):
        driver.launches.clear()
        assert_same(call(), want)
        assert len(driver.launches) == launches
    assert (driver.forwards, driver.backwards, driver.recipes) == ordinary


def cpu_case(**options: Any) -> Case:
    return make_inputs(device="cpu", **options)


DTYPES = [(torch.float32, None), (torch.bfloat16, None), (torch.float16, torch.float32)]


@pytest.mark.parametrize("struct", [False, True], ids=["arguments", "struct"])
@pytest.mark.parametrize(("dtype", "beside"), DTYPES, ids=str)
def test_same_results(dtype: Any, beside: Any, struct: bool, mode: dict[str, Any], driver: Driver) -> None:
    driver.struct = struct
    case = cpu_case(dtype=dtype, beside=beside, align_corners=mode["align_corners"])
    both(driver, lambda: run(case, impl="cuda" if struct else "triton", **mode))


@pytest.mark.parametrize("deterministic", [None, True, False])
@pytest.mark.parametrize("required", [False, True])
def test_deterministic(deterministic: bool | None, required: bool, driver: Driver) -> None:
    case = cpu_case()
    torch.use_deterministic_algorithms(required)
    try:
        if required and deterministic is False:
            with pytest.raises(RuntimeError, match="forbids"):
                run(case, impl="triton", deterministic=deterministic)
            return
        both(driver, lambda: run(case, impl="triton", deterministic=deterministic))
    finally:
        torch.use_deterministic_algorithms(False)


def levels_as(kind: str) -> Any:
    """LEVELS in another form."""
    pairs = cpu_case()["spatial_shapes"]
    return {
        "tuple": tuple(pairs),
        "lists": [list(pair) for pair in pairs],
        "int64": torch.tensor(pairs),
        "int32": torch.tensor(pairs, dtype=torch.int32),
    }[kind]


@pytest.mark.parametrize("kind", ["tuple", "lists", "int64", "int32"])
def test_levels_are_the_same_in_each_form(kind: str, driver: Driver) -> None:
    case = cpu_case()
    both(driver, lambda: run(case, impl="triton"))
    recipes = driver.recipes
    case["spatial_shapes"] = levels_as(kind)
    driver.launches.clear()
    run(case, impl="triton")
    assert (len(driver.launches), driver.recipes) == (2, recipes)


def test_points_per_level(driver: Driver) -> None:
    case = cpu_case()
    flat = case | {
        "sampling_locations": case["sampling_locations"].flatten(3, 4),
        "attention_weights": case["attention_weights"].flatten(3),
    }
    both(driver, lambda: run(flat, impl="triton", points_per_level=(3, 3, 3, 3)))
    # The same samples are others where the levels have other numbers of them.
    want = in_python(lambda: run(flat, impl="triton", points_per_level=[4, 2, 3, 3]))
    for _ in range(3):
        assert_same(run(flat, impl="triton", points_per_level=[4, 2, 3, 3]), want)


FROZEN = [names for count in range(3) for names in itertools.combinations(INPUTS, count)]


@pytest.mark.parametrize("frozen", FROZEN, ids="-".join)
def test_frozen(frozen: tuple[str, ...], driver: Driver) -> None:
    case = cpu_case(dtype=torch.bfloat16)
    both(driver, lambda: run(case, frozen=frozen, impl="triton"))


FUSED = ("value", "references", "offsets", "logits")


@pytest.mark.parametrize("boxes", [False, True], ids=["points", "boxes"])
@pytest.mark.parametrize(("dtype", "beside"), DTYPES, ids=str)
@pytest.mark.parametrize("frozen", [(), *((name,) for name in FUSED), FUSED[:3]], ids="-".join)
def test_fused(frozen: tuple[str, ...], dtype: Any, beside: Any, boxes: bool, driver: Driver) -> None:
    case = cpu_case(dtype=dtype, beside=beside)
    logits = case["attention_weights"].flatten(3)
    references = torch.rand(2, 11, 4, 4 if boxes else 2).to(beside or dtype)
    tensors = dict(zip(FUSED, (case["value"], references, case["sampling_locations"], logits), strict=True))

    def call() -> Any:
        leaves = {name: t.detach().requires_grad_(name not in frozen) for name, t in tensors.items()}
        value, *rest = leaves.values()
        out = ms_deform_attn_fused(value, case["spatial_shapes"], *rest, impl="triton")
        wanted = [name for name in FUSED if name not in frozen]
        grads = torch.autograd.grad(out, [leaves[name] for name in wanted], case["grad_out"])
        return dict(zip(("out", *wanted), (out.detach(), *grads), strict=True))

    both(driver, call, launches=1 + 3)


def test_without_gradients(driver: Driver) -> None:
    case = cpu_case()
    want = ms_deform_attn(*arguments(case), impl="triton")
    case["value"].requires_grad_()
    with torch.no_grad():
        got = ms_deform_attn(*arguments(case), impl="triton")
    assert torch.equal(got, want)
    assert got.grad_fn is None
    assert len(driver.launches) == 1


def leaves(case: Case) -> Case:
    return case | {name: case[name].detach().requires_grad_() for name in INPUTS}


def test_second_derivatives(driver: Driver) -> None:
    case = cpu_case()

    def second() -> Any:
        again = leaves(case)
        out = ms_deform_attn(*arguments(again), impl="triton")
        inputs = [again[name] for name in INPUTS]
        first = torch.autograd.grad(out, inputs, case["grad_out"], create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        return dict(zip(range(6), (*(g.detach() for g in first), *twice), strict=True))

    want = in_python(second)
    for _ in range(3):
        assert_same(second(), want)
    assert len(driver.launches) == 2  # forwards


def test_backward_twice(driver: Driver) -> None:
    case = leaves(cpu_case())
    run(case, impl="triton")
    out = ms_deform_attn(*arguments(case), impl="triton")
    inputs = [case[name] for name in INPUTS]
    first = torch.autograd.grad(out, inputs, case["grad_out"], retain_graph=True)
    second = torch.autograd.grad(out, inputs, case["grad_out"])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs, case["grad_out"])
    assert len(driver.launches) == 2


def test_a_saved_tensor_that_changed(driver: Driver) -> None:
    case = leaves(cpu_case())
    run(case, impl="triton")
    out = ms_deform_attn(*arguments(case), impl="triton")
    assert driver.launches
    with torch.no_grad():
        case["attention_weights"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_saved_tensor_hooks(driver: Driver) -> None:
    case = cpu_case()
    packed: list[Any] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append((t.dtype, t.shape))
        return t.clone()

    def call() -> Any:
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return run(case, impl="triton")

    both(driver, call)
    kept = list(packed)
    in_python(call)
    assert packed == kept


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool, driver: Driver) -> None:
    case = cpu_case()

    def grads() -> Any:
        again = leaves(case)

        def block(*tensors: torch.Tensor) -> torch.Tensor:
            return ms_deform_attn(tensors[0], case["spatial_shapes"], *tensors[1:], impl="triton") * 2

        checkpoint(block, *(again[n] for n in INPUTS), use_reentrant=reentrant).backward(case["grad_out"])
        return {name: again[name].grad for name in INPUTS}

    want = in_python(grads)
    for _ in range(3):
        assert_same(grads(), want)
    assert driver.launches


def test_node_as_python_sees_it(driver: Driver) -> None:
    case, seen = leaves(cpu_case()), []
    run(case, impl="triton")
    with torch.autograd.set_detect_anomaly(True):
        out = ms_deform_attn(*arguments(case), impl="triton")
    assert driver.launches
    assert out.grad_fn.name() == "MsdaFunctionBackward"
    assert "traceback_" in out.grad_fn.metadata
    names = [node and node.name() for node, _ in out.grad_fn.next_functions]
    assert names == ["torch::autograd::AccumulateGrad"] * 3 + [None]
    out.grad_fn.register_hook(lambda given, taken: seen.append((len(given), len(taken))))
    out.sum().backward()
    assert seen == [(4, 1)]


def test_nothing_is_left_alive(driver: Driver) -> None:
    case = cpu_case()
    for _ in range(2):
        again = leaves(case)
        value = again["value"] * 1
        alive = weakref.ref(value)
        out = ms_deform_attn(*arguments(again | {"value": value}), impl="triton")
        del value, out, again
        assert alive() is None
    assert driver.launches


def test_a_gradient_that_is_not_contiguous_goes_through_python(driver: Driver) -> None:
    case = cpu_case()
    both(driver, lambda: run(case, impl="triton"))
    case["grad_out"] = case["grad_out"][:1, :1].expand_as(case["grad_out"])
    want = in_python(lambda: run(case, impl="triton"))
    for _ in range(2):
        driver.launches.clear()
        assert_same(run(case, impl="triton"), want)
        assert len(driver.launches) == 1


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


class _Tensor(torch.Tensor):
    pass


OTHERS: dict[str, Callable[[Case], Any]] = {
    "unaligned": lambda c: ms_deform_attn(*arguments(c | {"value": _unaligned(c["value"])}), impl="triton"),
    "subclass": lambda c: ms_deform_attn(*arguments(c | {"value": c["value"].as_subclass(_Tensor)}), impl="triton"),
    "negated": lambda c: ms_deform_attn(*arguments(c | {"value": torch._neg_view(c["value"])}), impl="triton"),
    "strided": lambda c: ms_deform_attn(
        *arguments(c | {"value": c["value"].transpose(1, 2).contiguous().transpose(1, 2)}), impl="triton"
    ),
    "torch": lambda c: ms_deform_attn(*arguments(c), impl="torch"),
    "other-mode": lambda c: ms_deform_attn(*arguments(c), padding_mode="border", impl="triton"),
    "other-impl": lambda c: ms_deform_attn(*arguments(c), impl="cuda"),
    "other-size": lambda c: ms_deform_attn(*arguments(c | {"value": c["value"][:1].clone()} | {
        n: c[n][:1].clone() for n in INPUTS[1:]
    }), impl="triton"),
}  # fmt: skip


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_left_to_python(call: Callable[[Case], Any], driver: Driver) -> None:
    case = cpu_case()
    for _ in range(2):
        ms_deform_attn(*arguments(case), impl="triton")
    assert len(driver.launches) == 1
    want = in_python(lambda: call(case))
    assert torch.equal(call(case), want)
    assert len(driver.launches) == 1


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_left_to_python_where_somebody_watches(driver: Driver) -> None:
    case = cpu_case()
    want = ms_deform_attn(*arguments(case), impl="torch")
    for _ in range(2):
        ms_deform_attn(*arguments(case), impl="triton")
    driver.launches.clear()
    with _Mode():
        assert torch.equal(ms_deform_attn(*arguments(case), impl="torch"), want)
    dual = forward_ad.make_dual
    with forward_ad.dual_level():
        tangent = case | {"value": dual(case["value"], torch.ones_like(case["value"]))}
        with pytest.raises((NotImplementedError, RuntimeError)):
            ms_deform_attn(*arguments(tangent), impl="triton")
    assert driver.launches == []


def test_left_to_python_with_a_launch_hook(driver: Driver) -> None:
    import triton

    case, calls = cpu_case(), triton.knobs.runtime.launch_enter_hook.calls
    ms_deform_attn(*arguments(case), impl="triton")
    calls.append(print)
    try:
        ms_deform_attn(*arguments(case), impl="triton")
    finally:
        calls.remove(print)
    assert driver.launches == []
    ms_deform_attn(*arguments(case), impl="triton")
    assert len(driver.launches) == 1


WRONG: dict[str, tuple[Callable[[Case], Any], type[Exception]]] = {
    "levels": (lambda c: {"spatial_shapes": [(7, 9), (5, 4), (3, 1), (1, 2)]}, ValueError),
    "negative": (lambda c: {"spatial_shapes": [(7, 9), (5, 4), (-1, -4), (1, 1)]}, ValueError),
    "huge": (lambda c: {"spatial_shapes": [(2**64, 9), (5, 4), (3, 1), (1, 1)]}, ValueError),
    "triples": (lambda c: {"spatial_shapes": [(7, 9, 1), (5, 4, 1)]}, ValueError),
    "words": (lambda c: {"spatial_shapes": "levels"}, TypeError),
    "no-value": (lambda c: {"value": None}, TypeError),
    "three-dims": (lambda c: {"value": c["value"][0]}, ValueError),
    "no-points": (lambda c: {"sampling_locations": c["sampling_locations"].flatten(3, 4)}, ValueError),
    "scalar": (lambda c: {"sampling_locations": torch.tensor(1.0)}, ValueError),
    "weights": (lambda c: {"attention_weights": c["attention_weights"][..., :2].contiguous()}, ValueError),
    "narrow": (lambda c: {"sampling_locations": c["sampling_locations"].half()}, TypeError),
    "integers": (lambda c: {"value": c["value"].int()}, TypeError),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused_as_ever(wrong: Any, driver: Driver) -> None:
    change, error = wrong
    case = cpu_case()
    for _ in range(2):
        ms_deform_attn(*arguments(case), impl="triton")
    messages = []
    for call in (in_python, lambda f: f()):
        with pytest.raises(error) as caught:
            call(lambda: ms_deform_attn(*arguments(case | change(case)), impl="triton"))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert len(driver.launches) == 1


OPTIONS: dict[str, Any] = {
    "padding_mode": "reflection",
    "points_per_level": (3, 3, 3),
    "impl": ["triton"],
    "deterministic": "yes",
    "align_corners": 1,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_other_options_are_as_ever(name: str, driver: Driver) -> None:
    case = cpu_case()
    for _ in range(2):
        ms_deform_attn(*arguments(case), impl="triton")
    results = []
    for call in (in_python, lambda f: f()):
        try:
            results.append(call(lambda: ms_deform_attn(*arguments(case), **{"impl": "triton"} | {name: OPTIONS[name]})))
        except (TypeError, ValueError) as error:
            results.append((type(error), str(error)))
    assert len(driver.launches) == 1
    assert type(results[0]) is type(results[1])
    equal = torch.equal if isinstance(results[0], torch.Tensor) else tuple.__eq__
    assert equal(results[0], results[1])


def test_a_launch_that_fails(driver: Driver) -> None:
    case = cpu_case()
    ms_deform_attn(*arguments(case), impl="triton")
    driver.code = 719
    with pytest.raises(RuntimeError, match="driver error 719"):
        ms_deform_attn(*arguments(case), impl="triton")


def test_errors_of_the_python_backward_keep_their_type(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cpu_case()
    run(case, impl="triton")

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("lost")

    monkeypatch.setattr(torch_impl, "msda_bwd", broken)
    with pytest.raises(KeyError, match="lost"):
        run(case, impl="triton")


def test_a_call_that_is_no_launches_stays_in_python(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "recipe", lambda *_: None)
    dispatch.resolve.cache_clear()
    case = cpu_case()
    for _ in range(3):
        run(case, impl="triton")
    assert (driver.forwards, driver.backwards, driver.launches) == (3, 3, [])


def test_other_threads(driver: Driver) -> None:
    case = cpu_case()
    both(driver, lambda: run(case, impl="triton"))
    want = in_python(lambda: run(case, impl="triton"))
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: run(case, impl="triton"), range(40)):
            assert_same(got, want)


def test_compile_sees_no_extension(driver: Driver) -> None:
    case = cpu_case()
    compiled = torch.compile(
        lambda *t: ms_deform_attn(t[0], case["spatial_shapes"], *t[1:], impl="torch"), backend="eager", fullgraph=True
    )
    tensors = [case[name] for name in INPUTS]
    assert torch.equal(compiled(*tensors), ms_deform_attn(*arguments(case), impl="torch"))
    assert driver.launches == []


def test_the_driver_is_handed_what_triton_hands_it(built: Path, tmp_path: Path) -> None:
    done = driver_as_triton("msda", tmp_path, built)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["2", "3", "5", "4"]  # two more of the fused form; 16 bits take one more


def test_slots_are_those_of_cpp() -> None:
    text = (Path(host.__file__).parent / "host.cpp").read_text()
    names = re.search(r"enum Slot \{(.*?),\s*SLOTS\s*\}", text, re.S)
    assert names is not None
    said = [part.split("=") for part in names[1].replace(" ", "").replace("\n", "").split(",")]
    at = -1
    for name, *number in said:
        at = int(number[0]) if number else at + 1
        assert Slot[name] == at, name
    assert len(Slot) == at + 1  # SLOTS comes last
