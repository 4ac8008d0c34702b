"""docs/graph-4160.md shows what the commands print: each line of it, in order; a line of dots stands for any lines."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from retrograd.cli import main

HERE = Path(__file__).parent
PAGE = (HERE.parent.parent / "docs" / "graph-4160.md").read_text()
SHOWN = re.findall(r"^```\n\$ retrograd (.*)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)


def test_the_page_shows_its_four_commands():
    assert [shlex.split(command)[1] for command, _ in SHOWN] == ["watch", "diff", "follow", "diff"]


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=range(len(SHOWN)))
def test_the_page_shows_what_is_printed(command, output, monkeypatch):
    monkeypatch.chdir(HERE / "data" / "xla")
    monkeypatch.setenv("COLUMNS", "400")
    printed = CliRunner().invoke(main, shlex.split(command)).output.splitlines()
    at = 0
    for part in re.split(r"^\.\.\.$", output, flags=re.MULTILINE):
        lines = part.strip("\n").splitlines()
        while lines and printed[at : at + len(lines)] != lines:
            at += 1
            assert at < len(printed), f"not printed any more: {lines[0]}\n" + "\n".join(printed)
        at += len(lines)
