"""`retrograd bench`: ops by name and of one's own, what it says without a GPU, results shown again and compared."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from fake_timer import FakeTimer

from retrograd.bench import registry, runner
from retrograd.bench.rows import Row, load, to_line
from retrograd.cli import main

ROW = Row("rms_norm", "64x256", "bfloat16", "retrograd", fwd_ms=1.0, bwd_ms=1.0, copy_gb_per_s=1000.0)


POINTS = Row(
    "ms_deform_attn", "dec300", "float32", "retrograd", beside="float32", fwd_ms=1.0, bwd_ms=1.0, copy_gb_per_s=1000.0
)


TINY = ("--shapes", "8x64", "--dtype", "float32")


def bench(*args, of="norm"):
    return CliRunner().invoke(main, ["bench", *([of] if of else []), *args])


@pytest.fixture(autouse=True)
def _own_tables(monkeypatch):
    """Nothing is measured, and what a test adds is gone after it."""
    monkeypatch.setattr(runner, "make_timer", _timer)
    monkeypatch.setattr(registry, "PROVIDERS", list(registry.PROVIDERS))
    monkeypatch.setattr(registry, "BENCHMARKS", dict(registry.BENCHMARKS))


make_timer = runner.make_timer


def _timer(device, timing):
    return FakeTimer() if device == "cpu" else make_timer(device, timing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("of", ["norm", "msda"])
def test_without_a_gpu_that_was_asked_for_it_says_so(tmp_path, monkeypatch, of):
    monkeypatch.chdir(tmp_path)
    result = bench("--device", "cuda", of=of)
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
    assert "rms_norm 8x64 float32 torch" in result.stderr
    assert [row.provider for row in load([out])] == ["torch"]
    assert "<svg" in plot.read_text()


def test_deformable_attention_writes_its_table_beside_the_lines(tmp_path):
    result = bench(
        "--device", "cpu", "--providers", "retrograd,grid_sample", "--dtypes", "float32",
        "--shapes", "B1-Q20-H2-C8-P2-6x5+3x4", "--out", str(tmp_path / "r.jsonl"), of="msda",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "| B1-Q20-H2-C8-P2-6x5+3x4 | grid_sample | 1000.0 |" in result.stdout
    assert [row.provider for row in load([tmp_path / "r.jsonl"])] == ["retrograd", "grid_sample"]
    assert (tmp_path / "r.md").read_text() == result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_cpu_is_measured_and_that_is_said(tmp_path):
    result = bench(*TINY, "--providers", "torch", "--out", str(tmp_path / "r.jsonl"), of="rms_norm")
    assert result.exit_code == 0, result.output
    assert "no CUDA device: times on the CPU" in result.stderr


def test_ops_of_several_families_in_one_run(tmp_path):
    out = tmp_path / "r.jsonl"
    result = bench(
        *TINY, "layer_norm", "rank_sum", "--device", "cpu", "--providers", "torch", "--out", str(out), of="rms_norm"
    )
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["op"] for line in out.read_text().splitlines()] == ["rms_norm", "layer_norm", "rank_sum"]
    assert bench("--load", str(out), of=None).stdout == result.stdout
    assert not (tmp_path / "r.md").exists()


def test_the_list_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from retrograd.cli import main; main(['bench', '--list'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ms_deform_attn" in done.stdout
    assert "quack" in done.stdout


MINE = """
import torch
import retrograd as rg
from retrograd.bench import register

def norm(x, w, eps):
    return torch.nn.functional.rms_norm(x, w.shape, w, eps)

def off(x, w, eps):
    return 1.01 * norm(x, w, eps)

spec = rg.op(lambda x: x.exp(), torch.exp, dict(x=rg.tensor("M", "N")), name="grow")
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "adds.py").write_text(MINE + "register('added', 'rms_norm', norm)")
    return tmp_path


