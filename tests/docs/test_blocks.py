"""Blocks of README and documentation: Python runs, page by page; command lines of retrograd parse.

What a block needs beside the blocks before it stands in `setups.py` and is asked for in a comment above it,
`<!-- set-up: model -->`. A block that cannot run here says why, `<!-- shown: needs torch_xla -->`, and has to compile.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import click
import pytest
import torch
from setups import SETUPS

from retrograd.cli import main

ROOT = Path(__file__).resolve().parents[2]
# The gallery's programs and the notebook have tests of their own.
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name != "gallery.md")]
BLOCK = re.compile(r"(?:<!-- (set-up|shown): ([^\n]*?) -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    line: int
    setup: str
    shown: str
    code: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    every = []
    for match in BLOCK.finditer(text):
        mark, words, code = match.groups()
        line = text[: match.start(3)].count("\n") + 1
        every.append(Block(line, words if mark == "set-up" else "", words if mark == "shown" else "", code))
    return every


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for module in ("mylib", "mykernels", "page", "test_page"):
        sys.modules.pop(module, None)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch._dynamo.reset()


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=name)
def test_python_runs_as_it_stands(page, folder):
    sys.modules["page"] = module = ModuleType("page")  # where dataclasses look for names
    source = ""
    for block in blocks(page):
        place = f"{name(page)}:{block.line}"
        if block.shown:
            if "fragment" not in block.shown:
                compile(block.code, place, "exec")
            continue
        before = SETUPS[block.setup] if block.setup else ""
        exec(compile(before, f"set-up {block.setup}", "exec"), vars(module))
        importlib.invalidate_caches()
        exec(compile(block.code, place, "exec"), vars(module))
        source += before + block.code
        if "def test_" in block.code:
            (folder / "test_page.py").write_text(source)
            assert pytest.main(["-q", "-p", "no:cacheprovider", str(folder / "test_page.py")]) == 0, place


def commands() -> list[tuple[str, str]]:
    """(place, command line) of each retrograd command in a fence without a language."""
    every = []
    for page in [*PAGES, ROOT / "docs" / "gallery.md"]:
        text = page.read_text(encoding="utf-8")
        for fence in FENCE.finditer(text):
            if fence[1]:
                continue
            for number, line in enumerate(fence[2].replace("\\\n", " ").splitlines()):
                if re.match(r"(\$ )?retrograd (?!verify .*-> )[a-z]", line):
                    every.append(
                        (f"{name(page)}:{text[: fence.start()].count(chr(10)) + 2 + number}", line.removeprefix("$ "))
                    )
    return every


def parse(line: str) -> None:
    """Let click read the command's words; UsageError if it does not know one."""
    words = shlex.split(re.split(r" && | \| | > ", line)[0], comments=True)[1:]
    command: click.Command = main
    context = click.Context(main, info_name="retrograd")
    while isinstance(command, click.Group):
        found, chosen, words = command.resolve_command(context, words)
        assert chosen is not None, found
        command, context = chosen, click.Context(chosen, parent=context, **_settings(chosen))
    command.make_parser(context).parse_args(list(words))


def _settings(command: click.Command) -> dict:
    return {
        k: v
        for k, v in command.context_settings.items()
        if k in ("ignore_unknown_options", "allow_interspersed_args", "allow_extra_args")
    }


def test_command_lines_have_options_that_exist():
    wrong = []
    for place, line in commands():
        try:
            parse(line)
        except click.UsageError as error:
            wrong.append(f"{place}: {line}: {error.message}")
    assert not wrong
    assert len(commands()) > 50
    with pytest.raises(click.UsageError):
        parse("retrograd verify rms_norm --no-such-option")


def test_the_readme_is_short_and_its_links_are_absolute_where_the_project_lies():
    sys.path.append(str(ROOT / "tools"))
    import metadata

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    home = "https://example.org/retrograd"
    linked = re.findall(r"\]\(([^)\s]+)\)", metadata.absolute(text, home))
    assert len(linked) > 20
    for link in linked:
        path = re.fullmatch(rf"{re.escape(home)}/(?:blob|raw)/main/([^#]+)(#.*)?", link)
        assert path, link
        assert (ROOT / path[1]).exists()
    assert metadata.addresses(home)["Issues"] == f"{home}/issues"


def test_the_picture_of_the_readme_shows_what_verify_prints():
    sys.path.append(str(ROOT / "tools" / "site"))
    import finding

    plain = re.sub(r"<[^>]*>", "", (ROOT / "docs" / "assets" / "finding.svg").read_text()).replace("&#160;", " ")
    for line in finding.lines()[2:]:
        for word in line.replace("'", "&#x27;").replace(">", "&gt;").split():
            assert word in plain
