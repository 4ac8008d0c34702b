"""`retrograd bench norm` and `msda`: what it says without a GPU, and results shown again."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from retrograd.bench.msda.rows import Row as Deformable
from retrograd.bench.msda.rows import load as load_msda
from retrograd.bench.rows import Row, load, to_line
from retrograd.cli import main

ROW = Row("rms_norm", 64, 256, "bfloat16", "retrograd", fwd_ms=1.0, bwd_ms=1.0, copy_gb_per_s=1000.0)


POINTS = Deformable("dec300", "float32", "float32", "retrograd", fwd_ms=1.0, bwd_ms=1.0, copy_gb_per_s=1000.0)


def bench(*args, of="norm"):
    return CliRunner().invoke(main, ["bench", of, *args])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("of", ["norm", "msda"])
def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, of):
    monkeypatch.chdir(tmp_path)
    result = bench(of=of)
    assert result.exit_code == 2
    assert "CUDA device" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("of", "row", "line"),
    [("norm", ROW, "| 64x256 | retrograd |"), ("msda", POINTS, "| dec300 | retrograd | 1000.0 |")],
    ids=["norm", "msda"],
)
def test_results_are_shown_without_torch(tmp_path, of, row, line):
    (tmp_path / "r.jsonl").write_text(to_line(row) + "\n")
    code = (
        "import sys; sys.modules['torch'] = None; from retrograd.cli import main; "
        f"main(['bench', {of!r}, '--load', {str(tmp_path / 'r.jsonl')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert line in done.stdout


def test_table_on_stdout_lines_in_the_file_and_a_plot(tmp_path):
    pytest.importorskip("vl_convert")
    out, plot = tmp_path / "r.jsonl", tmp_path / "p.html"
    result = bench(
        "--device", "cpu", "--ops", "rms_norm", "--providers", "torch", "--shapes", "8x64", "--dtype", "float32",
        "--out", str(out), "--plot", str(plot),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "| 8x64 float32 | torch |" in result.stdout
    assert "rms_norm 8x64 torch" in result.stderr
    assert [row.provider for row in load([out])] == ["torch"]
    assert "<svg" in plot.read_text()


def test_deformable_attention_writes_its_table_beside_the_lines(tmp_path):
    result = bench(
        "--device", "cpu", "--providers", "retrograd,grid_sample", "--dtypes", "float32",
        "--shapes", "B1-Q20-H2-C8-P2-6x5+3x4", "--out", str(tmp_path / "r.jsonl"), of="msda",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "| B1-Q20-H2-C8-P2-6x5+3x4 | grid_sample | 1000.0 |" in result.stdout
    assert [row.provider for row in load_msda([tmp_path / "r.jsonl"])] == ["retrograd", "grid_sample"]
    assert (tmp_path / "r.md").read_text() == result.stdout


@pytest.mark.parametrize(
    "args", [["--shapes", "enc"], ["--dtypes", "int8"], ["--load", "missing.jsonl"], ["--timing", "host"]]
)
def test_wrong_usage_of_msda(args):
    assert bench(*args, of="msda").exit_code == 2


@pytest.mark.parametrize(
    "args", [["--shapes", "8*64"], ["--ops", "rmsnorm"], ["--plot", "p.pdf"], ["--load", "missing.jsonl"]]
)
def test_wrong_usage(args):
    assert bench(*args).exit_code == 2