def test_a_provider_of_ones_own_stands_beside_the_others(mine):
    users = [
        "--provider",
        f"mine={mine}/mine.py:norm",
        "--provider",
        f"off={mine}/mine.py:off",
        "--provider",
        f"{mine}/adds.py",
    ]
    result = bench(*TINY, *users, "--device", "cpu", "--out", str(mine / "r.jsonl"), of="rms_norm")
    assert result.exit_code == 0, result.output
    rows = {row.provider: row for row in load([mine / "r.jsonl"])}
    assert rows["mine"].fwd_ms == rows["added"].fwd_ms == rows["retrograd"].fwd_ms == 1.0
    assert rows["off"].fwd_ms is None
    assert "| off | wrong: y" in result.stdout


def test_an_op_of_ones_own_stands_beside_its_reference(mine):
    result = bench("--shapes", "M=4 N=8", "--device", "cpu", "--out", str(mine / "r.jsonl"), of=f"{mine}/mine.py:spec")
    assert result.exit_code == 0, result.output
    assert "| M=4 N=8 | float32 | op | 1000.0 |" in result.stdout
    assert "| M=4 N=8 | float32 | reference | 1000.0 |" in result.stdout


ROUNDS = tuple(1 + i / 100 for i in range(9))


@pytest.fixture
def saved(tmp_path):
    def save(name, row):
        (tmp_path / name).write_text(to_line(row) + "\n")
        return str(tmp_path / name)

    return save


def test_saved_results_are_those_of_the_op_that_is_named(saved, tmp_path):
    both = tmp_path / "both.jsonl"
    both.write_text(to_line(ROW) + "\n" + to_line(POINTS) + "\n")
    shown = bench("--load", str(both)).stdout
    assert "64x256" in shown
    assert "dec300" not in shown
    assert "dec300" in bench("--load", str(both), of=None).stdout
    result = bench("--load", saved("points.jsonl", POINTS))
    assert result.exit_code == 2
    assert "has results of ms_deform_attn, none of norm" in result.stderr


@pytest.mark.parametrize(("factor", "percent", "code"), [(1.2, "10", 1), (1.2, "30", 0), (1.0, "0", 0)])
def test_slower_than_earlier_results_is_exit_code_1(saved, factor, percent, code):
    then = replace(ROW, fwd_rounds=ROUNDS)
    now = replace(ROW, fwd_ms=factor, fwd_rounds=tuple(factor * ms for ms in ROUNDS))
    args = ["--load", saved("now.jsonl", now), "--compare", saved("then.jsonl", then), "--fail-slower", percent]
    result = bench(*args, of=None)
    assert result.exit_code == code, result.output
    assert ("slower by more than" in result.stderr) == bool(code)
    assert ("**slower**" in result.stdout) == (factor > 1)


def test_results_of_another_machine_decide_nothing(saved):
    then = saved("then.jsonl", replace(ROW, machine={"gpu": "G"}))
    args = ["--load", saved("now.jsonl", ROW), "--compare", then]
    assert bench(*args, of=None).exit_code == 0
    assert bench(*args, "--fail-slower", "5", of=None).exit_code == 3


def test_other_ops_are_drawn_as_bars(saved, tmp_path):
    pytest.importorskip("vl_convert")
    assert bench("--load", saved("r.jsonl", POINTS), "--plot", str(tmp_path / "p.html"), of=None).exit_code == 0
    assert "dec300" in (tmp_path / "p.html").read_text()


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


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ([], "name an op"),
        (["rmsnorm"], "did you mean 'rms_norm'"),
        (["rms_norm", "--fail-slower", "5"], "--compare"),
        (["norm", "--device", "cpu", "--provider", "mine=x.py:f"], "computes one op"),
        (["rms_norm", "--device", "cpu", "--provider", "mine=x"], "NAME=FILE.py:FUNCTION"),
        (["rms_norm", "--device", "cpu", "--host"], "--host"),
        (["nowhere.py:spec"], "no file"),
    ],
    ids=["nothing", "near", "fail-slower", "many", "form", "host", "file"],
)
def test_wrong_usage_says_what_to_do(args, word):
    result = bench(*args, of=None)
    assert result.exit_code == 2
    assert word in result.stderr
