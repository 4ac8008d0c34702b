"""The compiled tape notes what the recorder in Python notes, in the same order, and changes nothing either."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import extensions
import pytest
import torch
from test_trace_recording import CASES, after, compiled_step
from test_trace_statistics import TENSORS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformer import Transformer, line, train

from retrograd import trace
from retrograd.errors import NativeBuildError, UsageError
from retrograd.trace import tape
from retrograd.trace.statistics import cpu
from retrograd.trace.statistics.collector import StatisticsCollector
from retrograd.trace.tape import engine

# Under a dispatch mode in Python autograd keeps gradients in another way, and the mode is told of views that no
# operator makes: what stands on the left is noted there, what stands on the right runs without it.
_STANDS_FOR = {"aten.view.default": "aten._reshape_alias.default", "aten.add.Tensor": "aten.add_.Tensor"}


@pytest.fixture(scope="module", autouse=True)
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The library, in a cache of its own: 30 s of a core where it is compiled."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield extensions.built_once(tape.build, cache)


def recorded(engine: str, device: str, **options: Any) -> list[trace.Op]:
    torch.manual_seed(0)
    return train(Transformer().to(device), engine=engine, steps=2, **options).trace.ops


def plain(op: trace.Op) -> trace.Op:
    """Without what depends on which operators are noted: numbers of operators and of storages."""
    inputs, outputs = (tuple(replace(s, storage=0) for s in side) for side in (op.inputs, op.outputs))
    return replace(op, index=0, inputs=inputs, outputs=outputs)


@pytest.mark.parametrize("level", ["names", "fast", "full"])
def test_it_notes_what_python_notes(device, level):
    seen, noted = (
        [plain(op) for op in recorded(engine, device, level=level) if op.name != "aten.detach.default"]
        for engine in ("python", "tape")
    )
    assert len(seen) == len(noted)
    other = [(a, b) for a, b in zip(seen, noted, strict=True) if a != b]
    assert [(a.name, b.name) for a, b in other if _STANDS_FOR.get(a.name) != b.name] == []
    assert len(other) < len(seen) / 20
    for a, b in other:
        assert (a.place, a.module, a.node, a.inputs, a.outputs) == (b.place, b.module, b.node, b.inputs, b.outputs)


@pytest.mark.parametrize("level", ["names", "fast", "full"])
def test_a_noted_step_gives_the_same_bits_and_random_numbers(device, level):
    unrecorded, _ = after(device, False)
    noted, recorder = after(device, True, level=level, engine="tape")
    assert recorder.engine == "tape"
    assert all(torch.equal(a, b) for a, b in zip(unrecorded, noted, strict=True))
    assert "lost" not in recorder.trace.meta


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_unusual_tensors_neither_break_nor_change(case):
    torch.manual_seed(1)
    unrecorded = case()
    torch.manual_seed(1)
    with trace.record(level="full", engine="tape") as recorder:
        noted = case()
    assert torch.equal(unrecorded, noted)
    assert "lost" not in recorder.trace.meta
    assert recorder.trace.ops


def sized(count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(count)) * 50).to(dtype)


MEASURED = {name: cpu.as_real(x).contiguous() for name, x in TENSORS.items()}
# Without elements, less than the 32 lanes, around blocks of digests (8192 bytes), more than a table of exponents counts.
MEASURED |= {
    f"{count} {dtype}": sized(count, dtype)
    for count in (0, 1, 31, 32, 33, 1024, 2047, 4095, 4097, 9001)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64)
}


@pytest.mark.parametrize("width", [16, 32, 64])
def test_numbers_are_those_of_numpy_to_the_bit_however_wide_the_vectors(width):
    """Of the root mean square too, whose additions are in the order of 32 lanes."""
    measure = tape.load().measure
    for name, x in MEASURED.items():
        for exponents in (False, True):
            assert repr(measure(x, exponents, width, trace.Exponents)) == repr(cpu.measure(x, exponents)), name


def test_the_sum_of_squares_has_the_order_that_is_promised():
    """Other orders give other bits: 2^54 with ones beside it in its lane, which are lost, and in others, which are not."""
    x = torch.zeros(96, dtype=torch.float64)
    x[0] = 2.0**27
    x[32] = x[64] = 1.0  # the same lane: each is lost beside 2^54
    lost = cpu.measure(x)[2]
    x[32] = x[64] = 0.0
    assert cpu.measure(x)[2] == lost
    x[1] = x[17] = 1.4142135623730951  # lanes of their own, joined before they meet the large number
    assert cpu.measure(x)[2] != lost


@pytest.fixture
def late(monkeypatch):
    """Statistics come as from a GPU: once the records are made, when many of the tensors are long gone."""
    monkeypatch.setattr(engine, "table_limits", lambda: ("cpu", 0, 1 << 20))  # tensors of a CPU wait, too
    rows: list[Any] = []
    taken: list[Any] = []

    def request_all(_: StatisticsCollector, tensors: list[Any]) -> None:
        rows.extend((take, cpu.measure(tensor)) for tensor, take in tensors)

    def collect(_: StatisticsCollector) -> None:
        while rows:
            take, row = rows.pop(0)
            take(row)
            taken.append(row)

    monkeypatch.setattr(StatisticsCollector, "request_all", request_all)
    monkeypatch.setattr(StatisticsCollector, "collect", collect)
    return taken


def test_numbers_that_come_late_find_values_that_are_gone(late):
    ops = recorded("tape", "cpu", level="fast")
    assert late
    missing = {op.name for op in ops for s in op.outputs if op.phase == "backward" and s.nan is None}
    assert missing <= {"aten.empty.memory_format", "aten.detach.default"}
    assert any(op.phase == "backward" and op.outputs and op.outputs[0].low is not None for op in ops)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="without a GPU kernels reach no memory that is held from C++ alone"
)
@pytest.mark.parametrize("level", ["fast", "full"])
def test_tensors_that_are_measured_together_have_their_own_numbers(device, level, monkeypatch):
    found = recorded("tape", device, level=level)
    monkeypatch.setattr(engine, "table_limits", lambda: ("cuda", 0, 0))
    for a, b in zip(found, recorded("tape", device, level=level), strict=True):
        for s, t in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True):
            # What is held is not added to in place, and so lies in another storage.
            assert replace(s, rms=None, storage=0) == replace(t, rms=None, storage=0)
            assert s.rms == pytest.approx(t.rms)


class Listing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")
def test_a_mode_of_the_user_sees_nothing_of_it(device):
    def step() -> list[str]:
        x = torch.ones(4, 6, device=device)
        with Listing() as seen:
            (x * 2).t().mul(3).add_(1)
        return seen.names

    unrecorded = step()
    with trace.record(level="full", engine="tape"):
        assert step() == unrecorded


def test_what_is_read_within_a_step_keeps_its_numbers():
    with trace.record(engine="tape") as recorder:
        x = torch.ones(2) * 2
        recorder.step()
        y = x * 2
        assert len(recorder.trace.ops) == 3
        _ = x + y
    assert "lost" not in recorder.trace.meta
    last = recorder.trace.ops[-1]
    assert [s.high for s in (*last.inputs, *last.outputs)] == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("engine", ["python", "tape"])
def test_names_follow_parameters_that_are_replaced_moved_and_added_between_steps(engine):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with trace.record(model, engine=engine) as recorder:
        for step in range(4):
            if step == 1:
                model[0].weight = nn.Parameter(torch.ones(3, 3))
            if step == 2:
                model[1].weight.data = torch.ones(3, 3)
            if step == 3:
                model[0].add_module("inner", nn.Linear(3, 3))
                model[0].inner(torch.ones(2, 3))
            model(torch.ones(2, 3))
            recorder.step()
    names = [{s.name for op in recorder.trace.ops if op.step == step for s in op.inputs if s.name} for step in range(4)]
    usual = {f"{module}.{name}" for module in (0, 1) for name in ("weight", "bias")}
    assert names[:3] == [usual] * 3
    assert names[3] == usual | {"0.inner.weight", "0.inner.bias"}


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("engine", ["python", "tape"])
def test_what_ddp_does_in_a_backward_has_line_and_module_of_the_gradient(engine, one_rank):
    """Each parameter has its own shape: what is put into the buckets and taken out again is that of one module."""
    inner = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 6))
    model = nn.parallel.DistributedDataParallel(inner)
    with trace.record(model, engine=engine) as recorder:
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()  # a step of DDP
            recorder.step()
    shapes = {tuple(p.shape): name.rpartition(".")[0] for name, p in model.named_parameters()}
    own = [op for op in recorder.trace.ops if op.phase == "backward" and op.node in ("", "AccumulateGrad")]
    assert [op for op in own if not op.code.endswith("# a step of DDP")] == []
    told = [(op.module, shapes[s.shape]) for op in own for s in op.outputs if s.shape in shapes]
    assert len([op for op in own if not op.node]) >= 2 * len(
        shapes
    )  # views of the bucket and copies of them, each step
    assert [pair for pair in told if pair[0] != pair[1]] == []
    assert {module for module, _ in told} == set(shapes.values())


@pytest.mark.parametrize("engine", ["python", "tape"])
def test_a_hook_without_a_forward_has_the_line_that_waits_for_the_backward(engine):
    """In a thread of its own, on which no node had a number before: the first line of it is no node's."""

    def hook(_: torch.Tensor) -> None:
        torch.zeros(7)  # in the hook

    def step() -> list[trace.Op]:
        with trace.record(engine=engine) as recorder:
            weight = nn.Parameter(torch.ones(3))
            weight.register_post_accumulate_grad_hook(hook)
            (weight * 2).sum().backward()  # waits
        return recorder.trace.ops

    with ThreadPoolExecutor(1) as threads:
        ops = threads.submit(step).result()
    hooked = [op for op in ops if op.outputs and op.outputs[0].shape == (7,)]
    assert {(op.code.endswith("# waits"), op.inside.endswith("# in the hook")) for op in hooked} == {(True, True)}


