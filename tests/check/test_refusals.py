"""What raises: the reason of a reference is told, a layout that an op refuses is its own, what is by luck is no truth."""

from __future__ import annotations

import re

import pytest
import torch
from specimens import with_backward

import retrograd as rg
from retrograd.check import runner, verification
from retrograd.errors import SpecError

X = dict(x=rg.tensor("M", "N"))


def test_a_reference_that_raises_is_quoted():
    def refuses(x):
        raise ValueError("sixteen at most")

    with pytest.raises(SpecError, match="the reference raises ValueError: sixteen at most at M=7 N=48"):
        rg.verify(rg.op(torch.sin, refuses, X), level="quick")


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_what_raises_at_the_ordinary_case_is_told_once(half):
    def broken(x):
        raise ModuleNotFoundError("No module named 'kernels'")

    op = broken if half == "forward" else with_backward(torch.sin, lambda dy, x: broken(x))
    report = rg.verify(rg.op(op, torch.sin, X, dtypes=["float32"]), level="quick")
    assert [(f.stage, f.kind) for f in report.findings] == [("contract", "raises")]
    assert f"the {half} raised ModuleNotFoundError" in report.findings[0].what
    others = {s.status: s.reason for s in report.stages if s.id in ("mutation", "bounds", "races", "oracle")}
    assert others == {"skipped": "float32: it raises at the ordinary case"}


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_an_error_without_a_text_is_told_with_its_line(half):
    def broken(x):
        raise AssertionError  # as `assert x.is_contiguous()` does, which pytest gives a text

    op = broken if half == "forward" else with_backward(torch.sin, lambda dy, x: broken(x))
    (finding,) = rg.verify(rg.op(op, torch.sin, X, dtypes=["float32"]), level="quick").findings
    assert re.match(rf"the {half} raised AssertionError: test_refusals.py:\d+: raise AssertionError ", finding.what)


def test_what_has_lost_the_gpu_is_not_asked_whether_it_raises(monkeypatch):
    gone = []

    def loses(x):
        if gone:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        gone.append(True)
        return x.double().sin()

    monkeypatch.setattr(verification, "lost", lambda device: "an illegal memory access" * bool(gone))
    monkeypatch.setattr(runner, "lost", lambda device: "an illegal memory access" * bool(gone))
    monkeypatch.setattr(verification, "_raises", lambda context: pytest.fail("nothing answers there any more"))
    report = rg.verify(rg.op(loses, torch.sin, X, dtypes=["float32"]), level="quick", only=["contract", "oracle"])
    assert [(s.id, s.status) for s in report.stages] == [("contract", "failed"), ("oracle", "skipped")]
    assert [f.kind for f in report.findings] == ["crash"]


def test_what_raises_at_one_case_keeps_no_stage_from_the_others():
    def refuses(x):
        if x.shape[-1] == 1:
            raise ValueError("two columns at least")
        return x.sin()

    report = rg.verify(rg.op(refuses, torch.sin, X, dtypes=["float32"]), level="quick")
    assert {f.stage for f in report.findings} == {"shapes"}
    assert not [s.reason for s in report.stages if "it raises" in s.reason]


def test_a_layout_of_grad_out_is_no_part_of_the_truth():
    def pairs(x):  # its backward takes no grad_out that begins at an odd place
        return torch.view_as_real(x * 1j)

    report = rg.verify(rg.op(pairs, pairs, X), level="quick", only=["layouts"])
    assert {f.kind for f in report.findings} == {"raises"}
    assert "storage_offset" in report.findings[0].what
    mended = rg.op(lambda x: pairs(x) * 1.0, pairs, X)
    assert rg.verify(mended, level="quick", only=["layouts"])


def test_equal_rows_have_no_singular_vectors_to_compare():
    def vectors(x):
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        return (u * s[..., None, :]).abs() @ torch.ones_like(s)[..., None], vh.square()

    generator = torch.Generator().manual_seed(3)
    spec = rg.op(vectors, vectors, dict(x=torch.randn(3, 5, generator=generator)))
    report = rg.verify(spec, level="quick", only=["layouts"])
    assert report, [f.what for f in report.findings]


def test_equal_rows_beyond_the_numbers_of_a_dtype_have_none_either():
    def factors(x):
        u, s, vh = torch.linalg.svd(x, full_matrices=False)
        return u.abs().sum() + s.sum() + vh.abs().sum()

    for seed in range(4):  # float64 splits the zeros by luck, so that gradients are 1e49 beside NaN
        x = torch.randn(5, 5, generator=torch.Generator().manual_seed(seed))
        report = rg.verify(rg.op(factors, factors, dict(x=x)), level="quick", only=["layouts"])
        assert report, [f.what for f in report.findings]

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, dy):
            return 2 * dy if 0 in dy.stride() or dy.storage_offset() else dy

    broken = rg.op(lambda x: Doubled.apply(factors(x) * x), lambda x: factors(x) * x, dict(x=torch.randn(5, 5)))
    assert rg.verify(broken, level="quick", only=["layouts"]).findings


def test_a_second_derivative_that_rounding_cannot_have_is_no_failure_of_the_check():
    def one_path(x):
        return torch.zeros(2, dtype=x.dtype).index_reduce(0, torch.tensor([0, 0, 1]), x, "prod", include_self=False)

    spec = rg.op(one_path, one_path, dict(x=torch.tensor([0.0, 0.0, 2.0])))
    stage = rg.verify(spec, level="quick", only=["higher_order"]).stage("higher_order")
    assert stage.status == "passed"
