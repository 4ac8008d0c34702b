"""The wheel and the sdist: built from this checkout, complete, installed alone with the base dependencies, and used."""

from __future__ import annotations

import ensurepip
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parent.parent.parent
DUMPS = ROOT / "tests" / "graph" / "data" / "jax"
# What `dependencies` in pyproject.toml brings, with what these need; the test of the metadata names the first three.
BASE = ("click", "rich", "jinja2", "markupsafe", "pygments", "markdown_it", "mdurl")
# Suffixes that a wheel may hold: code, kernels in C++ and CUDA, templates and their script, the mark of types.
SHIPPED = {".py", ".cpp", ".cu", ".cuh", ".hpp", ".j2", ".js", ".txt", ".typed"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder with the sdist, and the wheel built from the sdist: what an index would serve."""
    pytest.importorskip("hatchling", reason="of the group dev, which `make setup` installs")
    out = tmp_path_factory.mktemp("dist")
    _hatchling(ROOT, out, "sdist")
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        # Debian 12's Python 3.11.2 has no filters yet.
        archive.extractall(out, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    _hatchling(next(p for p in out.iterdir() if p.is_dir()), out, "wheel")
    return out


def _hatchling(tree: Path, out: Path, target: str) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _files(*folders: str) -> set[str]:
    """Files of the checkout under these folders or names, without what Python and tests leave there."""
    found: set[str] = set()
    for top in (ROOT / folder for folder in folders):
        inside = [top] if top.is_file() else top.rglob("*")
        found |= {p.relative_to(ROOT).as_posix() for p in inside if p.is_file() and not _left(p)}
    return found


def _left(path: Path) -> bool:
    return "__pycache__" in path.parts or any(part.startswith(".") for part in path.relative_to(ROOT).parts[1:])


def test_wheel_holds_the_package_and_nothing_else(built):
    names = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == {name.removeprefix("src/") for name in _files("src")}
    assert {Path(name).suffix for name in inside} == SHIPPED
    information = {name.split("/", 1)[1] for name in names - inside}
    assert information == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def test_sdist_holds_what_tests_and_documents_need(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("src", "tests", "docs", "tools", "benchmarks", "examples")
    files = (
        "Makefile",
        "mkdocs.yml",
        "pyproject.toml",
        "constraints.txt",
        "LICENSE",
        "action.yml",
        ".pre-commit-hooks.yaml",
    )
    pages = ("README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "DESIGN.md", "SECURITY.md")
    assert _files(*folders, *files, *pages) - names == set()
    assert {name.split("/")[0] for name in names} <= {*folders, *files, *pages, ".ci", ".gitignore", "PKG-INFO"}


def test_metadata_is_valid_and_the_base_is_light(built):
    wheel = zipfile.ZipFile(next(built.glob("*.whl")))
    text = wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA")))
    meta = Metadata.from_email(text, validate=True)
    assert meta.name == "retrograd"
    assert meta.description_content_type == "text/markdown"
    base = {r.name for r in meta.requires_dist if r.marker is None}
    assert base == set(BASE[:3])


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A new environment with the wheel, and the base dependencies of this one: no index is asked."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, symlinks=True)
    # pip as Python brings it, run where it lies: installing it first would take eight seconds of ten.
    pip = next(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl")) / "pip"
    command = [
        folder / "bin" / "python",
        pip,
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--disable-pip-version-check",
    ]
    subprocess.run([*command, next(built.glob("*.whl"))], check=True, env=_clean())
    site = next((folder / "lib").glob("python*/site-packages"))
    for name in BASE:
        (site / name).symlink_to(Path(find_spec(name).origin).parent)
    return folder / "bin"


def _clean() -> dict[str, str]:
    """The environment without what would let the tree of this checkout in."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "PIP_", "RETROGRAD"))}


def _run(installed: Path, *arguments: str | Path, code: int = 0, cwd: Path = DUMPS) -> str:
    command = [installed / "retrograd", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=_clean())
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_installed_alone_it_starts_and_says_its_version(installed):
    assert "verify" in _run(installed, "--help")
    said = subprocess.run(
        [installed / "python", "-c", "import retrograd; print(retrograd.__file__, retrograd.__version__)"],
        capture_output=True, text=True, env=_clean(), cwd=installed,
    ).stdout.split()  # fmt: skip
    assert str(installed.parent) in said[0]
    assert said[1] == "0.1.0"


def test_installed_alone_it_compares_graphs_as_text_and_as_a_page(installed, tmp_path):
    page = tmp_path / "diff.html"
    said = _run(installed, "graph", "diff", "base.hlo.txt.gz", "perm.hlo.txt.gz", "-o", page, code=1)
    assert "different" in said + page.read_text().lower()
    assert "<script>" in page.read_text()
    _run(installed, "graph", "diff", "base.hlo.txt.gz", "again.hlo.txt.gz")


def test_installed_alone_it_renders_a_record_as_a_page(installed, tmp_path):
    fields = dict(
        target="op", verdict="proved", level="quick", seed=0, dtypes=["float32"], device="cpu", stages=[],
        environment={}, schema="retrograd.report/1",
    )  # fmt: skip
    record = tmp_path / "r.json"
    record.write_text(json.dumps(fields))
    assert "PROVED" in _run(installed, "report", record)
    _run(installed, "report", record, "-o", tmp_path / "r.html")
    assert "PROVED" in (tmp_path / "r.html").read_text()
    assert "retrograd[torch" in _run(installed, "verify", "rms_norm", code=2)
