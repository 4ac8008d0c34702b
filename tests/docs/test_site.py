"""The site builds strictly, needs no network, has no dead link, and says of every public name and command what it is."""

from __future__ import annotations

import importlib
import posixpath
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest

import retrograd
from retrograd.cli import main

ROOT = Path(__file__).resolve().parent.parent.parent
pytest.importorskip("mkdocs", reason="of the group docs, which `make setup` installs")
import hooks  # noqa: E402
import pages  # noqa: E402
from mkdocs.commands.build import build  # noqa: E402
from mkdocs.config import load_config  # noqa: E402
from mkdocs.exceptions import Abort  # noqa: E402


def test_no_page_loads_anything_from_elsewhere(site, built_pages):
    away = {(name, at) for name, page in built_pages.items() for at in page.loads if urlsplit(at).netloc}
    assert away == set()
    styles = [
        path for path in site.rglob("*.css") if re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", path.read_text())
    ]
    assert styles == []


def test_every_link_and_anchor_inside_the_site_is_there(site, built_pages):
    dead = []
    for name, page in built_pages.items():
        if name == "404.html":  # made for any depth of the address, so its links begin at the root
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (
                posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path))) if parts.path else name
            )
            anchor = unquote(parts.fragment)
            known = built_pages.get(target)
            if not (site / target).exists() or (anchor and known and anchor not in known.ids and anchor != "__top"):
                dead.append((name, link))
    assert dead == []


@pytest.mark.parametrize("module", pages.PUBLIC)
def test_every_public_name_has_its_place_in_the_reference(module, built_pages):
    names = importlib.import_module(module).__all__
    ids = {place for page in built_pages.values() for place in page.ids}
    rooms = {name for name in names if f"{module}.{name}" in (*pages.PUBLIC, *pages.WHOLE)}
    missing = {name for name in names if f"{module}.{name}" not in ids and not name.startswith("__")} - rooms
    assert missing == set()


def test_every_room_is_in_the_reference():
    assert {f"retrograd.{room}" for room in retrograd._ROOMS} <= {*pages.PUBLIC, *pages.WHOLE}


def _commands(command, path=()):
    context = click.Context(command)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from _commands(command.get_command(context, name), (*path, name))
    else:
        yield path, command


COMMANDS = dict(_commands(main))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_of_every_command_is_in_the_reference(path, built_pages):
    page = built_pages[f"cli/{path[0]}.html"]
    assert " ".join(("retrograd", *path)) in " ".join(page.text.split())
    for parameter in COMMANDS[path].params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.opts[-1] in page.text


def test_every_result_of_a_benchmark_is_a_page(built_pages):
    results = {file.stem for file in (ROOT / "benchmarks" / "results").glob("*.md")}
    assert {f"performance/{stem}.html" for stem in results} <= built_pages.keys()
    # The table as it was printed, row by row: one cell of the first and one of the last.
    shown = built_pages["performance/norm-nvidia-h200.html"].text
    assert "131072x256" in shown
    assert shown.count("quack") > 50


def test_pages_that_are_not_there_yet_have_a_place_and_strays_have_none():
    nav = load_config(str(ROOT / "mkdocs.yml"), strict=False).nav
    awaited = ["bench.md", "codegen.md", "env.md", "stages/new.md", "trace-divergence.md", "trace.md"]
    text = str(hooks.expand(nav, ["index.md", *awaited, "stray.md"]))
    assert [uri for uri in awaited if uri not in text] == []
    assert "stray.md" not in text


SOUND = "# A\n\n[b](b.md#there)\n"


@pytest.mark.parametrize(
    ("page", "nav", "passes"),
    [
        (SOUND, ["a.md", "b.md"], True),
        (SOUND, ["a.md"], False),
        (SOUND.replace("b.md", "c.md"), ["a.md", "b.md"], False),
        (SOUND.replace("there", "nowhere"), ["a.md", "b.md"], False),
    ],
    ids=["sound", "page-that-nav-leaves-out", "dead-link", "dead-anchor"],
)
def test_the_rules_of_the_site_stop_what_is_broken(page, nav, passes, tmp_path):
    rules = re.search(r"^validation:\n(?:  .*\n)+", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)[0]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(page)
    (tmp_path / "docs" / "b.md").write_text("# B\n\n## There\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"site_name: x\nstrict: true\ntheme: null\nplugins: []\nnav: {nav}\n{rules}")
    loaded = load_config(str(config))
    loaded.theme = loaded.theme or None
    if passes:
        build(loaded)
        return
    with pytest.raises(Abort, match="strict mode"):
        build(loaded)


@pytest.mark.parametrize("name", ["README.md", "DESIGN.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_between_files_of_the_repository_hold(name):
    text = re.sub(r"^```.*?^```", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    linked = [urlsplit(target) for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    assert [at.path for at in linked if not at.scheme and at.path and not (ROOT / at.path).exists()] == []


def test_every_stage_has_a_page_and_a_line():
    from retrograd.check.stages import load

    overview = (ROOT / "docs" / "stages" / "index.md").read_text()
    for stage in load():
        assert (ROOT / "docs" / "stages" / f"{stage.id}.md").exists()
        assert f"[{stage.id}]({stage.id}.md)" in overview
