"""`retrograd bench norm`: what it says without a GPU, and results shown again."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from retrograd.bench.rows import Row, load, to_line
from retrograd.cli import main

ROW = Row("rms_norm", 64, 256, "bfloat16", "retrograd", fwd_ms=1.0, bwd_ms=1.0, copy_gb_per_s=1000.0)


def bench(*args):
    return CliRunner().invoke(main, ["bench", "norm", *args])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = bench()
    assert result.exit_code == 2
    assert "CUDA device" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_results_are_shown_without_torch(tmp_path):
    (tmp_path / "r.jsonl").write_text(to_line(ROW) + "\n")
    code = (
        "import sys; sys.modules['torch'] = None; from retrograd.cli import main; "
        f"main(['bench', 'norm', '--load', {str(tmp_path / 'r.jsonl')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "| 64x256 | retrograd |" in done.stdout


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


@pytest.mark.parametrize(
    "args", [["--shapes", "8*64"], ["--ops", "rmsnorm"], ["--plot", "p.pdf"], ["--load", "missing.jsonl"]]
)
def test_wrong_usage(args):
    assert bench(*args).exit_code == 2
