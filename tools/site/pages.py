"""Pages of the site that are made from other files: nothing is written twice, so nothing gets stale.

Each function returns (path in the site, Markdown) pairs. Standard library and PyYAML's friends only: no torch.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / "src" / "retrograd"

# Rooms whose `__all__` people use, in the order of the reference; tests compare this with the modules themselves.
PUBLIC = (
    "retrograd",
    "retrograd.ops",
    "retrograd.ops.msda",
    "retrograd.nn",
    "retrograd.patch",
    "retrograd.flake",
    "retrograd.graph",
    "retrograd.trace",
    "retrograd.fsdp",
    "retrograd.report",
    "retrograd.testing",
)
# Modules that have no `__all__` and are public as a whole.
WHOLE = ("retrograd.ops.msda.adapters", "retrograd.fsdp.xla", "retrograd.check.schema", "retrograd.errors")
PROJECT = {"CONTRIBUTING.md": "contributing", "DESIGN.md": "design", "CHANGELOG.md": "changelog"}
_LANGUAGES = {".py": "python", ".cpp": "cpp", ".cu": "cpp", ".sh": "bash", ".toml": "toml", ".json": "json"}


@dataclass(frozen=True)
class Made:
    """One made page: where it stands in the site, its text, and the file that it shows, if any."""

    path: str
    text: str
    source: str = ""


def public_names(module: str) -> list[str]:
    """What `__all__` of a module holds, read without running it; `_HOMES` and the definitions where it is computed."""
    tree = ast.parse(_file(module).read_text(encoding="utf-8"))
    tables = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    if isinstance(tables.get("__all__"), ast.List) and not any(
        isinstance(e, ast.Starred) for e in tables["__all__"].elts
    ):
        names = ast.literal_eval(tables["__all__"])
    else:
        defined = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        rooms = ast.literal_eval(tables["_ROOMS"]) if "_ROOMS" in tables else ()
        names = [*ast.literal_eval(tables["_HOMES"]), *rooms, *defined]
    return sorted(name for name in names if not name.startswith("_"))


def _file(module: str) -> Path:
    stem = ROOT.joinpath("src", *module.split("."))
    return stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")


def api() -> Iterator[Made]:
    """A page a public module, with every public name from its docstring."""
    for module in PUBLIC:
        rooms = [name for name in public_names(module) if f"{module}.{name}" in (*PUBLIC, *WHOLE)]
        names = [name for name in public_names(module) if name not in rooms]
        text = [f"# {module}", _summary(module)]
        if rooms:
            text.append("Rooms: " + ", ".join(f"[`{module}.{r}`]({_stem(f'{module}.{r}')}.md)" for r in rooms) + ".")
        text += [f"::: {module}.{name}" for name in names]
        yield Made(f"api/{_stem(module)}.md", "\n\n".join(text) + "\n")
    for module in WHOLE:
        directive = f"::: {module}\n    options:\n      show_root_heading: false\n      show_root_toc_entry: false"
        yield Made(f"api/{_stem(module)}.md", f"# {module}\n\n{directive}\n")


def _stem(module: str) -> str:
    return module.replace("retrograd.", "") if module != "retrograd" else "retrograd"


def _summary(module: str) -> str:
    return ast.get_docstring(ast.parse(_file(module).read_text(encoding="utf-8"))) or ""


def command_line() -> Iterator[Made]:
    """A page a command, from click's own description of it."""
    from retrograd.cli import main

    context = main.make_context("retrograd", [], resilient_parsing=True)
    names = main.list_commands(context)
    intro = "Exit codes: 0 proved, same or steady; 1 finding; 2 wrong usage; 3 cannot decide."
    listing = "\n".join(f"- [`retrograd {name}`]({name}.md)" for name in names)
    yield Made("cli/index.md", f"# retrograd\n\n{intro}\n\n{listing}\n")
    for name in names:
        command = main.get_command(context, name)
        assert command is not None
        assert command.callback is not None
        function = command.callback
        shown = f"::: mkdocs-click\n    :module: {function.__module__}\n    :command: {function.__name__}\n"
        shown += f"    :prog_name: retrograd {name}\n    :style: table\n"
        yield Made(f"cli/{name}.md", f"---\ntitle: retrograd {name}\n---\n\n{shown}")


def project() -> Iterator[Made]:
    """The pages that stand at the root of the repository, where other tools look for them."""
    for name, stem in PROJECT.items():
        yield Made(f"project/{stem}.md", (ROOT / name).read_text(encoding="utf-8"), name)


def performance() -> Iterator[Made]:
    """A page a result of a benchmark, as it was printed, with its chart where rows were kept; and an overview."""
    lines = []
    for file in sorted((ROOT / "benchmarks").glob("*.md")) + sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        source = file.relative_to(ROOT).as_posix()
        text = file.read_text(encoding="utf-8")
        heading = re.match(r"# (.+)\n", text)
        title = heading[1] if heading else _title(file.stem)
        body = text if heading else f"# {title}\n\n{text}"
        picture = _picture(file.with_suffix(".jsonl"))
        if picture:
            body = body.replace("\n\n", f"\n\n{picture}\n\n", 1)
        yield Made(f"performance/{file.stem}.md", body, source)
        lines.append(f"| [{title}]({file.stem}.md) | `{source}` |")
    intro = (
        "# Performance\n\nEvery table is what a command of this repository printed; each page says which, and on what "
        "machine. They are made from the files named here when the site is built.\n\n| | from |\n|---|---|\n"
    )
    yield Made("performance/index.md", intro + "\n".join(lines) + "\n")


def _title(stem: str) -> str:
    """ "norm-nvidia-h200" -> "Norm, NVIDIA H200"."""
    head, _, rest = stem.partition("-")
    rest = re.sub(r"\b(nvidia|cpu|h\d+)\b", lambda m: m[0].upper(), rest.replace("-", " "))
    return head.capitalize() + (f", {rest}" if rest else "")


def _picture(rows: Path) -> str:
    """The chart of saved rows of `retrograd bench norm`, as SVG in the page; "" for other rows or none."""
    if not rows.exists() or not rows.name.startswith("norm"):
        return ""
    from retrograd.bench.plot import chart
    from retrograd.bench.rows import load

    return f'<div class="rg-picture">{svg(chart(load([rows])))}</div>'


def svg(chart: dict[str, Any]) -> str:
    """A Vega-Lite chart as SVG on one line, which follows the page's colours and names no address."""
    import vl_convert

    return re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", vl_convert.vegalite_to_svg(chart)).replace("\n", "")


def notebooks() -> Iterator[Made]:
    """Executed notebooks as pages: their cells and what these showed when the notebook was last run."""
    for file in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        text = "\n\n".join(part for cell in cells for part in _cell(cell))
        yield Made(f"notebooks/{file.stem}.md", text + "\n")


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "text/html" in data:  # blank lines would end the block of HTML in Markdown
            html = re.sub(r"\n\s*", "\n", "".join(data["text/html"]))
            yield f'<div class="rg-output">{html}</div>'
        else:
            text = "".join(output.get("text") or data.get("text/plain", ""))
            yield f'<div class="rg-output"><pre>{_one_block(text)}</pre></div>'


def _one_block(text: str) -> str:
    return escape(text.rstrip("\n")).replace("\n\n", "\n&#8203;\n")


def shown_file(name: str) -> Made:
    """A source file that some page links to, as a page."""
    file = ROOT / name
    text = file.read_text(encoding="utf-8")
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
    body = f"# {name}\n\n{fence}{_LANGUAGES.get(file.suffix, 'text')}\n{text}{fence}\n"
    return Made(f"files/{name}.md", body, name)
