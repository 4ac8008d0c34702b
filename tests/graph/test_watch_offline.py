"""Recorded graphs as the steps of a run: the founding case, and its healthy twin."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from retrograd.errors import GraphChangedError, UsageError
from retrograd.graph.watching.offline import replay
from retrograd.graph.watching.session import WatchSession

DATA = Path(__file__).parent / "data"


def steps(name, *numbers):
    return [DATA / "xla" / f"{name}_step{n}.hlo.txt.gz" for n in numbers]


def quiet(**options):
    return WatchSession(**options, say=lambda text: None)


def test_the_founding_case_has_four_graphs_and_the_cause_is_carried_over_gradients():
    report = replay(steps("tied_bucket", 0, 1, 2, 1, 4), quiet(expect=2))
    assert [g.instructions for g in report.graphs] == [1958, 2071, 2270, 2320]
    assert [g.parameters for g in report.graphs] == [28, 45, 57, 62]
    assert [row.ran for row in report.rows] == [(0,), (1,), (2,), (1,), (3,)]
    first = report.unexpected[0]
    assert (first.step, first.against) == (2, 1)
    assert first.causes[0].kind == "gradient_carried_over"
    assert "without having been reduced" in report.text()


# The six steps of two runs of examples/xla_buckets.py, recorded with torch_xla 2.9.0 on one CPU device.
RUNS = {"bucket": (0, 1, 2, 3, 2, 3), "repaired": (0, 1, 1, 1, 1, 1)}


@pytest.mark.parametrize("run", RUNS)
def test_the_recorded_example_has_four_graphs_with_buckets_and_two_with_the_repair(run):
    from click.testing import CliRunner

    from retrograd.cli import main

    count = 4 if run == "bucket" else 2
    files = [str(DATA / "xla_buckets" / f"{run}_step{n}.hlo.txt.gz") for n in RUNS[run]]
    unique = json.loads(CliRunner().invoke(main, ["graph", "unique", "--json", *files]).output)
    assert [level["unique"] for level in unique["levels"]] == [count] * 4
    assert unique["levels"][-1]["members"] == list(RUNS[run])
    watched = CliRunner().invoke(main, ["graph", "watch", "--from", "--expect", "2", *files])
    assert watched.exit_code == (0 if count == 2 else 1)
    assert f"6 steps, {count} graphs, expected at most 2" in watched.output
    carried = (
        "straight into reduce-scatter number 40 of 41 (12 operands) in A only: gradients of an earlier step, carried"
    )
    assert (carried in watched.output) == (run == "bucket")


def test_a_healthy_run_has_two_graphs():
    assert replay(steps("base", 0, 1, 1), quiet(expect=2))


def test_a_stray_tensor_is_found_at_its_step():
    paths = [*steps("base", 0, 1), *steps("stray", 2), *steps("base", 1)]
    with pytest.raises(GraphChangedError, match=r"step 2: a new step graph(?s:.*)output 3 f32\[\] made by add"):
        replay(paths, quiet(expect=2, on_extra="raise"))


def test_a_save_file_is_read_step_by_step_with_its_hashes(tmp_path):
    names = [
        (n, gzip.decompress(path.read_bytes()).decode()) for n, path in zip("ab", steps("base", 0, 1), strict=True)
    ]
    block = "[x]\nTensorsGraphInfo:\n\nRoot Hashes: ()\n\n## BEGIN_GRAPH\n{}\nGraph Hash: {}\n## END_GRAPH\n\n\n"
    saved = tmp_path / "saved.0"
    saved.write_text("".join(block.format(text, name) for name, text in [*names, names[1]]))
    report = replay([saved], quiet(expect=2))
    assert [g.recorded for g in report.graphs] == ["a", "b"]
    assert report.steps == 3


def test_forward_and_backward_graphs_are_told_apart():
    paths = sorted((DATA / "fx").glob("[0-3]_*.txt.gz"))
    report = replay(paths, quiet(expect=2))
    assert [g.role for g in report.graphs] == ["forward", "backward"] * 2
    assert [g.against for g in report.graphs] == [None, None, 0, 1]


def test_no_file():
    with pytest.raises(UsageError, match="no file"):
        replay([], quiet())
