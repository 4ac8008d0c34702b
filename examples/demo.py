"""make demo: a real Triton backward pass proved right, and a broken one caught that a common test lets through."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console

import retrograd as rg

OUT = Path("out")
HERE = Path(__file__).resolve().parent


def main() -> int:
    """Verify both, print both verdicts and where the pages are."""
    start = time.perf_counter()
    import torch

    from retrograd.catalog import resolve
    from retrograd.report import show

    torch.set_num_threads(1)
    console = Console()
    OUT.mkdir(exist_ok=True)
    console.rule("1. the shipped RMSNorm: real Triton kernels, executed on this CPU as on a GPU")
    good = rg.verify(resolve("rms_norm"), level="quick", name="rms_norm")
    show(good, console)
    rg.write(good, OUT / "rms_norm.html", OUT / "rms_norm.json")

    path = HERE / "broken_rms_norm.py"
    console.rule("2. a broken one: dx forgets the weight")
    module = resolve_module(path)
    module.fixed_tolerance_test()
    console.print("a fixed-tolerance test with weight = ones: passes\n")
    bad = rg.verify(module.spec, level="quick", name=f"examples/{path.name}:spec", dtypes=["float32"])
    show(bad, console)
    rg.write(bad, OUT / "broken_rms_norm.html", OUT / "broken_rms_norm.json")

    console.rule()
    console.print(f"shipped RMSNorm: {good.verdict}    broken RMSNorm: {bad.verdict}", soft_wrap=True)
    for name in ("rms_norm", "broken_rms_norm"):
        console.print(f"page: {(OUT / name).resolve()}.html", soft_wrap=True)
    console.print(f"{time.perf_counter() - start:.0f} s")
    return 0 if good.verdict == "proved" and bad.verdict == "finding" else 1


def resolve_module(path: Path):
    """Import a file by its path."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
