"""An eager run beside the same run under torch.compile: what both have is compared, what is not seen is not said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from diffed import Block
from torch import nn

from retrograd import trace
from retrograd.trace import Trace

aten = torch.ops.aten
COMPILED = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))


def _transformer() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(32, 16), Block(), Block(), nn.Linear(16, 32)).eval()


def _dropout() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.LayerNorm(32), nn.Linear(32, 8))


def _run(
    make: Callable[[], nn.Sequential],
    backend: Any = None,
    *,
    level: str = "full",
    scale: float = 1.0,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> Trace:
    """Two steps; `scale` changes the batch."""
    torch.manual_seed(0)
    net = make()
    data = torch.arange(24).view(3, 8) if isinstance(net[0], nn.Embedding) else scale * torch.randn(4, 16)
    updates = optimizer(net.parameters(), lr=0.1)
    run = net if backend is None else torch.compile(net, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(data).square().mean().backward()  # compiled before it is recorded
        updates.zero_grad()
        torch.manual_seed(1)
        with trace.record(net, level=level, engine="python") as recorder:
            for _ in range(2):
                run(data).square().mean().backward()
                updates.step()
                updates.zero_grad()
    return recorder.trace


@pytest.fixture(autouse=True)
def _compiled_anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.dealt(4)
@COMPILED
@pytest.mark.parametrize("make", [_mlp, _transformer], ids=["mlp", "transformer"])
def test_a_healthy_compiled_run_is_the_same_up_to_rounding(make: Callable[[], nn.Sequential], backend: str) -> None:
    eager, compiled = _run(make), _run(make, backend)
    there, back = trace.diff(eager, compiled), trace.diff(compiled, eager)
    assert there.causes == back.causes == ()
    assert there.text().startswith("the same within the attainable error")
    assert "tensors of A are in B, where torch.compile compiled, the same up to rounding" in there.notes[0]
    assert "tensors of B are in A" in back.notes[0]


def _backend(table: dict[Any, Callable[..., Any]], inductor: bool = False) -> Callable[..., Any]:
    """Operators visible, and decomposed by this table; or by Inductor with this table."""
    if inductor:
        from torch._inductor import config, decomposition
        from torch._inductor.compile_fx import compile_fx

        def compiled(graph: Any, inputs: Any) -> Any:
            decomposition.fast_random_decomps.cache_clear()
            known = mock.patch.dict(decomposition.decompositions, table)
            with config.patch(force_disable_caches=True), known:
                return compile_fx(graph, inputs, decompositions=dict(decomposition.decompositions))

        return compiled
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), decompositions=table)


def _wrong_gelu_backward(grad: Any, x: Any, *, approximate: str = "none") -> Any:
    slope = 0.7978845608
    t = torch.tanh(slope * (x + 0.044715 * x**3))
    return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)  # the derivative of the cube is left out


def _wrong_norm_backward(grad: Any, x: Any, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Any) -> Any:
    normed, scaled = (x - mean) * rstd, grad * weight
    rows = list(range(x.dim() - 1))
    # The projection on the normalised input is left out.
    return rstd * (scaled - scaled.mean(-1, keepdim=True)), (grad * normed).sum(rows), grad.sum(rows)


GELU = {aten.gelu_backward.default: _wrong_gelu_backward}
NORM = {aten.native_layer_norm_backward.default: _wrong_norm_backward}


def _updated(backend: str | Callable[..., Any] | None, decay: float = 0.0, rate: float = 0.1) -> Trace:
    """Three steps whose optimizer alone is compiled."""
    torch.manual_seed(0)
    net = _mlp()
    updates = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, weight_decay=decay)
    step = updates.step if backend is None else torch.compile(updates.step, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with trace.record(net, level="full", engine="python") as recorder:
            for _ in range(3):
                net(torch.ones(4, 16)).square().mean().backward()
                step()
                updates.zero_grad()
    return recorder.trace


@pytest.mark.dealt(2)
@COMPILED
def test_a_compiled_optimizer_is_compared_by_the_parameters_that_are_read_next(backend: str) -> None:
    compiled = _updated(backend)
    found = trace.diff(_updated(None), compiled)
    assert (found.same, compiled.meta["compiled"].startswith("not seen")) == (True, True)
    assert any("whose optimizer is compiled" in note for note in found.notes) == (backend == "inductor")
    weight = [t.rms for op in compiled.ops for t in op.inputs if t.name == "3.weight" and t.rms is not None]
    assert len(set(weight)) == 3  # what was measured before an update is not taken for what comes after it
    torch._dynamo.reset()
    (cause,) = trace.diff(_updated(None), _updated(backend, decay=0.5)).causes
    assert "what it leads to is out" in cause.why
    assert cause.a is not None
    assert cause.a.code == "step()"


def _factor_apart(x: Any, y: Any, *, alpha: float = 1) -> Any:
    return aten.add(x, y * alpha) if alpha != 1 else NotImplemented


@pytest.mark.dealt(3)
def test_a_compiled_optimizer_may_multiply_before_it_adds() -> None:
    apart = {aten.add.Tensor: _factor_apart}  # as torch 2.11 does by itself
    found = trace.diff(_updated(None), _updated(_backend(apart)))
    assert found.same, found.causes
    torch._dynamo.reset()
    assert not trace.diff(_updated(None), _updated(_backend(apart), rate=0.15)).same


@pytest.mark.dealt(3)
def test_right_decompositions_are_the_same() -> None:
    table = torch._decomp.get_decompositions(
        [
            aten.gelu,
            aten.gelu_backward,
            aten.native_layer_norm,
            aten.native_layer_norm_backward,
            aten.addmm,
            aten._softmax,
        ]
    )
    found = trace.diff(_run(_transformer), _run(_transformer, _backend(table)))
    assert found.causes == ()
    assert "have no counterpart of their own: one side splits, fuses or leaves out" in found.notes[1]


@pytest.mark.parametrize(
    ("table", "name", "module", "code"),
    [
        (GELU, "aten.gelu_backward.default", "2", "h = nn.functional.gelu(self.wide(x))"),
        (NORM, "aten.native_layer_norm_backward.default", "2.norm", "q, k, v = self.qkv(self.norm(x)).chunk(3, -1)"),
    ],
    ids=["gelu", "layer norm"],
)
def test_a_wrong_decomposition_is_named_with_its_line(table: dict, name: str, module: str, code: str) -> None:
    eager, compiled = _run(_transformer), _run(_transformer, _backend(table))
    found = trace.diff(eager, compiled)
    (cause,) = found.causes
    assert cause.what == f"{name} has another result in B, where torch.compile compiled"
    assert (cause.a.name, cause.a.module, cause.a.code) == (name, module, code)
    assert (cause.b.module, cause.b.code) == (module, code)  # generated code has no line of its own
    differ = [t.text for side in (cause.a.outputs, cause.b.inputs) for t in side if t.differs]
    assert len(differ) == 2
    assert differ[0] != differ[1]
    assert "times the attainable difference" in cause.why
    (back,) = trace.diff(compiled, eager).causes
    assert (back.what, back.b) == (cause.what.replace(" in B", " in A"), cause.a)


def test_of_a_kernel_that_fuses_the_first_and_the_last_operator_are_named() -> None:
    found = trace.diff(_run(_mlp), _run(_mlp, _backend(GELU, inductor=True)))
    (cause,) = found.causes
    assert cause.what == "aten.gelu_backward.default has another result in B, where torch.compile compiled"
    assert "between aten.native_layer_norm_backward.default (" in cause.why
    assert cause.a.module == "1"


def test_other_random_numbers_of_generated_code_are_said_to_be_that() -> None:
    (cause,) = trace.diff(_run(_dropout), _run(_dropout, "inductor")).causes
    assert cause.kind == "random"
    assert "fallback_random" in cause.advice
    assert trace.diff(_run(_dropout), _run(_dropout, "aot_eager"))


def test_another_batch_comes_in_from_outside() -> None:
    (cause,) = trace.diff(_run(_mlp), _run(_mlp, "aot_eager", scale=2.0)).causes
    assert cause.kind == "outside"


@pytest.mark.parametrize("level", ["fast", "names"])
def test_where_values_are_missing_it_cannot_be_told(level: str) -> None:
    """At level fast nobody measures the gradients that generated kernels make."""
    (cause,) = trace.diff(_run(_mlp, level=level), _run(_mlp, "inductor", level=level)).causes
    assert cause.what == "operators do not correspond where torch.compile compiled in B alone"
    assert "none of these is known to be missing" in cause.why


@pytest.mark.parametrize("engine", ["python", "tape"])
def test_a_program_that_resets_dynamo_is_recorded_to_its_end(engine: str) -> None:
    with trace.record(engine=engine) as recorder:
        torch._dynamo.reset()  # removes the callbacks of the recording
        torch.ones(2).sum()
    assert [op.name for op in recorder.trace.ops][-1] == "aten.sum.default"


def _compiled_steps(make_loss: Any, optimizer: Any) -> trace.Provenance:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    body = torch.compile(lambda x, factor: make_loss(model(x) * factor), backend="aot_eager")
    updates = optimizer(model.parameters())
    with trace.record(engine="tape") as recorder:
        for factor in (1.0, 0.0):
            body(torch.ones(2, 4), torch.tensor(factor)).mean().backward()
            updates.step()
            updates.zero_grad()
        model.weight.sum()
    return trace.provenance(recorder.trace)


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    lambda p: torch.optim.AdamW(p, 0.1),
    lambda p: torch.optim.AdamW(p, 0.1, fused=True),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adamw", "fused"])
def test_no_optimizer_is_accused_of_a_gradient_that_compiled_code_made(optimizer: Any) -> None:
    found = _compiled_steps(lambda h: h.square().sum(-1).sqrt(), optimizer)
    assert (found.found, found.origin, found.op.step) == ("nan", "unseen", 1)
    assert "nobody has counted, as a gradient of compiled code is" in found.reason
    assert _compiled_steps(lambda h: (h.square().sum(-1) + 1).sqrt(), optimizer).found == ""
    loss = _compiled_steps(lambda h: h.abs().log(), optimizer)  # infinite before the gradient is NaN
    assert (loss.origin, loss.op.name) == ("outside", "aten.mean.default")


def _exported(engine: str, wrong: bool = False, around: Any = None) -> Trace:
    """A step of a model that torch.export made, as torch.distributed.pipelining.pipeline() makes its stages."""
    torch.manual_seed(0)
    data = torch.randn(4, 16)
    net = torch.export.export(_mlp().eval(), (data,)).module()
    if wrong:
        gelu = next(node for node in net.graph.nodes if node.target is aten.gelu.default)
        gelu.kwargs = {"approximate": "tanh"}
        net.recompile()
    run = around(net) if around else net
    with warnings.catch_warnings():
        warnings.simplefilter("error" if around is None else "ignore")
        run(data).sum().backward()
        with trace.record(net, level="full", engine=engine) as recorder:
            run(data).sum().backward()
    return recorder.trace


@pytest.mark.parametrize("engine", ["python", "tape"])
def test_code_of_an_exported_model_is_seen_and_called_compiled_where_it_is(engine: str) -> None:
    seen = _exported(engine)
    assert "compiled" not in seen.meta
    assert trace.diff(seen, _exported(engine))
    cause = trace.diff(seen, _exported(engine, wrong=True)).causes[0]  # and that of its backward
    assert cause.what == "aten.gelu.default has other arguments: none -> approximate=tanh"
    compiled = _exported(engine, around=lambda net: torch.compile(net, backend="aot_eager"))
    assert compiled.meta["compiled"].startswith("not seen")
