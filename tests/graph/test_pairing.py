"""Folders and logs with many graphs, graph by graph; two stages of one program as a table."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from retrograd import graph, report
from retrograd.cli import main
from retrograd.errors import GraphError, UsageError
from retrograd.graph.ir import Graph
from retrograd.graph.readers import parse, read

DATA = Path(__file__).parent / "data"
XLA, TRACE = DATA / "formats" / "xla", DATA / "formats" / "torch_trace"
BEFORE, AFTER = (XLA / f"module_0001.jit_step.{stage}_optimizations.txt.gz" for stage in ("before", "cpu_after"))


def _edited(file: Path, target: Path, old: str, new: str) -> None:
    text = gzip.decompress(file.read_bytes()).decode()
    assert old in text
    target.write_text(text.replace(old, new))


def test_a_folder_of_xla_dump_to_is_compared_by_module_and_stage(tmp_path: Path) -> None:
    for number, module in ((7, "jit_ones"), (9, "jit_step"), (11, "jit_step")):
        _edited(BEFORE, tmp_path / f"module_{number:04d}.{module}.before_optimizations.txt", "0.1)", "0.1)")
    _edited(AFTER, tmp_path / "module_0009.jit_step.cpu_after_optimizations.txt", "constant(0.1)", "constant(0.2)")
    (tmp_path / "module_0009.jit_step.cpu_after_optimizations-live-range.txt").write_text("no graph")
    pairs = graph.pairs(XLA, tmp_path)
    assert [(pair.name, pair.status) for pair in pairs.pairs] == [
        ("jit_step after_optimizations", "different"),
        ("jit_step before_optimizations", "same"),
        ("jit_ones before_optimizations", "only in B"),
        ("jit_step (2) before_optimizations", "only in B"),
    ]
    assert "0.1 -> 0.2" in pairs.pairs[0].diff.causes[0].what
    assert not pairs
    assert pairs.exit_code == 1
    assert report.read(pairs.to_json()) == pairs
    report.write(pairs, tmp_path / "pairs.html", tmp_path / "pairs.txt")
    for file in ("pairs.html", "pairs.txt"):
        assert "0.1 -&gt; 0.2" in (tmp_path / file).read_text().replace("0.1 -> 0.2", "0.1 -&gt; 0.2")
    assert "::error" in report.to_github(pairs)
    assert "3 of 4 graphs differ" in pairs._repr_html_()


def test_equal_folders_are_the_same_and_one_of_several_can_be_named() -> None:
    result = CliRunner().invoke(main, ["graph", "diff", str(XLA), str(XLA)])
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "all 2 graphs are the same")
    assert graph.diff(f"{XLA}#1", BEFORE)
    with pytest.raises(UsageError, match="holds 2 graphs; name one of them"):
        graph.diff(XLA, BEFORE)


def test_a_folder_without_graphs(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("HloModule")
    with pytest.raises(GraphError, match="is a directory without graphs; expected one that xla_dump_to"):
        graph.pairs(tmp_path, XLA)


def test_ranks_of_a_log_of_torch_trace(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        [file] = TRACE.glob(f"*rank_{rank}*")
        shutil.copy(file, tmp_path / str(rank) / file.name.replace(f"rank_{rank}", "rank_0"))
    pairs = {pair.name: pair.status for pair in graph.pairs(tmp_path / "0", tmp_path / "1").pairs}
    alike = [
        f"rank_0 [{number}/0] {stage}" for number in (0, 1) for stage in ("traced", "joint", "forward", "backward")
    ]
    assert [name for name, status in pairs.items() if status == "same"] == alike
    assert {name.split()[1] for name, status in pairs.items() if status == "only in B"} == {"[0/1]", "[1/1]"}


def test_a_joint_graph_has_the_leaves_of_its_pytrees_as_parameters() -> None:
    graphs = {g.name: g for g in read(next(TRACE.glob("*rank_0*")))}
    joint = graphs["[0/0] joint"]
    names = [joint.main.instructions[place].name for place in joint.main.parameters]
    assert names == ["primals_1", "primals_2", "tangents_1"]
    assert all(joint.main.instructions[place].shape for place in joint.main.parameters)


@pytest.mark.parametrize(
    ("cut", "words"), [(-700, "is not complete|not a line of FX|no message"), (60, "this is no message of TORCH_TRACE")]
)
def test_a_log_that_is_cut_off(tmp_path: Path, cut: int, words: str) -> None:
    text = gzip.decompress(next(TRACE.glob("*rank_1*")).read_bytes()).decode()
    end = text.rindex("class GraphModule") + 400 if cut < 0 else cut
    (tmp_path / "log").write_text(text[:end] + ("\n" if cut < 0 else '{"\nrest\n'))
    with pytest.raises(GraphError, match=words):
        read(tmp_path / "log")


def test_hlo_and_stablehlo_of_one_program_are_the_same_and_of_two_are_not(tmp_path: Path) -> None:
    pytest.importorskip("jaxlib", reason="jaxlib translates StableHLO; it comes with retrograd[jax]")
    mlir = DATA / "formats" / "step.mlir.gz"
    assert graph.diff(BEFORE, mlir).computes_the_same
    assert graph.diff(DATA / "formats" / "step.export.mlirbc.gz", BEFORE).computes_the_same
    _edited(mlir, tmp_path / "other.mlir", "dense<1.000000e-01>", "dense<2.000000e-01>")
    [first, *_] = graph.diff(BEFORE, tmp_path / "other.mlir").causes
    assert "0.1 -> 0.2" in first.what


def test_devices_of_a_module_count_where_both_texts_have_them(tmp_path: Path) -> None:
    pytest.importorskip("jaxlib", reason="jaxlib translates StableHLO; it comes with retrograd[jax]")
    mlir = DATA / "formats" / "step.mlir.gz"
    for count in (1, 2):
        text = gzip.decompress(BEFORE.read_bytes()).decode()
        (tmp_path / str(count)).write_text(
            text.replace("HloModule jit_step,", f"HloModule jit_step, num_partitions={count},", 1)
        )
    told = [{c.what for c in graph.diff(tmp_path / n, mlir).causes} for n in ("1", "2")]
    assert told[1] - told[0] == {"num_partitions of the module: 2 -> 1"}


def test_before_and_after_optimisation_is_a_table_and_never_the_same() -> None:
    diff = graph.diff(BEFORE, AFTER)
    assert (diff.verdict, diff.exit_code, diff.causes) == ("cannot tell", 3, ())
    kinds = {row.kind: row for row in diff.passes}
    assert list(kinds) == ["fused", "removed", "added", "kept"]
    assert "reshape" in kinds["removed"].how
    assert "bitcast" in kinds["added"].how
    assert any("dump_formats.py:" in line for line in kinds["fused"].how.splitlines())
    assert graph.diff(AFTER, AFTER).verdict == "same"


COLLECTIVES = """HloModule m{header}

