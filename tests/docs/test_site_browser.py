"""Pages of the site opened from files: axe finds nothing serious, they fit a phone, and search finds what is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_browser import IDS, SCREENS, faults, opened

# One of each kind: cards, code, findings, a notebook, a reference, a table of figures, a command, long lines.
PAGES = (
    "index", "quickstart", "gallery", "notebooks/verify", "api/retrograd", "performance/index", "cli/verify", "ci",
    "tolerance", "versioning",
)  # fmt: skip


@pytest.mark.parametrize(("width", "scheme"), SCREENS, ids=IDS)
def test_nothing_serious_and_nothing_too_wide(site: Path, width: int, scheme: str) -> None:
    with opened(width, scheme) as tab:
        assert [fault for name in PAGES for fault in faults(tab, site / f"{name}.html", width)] == []


def test_search_works_from_files(site: Path) -> None:
    with opened(1280, "light") as tab:
        tab.goto((site / "quickstart.html").as_uri())
        tab.click("input.md-search__input")
        ready = "document.querySelector('.md-search-result__meta').innerText.startsWith('Type')"
        tab.wait_for_function(ready, timeout=120_000)
        tab.keyboard.type("attainable")
        tab.wait_for_selector(".md-search-result__link", timeout=120_000)
        assert "matching documents" in tab.inner_text(".md-search-result__meta")
        links = tab.eval_on_selector_all(".md-search-result__link", "links => links.map(link => link.href)")
    assert any("tolerance.html" in link for link in links)
    assert all(link.startswith("file:") for link in links)
