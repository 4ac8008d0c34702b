"""The command line as a person, a pipe and a shell meet it: help with examples, Ctrl-C, `| head`, programs of any form."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from retrograd.cli import main
from retrograd.core.run_program import with_interpreter

RETROGRAD = [sys.executable, "-m", "retrograd"]
# Without what readline puts past os.environ: how wide the terminal is.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
# Its backward waits in a later stage for longer than any test, once contract and mutation have passed.
SLOW = """
import os, pathlib, time, torch, retrograd as rg
pathlib.Path("child").write_text(str(os.getpid()))
calls = 0

def slow(x):
    global calls
    calls += 1
    if calls > 30:
        time.sleep(600)
    return x * 2

spec = rg.op(slow, lambda x: x * 2, dict(x=rg.tensor("M", "N")))
"""


def _commands(command: click.Command, path: tuple[str, ...] = ()):
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from _commands(command.get_command(context, name), (*path, name))


@pytest.mark.parametrize("path", [path for path, _ in _commands(main)], ids=lambda path: " ".join(path) or "retrograd")
def test_every_help_page_has_examples_that_parse(path) -> None:
    page = CliRunner().invoke(main, [*path, "--help"]).output
    examples = [line.strip() for line in page[page.index("Examples:") :].splitlines()[1:] if line.strip()]
    assert examples
    assert all(f"retrograd {' '.join(path)}".strip() in line for line in examples[:1] if path != ("repro",))


def test_alike_names_are_proposed() -> None:
    for words, meant in (
        (["verfy"], "'verify'"),
        (["graph", "dif"], "'diff'"),
        (["verify", "x", "--levle", "quick"], "--level"),
    ):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 2
        assert re.search(rf"[Dd]id you mean.*{meant}", done.output), done.output


def test_the_version_is_said() -> None:
    assert re.fullmatch(r"retrograd \S+\n", CliRunner().invoke(main, ["--version"]).output)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_verification_reports_what_it_has_and_leaves_no_process(number: int, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    process = subprocess.Popen(
        [*RETROGRAD, "verify", "slow.py", "--level", "quick"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("contract: passed"):
            break
    process.send_signal(number)
    out, error = process.communicate()
    assert process.returncode == 130, error
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "child").read_text()), 0)
    assert re.search(r"^pass +contract", out, re.MULTILINE)
    assert "interrupted; it and the stages after it were not run to their end" in out
    assert "CANNOT DECIDE" in out  # what was not run proves nothing


def test_an_interrupted_examination_reports_the_runs_that_there_are(tmp_path: Path) -> None:
    marker = tmp_path / "second"
    (tmp_path / "rare.py").write_text(
        "import pathlib, time\n"
        "def rare(seed):\n"
        "    if seed == 2:\n"
        f"        pathlib.Path({str(marker)!r}).touch()\n"
        "        time.sleep(600)\n"
        "    return 0.5\n"
    )
    process = subprocess.Popen(
        [*RETROGRAD, "flake", "rare.py:rare", "--seeds", "5", "--no-history"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    while not marker.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate()
    assert process.returncode == 130, error
    assert "interrupted: the other runs that were planned were not made" in out
    assert "0 of 2 seeds fail" in out


def test_a_terminated_run_of_specs_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    process = subprocess.Popen([*RETROGRAD, "ci", "slow.py"], cwd=tmp_path, stderr=subprocess.PIPE, env=ENVIRONMENT)
    child = tmp_path / "child"
    others = ("", str(process.pid))  # which reads the specs too
    while process.poll() is None and (not child.exists() or child.read_text() in others):
        time.sleep(0.05)
    process.terminate()
    assert process.communicate()[1].endswith(b"retrograd: interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int(child.read_text()), 0)


def test_an_interrupted_command_without_a_report_says_so(monkeypatch) -> None:
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("retrograd.catalog.proposal.propose", interrupted)
    done = CliRunner().invoke(main, ["init", "x:y"])
    assert (done.exit_code, "retrograd: interrupted" in done.output) == (130, True)


@pytest.mark.parametrize("words", [["verify", "--list-stages"], ["graph", "ls", "{dump}"], ["report", "{record}"]])
def test_a_reader_may_go_before_all_is_written(words, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    fields = '{"target": "op", "verdict": "proved", "level": "quick", "seed": 0, "dtypes": ["float32"], "device": "cpu", "stages": [], "environment": {}, "schema": "retrograd.report/1"}'
    record = tmp_path / "r.json"
    record.write_text(fields)
    dump = root / "graph" / "data" / "jax" / "base.hlo.txt.gz"
    command = [*RETROGRAD, *(word.format(dump=dump, record=record) for word in words)]
    whole = subprocess.run(command, capture_output=True, check=False)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    process.stdout.close()  # before anything is written, as the quickest `head` would
    _, error = process.communicate()
    assert (process.returncode, error) == (whole.returncode, whole.stderr)


def test_in_a_pipe_each_row_of_a_table_is_a_line(tmp_path: Path) -> None:
    long = "a reason of many words " * 20
    stage = f'{{"id": "oracle", "title": "values", "status": "skipped", "reason": "{long.strip()}"}}'
    (tmp_path / "r.json").write_text(
        '{"target": "op", "verdict": "undecided", "level": "quick", "seed": 0, "dtypes": ["float32"], "device": "cpu", '
        f'"stages": [{stage}], "environment": {{}}, "schema": "retrograd.report/1"}}'
    )
    command = [*RETROGRAD, "report", "r.json"]
    piped = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=ENVIRONMENT).stdout
    assert any("oracle" in line and long.strip() in line for line in piped.splitlines())


def test_programs_run_with_this_interpreter_however_they_are_written(tmp_path: Path) -> None:
    here = sys.executable
    assert with_interpreter(["x.py", "-v"]) == [here, "x.py", "-v"]
    assert with_interpreter(["python", "x.py"]) == [here, "x.py"]
    assert with_interpreter(["python3", "-u", "x.py"]) == [here, "-u", "x.py"]
    assert with_interpreter(["-m", "module"]) == [here, "-m", "module"]
    assert with_interpreter(["python3.11", "x.py"]) == ["python3.11", "x.py"]
    assert with_interpreter(["/opt/python3", "x.py"]) == ["/opt/python3", "x.py"]
    assert with_interpreter(["torchrun", "x.py"]) == ["torchrun", "x.py"]
    (tmp_path / "x.py").write_text("import sys; print('runs with', sys.executable)\n")
    for before in ([], ["python"]):
        for command in (
            ["fsdp", "check"],
            ["graph", "watch", "--expect", "0"],
            ["trace", "record", "-o", "t.trace"],
            ["run-kernel"],
        ):
            done = subprocess.run(
                [*RETROGRAD, *command, "--", *before, "x.py"], cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert f"runs with {here}" in done.stdout + done.stderr, (command, done)
