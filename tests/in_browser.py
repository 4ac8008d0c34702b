"""Pages in Chromium: how wide they are, and what axe finds on them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
SCREENS = [(400, "light"), (400, "dark"), (1280, "light"), (1280, "dark")]
IDS = [f"{width}-{scheme}" for width, scheme in SCREENS]


@contextmanager
def opened(width: int, scheme: str) -> Iterator[Any]:
    """A tab of the browser; skips where Chromium or what drives it is missing."""
    if BROWSER is None:
        pytest.skip("needs Chromium")
    driver = pytest.importorskip("playwright.sync_api", reason="of the group test, which `make setup` installs")
    with driver.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        # Pages forbid scripts that are not theirs, and axe is one.
        context = browser.new_context(viewport=dict(width=width, height=900), color_scheme=scheme, bypass_csp=True)
        context.set_default_timeout(300_000)  # of a machine that does much else; 30 s were not enough
        yield context.new_page()
        browser.close()


def faults(tab: Any, page: Path, width: int) -> list[str]:
    """What is wrong with a page: wider than the screen, and what axe calls serious or critical."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="of the group test")
    tab.goto(page.resolve().as_uri())
    wide = tab.evaluate("document.documentElement.scrollWidth")
    faults = [f"{page.name} is {wide} wide"] if wide > width else []
    for rule in axe.Axe().run(tab).response["violations"]:
        if rule["impact"] in ("serious", "critical"):
            faults += [f"{page.name}: {rule['id']}: {node['html'][:120]}" for node in rule["nodes"]]
    return faults
