"""`retrograd trace diff`, `repeat` and `bisect` as a person runs them: what is printed, written and returned."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import diffed
import pytest
from click.testing import CliRunner, Result

from retrograd import report
from retrograd.cli import main
from retrograd.trace import Trace, save
from retrograd.trace.bisecting.schema import Bisection, Culprit
from retrograd.trace.diffing.schema import TraceDiff

NAMES = ("aten.mm.default", "aten.gelu.default", "aten.sum.default")


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    """Two files: the second has one operator more, whose line looks like markup."""
    a, b = diffed.chain(*NAMES), diffed.chain("aten.mm.default", "aten.<b>[red].default", *NAMES[1:])
    files = str(tmp_path / "a.trace"), str(tmp_path / "b.trace")
    for trace, file in zip((a, b), files, strict=True):
        save(trace, file)
    return files


def _call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["trace", *arguments])


def test_different_runs(runs: tuple[str, str]) -> None:
    said = _call("diff", *runs)
    assert said.exit_code == 1
    lines = said.stdout.splitlines()
    assert lines[0] == "different: first at operator 1 (step 0, forward)"
    assert "1. aten.<b>[red].default is in B alone" in lines


def test_the_same_run(runs: tuple[str, str]) -> None:
    said = _call("diff", runs[0], runs[0])
    assert said.exit_code == 0
    assert said.stdout.startswith("the same bit for bit\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("diff", "{a}", "nowhere.trace"), "cannot read 'nowhere.trace'"),
        (("diff", "{a}", "{a}", "-o", "x.pdf"), "cannot write 'x.pdf'"),
        (("repeat", "--", "nowhere.py"), ""),
        (("bisect", "nowhere.py:f"), "there is no file 'nowhere.py'"),
        (("bisect", "step"), "target 'step' names no function"),
    ],
    ids=["missing", "suffix", "program", "file", "name"],
)
def test_wrong_usage(runs: tuple[str, str], arguments: tuple[str, ...], message: str, monkeypatch) -> None:
    # The child that records would load torch to say the same.
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 2))
    said = _call(*(word.format(a=runs[0]) for word in arguments))
    assert said.exit_code == 2
    assert message in said.stderr


def test_json_and_files_hold_the_same_record(runs: tuple[str, str], tmp_path: Path) -> None:
    files = [str(tmp_path / f"x.{suffix}") for suffix in ("json", "txt", "html")]
    said = _call("diff", *runs, "--json", "--attainable", *(word for file in files for word in ("-o", file)))
    printed = TraceDiff.from_json(said.stdout)
    assert printed == report.load(files[0])
    assert printed.mode == "attainable"
    shown = CliRunner().invoke(main, ["report", files[0]])
    assert shown.exit_code == 0
    assert shown.stdout.split() == Path(files[1]).read_text().split()


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


CULPRIT = Culprit("aten.sub.Tensor", "net.<i>", "forward", 0.5, 0.25, 1, "m.py:3", "x - <b>")
BISECTIONS = [
    Bisection("m.py:step", "found", "float64", "operator", 1e-4, 0.5, 1e-6, 1e-7, "loss", (CULPRIT, CULPRIT), 9, 12),
    Bisection(
        "m.py:step", "undecided", "float32", "module", 1e-4, 0.5, 0.5, 0.4, "loss", notes=("left as is: aten.x",)
    ),
    Bisection("", "within", "float64", "operator", 1e-4, 1e-5, 1e-5, 0.0, "loss"),
]


def _records() -> list[TraceDiff | Bisection]:
    from retrograd.trace import diff

    a, b = diffed.chain(*NAMES), diffed.chain("aten.mm.default", "aten.<b>.default", *NAMES[1:])
    return [diff(a, b), diff(a, a), *BISECTIONS]


@pytest.mark.parametrize("record", _records(), ids=["different", "same", "found", "undecided", "within"])
def test_the_page_is_whole_and_loads_nothing(record: TraceDiff | Bisection, tmp_path: Path) -> None:
    file = tmp_path / "x.html"
    report.write(record, file)
    text = file.read_text()
    page = _Page(text)
    assert page.open == []
    assert page.links == []
    assert "b" not in page.tags
    assert "i" not in page.tags
    island = re.search(r'<script type="application/json" id="retrograd-report">(.*?)</script>', text, re.DOTALL)
    assert island
    assert type(record).from_json(island[1].replace("\\u003c", "<")) == record


@pytest.mark.parametrize("record", BISECTIONS, ids=["found", "undecided", "within"])
def test_a_bisection_in_words(record: Bisection) -> None:
    said = record.text().splitlines()[0]
    assert (
        said
        == {
            "found": "2 operators in float64: error 0.5 -> 1e-06",
            "undecided": "not a matter of operators' precision: with all of them in float32 the error is 0.4, the tolerance 0.0001",
            "within": "no mismatch: the error 1e-05 is within the tolerance 0.0001",
        }[record.verdict]
    )


PROGRAM = """
import os, torch
torch.manual_seed(0)
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for step in range(3):
    x = torch.randn(2, 4)
    {line}
    layer(x).sum().backward()
    optimizer.step()
"""


def test_repeat_finds_what_no_seed_governs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(line="x = x * torch.tensor(list(os.urandom(4))) if step else x"))
    said = subprocess.run(
        [sys.executable, "-m", "retrograd", "trace", "repeat", "--json", "--", str(script)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert said.returncode == 1, said.stderr
    found = TraceDiff.from_json(said.stdout)
    assert found.causes[0].b.step == 1
    assert "os.urandom" in found.causes[0].first.code


STEPS = """
import torch

def cancelling():
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8)
    return lambda: (layer(x) + 1e6 - 1e6).sum(), layer

def wrong():
    return 3
"""


def test_bisect(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    said = _call("bisect", f"{tmp_path}/steps.py:cancelling", "--json")
    assert said.exit_code == 1, said.output
    assert [c["name"] for c in json.loads(said.stdout)["culprits"]] == ["aten.add.Tensor", "aten.sub.Tensor"]
    refused = _call("bisect", f"{tmp_path}/steps.py:wrong")
    assert refused.exit_code == 2
    assert "returned int, expected (step, model)" in refused.stderr


def test_comparing_needs_no_torch(runs: tuple[str, str]) -> None:
    code = "import sys; from retrograd.cli import main; main(sys.argv[1:], standalone_mode=False); print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code, "trace", "diff", *runs], capture_output=True, text=True)
    assert said.stdout.splitlines()[-1] == "False", said.stderr


def test_a_trace_without_operators(tmp_path: Path, runs: tuple[str, str]) -> None:
    empty = tmp_path / "e.trace"
    save(Trace(), empty)
    said = _call("diff", runs[0], str(empty))
    assert said.exit_code == 2
    assert "`b` has no operators" in said.stderr
