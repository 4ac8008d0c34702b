"""Picture of a finding for the README: what `retrograd demo` prints, measured and drawn.

python tools/site/finding.py     # writes docs/assets/finding.svg
"""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

ASSET = Path(__file__).resolve().parents[2] / "docs" / "assets" / "finding.svg"


def lines() -> list[str]:
    """The finding, as printed."""
    from retrograd import report
    from retrograd.catalog.demo import spec
    from retrograd.check.runner import verify

    text = report.to_text(verify(spec, level="quick", name="my_op.py"))
    printed = text.splitlines()
    start = next(i for i, line in enumerate(printed) if line.startswith("Finding 1"))
    end = printed.index("", start)
    return ["$ retrograd verify my_op.py --level quick", "", *printed[start:end]]


def svg(printed: list[str]) -> str:
    """A terminal of 116 columns; rich would load its font from the network."""
    console = Console(record=True, width=116, file=StringIO(), force_terminal=True)
    styles = {"Finding": "bold red", "  like": "bold yellow", "$": "dim"}
    for line in printed:
        console.print(Text(line, style=next((s for start, s in styles.items() if line.startswith(start)), "")))
    drawn = console.export_svg(title="retrograd", unique_id="finding")
    drawn = re.sub(r"@font-face \{.*?\}\n?", "", drawn, flags=re.DOTALL)
    return re.sub(r"Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace", drawn)


if __name__ == "__main__":
    ASSET.write_text(svg(lines()), encoding="utf-8")
