"""What torch.compile compiled, from recorded logs of two ranks that part, and from logs edited by a line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from retrograd import report
from retrograd.cli import main
from retrograd.errors import GraphError, UsageError
from retrograd.graph.compilations.listing import compilations
from retrograd.graph.compilations.schema import Compilations

TRACE = Path(__file__).parent / "data" / "formats" / "torch_trace"
NAME = "dedicated_log_torch_trace_rank_{}_00000000.log"
HEAD = "V1124 12:00:00.000000 100 torch/x.py:1] "


def _log(rank: int) -> str:
    return gzip.decompress((TRACE / (NAME.format(rank) + ".gz")).read_bytes()).decode()


def _run(folder: Path, *logs: str) -> Compilations:
    for rank, text in enumerate(logs):
        (folder / NAME.format(rank)).write_text(text)
    return compilations([folder])


def _artifact(name: str, payload: str = "") -> str:
    return _message({"artifact": {"name": name}}, payload)


def _message(about: dict[str, object], payload: str = "") -> str:
    lines = "".join(f"\t{line}\n" for line in payload.splitlines())
    return f"{HEAD}{json.dumps(about | {'frame_id': 0, 'frame_compile_id': 0})}\n{lines}"


def test_ranks_that_part_in_a_shape_with_line_guards_breaks_and_reasons(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["graph", "compilations", str(TRACE)])
    assert result.exit_code == 1, result.output
    record = compilations([TRACE])
    assert record.ranks == (0, 1)
    [cause] = record.causes
    assert "only rank 1 compiles [0/1], [1/1]: 0/0: tensor 'x' size mismatch at index 0" in cause.what
    assert cause.where == "dump_torch_trace.py:31"
    first, *_, last = record.rows
    assert (first.rank, first.id, first.where, first.function) == (0, "0/0", "dump_torch_trace.py:31", "step")
    assert first.breaks == ("dump_torch_trace.py:34: Data-dependent branching",)
    assert [text.split()[0] for text in first.graphs] == ["traced", "joint", "forward", "backward"]
    assert (first.guards, first.reason) == (9, "")
    assert first.seconds is not None
    assert last.reason.startswith("1/0: tensor 'y' size mismatch")
    assert report.read(record.to_json()) == record
    report.write(record, tmp_path / "run.html")
    assert "only rank 1 compiles [0/1]" in (tmp_path / "run.html").read_text()
    assert "::error" in report.to_github(record)


def test_ranks_that_compile_the_same_do_not_part(tmp_path: Path) -> None:
    record = _run(tmp_path, _log(0), _log(0))
    assert record
    assert record.exit_code == 0


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"size": [3, 4]', '"size": [5, 4]', "[0/0]: L['x'] is float32[3, 4], strides [4, 1], device(type='cpu') -> float32[5, 4]"),
        ('"stride": [4, 1]', '"stride": [1, 3]', "[0/0]: L['x'] is float32[3, 4], strides [4, 1]"),
        ("torch.tanh(", "torch.sin(", "[1/0], traced graph: torch.tanh"),
        ("_c10d_functional.all_reduce.default(tanh", "_c10d_functional.broadcast.default(tanh", "[1/0]: collectives all_reduce"),
    ],
    ids=["shape", "strides", "operation", "collective"],
)  # fmt: skip
def test_where_ranks_part(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in _log(0)
    [cause] = _run(tmp_path, _log(0), _log(0).replace(old, new)).causes
    assert f"rank 0 and rank 1 part at {words}" in cause.what


def test_caches_recordings_failures_and_schedules(tmp_path: Path) -> None:
    recording = json.dumps({"name": "CUDAGraphNode.record", "ph": "B", "args": {"compile_id": "0/0"}})
    log = _message({"dynamo_start": {"stack": [{"line": 3, "name": "f", "filename": 7}]}})
    log = f'{HEAD}{{"str": ["/a/train.py", 7]}}\n' + log + _artifact("fx_graph_cache_miss", "{}")
    log += _artifact("aotautograd_cache_bypass", "{}") + _message({"chromium_event": {}}, recording) * 3
    metrics = {"guard_count": 4, "fail_type": "Unsupported", "fail_reason": "no\nway", "duration_us": 2_000_000}
    log += _message({"compilation_metrics": metrics})
    schedules = [_artifact("inductor_collective_schedule", json.dumps(names)) for names in (["a", "b"], ["b", "a"])]
    record = _run(tmp_path, log + schedules[0], log + schedules[1])
    row = record.rows[0]
    assert (row.where, row.function, row.guards, row.seconds) == ("train.py:3", "f", 4, 2.0)
    assert row.caches == ("fx_graph miss", "aotautograd bypass")
    assert (row.recordings, row.failure) == (3, "Unsupported: no way")
    assert "CUDA graphs recorded 3 times" in record.text()
    assert [cause.what for cause in record.causes] == ["rank 0 and rank 1 part at [0/0]: collectives a, b -> b, a"]


def test_a_log_that_a_killed_rank_left_is_read_up_to_its_end(tmp_path: Path) -> None:
    record = _run(tmp_path, _log(0)[:-90] + "\nrest")
    assert [row.id for row in record.rows] == ["0/0", "1/0"]
    assert "this is no message of TORCH_TRACE" in record.notes[0]
    with pytest.raises(GraphError, match="line 1: this is no message of TORCH_TRACE"):
        _run(tmp_path, 'V1124 12:00:00.000000 100 x] {"a\n')
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="there is no log in"):
        compilations([tmp_path / "empty"])


@pytest.mark.parametrize("about", ['{"a": ' + "9" * 5000 + "}", '{"str": 3}'])
def test_a_message_that_torch_does_not_write(tmp_path: Path, about: str) -> None:
    (tmp_path / "log").write_text(f"{HEAD}{about}\n")
    with pytest.raises(GraphError, match=r"line 1: this (is no message|message is not as torch writes it)"):
        compilations([tmp_path / "log"])
