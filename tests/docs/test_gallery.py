"""Gallery of bugs: every proof runs without retrograd, and every finding is what `verify` prints, numbers aside."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from retrograd.check.runner import verify

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(python)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CRASHES = "took the process down"


class Entry(NamedTuple):
    library: str  # "torch 2.13.0", as the heading has it
    title: str
    spec: str
    told: list[str]
    proof: str


def entries() -> list[Entry]:
    every = []
    for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        heading, *sections = re.split(r"^### ", part, flags=re.MULTILINE)
        for section in sections:
            spec, told, proof = (match[2] for match in FENCE.finditer(section))
            every.append(Entry(heading.strip(), section.splitlines()[0], spec, told.splitlines(), proof))
    return every


ENTRIES = entries()
IDS = [re.sub(r"\W+", "-", f"{e.library.split()[0]} {e.title}")[:60].strip("-") for e in ENTRIES]


def needed(entry: Entry) -> None:
    """Skip where the library is not there, or is another release than the page is about."""
    name, release = entry.library.replace("PyTorch", "torch").split()
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed here; make outside has all but Liger")
    if installed.split("+")[0] != release:
        pytest.skip(f"the page is about {name} {release}, installed is {installed}")
    if name == "torchvision":
        sys.path.insert(0, str(ROOT / "benchmarks" / "outside"))
        importlib.import_module("cpu_wheels").prepare()


def plain(text: str) -> str:
    """A finding without its numbers, which depend on the machine."""
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?|\bnan\b|\binf\b", "#", text)


def test_the_page_has_its_parts():
    assert len(ENTRIES) > 20
    assert {"PyTorch", "torchvision"} <= {e.library.split()[0] for e in ENTRIES}
    assert all(e.told and "import retrograd" not in e.proof and "spec = " in e.spec for e in ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=IDS)
def test_it_is_wrong_without_retrograd(entry):
    needed(entry)
    start = "import sys; sys.path.insert(0, 'benchmarks/outside'); import cpu_wheels; cpu_wheels.prepare()\n"
    program = (start if entry.library.startswith("torchvision") else "") + entry.proof
    if CRASHES in entry.told[0]:
        ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=False)
        assert ended.returncode < 0
    elif "TRITON_INTERPRET" in program:  # Triton reads it while it is imported
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    else:
        torch.manual_seed(0)
        exec(compile(program, entry.title, "exec"), {})


@pytest.mark.parametrize("entry", ENTRIES, ids=IDS)
def test_verify_finds_it(entry):
    needed(entry)
    if CRASHES in entry.told[0]:
        pytest.skip("verify would end this process; its finding is a line of benchmarks/results/outside.md")
    space: dict = {}
    exec(compile(entry.spec, entry.title, "exec"), space)
    report = verify(space["spec"], level="quick", only=[entry.told[0].split()[0]])
    printed = {plain(f"{f.stage} ({f.kind}): {f.what}") for f in report.findings}
    assert {plain(line) for line in entry.told} <= printed
