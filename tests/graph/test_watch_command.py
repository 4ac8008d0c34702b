"""`retrograd graph watch`, `lock` and `check`: real programs, exit codes."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner
from fake_torch_xla import hlo

from retrograd.cli import main
from retrograd.cli.graph import split
from retrograd.errors import UsageError
from retrograd.graph.watching.schema import WatchReport

PROGRAM = """
import sys, torch

model = torch.nn.Linear(4, 2)
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in map(int, sys.argv[1:]):
    compiled(torch.randn(batch, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("ran as", __name__, "with", sys.argv[1:])
if batch == 4:
    raise SystemExit(5)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def graph(*words):
    # The program's own output goes to the real stdout, past the runner.
    return CliRunner().invoke(main, ["graph", *map(str, words)])


@pytest.mark.dealt(3)
@pytest.mark.parametrize(
    ("batches", "code", "graphs", "unexpected"), [((8, 8), 0, 2, 0), ((8, 5), 1, 4, 2), ((8, 4), 5, 4, 2)]
)
def test_a_program_is_run_unchanged(program, tmp_path, capfd, batches, code, graphs, unexpected):
    out = tmp_path / "report.json"
    result = graph("watch", "--expect", 2, "-o", out, "--", sys.executable, "-u", program, *batches)
    assert result.exit_code == code, result.output
    report = WatchReport.from_json(out.read_text())
    assert (len(report.graphs), len(report.unexpected), report.steps) == (graphs, unexpected, 2)
    assert f"ran as __main__ with {[str(b) for b in batches]}" in capfd.readouterr().out
    assert "expected at most 2" in result.output
    assert ("size mismatch" in result.output) == bool(unexpected)


def test_a_module_an_inline_program_and_one_that_uses_no_framework(tmp_path, monkeypatch, capfd):
    (tmp_path / "quiet.py").write_text("import sys; print(__name__, sys.argv[1:], sys.path[0]); sys.exit(0)")
    monkeypatch.chdir(tmp_path)
    result = graph("watch", "--", sys.executable, "-m", "quiet", "a")
    assert result.exit_code == 3
    assert "no framework that is watched" in result.output
    assert capfd.readouterr().out == f"__main__ ['a'] {tmp_path}\n"
    assert graph("watch", "--", sys.executable, "-c", "import sys; print(sys.argv, __name__)", "b").exit_code == 3
    assert capfd.readouterr().out == "['-c', 'b'] __main__\n"
    assert graph("watch", "--", "quiet.py").exit_code == 3
    assert graph("watch", "--", sys.executable, "-c", "raise ValueError('own')").exit_code == 1
    assert "ValueError: own" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "there is no program"),
        (("torchrun", "train.py"), "torchrun ... -m retrograd.graph.watching.run"),
        (("python",), "nothing to run"),
        (("no/python", "x.py"), "cannot be started"),
    ],
)
def test_other_programs(words, said):
    result = graph("watch", "--", *words)
    assert result.exit_code == 2
    assert said in result.output


def test_flags_of_python_stay_its_own():
    assert split(["python3.11", "-u", "-X", "dev", "-m", "a.b", "-x"]) == (
        "python3.11",
        ["-u", "-X", "dev"],
        ["-m", "a.b", "-x"],
    )
    assert split(["t.py", "-m"]) == (sys.executable, [], ["t.py", "-m"])
    assert split(["python", "t.py"])[0] == split(["python3", "t.py"])[0] == sys.executable  # not that of PATH
    assert split(["/opt/python", "t.py"])[0] == "/opt/python"
    with pytest.raises(UsageError):
        split(["python", "-u"])


SEVERAL = """
import torch, retrograd.graph
model = torch.nn.Linear(4, 2)
compiled = torch.compile(model, backend="aot_eager")
optimizers = [torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()]
for batch in (8, 8, 5):
    compiled(torch.randn(batch, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    {mark}
"""


