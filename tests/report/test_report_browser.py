"""The page in a real browser, on a phone and a laptop, light and dark: it fits, and its text can be read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import fake_report as fake
import pytest

from retrograd.report import document
from retrograd.report.html import to_html

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")

# The page has no script of its own and refuses any, so it is measured from the page around it.
_MEASURE = """
<!doctype html><meta name="color-scheme" content="light dark">
<iframe id="page" style="width:%dpx;height:900px;border:0;color-scheme:light dark" srcdoc="%s"></iframe>
<pre id="measured"></pre>
<script>
const light = c => { const [r, g, b] = c.map(v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
                     return .2126 * r + .7152 * g + .0722 * b; };
const parts = c => c.match(/[\\d.]+/g).map(Number);
document.getElementById("page").onload = event => {
  const view = event.target.contentWindow, page = view.document, faint = [];
  const ground = e => { for (; e; e = e.parentElement) { const c = parts(view.getComputedStyle(e).backgroundColor);
                        if (c.length < 4 || c[3]) return c.slice(0, 3); } return [255, 255, 255]; };
  const shown = [...page.querySelectorAll("h1,h2,h3,p,dt,dd,td,th,li,code,figcaption,text")].filter(e => e.textContent.trim());
  for (const e of shown) {
    const style = view.getComputedStyle(e);
    const ink = parts(e.tagName == "text" ? style.fill : style.color).slice(0, 3);
    const [a, b] = [light(ink), light(ground(e))].sort((x, y) => y - x);
    const contrast = (a + .05) / (b + .05);
    if (contrast < 4.5) faint.push([e.tagName, e.textContent.trim().slice(0, 40), contrast]);
  }
  const wide = [...page.querySelectorAll("main *:not(.scroll *):not(svg *)")].filter(
    e => e.getBoundingClientRect().right > page.documentElement.clientWidth + 1).map(e => e.tagName + "." + e.className);
  document.getElementById("measured").textContent = JSON.stringify({
    width: page.documentElement.scrollWidth, ground: ground(page.body), texts: shown.length, faint, wide,
    bars: [...page.querySelectorAll(".bar span")].map(e => e.getBoundingClientRect().width)});
};
</script>
"""


def _measure(page: str, folder: Path, width: int, *, dark: bool) -> dict:
    """What the browser makes of a page at a width in CSS pixels."""
    around = folder / "around.html"
    around.write_text(_MEASURE % (width, escape(page, quote=True)))
    said = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
         f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=20000", "--dump-dom",
         around.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    found = re.search(r'<pre id="measured">(.*?)</pre>', said, re.DOTALL)
    assert found
    assert found[1], "the page did not load"
    return json.loads(unescape(found[1]))


@pytest.fixture(scope="module")
def page() -> str:
    pytest.importorskip("vl_convert", reason="charts need vl-convert-python (extra html)")
    return to_html(document(fake.report()), fake.report().to_json())


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "laptop"])
def test_page_fits_and_can_be_read(page: str, tmp_path: Path, width: int, dark: bool) -> None:
    seen = _measure(page, tmp_path, width, dark=dark)
    assert seen["width"] <= width, seen["wide"]
    assert not seen["wide"]
    assert not seen["faint"]
    assert seen["texts"] > 40
    assert (sum(seen["ground"]) < 200) is dark
    bars = seen["bars"]
    assert max(bars) > 20
    assert min(bars) >= 1


def test_what_does_not_fit_or_is_too_faint_is_measured(page: str, tmp_path: Path) -> None:
    broken = page.replace(
        "<main>", '<main><p style="width:700px;color:#ccc;background:#fff">too wide and too faint</p>'
    )
    seen = _measure(broken, tmp_path, 390, dark=False)
    assert seen["width"] > 390
    assert [text for _, text, _ in seen["faint"]] == ["too wide and too faint"]
