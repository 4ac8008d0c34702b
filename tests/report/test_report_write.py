import math
from pathlib import Path

import fake_report as fake
import pytest

from retrograd.check.schema import Report
from retrograd.errors import UsageError
from retrograd.report import check_paths, write


def test_json_round_trip_keeps_nan_and_inf(tmp_path: Path) -> None:
    write(fake.report(), tmp_path / "r.json")
    back = Report.from_json((tmp_path / "r.json").read_text())
    assert back.findings[0].want is not None
    assert math.isnan(back.findings[0].want)
    assert back.stage("oracle").profiles[0].worst == math.inf
    assert back.to_json() == fake.report().to_json()
    assert back.findings[0].case == fake.CASE


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"schema": "retrograd.report/1"}', '{"schema": "retrograd.report/999"}']
)
def test_damaged_json_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        Report.from_json(text)


def test_text_file(tmp_path: Path) -> None:
    write(fake.report(), tmp_path / "r.txt", tmp_path / "s.JSON")
    assert fake.REPRO in (tmp_path / "r.txt").read_text()
    assert (tmp_path / "s.JSON").exists()


@pytest.mark.parametrize("name", ["r.pdf", "r", "folder.html/r"])
def test_other_suffixes_name_the_allowed_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"\.html, \.json, \.txt"):
        write(fake.report(), tmp_path / "good.json", tmp_path / name)
    assert not (tmp_path / "good.json").exists()


def test_unwritable_paths(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        check_paths(tmp_path / "none" / "r.json")
    (tmp_path / "d.json").mkdir()
    with pytest.raises(UsageError, match=r"cannot write .*d\.json"):
        write(fake.report(), tmp_path / "d.json")
