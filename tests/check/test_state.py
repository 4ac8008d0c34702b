"""The state stage: what calls leave behind."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from specimens import with_backward

import retrograd as rg
from retrograd.errors import VerificationError

_PATH = Path(__file__).resolve().parent.parent / "mutants" / "state.py"
_MODULE = importlib.util.spec_from_file_location("state_mutants", _PATH)
mutants = importlib.util.module_from_spec(_MODULE)
_MODULE.loader.exec_module(mutants)

KINDS = {"S01": "second-backward", "S02": "two-graphs", "S03": "kept-buffer", "S04": "stale-copy", "S05": "two-graphs"}


@pytest.mark.parametrize("name", KINDS)
def test_mutant_is_found_and_named(name):
    report = rg.verify(mutants.MUTANTS[name], level="quick", only=["state"])
    assert KINDS[name] in {f.kind for f in report.findings}


@pytest.mark.parametrize("name", ["S01", "S02", "S04", "S05"])
def test_no_other_stage_sees_it(name):
    assert rg.verify(mutants.MUTANTS[name], level="quick", skip=["state"])


def test_the_unbroken_form_is_proved():
    spec = mutants.mutant("healthy", mutants.right)
    assert rg.verify(spec, level="quick", only=["state"])


def test_noise_from_run_to_run_is_no_state():
    def noisy(x):
        return x * x * (1 + torch.rand(()) * 1e-7)

    assert rg.verify(rg.op(noisy, lambda x: x * x, dict(x=rg.tensor("M", "N"))), level="quick", only=["state"])


def test_a_backward_that_frees_its_memory_is_refused():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x.clone()
            return x * x

        @staticmethod
        def backward(ctx, dy):
            x, ctx.x = ctx.x, None
            return 2 * x * dy

    report = rg.verify(rg.op(Once.apply, None, dict(x=rg.tensor("N"))), level="quick", only=["state"])
    with pytest.raises(VerificationError, match="retain_graph"):
        report.raise_if_failed()


def test_dtypes_share_no_cache():
    seen = []

    def first_dtype_wins(x):
        seen.append(x.dtype)
        return (x * x).to(seen[-2] if len(seen) > 1 else x.dtype).to(x.dtype)

    spec = rg.op(first_dtype_wins, None, dict(x=rg.tensor("N")), dtypes=["float32", "bfloat16"])
    report = rg.verify(spec, level="quick", only=["state"])
    assert "bfloat16" in report.findings[0].what


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a CUDA device")
def test_work_on_another_stream_is_found():
    class Escapes(torch.autograd.Function):
        """Writes on the default stream whatever the current one is."""

        @staticmethod
        def forward(_ctx, x):
            with torch.cuda.stream(torch.cuda.default_stream()):
                return x * x

        @staticmethod
        def backward(_ctx, dy):
            return dy

    spec = rg.op(Escapes.apply, None, dict(x=rg.tensor("M", "N")))
    report = rg.verify(spec, level="quick", only=["state"], device="cuda")
    assert "stream" in {f.kind for f in report.findings}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("keyed", [False, True])
def test_what_is_kept_for_one_device_and_used_on_another_is_found(keyed):
    tables = {}

    def weighted(x):
        key = (x.shape[-1], x.device) if keyed else x.shape[-1]
        return x * tables.setdefault(key, torch.arange(1.0, 1.0 + x.shape[-1], device=x.device))

    spec = rg.op(
        weighted, lambda x: x * torch.arange(1.0, 1.0 + x.shape[-1], device=x.device), dict(x=rg.tensor("M N"))
    )
    report = rg.verify(spec, level="quick", only=["state"], device="cuda")
    assert {f.kind for f in report.findings} == (set() if keyed else {"device"})


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_kernel_that_is_launched_on_the_current_device_is_found():
    # Triton launches on the current device; its kernel reaches the other's memory, but waits for none of its work.
    # Backwards are safe: autograd makes a tensor's device the current one.
    path = _PATH.parent / "triton_bounds.py"
    made = importlib.util.spec_from_file_location("state_launches", path)
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)

    class Launched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            out = torch.empty_like(x)
            module.masked_kernel[(-(-x.numel() // 64),)](x, x, out, x.numel(), BLOCK=64)
            return out

        @staticmethod
        def backward(ctx, dy):
            return 4 * ctx.saved_tensors[0] * dy

    spec = rg.op(Launched.apply, lambda x: 2 * x * x, dict(x=rg.tensor("M", "N")), sizes=dict(M=(1, 64), N=(1, 64)))
    report = rg.verify(spec, level="quick", only=["state"], device="cuda")
    assert {f.kind for f in report.findings} == {"device"}


def test_an_overwritten_input_is_no_copy_that_is_kept():
    def forward(x):
        y = x.detach().sin()
        x.detach().mul_(0.5)
        return y

    report = rg.verify(
        rg.op(with_backward(forward, lambda dy, x: dy), torch.sin, dict(x=rg.tensor("M", "N"))), level="quick"
    )
    kinds = {(f.stage, f.kind) for f in report.findings}
    assert ("mutation", "input") in kinds
    assert "stale-copy" not in {kind for _, kind in kinds}


class _Shared(torch.autograd.Function):
    """The square of x, whose backward reads what the latest forward of an op or of its reference left outside."""

    left: torch.Tensor

    @staticmethod
    def forward(_ctx, x, factor):
        _Shared.left = x.detach() * factor
        return x * x

    @staticmethod
    def backward(_ctx, g):
        return 2 * _Shared.left.to(g.dtype) * g, None


@pytest.mark.parametrize(("factor", "verdict"), [(1.5, "finding"), (1.0, "proved")])
def test_truth_is_not_made_of_what_the_op_left_for_a_backward(factor, verdict):
    report = rg.verify(
        lambda x: _Shared.apply(x, factor),
        reference=lambda x: _Shared.apply(x, 1.0),
        inputs={"x": rg.tensor("M", "N")},
        dtypes=["float32"],
        level="quick",
        only=["oracle"],
    )
    assert report.verdict == verdict, report
    assert {f.kind for s in report.stages for f in s.findings} <= {"wrong-value"}
