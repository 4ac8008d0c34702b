"""Events of TensorBoard, read back with its own reader."""

from __future__ import annotations

import builtins
import math
from pathlib import Path
from typing import Any

import fake_report as fake
import pytest
from click.testing import CliRunner

from retrograd.cli import main
from retrograd.errors import MissingExtraError, UsageError
from retrograd.report import to_tensorboard


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def test_stages_and_tensors_are_there_at_each_step(tmp_path: Path) -> None:
    report = fake.report()
    to_tensorboard(report, tmp_path / "runs", 3)
    to_tensorboard(report, tmp_path / "runs", 4)
    found = read(tmp_path / "runs")
    tag = f"{report.target}/oracle"
    assert [(e.step, round(e.value, 6)) for e in found.Scalars(f"{tag}/seconds")] == [(3, 1.5), (4, 1.5)]
    assert [e.value for e in found.Scalars(f"{tag}/findings")] == [1, 1]
    assert math.isinf(found.Scalars(f"{tag}/grad_x/worst")[0].value)
    assert found.Scalars(f"{tag}/power")[0].value == pytest.approx(3e-6)
    histogram = found.Histograms(f"{tag}/grad_x/ulp")[0].histogram_value
    assert histogram.num == sum(fake.profile().ulp_counts)
    assert not any("races" in name for name in found.Tags()["scalars"])  # it was skipped


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(fake.report().to_json())
    command = ["report", str(tmp_path / "r.json"), "--tensorboard", str(tmp_path / "runs"), "--step", "7"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert read(tmp_path / "runs").Scalars("my/file.py:rms_norm/empty/seconds")[0].step == 7


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write events"):
        to_tensorboard(fake.report(), tmp_path / "file")


def test_steps_are_counted_from_0(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`step` is -1, expected 0 or more"):
        to_tensorboard(fake.report(), tmp_path, -1)


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = builtins.__import__

    def hidden(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("tensorboard."):
            raise ModuleNotFoundError(f"No module named {name!r}", name="tensorboard")
        return stock(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", hidden)
    with pytest.raises(MissingExtraError, match=r"retrograd\[tensorboard\]"):
        to_tensorboard(fake.report(), tmp_path)
