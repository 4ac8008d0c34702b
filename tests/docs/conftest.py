"""Scripts of the site as modules; the site itself, built once, strictly, as `make docs` does."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "tools" / "site"))


class Page(HTMLParser):
    """What a page refers to, and the places in it that can be referred to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        at = dict(attrs)
        if at.get("id"):
            self.ids.add(at["id"])
        if tag == "a" and at.get("href"):
            self.links.append(at["href"])
        elif tag == "link" and at.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(at.get("href") or "")
        elif at.get("src"):
            self.loads.append(at["src"])

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    pytest.importorskip("mkdocs", reason="of the group docs, which `make setup` installs")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", out]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="session")
def built_pages(site: Path) -> dict[str, Page]:
    """Every page by its path in the site."""
    return {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html")}
