"""Records of a check: their JSON, what a damaged one is told, copies of a case."""

from __future__ import annotations

import json

import pytest

from retrograd.check.coverage import joined
from retrograd.check.schema import Case, Finding, Report, StageResult
from retrograd.errors import UsageError


def _report() -> Report:
    case = Case("float32").but(sizes={"M": (2, 3), "N": 5}, params={"eps": 1e-6})
    found = Finding("oracle", "wrong-value", "dx is off", case, excess=float("inf"), got=float("nan"))
    stage = StageResult("oracle", "values", "failed", findings=(found,))
    return Report("op", "finding", "quick", 0, ("float32",), "cpu", (stage,))


def test_round_trip():
    again = Report.from_json(_report().to_json())
    assert again.findings[0].case == _report().findings[0].case
    assert again.findings[0].excess == float("inf")
    assert again.exit_code == 1


@pytest.mark.parametrize("damage", [{"stages": ["x"]}, {"verdict": "fine"}, {"stages": None}], ids=str)
def test_damaged_report_is_a_usage_error(damage):
    data = json.loads(_report().to_json()) | damage
    with pytest.raises(UsageError, match="damaged"):
        Report.from_json(json.dumps(data))


def test_other_schema_is_named():
    with pytest.raises(UsageError, match="schema 'x/9'"):
        Report.from_json('{"schema": "x/9"}')


def test_a_case_is_copied_only_where_it_changes_and_parameters_keep_their_types():
    case = Case("float32", sizes=(("M", 2),), params=(("scale", 1),))
    assert case.but(layouts=(), values={}) is case
    assert case.but(draw=1) == Case("float32", sizes=(("M", 2),), params=(("scale", 1),), draw=1)
    assert type(dict(case.but(params=dict(scale=1.0)).params)["scale"]) is float


def test_what_is_not_judged_for_one_reason_is_one_note():
    notes = ["a is not judged in float16: it overflows", "one", "b is not judged in float16: it overflows",
             "a is not judged in float32: it overflows", "one"]  # fmt: skip
    assert joined(notes) == (
        "a, b are not judged in float16: it overflows", "one", "a is not judged in float32: it overflows",
    )  # fmt: skip
