"""Every kind of page that is written, on a phone and a laptop, light and dark: axe finds nothing serious, and it fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from every_page import every_page
from in_browser import IDS, SCREENS, faults, opened

from retrograd.report import _RECORDS


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    pytest.importorskip("vl_convert", reason="charts need vl-convert-python (extra html)")
    folder = tmp_path_factory.mktemp("pages")
    for name, page in every_page().items():
        (folder / f"{name}.html").write_text(page)
    return sorted(folder.iterdir())


@pytest.mark.parametrize(("width", "scheme"), SCREENS, ids=IDS)
def test_nothing_serious_and_nothing_too_wide(pages: list[Path], width: int, scheme: str) -> None:
    with opened(width, scheme) as tab:
        assert [fault for page in pages for fault in faults(tab, page, width)] == []


def test_a_faint_text_a_picture_without_a_name_and_a_wide_word_are_seen(pages: list[Path], tmp_path: Path) -> None:
    verify = next(page for page in pages if page.stem == "verify").read_text()
    for what, broken in {
        "color-contrast": verify.replace("<main>", '<main><p style="color:#ccc;background:#fff">faint</p>'),
        "svg-img-alt": verify.replace("<main>", '<main><svg role="img"></svg>'),
        "wide": verify.replace("<main>", f"<main><h1 style='overflow-wrap:normal'>{'w' * 90}</h1>"),
    }.items():
        page = tmp_path / "broken.html"
        page.write_text(broken)
        with opened(400, "light") as tab:
            (fault,) = faults(tab, page, 400)
        assert what in fault


def test_every_record_has_a_page_here(pages: list[Path]) -> None:
    schemas = {schema for page in pages for schema in _RECORDS if f'"{schema}"' in page.read_text()}
    assert schemas == set(_RECORDS)
