"""What PROVED states: which results were compared, where; and that nothing compared is nothing proved."""

from __future__ import annotations

import pytest
import torch

import retrograd as rg
from retrograd import report as reports
from retrograd.check.schema import StageResult, verdict_of
from retrograd.errors import UndecidedError

MN = dict(x=rg.tensor("M", "N"))


def _verify(fn, reference, inputs=MN, only=("contract", "oracle", "shapes"), **more):
    return rg.verify(rg.op(fn, reference, inputs, **more), level="quick", only=only)


def test_a_line_says_what_was_compared_at_which_sizes(tmp_path):
    pytest.importorskip("vl_convert", reason="charts need vl-convert-python (extra html)")
    report = _verify(torch.sin, torch.sin, dtypes=["float32", "bfloat16"], sizes=dict(M=(2, 40)))
    assert report.covers.startswith(
        "out, grad x compared with the reference; float32, bfloat16; M 2 to 40, N 0 to 4097; "
    )
    cases, runs = (sum(getattr(stage, name) for stage in report.stages) for name in ("cases", "runs"))
    assert report.covers.endswith(f"; {cases} cases, {runs} runs")
    line = f"covers {report.covers}"
    files = [tmp_path / "r.html", tmp_path / "r.txt"]
    rg.write(report, *map(str, files))
    assert all(line in file.read_text() for file in files)
    assert line.replace(",", "%2C") in reports.to_github(report) or line in reports.to_github(report)
    assert rg.Report.from_json(report.to_json()).covers == report.covers


def test_what_was_not_compared_is_named():
    fn = lambda x: (x.sin(), "text", x.argmax(), 3.5)  # noqa: E731
    report = _verify(fn, fn, sizes=dict(M=(1, 9), N=(1, 9)))
    assert "not compared: out1 (str), out3 (float)" in report.covers
    assert "out0, grad x, out2 compared" in report.covers or "out0, out2" in report.covers


def test_without_a_reference_it_says_against_what():
    assert "grad x compared with differences" in _verify(torch.sin, None, only=["contract", "adjoint"]).covers
    assert "grad x without a reference" in _verify(torch.sin, None, only=["contract"]).covers


def test_whole_numbers_are_compared_without_a_gradient():
    report = _verify(torch.argmax, torch.argmax, sizes=dict(M=(1, 9), N=(1, 9)))
    assert report
    assert "out compared with the reference; no gradient" in report.covers


@pytest.mark.parametrize("only", [["contract"], ["mutation", "determinism"]])
def test_nothing_compared_is_nothing_to_prove(only):
    inputs = dict(x=rg.tensor("M", "N", grad=False))
    report = _verify(torch.sin, None, inputs, only=only)
    assert (report.verdict, report.exit_code) == ("undecided", 3)
    assert report.covers.startswith("nothing: ")
    assert "covers nothing" in reports.to_text(report)
    with pytest.raises(UndecidedError, match="nothing to prove: it covers nothing"):
        report.raise_if_failed()
    assert _verify(torch.sin, None, only=only)
    assert _verify(torch.sin, torch.sin, inputs)


def test_a_stage_that_ran_nothing_decides_nothing_by_itself():
    ran = StageResult("oracle", "", "passed", cases=1, runs=3)
    assert verdict_of([ran]) == "undecided"
    assert verdict_of([ran, StageResult("contract", "", "passed", runs=1, gradients=("grad x",))]) == "proved"
