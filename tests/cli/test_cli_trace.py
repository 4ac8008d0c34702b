"""`retrograd trace`: a program recorded as it is, answers, exit codes, forms."""

from __future__ import annotations

import bdb
import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from retrograd.cli import main

PROGRAM = """
import sys
import torch

assert __name__ == "__main__"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(2, 4)).sum()
    loss = loss * float(sys.argv[1])
    loss.backward()
    optimizer.step()
print("loss", loss.item())
if len(sys.argv) > 2:
    raise SystemExit(int(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def run(*args: str) -> Any:
    return CliRunner().invoke(main, ["trace", *args], terminal_width=200)


def test_a_program_is_recorded_unchanged_and_its_steps_counted(folder):
    before = sys.argv, list(sys.path)
    result = run("record", "-o", "a.trace", "--", "train.py", "1")
    assert (result.exit_code, result.stdout.split()[0]) == (0, "loss")
    assert "operators, 3 whole steps, are in a.trace" in result.stderr
    assert (sys.argv, sys.path) == before
    assert run("nan", "a.trace").stdout.startswith("no NaN and no Inf in ")
    assert run("nan", "a.trace").exit_code == 0


def test_the_program_ends_after_the_steps_wanted_or_with_its_own_code(folder):
    result = run("record", "--steps", "2", "--", "python", "train.py", "1")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "operators, 2 whole steps, are in run.trace" in result.stderr
    assert run("record", "--", "train.py", "1", "7").exit_code == 7
    (folder / "broken.py").write_text("import torch\ntorch.ones(2) @ torch.ones(3)\n")
    result = run("record", "-o", "b.trace", "--", "broken.py")
    assert result.exit_code == 1
    assert "raised: aten.dot.default at broken.py:2" in run("show", "b.trace").stdout


def test_the_first_nan_is_named_in_every_form(folder):
    result = run("record", "-o", "a.trace", "--nan", "--", "train.py", "nan")
    assert result.exit_code == 1
    result = run("nan", "a.trace", "-o", "n.html", "-o", "n.json", "-o", "n.txt")
    assert result.exit_code == 1
    first, *rest = result.stdout.splitlines()
    assert first == "NaN in step 0, made in the forward by aten.mul.Tensor"
    assert "  line    train.py:12  loss = loss * float(sys.argv[1])" in rest
    assert (folder / "n.txt").read_text() == result.stdout
    assert json.loads((folder / "n.json").read_text())["op"]["name"] == "aten.mul.Tensor"
    assert json.loads(run("nan", "a.trace", "--json").stdout)["origin"] == "made"
    again = CliRunner().invoke(main, ["report", "n.json"])
    assert again.stdout.splitlines()[0] == first
    page = (folder / "n.html").read_text()
    assert "://" not in page
    assert "loss = loss * float(sys.argv[1])" in page


def test_operators_are_listed_and_filtered(folder):
    run("record", "-o", "a.trace", "--", "train.py", "nan")
    result = run("show", "a.trace", "--op", "tanh", "--step", "1", "-o", "s.html", "-o", "s.json")
    assert result.stdout.startswith("2 operators that fit, of ")
    table = [row.split() for row in result.stdout.splitlines() if "aten.tanh" in row]
    assert [(row[1], row[2], row[3]) for row in table] == [
        ("1", "forward", "aten.tanh.default"),
        ("1", "backward", "aten.tanh_backward.default"),
    ]
    assert len(json.loads((folder / "s.json").read_text())["ops"]) == 2
    assert CliRunner().invoke(main, ["report", "s.json"]).stdout.splitlines()[0] == result.stdout.splitlines()[0]
    assert "aten.tanh_backward.default" in (folder / "s.html").read_text()
    assert run("show", "a.trace", "--phase", "backward", "--most", "1").stdout.startswith("1 of ")


def test_the_seed_is_the_one_that_the_program_set(folder):
    metas = []
    for name in ("a.trace", "b.trace"):
        run("record", "-o", name, "--", "train.py", "1")
        metas.append(json.loads(run("show", name, "--json").stdout)["meta"])
    assert [meta["seed"] for meta in metas] == ["0", "0"]


def test_the_debugger_says_how_to_reach_the_line_and_is_left_quietly(monkeypatch):
    seen: list[Any] = []

    def quit_at_once() -> None:
        seen.append(sys._getframe(1))
        raise bdb.BdbQuit

    monkeypatch.setattr(sys, "breakpointhook", quit_at_once)
    result = run("record", "--pdb", "--", "train.py", "nan")
    assert "retrograd: NaN or Inf from aten.mul.Tensor at train.py:12; here are `op`" in result.stderr
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    (frame,) = seen
    assert frame.f_locals["op"].name == "aten.mul.Tensor"
    for _ in range(int(re.findall(r"`up (\d+)` is the line", result.stderr)[0])):
        frame = frame.f_back
    assert (Path(frame.f_code.co_filename).name, frame.f_lineno) == ("train.py", 12)


def test_help_says_what_each_command_does_in_a_whole_sentence():
    said = " ".join(run("--help").stdout.split())
    assert (
        "Run a Python program in this process and record every operator, without a change of its source. show" in said
    )
    assert "..." not in said.partition("Commands:")[2]


def test_text_in_a_trace_is_no_markup(folder):
    (folder / "evil.py").write_text("import torch\nx = torch.ones(1)  # <script>alert(1)</script>\n")
    run("record", "-o", "a.trace", "--", "evil.py")
    run("show", "a.trace", "-o", "s.html", "-o", "s.json")
    assert "<script>alert" not in (folder / "s.html").read_text()
    assert "<script>alert" in json.loads((folder / "s.json").read_text())["ops"][0]["code"]


WRONG = {
    "nothing": (["record"], "there is no program"),
    "no file": (["record", "--", "none.py"], "there is no file 'none.py'"),
    "suffix": (["record", "-o", "a.pt", "--", "train.py", "1"], "must end in .trace or .jsonl.gz"),
    "no trace": (["nan", "train.py"], "not compressed by gzip"),
    "folder": (["show", "train.py", "-o", "x/y.html"], "there is no folder 'x'"),
}


@pytest.mark.parametrize(("args", "said"), WRONG.values(), ids=WRONG)
def test_wrong_usage_is_told(args, said):
    result = run(*args)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_trace_that_was_cut_off_can_be_taken_as_it_is(folder):
    run("record", "-o", "a.trace", "--", "train.py", "nan")
    whole = gzip.decompress((folder / "a.trace").read_bytes()).splitlines(keepends=True)
    (folder / "cut.trace").write_bytes(gzip.compress(b"".join(whole[:-3])))
    assert run("nan", "cut.trace").exit_code == 2
    assert run("nan", "cut.trace", "--partial").exit_code == 1


def test_scalars_over_the_steps_for_tensorboard(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("record", "-o", "a.trace", "--", "train.py", "1")
    shown = run("show", "a.trace", "--op", "tanh", "--tensorboard", "runs")
    assert shown.exit_code == 0
    events = EventAccumulator(str(folder / "runs"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert "forward/1/tanh/rms" in tags
    assert "backward/1/tanh_backward/nan" in tags
    assert [point.step for point in events.Scalars("forward/1/tanh/rms")] == [0, 1, 2]
    rms = [
        op["outputs"][0]["rms"] for op in json.loads(run("show", "a.trace", "--op", "tanh.", "--json").stdout)["ops"]
    ]
    assert [point.value for point in events.Scalars("forward/1/tanh/rms")] == pytest.approx(rms)
    assert events.Tags()["histograms"] == []
    assert "no histograms: a.trace was recorded at level fast" in shown.stderr


def test_histograms_over_the_steps_for_tensorboard(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("record", "-o", "a.trace", "--level", "full", "--", "train.py", "1")
    shown = run("show", "a.trace", "--op", "tanh", "--tensorboard", "runs")
    assert (shown.exit_code, shown.stderr) == (0, "")
    events = EventAccumulator(str(folder / "runs"), size_guidance={"histograms": 0})
    events.Reload()
    assert {"forward/1/tanh/values", "backward/1/tanh_backward/exponents"} <= set(events.Tags()["histograms"])
    tanh = [op["outputs"][0] for op in json.loads(run("show", "a.trace", "--op", "tanh.", "--json").stdout)["ops"]]
    values, exponents = (events.Histograms(f"forward/1/tanh/{what}") for what in ("values", "exponents"))
    assert [point.step for point in values] == [point.step for point in exponents] == [0, 1, 2]
    for stats, value, exponent in zip(tanh, values, exponents, strict=True):
        found, counts = value.histogram_value, stats["exponents"]
        assert (found.num, found.min, found.max) == (8, stats["low"], stats["high"])
        assert sum(n for limit, n in zip(found.bucket_limit, found.bucket, strict=True) if limit <= 0) == sum(
            counts["negative"]
        )
        found = exponent.histogram_value
        assert found.bucket_limit[0] == found.min + 1 == counts["least"] + 1
        assert list(found.bucket) == [a + b for a, b in zip(counts["positive"], counts["negative"], strict=True)]
