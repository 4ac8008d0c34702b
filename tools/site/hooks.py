"""What MkDocs is told while it builds the site: made pages, navigation by patterns, links that leave `docs/`."""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(Path(__file__).parent))

import pages  # noqa: E402

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[`~]*\s*$", re.MULTILINE | re.DOTALL)

# File of the repository -> page of the site, for pages that show files from outside docs/; made anew by each build.
_shown: dict[str, str] = {}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the made pages, and expand the patterns of the navigation over all pages there are."""
    _shown.clear()
    makers = (pages.project, pages.performance, pages.api, pages.command_line, pages.notebooks)
    made = [page for maker in makers for page in maker()]
    for page in made:
        _add(files, page, config)
    for page in _linked_files(files):
        _add(files, page, config)
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):  # its page is made above; the notebook itself is there to be downloaded
            file.inclusion = InclusionLevel.INCLUDED
    uris = sorted(file.src_uri for file in files.documentation_pages())
    config.nav = expand(config.nav or [], uris)
    return files


def _add(files: Files, page: pages.Made, config: MkDocsConfig) -> None:
    files.append(File.generated(config, page.path, content=page.text))
    if page.source:
        _shown[page.source] = page.path


def _linked_files(files: Files) -> Iterator[pages.Made]:
    """Pages for the sources that documents link to, so that the link works in the site as it does in the repository."""
    wanted: set[str] = set()
    for file in files.documentation_pages():
        text = _FENCE.sub("", file.content_string)
        for _, target, _, _ in _LINK.findall(text):
            name = _in_repository(file.src_uri, target)
            if name and name not in _shown and not name.startswith("docs/") and (ROOT / name).is_file():
                wanted.add(name)
    for name in sorted(wanted):
        yield pages.shown_file(name)


def _in_repository(uri: str, target: str) -> str:
    """The file of the repository that a link on a page means, as a path from its root; "" for an address."""
    if re.match(r"[a-z]+:", target):
        return ""
    source = next((name for name, page in _shown.items() if page == uri), f"docs/{uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def expand(nav: list[Any], uris: list[str]) -> list[Any]:
    """The navigation with each pattern replaced by the pages that fit it and that none before it has taken."""
    taken: set[str] = set()

    def items(entries: list[Any]) -> list[Any]:
        found: list[Any] = []
        for entry in entries:
            if isinstance(entry, dict):
                inside = {title: items(below) for title, below in entry.items()}
                found += [{title: below} for title, below in inside.items() if below]
                continue
            fits = [uri for uri in uris if uri not in taken and fnmatchcase(uri, entry)]
            taken.update(fits)
            found += fits
        return found

    return items(nav)


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files outside docs/ into links to the pages that show them."""
    uri = page.file.src_uri
    here = posixpath.dirname(uri)

    def link(match: re.Match[str]) -> str:
        name = _in_repository(uri, match[2])
        target = _shown.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else "")
        if not target:
            return match[0]
        return f"{match[1]}{posixpath.relpath(target, here or '.')}{match[3] or ''}{match[4]}"

    fences = [m.span() for m in _FENCE.finditer(markdown)]
    return _LINK.sub(lambda m: m[0] if any(a <= m.start() < b for a, b in fences) else link(m), markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """mkdocs-click 0.9 shows click's mark for "no default" as if it were one."""
    return html.replace("<code>Sentinel.UNSET</code>", "").replace("<td>N/A</td>", "<td></td>")
