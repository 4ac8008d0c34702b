"""The recorder changes nothing, sees everything it can, says what it cannot, and names module, node and line."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformer import Transformer, line, train

from retrograd import trace
from retrograd.errors import UsageError
from retrograd.trace.operator_schemas import attributes_text


def after(device: str, recorded: bool, **options: Any) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(3)
    model = Transformer().to(device)
    recorder = train(model, recorded, steps=2, **options)
    state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    return [*(p.detach() for p in model.parameters()), *(p.grad for p in model.parameters()), state], recorder


@pytest.mark.parametrize("level", ["names", "fast", "full"])
def test_a_recorded_step_gives_the_same_bits_and_random_numbers(device, level):
    plain, _ = after(device, False)
    recorded, recorder = after(device, True, level=level)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert "lost" not in recorder.trace.meta
    assert len({op.step for op in recorder.trace.ops}) == 2


@pytest.fixture(scope="module")
def one_step() -> trace.Trace:
    torch.manual_seed(0)
    return train(Transformer()).trace


def test_forward_operators_have_their_module_and_line(one_step):
    (gelu,) = [op for op in one_step.ops if op.name == "aten.gelu.default" and op.module == "blocks.1"]
    assert (gelu.phase, gelu.node) == ("forward", "")
    assert gelu.place.endswith(line("F.gelu("))
    assert gelu.code == "hidden = F.gelu(self.up(self.norm2(x)))"
    (head,) = [op for op in one_step.ops if op.module == "head" and op.name == "aten.addmm.default"]
    assert [s.name for s in head.inputs] == ["head.bias", "", "head.weight"]


def test_backward_operators_have_node_module_and_line_of_their_forward(one_step):
    (gelu,) = [op for op in one_step.ops if op.name == "aten.gelu_backward.default" and op.module == "blocks.1"]
    assert (gelu.phase, gelu.node) == ("backward", "GeluBackward0")
    assert gelu.place.endswith(line("F.gelu("))
    assert [op for op in one_step.ops if op.phase == "backward" and not op.place and op.node != "AccumulateGrad"] == []
    assert {"embedding", "blocks.0.qkv", "head"} <= {op.module for op in one_step.ops if op.node == "AccumulateGrad"}


def test_a_line_inside_a_custom_backward_is_told_beside_that_of_the_forward(one_step):
    inside = [op for op in one_step.ops if op.node == "ScaleBackward" and op.name == "aten.mul.Tensor"]
    assert len(inside) == 2
    assert line("planted in the backward") in inside[0].inside
    assert inside[0].place.endswith(line("return x.clone()"))


def test_phases_and_random_operators_are_told(one_step):
    assert {op.phase for op in one_step.ops} == {"forward", "backward", "other"}
    assert {op.module for op in one_step.ops if op.random} == {"blocks.0.dropout", "blocks.1.dropout"}
    assert any("optimizer.step" in op.code for op in one_step.ops if op.phase == "other")


def test_what_is_computed_and_what_it_is_computed_from_has_statistics_at_level_fast(one_step):
    # Views are measured where they are read; an optimizer's own moments are not, its parameters are.
    handles = re.compile("view|transpose|split|expand|slice|empty|detach|alias|t.default|unsqueeze")
    computed = [op for op in one_step.ops if not handles.search(op.name) and op.phase != "other"]
    assert len(computed) > 50
    assert [op.name for op in computed if any(s.rms is None for s in (*op.inputs, *op.outputs))] == []
    updated = [s for op in one_step.ops if op.phase == "other" for s in op.outputs if s.name == "head.weight"]
    assert updated
    assert all(s.rms is not None for s in updated)


def test_statistics_are_those_of_the_tensor():
    x = torch.tensor([[1.5, -2.0, float("nan"), 0.0], [float("inf"), 1e-40, -0.0, float("-inf")]])
    with trace.record(level="full") as recorder:
        x.clone()
    (made,) = recorder.trace.ops[-1].outputs
    assert (made.low, made.high, made.nan, made.inf, made.subnormal, made.zero) == (-2.0, 1.5, 1, 2, 1, 2)
    assert made.rms == (6.25 / 5) ** 0.5
    assert (made.shape, made.dtype, made.device) == ((2, 4), "float32", "cpu")


@pytest.mark.parametrize("level", ["full", "fast"])
def test_exponents_are_counted_at_level_full(level):
    x = torch.tensor([1.5, -3.0, 0.0, float("nan")], dtype=torch.float16)
    with trace.record(level=level) as recorder:
        x.clone().view(2, 2).sum()
    counted = trace.Exponents(0, (1, 0), (0, 1)) if level == "full" else None
    clone, view, _ = recorder.trace.ops
    assert [s.exponents for s in (*clone.inputs, *clone.outputs, *view.outputs)] == [counted] * 3


def test_a_storage_is_told_by_its_size():
    # Its own text is all of its bytes: a checkpoint of 5 MB took 30 s to load in a recorded step.
    storage = torch.zeros(4).untyped_storage()
    assert attributes_text((("source", storage), ("offset", 0))) == "source=storage of 16 bytes, offset=0"


def test_numbers_follow_storage_view_and_version():
    with trace.record(level="full") as recorder:
        x = torch.ones(3)
        y = x.view(3, 1)
        x.mul_(2)
        y.sum()
    ones, view, double, total = recorder.trace.ops
    assert view.inputs[0].tensor == ones.outputs[0].tensor
    assert view.outputs[0].storage == ones.outputs[0].storage
    assert double.inputs[0].tensor == ones.outputs[0].tensor != double.outputs[0].tensor
    # The view shows what was written through the other name.
    assert total.inputs[0].tensor not in (view.outputs[0].tensor, double.outputs[0].tensor)
    assert (total.inputs[0].high, double.outputs[0].high, ones.outputs[0].high) == (2.0, 2.0, 1.0)


def in_place() -> torch.Tensor:
    x = torch.randn(4, 4, requires_grad=True)
    y = x * 2
    y[0].add_(1)
    y.neg_().t().mul_(3)
    y.sum().backward()
    return x.grad


def out_arguments() -> torch.Tensor:
    a, out = torch.randn(3, 3), torch.empty(3, 3)
    torch.mm(a, a, out=out)
    return torch.add(out, 1, out=out)


def sparse() -> torch.Tensor:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 1, 4])).sum().backward()
    return table.weight.grad.to_dense()


def dtypes() -> torch.Tensor:
    z = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    (z.conj() * z.abs()).real.sum().backward()
    whole = torch.arange(4).bool() | torch.tensor([True, False, True, False])
    small = torch.randn(4).to(torch.float8_e5m2).to(torch.float16)
    return torch.view_as_real(z.grad).sum() + whole.sum() + small.float().sum() + torch.empty(0, 3).sum()


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.randn(4, 4, requires_grad=True)
        (x @ x).sum().backward()
    return torch.tensor(torch.empty(3, device="meta").sum().dim())


def aliases() -> torch.Tensor:
    x = torch.randn(6)
    parts = [*x.split(2), x.as_strided((2, 2), (1, 1)), x.expand(3, 6), x.detach(), x.unsqueeze(0)[0]]
    return torch.stack([p.sum() for p in parts])


def checkpointed() -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.randn(2, 4, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    return x.grad


def transformed() -> torch.Tensor:
    return torch.func.vmap(torch.func.grad(lambda x: (x * x).sum()))(torch.randn(3, 2))


def second_derivatives() -> torch.Tensor:
    x = torch.randn(3, requires_grad=True)
    (g,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad(g.sum(), x)[0]


def inference() -> torch.Tensor:
    with torch.inference_mode():
        total = nn.Linear(3, 3)(torch.ones(2, 3)).add_(1).sum()
    return total.clone()


CASES = [
    in_place,
    out_arguments,
    sparse,
    dtypes,
    fake,
    aliases,
    checkpointed,
    transformed,
    second_derivatives,
    inference,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_unusual_tensors_neither_break_nor_change(case):
    torch.manual_seed(1)
    plain = case()
    for level in ("fast", "full"):
        torch.manual_seed(1)
        with trace.record(level=level) as recorder:
            seen = case()
        assert torch.equal(plain, seen)
        assert "lost" not in recorder.trace.meta
        assert recorder.trace.ops


def test_a_forward_computed_again_has_its_own_module():
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    with trace.record(model) as recorder:
        checkpoint(model, torch.randn(2, 4, requires_grad=True), use_reentrant=False).sum().backward()
    again = [op for op in recorder.trace.ops if op.name == "aten.gelu.default"]
    assert [(op.phase, op.module) for op in again] == [("forward", "1"), ("backward", "1")]


def test_dtensors_are_seen_by_their_local_operators_and_collectives_by_name():
    if not torch.distributed.is_available():
        pytest.skip("torch is built without distributed")
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
        with trace.record() as recorder:
            (x * 2).sum().backward()
            whole = torch.ones(3)
            dist.all_reduce(whole)
            whole.exp()
        assert torch.equal(x.grad.full_tensor(), torch.full((4, 4), 2.0))
    finally:
        dist.destroy_process_group()
    assert "lost" not in recorder.trace.meta
    assert any(op.name == "aten.mul.Tensor" and op.outputs[0].rms is not None for op in recorder.trace.ops)
    # A collective writes without saying so: what is read after it is another value, measured again.
    reduced, read = recorder.trace.ops[-2:]
    assert (reduced.name, read.name) == ("c10d::allreduce_", "aten.exp.default")
    assert reduced.inputs[0].tensor != read.inputs[0].tensor
    assert (reduced.inputs[0].rms, read.inputs[0].rms) == (1.0, 1.0)


def test_an_exception_leaves_what_ran_before(tmp_path):
    def step() -> None:
        x = torch.ones(2, 3)
        x.exp()
        x @ x

    recorder = trace.record(out=tmp_path / "a.trace")
    with pytest.raises(RuntimeError), recorder:
        step()
    assert [op.name for op in recorder.trace.ops] == ["aten.ones.default", "aten.exp.default", "aten.mm.default"]
    assert recorder.trace.ops[1].outputs[0].high == float(torch.tensor(1.0).exp())
    assert re.match(r"aten.mm.default at .*test_trace_recording.py:\d+: RuntimeError", recorder.trace.meta["raised"])
    assert trace.load(tmp_path / "a.trace") == recorder.trace


@pytest.mark.parametrize(
    ("said", "limit", "expected"),
    [(False, None, [0, 1, 2, 3]), (False, 2, [0, 1]), (True, None, [0, 1])],
    ids=["optimizer", "limit", "said"],
)
def test_steps_end_with_the_optimizer_or_where_the_program_says(said, limit, expected):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with trace.record(model, steps=limit) as recorder:
        if said:
            recorder.step()  # from here on the program says
        for _ in range(2):
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            if said:
                recorder.step()
    assert sorted({op.step for op in recorder.trace.ops}) == expected


class Items(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full((3,), float(at)).cos()


def test_workers_of_a_data_loader_leave_the_trace_alone(tmp_path):
    with trace.record(out=tmp_path / "a.trace") as recorder:
        loader = torch.utils.data.DataLoader(Items(), batch_size=2, num_workers=1, multiprocessing_context="fork")
        total = sum(float(batch.sum()) for batch in loader)
    assert total == pytest.approx(sum(float(item.sum()) for item in map(Items().__getitem__, range(6))))
    names = {op.name for op in recorder.trace.ops}
    assert "aten.sum.default" in names
    assert "aten.cos.default" not in names
    assert trace.load(tmp_path / "a.trace") == recorder.trace


def compiled_step(choice: str, **options: Any) -> trace.Trace:
    torch._dynamo.reset()
    layer = nn.Linear(4, 4)
    run = torch.compile(lambda x: layer(x).sin().cos(), backend="aot_eager")
    with trace.record(compiled=choice, **options) as recorder:
        run(torch.ones(2, 4)).sum().backward()
    return recorder.trace


def test_compiled_regions_are_told_of():
    with pytest.warns(UserWarning, match=r"retrograd.trace: .*compiled='eager'"):
        kept = compiled_step("keep")
    assert kept.meta["compiled"].startswith("not seen")


def test_compiled_regions_can_be_run_eagerly():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = compiled_step("eager")
    assert {"aten.sin.default", "aten.cos.default"} <= {op.name for op in seen.ops}
    assert "eagerly" in seen.meta["compiled"]


def test_compiled_regions_can_be_refused():
    with pytest.raises(UsageError, match="compiled='eager'"):
        trace.record(torch.compile(nn.Linear(2, 2)), compiled="refuse")


WRONG = {
    "level": (dict(level="some"), "`level` is 'some'"),
    "steps": (dict(steps=0), "`steps` is 0"),
    "compiled": (dict(compiled="off"), "`compiled` is 'off'"),
    "breakpoint": (dict(breakpoint_on="zero"), "`breakpoint_on` is 'zero'"),
    "names": (dict(breakpoint_on="nan", level="names"), "needs numbers"),
    "suffix": (dict(out="run.json"), "must end in .trace or .jsonl.gz"),
    "model": (dict(model=3), "`model` is a int"),
}


@pytest.mark.parametrize(("options", "said"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(options, said):
    with pytest.raises(UsageError, match=said):
        trace.record(**options)


def test_the_first_bad_operator_stops_with_its_tensors():
    stops: list[Any] = []
    with trace.record(breakpoint_on="nan", then=stops.append):
        x = torch.tensor([1.0, -1.0], requires_grad=True)
        x.sqrt().sum().backward()
    (stop,) = stops
    assert stop.op.name == "aten.sqrt.default"
    assert torch.equal(stop.inputs[0], torch.tensor([1.0, -1.0]))
    assert stop.outputs[0].isnan().tolist() == [False, True]


@pytest.mark.parametrize("kind", ["nan", "bad"])
def test_nothing_stops_a_healthy_step(kind):
    stops: list[Any] = []
    train(Transformer(), breakpoint_on=kind, then=stops.append)
    assert stops == []


def scores(largest: float, own: torch.Tensor | None = None) -> torch.Tensor:
    """Masked by an addition: by a mask that is made here, or comes in."""
    mask = torch.full((3, 3), float("-inf")).triu(1) if own is None else own
    return ((torch.full((3, 3), largest) * 2.0 + 0.5) + mask.expand(2, 3, 3)).softmax(-1).sum()


BEFORE = torch.full((3, 3), float("-inf")).triu(1)


@pytest.mark.parametrize("level", ["fast", "full"])
@pytest.mark.parametrize("own", [None, BEFORE], ids=["made", "given"])
@pytest.mark.parametrize(("largest", "names"), [(1.0, []), (3e38, ["aten.mul.Tensor"])], ids=["healthy", "overflow"])
def test_a_mask_stops_nobody_and_an_overflow_beside_it_does(level, own, largest, names):
    stops: list[Any] = []
    with trace.record(level=level, breakpoint_on="bad", then=stops.append):
        scores(largest, own)
    assert [stop.op.name for stop in stops] == names


def test_a_row_that_is_masked_whole_stops():
    stops: list[Any] = []
    with trace.record(breakpoint_on="bad", then=stops.append):
        torch.zeros(2, 2).masked_fill(torch.ones(2, 2, dtype=torch.bool), float("-inf")).softmax(-1)
    assert [stop.op.name for stop in stops] == ["aten._softmax.default"]


@pytest.mark.parametrize("arguments", [(None, "run.trace"), (torch.nn.Linear(1, 1), "run.trace"), ("run.trace",)])
def test_a_file_without_its_name_is_told_how_it_is_named(arguments):
    with pytest.raises(UsageError, match=r"out='run.trace'"):
        trace.record(*arguments)
