"""The benchmark over ops that nobody here wrote: a campaign that goes on where it was, and a table of what it keeps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants are forked, which needs a GPU hidden")


@pytest.fixture
def mutation_script(monkeypatch):  # `benchmark` is the fixture of pytest-benchmark, which wants it to be its own
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    import mutation

    yield mutation
    for name in [n for n in sys.modules if n in ("mutation", "detection") or n.startswith("mutation_ops")]:
        del sys.modules[name]


def test_what_is_there_is_not_run_again_and_a_dead_process_is_named(mutation_script, monkeypatch, tmp_path, capsys):
    out = tmp_path / "table.md"
    options = ["--level", "quick", "--count", "2", "--results", str(tmp_path / "m.sqlite"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["", "--set", "decompositions", "--only", "forward_silu", *options])
    assert mutation_script.main() == 0
    assert "forward_silu 0: verify quick" in capsys.readouterr().out
    table = out.read_text()
    assert "1 ops, seeds 0" in table
    assert "\n2 mutants: " in table

    monkeypatch.setattr(sys, "argv", ["", "--set", "decompositions", "--only", "forward_silu,gelu", *options])
    monkeypatch.setattr(mutation_script, "mutants_of", lambda job, deadline: sys.exit(3))
    assert mutation_script.main() == 0
    printed = capsys.readouterr().out
    assert "lost: decompositions gelu 0 2: crashed exit code 3" in printed
    assert "forward_silu 0:" not in printed
    assert out.read_text() == table