def test_an_overflow_in_the_backward_is_found_with_its_line(device):
    torch.manual_seed(0)
    model = Transformer().to(device)
    model.blocks[0].by, model.blocks[1].by = 1e38, 1e4
    found = trace.provenance(train(model, engine="tape").trace)
    assert found.op is not None
    assert (found.op.phase, found.op.module, found.op.node) == ("backward", "blocks.0", "ScaleBackward")
    assert line("planted in the backward") in found.op.inside


def test_what_is_overwritten_was_measured_before():
    x = torch.ones(3)
    with trace.record(level="full", engine="tape") as recorder:
        y = x * 2
        y.mul_(2).add_(1)
    assert [op.outputs[0].high for op in recorder.trace.ops] == [2.0, 4.0, 5.0]


def test_an_exception_is_told_with_its_operator_and_place():
    recorder = trace.record(engine="tape")
    with pytest.raises(RuntimeError), recorder:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert [op.name for op in recorder.trace.ops][-1] == "aten.mm.default"
    assert recorder.trace.meta["raised"].startswith("aten.mm.default at ")


def test_steps_are_read_when_they_are_asked_for_and_written_as_they_end(tmp_path):
    path = tmp_path / "a.trace"
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with trace.record(model, engine="tape", out=path) as recorder:
        for step in (1, 2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            assert {op.step for op in recorder.trace.ops} == set(range(step))
            assert trace.load(path, partial=True).ops == recorder.trace.ops
    assert trace.load(path) == recorder.trace


def test_compiled_regions_are_told_of():
    with pytest.warns(UserWarning, match=r"retrograd.trace: .*compiled='eager'"):
        kept = compiled_step("keep", engine="tape")
    assert kept.meta["compiled"].startswith("not seen")
    assert "aten.sin.default" not in {op.name for op in kept.ops}


def test_a_second_recorder_goes_without_it():
    with trace.record(engine="tape") as outer, trace.record() as inner:
        torch.ones(2).exp()
        with pytest.raises(UsageError, match="another recorder has the tape"):
            trace.record(engine="tape")
    assert (outer.engine, inner.engine) == ("tape", "python")
    assert "aten.exp.default" in {op.name for op in inner.trace.ops}


def test_wrong_engines_are_named():
    with pytest.raises(UsageError, match="`engine` is 'rust'"):
        trace.record(engine="rust")
    with pytest.raises(UsageError, match="needs engine='python'"):
        trace.record(engine="tape", breakpoint_on="nan")


def chosen(**options: Any) -> tuple[str, str]:
    """The engine of a recorder that was asked for none, and why it is not the tape."""
    recorder = trace.record(**options)
    assert recorder.trace.meta["engine"] == recorder.engine
    return recorder.engine, recorder.trace.meta.get("no tape", "")


def test_the_tape_records_where_it_has_been_built(monkeypatch):
    monkeypatch.setenv("RETROGRAD_TAPE", "auto")
    assert chosen() == ("tape", "")
    assert chosen(engine="python") == ("python", "")
    assert chosen(breakpoint_on="nan") == ("python", "it stops at no operator")
    with trace.record():
        assert chosen() == ("python", "another recorder has the tape")
    monkeypatch.setenv("RETROGRAD_TAPE", "off")
    assert chosen() == ("python", "RETROGRAD_TAPE is off")
    assert chosen(engine="tape") == ("tape", "")


def test_before_torch_2_13_tensors_made_of_others_are_left_to_python(monkeypatch):
    monkeypatch.setenv("RETROGRAD_TAPE", "auto")
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", sys)
    assert chosen() == ("tape", "")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert chosen()[0] == ("python" if tape.load().above_python else "tape")


def test_without_the_tape_python_records_while_it_is_compiled_once_in_the_background(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("RETROGRAD_TAPE", "auto")
    tape.load.cache_clear()
    tape._background.cache_clear()
    try:
        with monkeypatch.context() as here:
            here.setattr(torch.cuda, "is_available", lambda: False)
            assert chosen()[0] == "python"
            tape._background().wait()
            assert chosen()[1].startswith("CXX is 'no-such-compiler'")
        assert "compiling" not in capfd.readouterr().err  # there is nothing to compile with
        monkeypatch.setenv("RETROGRAD_TAPE", "build")
        engine, why = chosen()
        assert engine == "python"
        assert why.startswith("CXX is 'no-such-compiler'")
        assert "retrograd: compiling the trace tape" in capfd.readouterr().err
        with pytest.raises(NativeBuildError, match="CXX is 'no-such-compiler'"):
            trace.record(engine="tape")
    finally:
        tape.load.cache_clear()
        tape._background.cache_clear()


def test_what_was_compiled_in_the_background_is_taken_by_the_next_recorder(monkeypatch):
    """The library that these tests have built stands for it: as long as nobody finds it, it is being built."""
    monkeypatch.setenv("RETROGRAD_TAPE", "auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tape._background.cache_clear()
    with monkeypatch.context() as here:
        here.setattr(type(tape._EXTENSION), "find", lambda self: None)
        assert chosen()[0] == "python"
        tape._background().wait()
        assert (tape._background().reason, tape._background().tried) == ("", False)
    assert chosen() == ("tape", "")
    tape._background.cache_clear()