@pytest.mark.parametrize("mark", ["pass", "retrograd.graph.step()"])
def test_one_step_is_one_round_of_the_loop(tmp_path, mark):
    (tmp_path / "train.py").write_text(SEVERAL.format(mark=mark))
    result = graph("watch", "--expect", 2, "--json", "--", "python", tmp_path / "train.py")
    [report] = json.loads(result.stdout)
    assert (report["steps"], [graph["step"] for graph in report["graphs"]]) == (3, [0, 0, 2, 2])
    own = "the program's first optimizer" if mark == "pass" else mark
    assert report["notes"] == [f"each call of {own} counts as a step"]


def test_recorded_graphs(tmp_path):
    paths = [tmp_path / f"{i}.hlo" for i in range(3)]
    for path, text in zip(paths, (hlo(rate=0.25), hlo(), hlo(stray=True)), strict=True):
        path.write_text(text)
    assert graph("watch", "--from", "--expect", 3, *paths).exit_code == 0
    result = graph("watch", "--from", "--expect", 2, "--json", *paths)
    assert result.exit_code == 1
    (report,) = json.loads(result.output)
    assert report["graphs"][2]["causes"][0]["where"] == "train.py:41"
    assert graph("watch", "--from").exit_code == 2
    assert graph("watch", "--from", tmp_path / "none.hlo").exit_code == 2


@pytest.mark.dealt(2)
def test_a_program_is_held_to_its_lock_file_and_the_report_is_printed_all_the_same(program, tmp_path, capfd):
    path, folder = tmp_path / "graphs.lock", tmp_path / "kept"
    first = graph("watch", "--lock", path, "--save", folder, "--", sys.executable, program, 8)
    assert first.exit_code == 0, first.output
    assert sorted(p.name for p in folder.iterdir()) == [
        "graph-000-forward.fx.txt.gz",
        "graph-001-backward.fx.txt.gz",
        "report.json",
    ]
    second = graph("watch", "--lock", path, "--", sys.executable, program, 7)
    assert second.exit_code == 1
    assert "1 step, 2 graphs" in second.output
    assert "2 of 2 graphs are not as locked" in capfd.readouterr().err
    kept = graph("watch", "--from", "--expect", 2, *sorted(folder.glob("*.gz")))
    assert "forward graph-000-forward.fx.txt.gz" in kept.output
    assert kept.exit_code == 0


def test_options_that_recorded_graphs_do_not_have(tmp_path):
    (tmp_path / "a.hlo").write_text(hlo())
    result = graph("watch", "--from", "--gc-before-cut", tmp_path / "a.hlo")
    assert result.exit_code == 2
    assert "`--gc-before-cut` is for a program" in result.output
    assert (
        graph("watch", "--from", "--lock", tmp_path / "l", "--save", tmp_path / "s", tmp_path / "a.hlo").exit_code == 0
    )
    (tmp_path / "a.hlo").write_text(hlo(rate=0.75))
    assert graph("watch", "--from", "--lock", tmp_path / "l", tmp_path / "a.hlo").exit_code == 1
    assert (tmp_path / "s" / "report.json").exists()


def test_lock_and_check(tmp_path):
    dump, path = tmp_path / "step.hlo", tmp_path / "graphs.lock"
    dump.write_text(hlo())
    result = graph("lock", dump, "-o", path)
    assert (result.exit_code, result.output) == (0, f"{path}: 1 graph\n")
    assert graph("check", dump, "--lock", path).exit_code == 0
    dump.write_text(hlo(rate=0.75))
    result = graph("check", dump, "--lock", path)
    assert result.exit_code == 1
    assert "0.5" in result.output
    assert "0.75" in result.output
    result = graph("check", dump, "--lock", path, "--json")
    assert json.loads(result.output)["graphs"][0]["causes"][0]["kind"] == "constant_changed"
    result = graph("check", dump, "--lock", tmp_path / "no.lock")
    assert result.exit_code == 2
    assert "`retrograd graph lock` writes one" in result.output
