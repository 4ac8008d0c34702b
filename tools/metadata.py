"""Metadata of the package that depends on where the project lies: absolute links in its README, and its addresses.

An index shows the README without the files beside it. `home` of `tool.hatch.metadata.hooks.custom` in pyproject.toml,
or the variable RETROGRAD_HOME while a release is built, is the address of the repository; without one links stay
relative.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # tests read this file where nothing is built
    MetadataHookInterface = object  # type: ignore[assignment,misc]


def absolute(text: str, home: str) -> str:
    """Markdown with links to files of the repository as addresses; pictures as what they show."""

    def at(match: re.Match[str]) -> str:
        mark, target = match.groups()
        kind = "raw" if mark.startswith("!") else "blob"
        return match[0] if "://" in target or target.startswith("#") else f"{mark}({home}/{kind}/main/{target})"

    return re.sub(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)", at, text)


def addresses(home: str) -> dict[str, str]:
    """What an index lists beside a project."""
    pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
    return {
        "Homepage": home,
        "Issues": f"{home}/issues",
        **{name: f"{home}/blob/main/{path}" for name, path in pages.items()},
    }


class CustomMetadataHook(MetadataHookInterface):
    """What hatchling calls."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README, and the addresses if there are any."""
        home = os.environ.get("RETROGRAD_HOME", self.config.get("home", "")).rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, home) if home else text}
        metadata["urls"] = addresses(home) if home else {}