add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}

ENTRY e {{
  x = f32[4] parameter(0)
  y = f32[8] parameter(1)
{body}
}}
"""
REDUCE = 'all-reduce({of}), channel_id=1, replica_groups={{{{0,1}}}}, to_apply=add, metadata={{op_name="{name}" source_file="t.py" source_line={line}}}'


def _module(body: list[str], header: str = "") -> Graph:
    return parse(COLLECTIVES.format(header=header, body="\n".join(f"  {line}" for line in body)), "m")[0]


def test_where_a_collective_moved_and_which_were_combined() -> None:
    [p, q] = (REDUCE.format(of=of, name=f"psum_{of}", line=line) for of, line in (("x", 3), ("y", 4)))
    tail = ["z = f32[4] negate(p)", "ROOT r = (f32[4], f32[8]) tuple(z, q)"]
    before = _module([f"p = f32[4] {p}", f"q = f32[8] {q}", *tail])
    moved = _module([f"q = f32[8] {q}", f"p = f32[4] {p}", *tail], ", is_scheduled=true")
    rows = [(row.what, row.how) for row in graph.diff(before, moved).passes if row.kind == "collective"]
    assert rows == [
        ("all-reduce f32[4] at t.py:3", "1 of 2 -> 2 of 2 in order"),
        ("all-reduce f32[8] at t.py:4", "2 of 2 -> 1 of 2 in order"),
    ]
    both = REDUCE.format(of="x, y", name="psum_x", line=3)
    parts = ["p = f32[4] get-tuple-element(t), index=0", "q = f32[8] get-tuple-element(t), index=1"]
    combined = _module([f"t = (f32[4], f32[8]) {both}", *parts, *tail], ", is_scheduled=true")
    rows = [row.how for row in graph.diff(before, combined).passes if row.kind == "collective"]
    assert rows == ["1 of 2 -> 1 of 1 in order, 1 -> 2 operands", "combined with another"]


def test_graphs_of_one_stage_are_compared_whatever_they_are_called() -> None:
    """A forward of a log beside the same one in a file, and beside one that computes nothing."""
    file = next(TRACE.glob("*rank_0*"))
    forward = {g.name: g for g in read(file)}["[1/0] forward"]
    assert forward.digest
    text = 'class GraphModule(torch.nn.Module):\n    def forward(self, primals_1: "f32[3, 2]"):\n        return (primals_1,)\n'
    assert graph.diff(forward, parse(text)[0]).verdict == "different"
    aten = text.replace(
        "        return (primals_1,)", "        t = torch.ops.aten.t.default(primals_1)\n        return (t,)"
    )
    assert graph.diff(forward, parse(aten)[0]).verdict == "different"


def test_dynamo_and_aot_are_told_line_by_line() -> None:
    graphs = {g.name: g for g in read(next(TRACE.glob("*rank_0*")))}
    diff = graph.diff(graphs["[1/0] traced"], graphs["[1/0] forward"])
    assert diff.verdict == "cannot tell"
    assert [(row.kind, row.how) for row in diff.passes if "tanh" in row.how] == [
        ("rewritten", "torch.tanh -> 2 x aten.detach, aten.tanh")
    ]
    [moved] = [row.how for row in diff.passes if row.kind == "collective"]
    assert moved == "1 of 1 -> 1 of 1 in order"


def test_a_folder_is_locked_by_module_and_stage(tmp_path: Path) -> None:
    lock, other = str(tmp_path / "graphs.lock"), tmp_path / "dump"
    other.mkdir()
    for file in XLA.glob("*.txt.gz"):
        shutil.copy(file, other / file.name.replace("0001", "0042"))
    assert CliRunner().invoke(main, ["graph", "lock", str(XLA), "-o", lock]).exit_code == 0
    assert CliRunner().invoke(main, ["graph", "check", str(other), "--lock", lock]).exit_code == 0
    after = next(other.glob("*cpu_after*"))
    _edited(after, other / after.name.removesuffix(".gz"), "constant(0.1)", "constant(0.2)")
    after.unlink()
    result = CliRunner().invoke(main, ["graph", "check", str(other), "--lock", lock])
    assert result.exit_code == 1
    assert "jit_step after_optimizations" in result.stdout
    assert "0.1 -> 0.2" in result.stdout
    before = next(other.glob("*before*"))
    _edited(before, other / before.name.removesuffix(".gz"), "constant(0.1)", "constant({...})")
    before.unlink()
    for command in (["check", str(other), "--lock", lock], ["lock", str(other), "-o", lock]):
        assert CliRunner().invoke(main, ["graph", *command]).exit_code == 3
