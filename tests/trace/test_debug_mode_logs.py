"""Two logs of torch's DebugMode: what was planted is named, what is healthy is the same, what is no log is refused."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from retrograd import trace
from retrograd.cli import main
from retrograd.errors import TraceError, UsageError
from retrograd.trace.debug_mode_log import FORMAT

LOGS = Path(__file__).parent / "debug_mode"


@pytest.fixture
def log(tmp_path):
    """The path of a log of `debug_mode`, unpacked."""

    def unpack(name: str) -> Path:
        path = tmp_path / f"{name}.json"
        path.write_bytes(gzip.decompress((LOGS / f"{name}.json.gz").read_bytes()))
        return path

    return unpack


# What the first cause says, and where it is.
PLANTED = {
    "seeds": ("aten::bernoulli_.float draws other random numbers", "module Sequential.1, call 39"),
    "extra_operator": ("aten::mul.Tensor is in B alone", "call 48"),
    "missing_operator": ("aten::relu is in A alone", "module Model, call 13"),
    "narrower": ("float32 is cast to bfloat16 in B alone", "module Sequential.0.up, call 30"),
    "shapes": ("aten::uniform_ gives other sizes: [32, 16] -> [48, 16]", "call 18"),
    "in_place": ("aten::mul.Tensor reads another value: input 0 is the result of aten::relu (8) in A", "call 10"),
    "not_a_number": ("aten::add.Tensor in A is aten::sub.Tensor in B", "call 50"),
    "weight": ("aten::add_.Tensor has other arguments: 0.0 -> 1.0", "call 26"),
    "learning_rate": ("aten::add_.Tensor has other arguments: alpha=-0.1 -> alpha=-0.2", "call 101"),
    "wrong_backward": ("aten::mul.Tensor has other arguments: 3.0 -> 2.0", "write_logs.py:145, backward, call 77"),
    "another_gelu": ("aten::gelu has other arguments: none -> approximate=tanh", "write_logs.py:153, module Sequential.1"),
    "one_step_less": ("aten::randn.generator, aten::pow.Tensor_Scalar, ", "call 52"),
    "inductor": ("operators do not correspond where torch.compile compiled in B alone", "module Sequential.0.norm"),
    "distributed": ("aten::empty_like, c10d::scatter_, output placement, redistribute_input are in B alone", "call 21"),
    # Written after the reader, of which it had seen no log: named as here at first sight.
    "not_causal": ("_scaled_dot_product_flash_attention_for_cpu has other arguments: 0.0, True -> none", "module Attention"),
    "swapped": ("_scaled_dot_product_flash_attention_for_cpu reads another value", "module Attention, call 43"),
    "another_scale": ("scale=0.25 -> 0.0, True, scale=0.5", "later_programs.py:31, module Attention, call 43"),
    "clipped": ("aten::_foreach_norm.Scalar, aten::stack, aten::linalg_vector_norm", "call 105"),
    "not_zeroed": ("aten::detach in A is aten::add_.Tensor in B", "call 300"),
    "another_batch": ("aten::add.Tensor has other arguments: 0.0 -> 0.001", "call 25"),
    "weight_decay": ("aten::add.Tensor is in B alone", "call 106"),
    "fused": ("aten::_fused_adamw_ has other arguments: [], lr=0.01", "call 143"),
    "frozen_statistics": ("aten::add_.Tensor is in A alone", "module Sequential.1, call 20"),
    "no_residual": ("aten::add.Tensor is in A alone", "module Sequential.0, call 36"),
    "detached": ("aten::native_layer_norm_backward, ", "call 77"),
    "eps": ("aten::native_layer_norm has other arguments: [16], 1e-05 -> [16], 0.001", "module Sequential.1.norm, call 39"),
    "microbatches": ("aten::split.Tensor is in A alone", "call 25"),
    # Healthy, but for what one of them runs beside: that is said, and nothing else.
    "checkpointed": ("aten::native_layer_norm is in B alone", "module Model.0.norm, call 85"),
    "logged_more": ("aten::linalg_vector_norm, aten::stack, aten::max are in B alone", "call 105"),
    # An L1 norm sees neither: the first call whose number differs is named, and that its inputs may differ all the same.
    "sign": ("aten::exp gives another result, from inputs with the same numbers", "call 11"),
    "rolled": ("aten::addmm gives another result, from inputs with the same numbers", "module Linear, call 15"),
}  # fmt: skip
HEALTHY = ("another_order", "compiled", "healthy")


@pytest.mark.parametrize("name", PLANTED)
def test_the_first_call_that_differs(log, name):
    found = trace.diff(log(f"{name}.right"), log(f"{name}.wrong"))
    assert not found
    assert (found.mode, found.a.title) == ("logged", f"{name}.right.json")
    what, where = PLANTED[name]
    assert what in found.causes[0].what, found.text()
    assert where in found.causes[0].where, found.text()
    assert any(note.startswith("a log holds") and "do not prove equal tensors" in note for note in found.notes)


@pytest.mark.parametrize("name", HEALTHY)
def test_what_computes_the_same_is_the_same(log, name):
    found = trace.diff(log(f"{name}.right"), log(f"{name}.wrong"))
    assert found, found.text()
    assert found.text().startswith("the same in all that was logged")
    assert found.carried == 0


@pytest.mark.parametrize("name", [*PLANTED, *HEALTHY])
def test_a_log_is_the_same_as_itself(log, name):
    for side in ("right", "wrong"):
        found = trace.diff(log(f"{name}.{side}"), log(f"{name}.{side}"))
        assert found, found.text()


def test_what_follows_from_a_cause_and_what_stands_elsewhere_is_counted(log):
    found = trace.diff(log("weight.right"), log("weight.wrong"))
    assert (len(found.causes), found.matched, found.carried) == (1, 57, 130)
    order = trace.diff(log("another_order.right"), log("another_order.wrong"))
    assert any(
        note.startswith("6 calls with the same numbers in another order: aten::t (call 10") for note in order.notes
    )
    other = trace.diff(log("rolled.right"), log("rolled.wrong"))
    assert "aten::roll in A is aten::flip in B (call 8) with the same numbers" in other.notes
    assert "an L1 norm sees neither signs nor order" in other.causes[0].advice


def test_lines_and_numbers_of_a_cause(log):
    (cause,) = trace.diff(log("wrong_backward.right"), log("wrong_backward.wrong")).causes
    assert cause.b.code == "return self[1](Scaled.apply(self[0](x), 2.0 if fault else 3.0))"  # of the forward
    assert cause.b.inside == "project/write_logs.py:44: return grad * ctx.factor, None"
    assert cause.why == "logged 192.00000071525574 in A, 128.00000011920929 in B, 3.3e-01 apart"
    assert cause.a.outputs[0].text == "float32 [4, 16], logged 192.00000071525574"


# Synthetic logs.


def _written(tmp_path: Path, name: str, calls: list[dict[str, Any]], **more: Any) -> Path:
    path = tmp_path / name
    path.write_text(json.dumps({"format": FORMAT, "version": 1, "logs": calls} | more))
    return path


def _scalar(value: float | str | None) -> dict[str, Any]:
    return {"type": "nonfinite_float" if isinstance(value, str) else "scalar", "value": value}


def _list(*items: Any) -> dict[str, Any]:
    return {"type": "tuple", "items": list(items)}


def _dict(**items: Any) -> dict[str, Any]:
    return {"type": "dict", "items": [[key, value] for key, value in items.items()]}


def _call(
    name: str, given: str = "t: f32[4]", before: Any = None, after: Any = None, result: str = "t: f32[4]", **more: Any
):
    log = _dict(
        **({} if before is None else {"input_hash": _list(_list(*map(_scalar, before)), _dict())}),
        **({} if after is None else {"hash": _scalar(after)}),
    )
    call = {
        "type": "op",
        "op_name": name,
        "args_str": given,
        "kwargs_str": "",
        "output_str": f"  ->  {result}",
        "log": log,
    }
    return {"call_depth": 1, "stack_trace": None, "fwd_stack_trace": None} | call | more


def _kernel(name: str, before: float, after: float) -> dict[str, Any]:
    hashes = {
        key: _dict(in_ptr0=_scalar(before), out_ptr0=_scalar(n))
        for key, n in (("pre_hashes", 0.0), ("post_hashes", after))
    }
    arguments = "in_ptr0=t: f32[4], out_ptr0=t: f32[4], xnumel=4"
    return {
        "type": "triton_kernel",
        "kernel_name": name,
        "kwargs_str": arguments,
        "call_depth": 1,
        "log": None,
    } | hashes


def test_kernels_of_inductor_are_calls(tmp_path):
    logs = [_written(tmp_path, f"{n}.json", [_kernel("triton_poi_fused_gelu_0", 2.0, n)]) for n in (3.0, 4.0)]
    assert trace.diff(logs[0], logs[0])
    (cause,) = trace.diff(*logs).causes
    assert cause.what == "triton::triton_poi_fused_gelu_0 gives another result, from inputs with the same numbers"
    assert cause.why == "logged 3 in A, 4 in B, 2.5e-01 apart"


def test_nan_is_nan_and_one_that_only_one_side_has_is_said(tmp_path):
    calls = [[_call("aten::log", before=[2.0], after=number), _call("aten::exp", before=[number], after=number)]
             for number in ("nan", 5.0)]  # fmt: skip
    nan, finite = (_written(tmp_path, f"{k}.json", c) for k, c in enumerate(calls))
    assert trace.diff(nan, nan)
    (cause,) = trace.diff(finite, nan).causes
    assert cause.kind == "nonfinite"
    assert cause.what == "aten::log gives NaN or Inf in B alone, from inputs with the same numbers"


def test_a_number_that_another_order_of_adding_explains_is_told_so(tmp_path):
    tensors = dict(given="t: f32[1000]", result="t: f32[1000]")
    logs = [
        _written(tmp_path, f"{n}.json", [_call("aten::exp", before=[2.0], after=n, **tensors)])
        for n in (9.0, 9.0 + 2**-45)
    ]
    (cause,) = trace.diff(*logs).causes
    assert cause.why.endswith("3.2e-15 apart, which another order of adding up the norm explains as well")


def test_what_a_collective_under_way_holds_is_not_compared(tmp_path):
    def calls(racing: float) -> list[dict[str, Any]]:
        reduced = _call("_c10d_functional::all_reduce", before=[2.0], after=racing)
        return [
            reduced,
            _call("_c10d_functional::wait_tensor", before=[racing], after=4.0),
            _call("aten::exp", before=[4.0], after=9.0),
        ]

    assert trace.diff(_written(tmp_path, "a.json", calls(2.0)), _written(tmp_path, "b.json", calls(4.0)))


def test_without_inputs_the_first_number_is_named_and_what_that_leaves_open(tmp_path):
    def calls(first: float) -> list[dict[str, Any]]:
        return [
            _call("aten::exp", after=first),
            _call("aten::log", after=first + 1),
            _call("aten::ones", given="", after=4.0),
        ]

    found = trace.diff(_written(tmp_path, "a.json", calls(2.0)), _written(tmp_path, "b.json", calls(3.0)))
    (cause,) = found.causes
    assert (cause.what, found.carried) == ("aten::exp gives another result", 1)
    assert "log_tensor_hashes(hash_inputs=True)" in cause.advice


def test_logs_without_numbers_are_compared_by_their_calls(tmp_path):
    logs = [_written(tmp_path, f"{k}.json", [_call("aten::mm", "t: f32[4, 4], t: f32[4, 4]"), _call("aten::exp", given)])
            for k, given in enumerate(("t: f32[4]", "t: f32[4], True"))]  # fmt: skip
    assert trace.diff(logs[0], logs[0]).mode == "names"
    (cause,) = trace.diff(*logs).causes
    assert cause.what == "aten::exp has other arguments: none -> True"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"version": 2, "logs": []}', "of version 2, expected 1"),
        ('"version": 1, "logs": [{"type": "op", "op_na', "was cut off"),
        ('"version": 1, "logs": {}}', "has dict as 'logs', expected a list of calls"),
        ('"version": 1, "logs": [7]}', "call 0: expected an object, got int"),
        ('"version": 1, "logs": [{"call_depth": 1, "type": "spell"}]}', "call 0: type 'spell', expected"),
        ('"version": 1, "logs": [{"call_depth": true, "type": "op"}]}', "'call_depth' is True"),
        ('"version": 1, "logs": [{"call_depth": 1, "type": "op"}]}', "'op_name' is None, expected str"),
        ('"version": 1, "logs": []}', "has no calls; was anything run under DebugMode"),
    ],
)  # fmt: skip
def test_what_is_no_log_is_refused(tmp_path, log, text, message):
    path = tmp_path / "bad.json"
    path.write_text(f'{{"format": "{FORMAT}", {text}')
    with pytest.raises((TraceError, UsageError), match=message):
        trace.diff(path, path)
    for other in (f'{{"format": "else", "of": "{FORMAT}"}}', '{"logs": []}'):
        path.write_text(other)
        with pytest.raises(TraceError, match="is no trace"):
            trace.diff(path, path)


def test_a_log_is_compared_with_one_log_of_the_same_kind(tmp_path, log):
    right = log("healthy.right")
    recorded = tmp_path / "run.trace"
    with trace.record() as recorder:
        torch.ones(2).exp()
    trace.save(recorder.trace, recorded)
    with pytest.raises(UsageError, match=r"'healthy.right.json' is a log of DebugMode: expected two of them"):
        trace.diff(right, recorded)
    with pytest.raises(UsageError, match="expected two of them"):
        trace.diff(recorded, [right, right])
    with pytest.raises(UsageError, match="an L1 norm in A and a hash in B; expected one kind"):
        trace.diff(right, log("no_residual.right"))
    with pytest.raises(UsageError, match="`level` is 'attainable', but logs"):
        trace.diff(right, right, "attainable")
    call = _call("aten::exp", after=2.0)
    call["log"]["items"][0][1] = {"type": "unheard of"}
    with pytest.raises(TraceError, match="call 0: a logged value is"):
        trace.diff(_written(tmp_path, "odd.json", [call]), right)


def test_the_command_reads_logs(log):
    files = [str(log(f"another_gelu.{side}")) for side in ("right", "wrong")]
    different = CliRunner().invoke(main, ["trace", "diff", *files])
    assert different.exit_code == 1
    assert "1. aten::gelu has other arguments: none -> approximate=tanh" in different.output
    assert CliRunner().invoke(main, ["trace", "diff", files[0], files[0]]).exit_code == 0


def test_a_log_of_the_torch_that_is_here(tmp_path):
    debug_mode = pytest.importorskip("torch.utils._debug_mode")
    mode = debug_mode.DebugMode
    if not hasattr(mode, "save_logs"):
        pytest.skip("this torch does not save logs of DebugMode: from 2.15 on")

    def saved(factor: float) -> Path:
        torch.manual_seed(0)
        x = torch.randn(3, 4, requires_grad=True)
        with mode(record_stack_trace=True) as seen, mode.log_tensor_hashes(hash_inputs=True):
            (x.exp() * factor).sum().backward()
        text = io.StringIO()
        mode.save_logs(seen.logs, text)
        path = tmp_path / f"{factor}.json"
        path.write_text(text.getvalue())
        return path

    assert trace.diff(saved(2.0), saved(2.0))
    found = trace.diff(saved(2.0), saved(3.0))
    assert found.causes[0].what == "aten::mul.Tensor has other arguments: 2.0 -> 3.0"
    assert found.causes[0].b.code == "(x.exp() * factor).sum().backward()"
