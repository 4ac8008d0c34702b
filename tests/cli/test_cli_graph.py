"""`retrograd graph`: answers, exit codes, forms, files, stdin, and what wrong usage says."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from retrograd.cli import main

DATA = Path(__file__).parent.parent / "graph" / "data"
BUCKET = str(DATA / "xla" / "tied_bucket_step2.hlo.txt.gz")
BASE, STRAY = (str(DATA / "xla" / f"{name}.hlo.txt.gz") for name in ("base_step1", "stray_step2"))
SMALL = "HloModule m\n\nENTRY e {\n  x = f32[2] parameter(0)\n  ROOT n = f32[2] negate(x)\n}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.txt").write_text(SMALL)
    (tmp_path / "two.txt").write_text(SMALL + "\n" + SMALL.replace("negate", "tanh"))
    return tmp_path


def graph(*args: str, stdin: str | bytes | None = None) -> Any:
    return CliRunner().invoke(main, ["graph", *args], input=stdin, terminal_width=200)


def test_follow_answers_the_question_of_the_founding_case() -> None:
    result = graph("follow", BUCKET, "p30")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "p30 = p30.1727: reaches 2 of 56 outputs, through 1 collective"
    assert (
        "into reduce-scatter.1760 (reduce-scatter 3 of 4, collective 40 of 41): operand 8 of 13 -> result 8" in lines[2]
    )
    assert "the value itself" in lines[2]
    assert lines[3] == "  goes into outputs 24-25"
    assert any("[via tuple.2048[48], opt-barrier.2049[48]]  => output 24" in line for line in lines)


def test_all_leaves_nothing_out() -> None:
    cut, full = graph("follow", BUCKET, "p0").stdout, graph("follow", BUCKET, "p0", "--all").stdout
    assert "more steps; --all prints them" in cut
    assert "more" not in full
    assert len(cut.splitlines()) < 80 < 400 < len(full.splitlines())
    assert len(json.loads(graph("follow", BUCKET, "p0", "--all", "--json").stdout)["steps"]) > 500


def test_diff_is_0_for_the_same_and_1_for_a_stray_tensor() -> None:
    same = graph("diff", BASE, BASE)
    assert same.exit_code == 0, same.output
    assert same.stdout.startswith("same computation")
    different = graph("diff", BASE, STRAY)
    assert different.exit_code == 1
    lines = different.stdout.splitlines()
    assert lines[0] == "different: 1 cause"
    assert any(line.startswith("1. + output 3 f32[]") for line in lines)
    assert any(line.split() == ["at", "fsdp_run.py:79"] for line in lines)


def test_diff_as_annotations_and_json() -> None:
    result = graph("diff", BASE, STRAY, "--format", "github")
    assert result.exit_code == 1
    assert result.stdout.startswith("::error file=fsdp_run.py,line=79,title=output added::")
    result = graph("diff", BASE, STRAY, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["causes"][0]["where"] == "fsdp_run.py:79"


def test_files_beside_the_answer_can_be_rendered_again(folder: Path) -> None:
    result = graph("diff", BASE, STRAY, "-o", "d.html", "-o", "d.json", "-o", "d.txt")
    assert result.exit_code == 1
    page = (folder / "d.html").read_text()
    assert page.count("</script>") == 2
    assert len(page) > 50_000
    again = CliRunner().invoke(main, ["report", "d.json", "-o", "again.html", "-o", "again.txt"])
    assert again.exit_code == 0, again.output
    assert (folder / "again.html").read_text() == page
    assert (folder / "again.txt").read_text() == (folder / "d.txt").read_text()
    printed = CliRunner().invoke(main, ["report", "d.json"])
    assert printed.stdout.startswith("different: 1 cause")
    events = CliRunner().invoke(main, ["report", "d.json", "--tensorboard", "events"])
    assert events.exit_code == 2
    assert "takes a report of `retrograd verify`" in events.output


def test_unique_counts_and_says_who_has_which(folder: Path) -> None:
    result = graph("unique", "two.txt", "small.txt", "two.txt#0")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("2 different computations in 4 graphs")
    rows = [line.split()[:2] for line in result.stdout.splitlines()]
    assert rows[-4:] == [["two.txt", "A"], ["two.txt#1", "B"], ["small.txt", "C"], ["two.txt", "A"]]
    assert [row.split()[1:4] for row in result.stdout.splitlines()[-2:]] == [["C", "A", "A"], ["A", "A", "A"]]
    assert json.loads(graph("unique", "two.txt", "--json").stdout)["titles"] == ["two.txt", "two.txt#1"]


def test_ls_lists_graphs(folder: Path) -> None:
    result = graph("ls", "two.txt", BUCKET)
    assert result.exit_code == 0, result.output
    head, first, second, bucket = result.stdout.splitlines()
    assert head.split()[:4] == ["graph", "name", "format", "key"]
    assert first.split()[0] == "two.txt"
    assert second.split()[0] == "two.txt#1"
    rows = json.loads(graph("ls", "two.txt", BUCKET, "--json").stdout)
    assert [(row["instructions"], row["parameters"], row["outputs"]) for row in rows] == [
        (2, 1, 1),
        (2, 1, 1),
        (2270, 57, 56),
    ]
    assert len({row["key"] for row in rows}) == 3
    assert "2270" in bucket


def test_one_graph_of_several_and_stdin(folder: Path) -> None:
    result = graph("follow", "two.txt#1", "n")
    assert "tanh f32[2]" in result.stdout
    assert "in two.txt#1" in result.stdout
    (folder / "odd#1").write_text(SMALL)
    assert graph("follow", "odd#1", "n").exit_code == 0
    for text in (SMALL, gzip.compress(SMALL.encode())):
        assert "reaches 1 of 1 output" in graph("follow", "-", "p0", stdin=text).stdout
    assert graph("diff", "small.txt", "-", stdin=SMALL.replace("negate", "tanh")).exit_code == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["follow", "none.txt", "p0"], r"none\.txt.*No such file"),
        (["follow", ".", "p0"], "directory"),
        (["follow", "empty.txt", "p0"], "empty"),
        (["follow", "prose.txt", "p0"], r"prose\.txt.*no graph"),
        (["follow", "cut.txt", "p0"], r"cut\.txt, line \d.*cut off"),
        (["follow", "two.txt", "p0"], r"two\.txt' holds 2 graphs; name one of them, from two\.txt#0 to two\.txt#1"),
        (["follow", "two.txt#2", "p0"], "names graph 2, but two.txt holds graphs 0 to 1"),
        (["follow", "small.txt#7", "p0"], "one graph, number 0"),
        (["follow", "small.txt", "p1"], "parameter 1, but small.txt has parameters 0 to 0"),
        (["follow", "small.txt", "nn.3"], "'nn.3', but small.txt has no such value"),
        (["follow", "small.txt", "p0", "-o", "x.pdf"], r"must end in one of \.html, \.json, \.txt"),
        (["follow", "small.txt", "p0", "-o", "none/x.html"], "there is no folder 'none'"),
        (["follow", "small.txt", "p0", "-o", "x.xml"], "only `verify` has JUnit XML"),
        (["follow", "small.txt", "p0", "-o", "taken.json"], "cannot write 'taken.json'"),
        (["follow", "small.txt"], "VALUE"),
        (["diff", "small.txt"], "'B'"),
        (["diff", "-", "-"], "- twice"),
        (["unique"], "FILE"),
        (["unique", "-", "-"], "- twice"),
        (["ls", "none.txt"], "none.txt"),
        (["diff", "small.txt", "small.txt", "--format", "xml"], "xml"),
        (["nothing"], "No such command"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_wrong_usage_is_2_and_says_what_to_do(folder: Path, args: list[str], said: str) -> None:
    (folder / "empty.txt").write_text("")
    (folder / "prose.txt").write_text("nothing of the kind\n")
    (folder / "cut.txt").write_text(SMALL[:-10])
    (folder / "taken.json").mkdir()
    result = graph(*args)
    assert result.exit_code == 2, result.output
    assert re.search(said, result.output.replace("\n", " ")), result.output
    assert "Traceback" not in result.output
    assert not isinstance(result.exception, Exception)


def test_bytes_on_stdin_that_are_no_text() -> None:
    for data, said in (
        (b"\xff\xfe\x00", "binary file"),
        (b"\xff", "not UTF-8"),
        (gzip.compress(SMALL.encode())[:-9], "gzip data"),
    ):
        result = graph("follow", "-", "p0", stdin=data)
        assert result.exit_code == 2
        assert said in result.output


def test_help_costs_no_reader_and_no_torch() -> None:
    code = (
        "import sys; from retrograd.cli import main\n"
        "try: main(['graph', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in sys.modules if m in ('torch', 'rich', 'jinja2', 'retrograd.graph.readers')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
    for name in ("unique", "diff", "follow", "ls"):
        assert re.search(rf"^  {name}\s+\w", ran.stdout, re.MULTILINE), name


def test_commands_run_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from retrograd.cli import main\n"
        f"main(['graph', 'follow', {BUCKET!r}, 'p30', '-o', 'f.html', '-o', 'f.json'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "reaches 2 of 56 outputs" in ran.stdout


def test_the_documentation_shows_what_the_commands_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DATA / "xla")
    text = (Path(__file__).parents[2] / "docs" / "graph.md").read_text()
    blocks = re.findall(r"```\n\$ retrograd graph (.*)\n([^`]*)```", text)
    assert len(blocks) == 4
    for command, shown in blocks:
        printed = graph(*command.split()).stdout
        assert shown.rstrip() in "\n".join(line.rstrip() for line in printed.splitlines()), command
