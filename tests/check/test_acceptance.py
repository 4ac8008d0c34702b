"""Accepted findings: by `accept=`, by a baseline file, in every report; and what is accepted and gone."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from specimens import with_backward

import retrograd as rg
from retrograd import report as reports
from retrograd.check import acceptance, stages
from retrograd.cli import main
from retrograd.errors import SpecError, UsageError, VerificationError

pytest_plugins = ["pytester"]
CHECK = Path(acceptance.__file__).parent
ONLY = ["contract", "oracle", "mutation"]
# The gradient is off by a tenth in one place: an accepted mistake.
off = with_backward(torch.sin, lambda dy, x: dy * torch.cos(x) * 1.1, once=True)
sine = with_backward(torch.sin, lambda dy, x: dy * torch.cos(x), once=True)


def _op(fn=off, accept=None, **more):
    return rg.op(fn, torch.sin, dict(x=rg.tensor("M", "N")), accept=accept, name="sine", **more)


def _verify(spec, **more):
    return rg.verify(spec, level="quick", only=ONLY, **more)


def test_what_is_accepted_is_shown_and_fails_nothing():
    report = _verify(_op(accept={"oracle/wrong-value": "a tenth is enough"}))
    assert report.verdict == "proved"
    assert report.exit_code == 0
    report.raise_if_failed()
    assert not report.findings
    assert [(f.tensor, f.accepted) for f in report.accepted] == [("grad x", "a tenth is enough")]
    assert report.accepted[0].repro


def test_every_format_shows_it(tmp_path):
    pytest.importorskip("vl_convert", reason="charts need vl-convert-python (extra html)")
    report = _verify(_op(accept={"oracle": "a tenth is enough"}))
    files = [tmp_path / name for name in ("r.html", "r.json", "r.txt", "r.xml")]
    rg.write(report, *map(str, files))
    assert all("a tenth is enough" in file.read_text() for file in files)
    assert json.loads(files[1].read_text())["stages"][2]["accepted"][0]["accepted"] == "a tenth is enough"
    notice = reports.to_github(report)
    assert notice.startswith("::notice file=")
    assert "title=sine%3A accepted::oracle/wrong-value/grad x" in notice
    assert rg.Report.from_json(files[1].read_text()) == report
    assert "1 accepted, 3 of 3 stages" in files[2].read_text()
    assert "<failure" not in files[3].read_text()


@pytest.mark.parametrize("name", ["mutation", "oracle", "oracle/wrong-scale", "oracle/wrong-value/grad w"])
def test_what_does_not_occur_any_more_fails(name):
    report = _verify(_op(sine, {name: "until it is mended"}))
    assert report.verdict == "finding"
    (finding,) = report.findings
    assert (finding.kind, finding.stage) == ("accepted-gone", name.partition("/")[0])
    assert "does not occur any more: remove it from accept" in finding.what
    with pytest.raises(VerificationError, match="until it is mended"):
        report.raise_if_failed()


def test_nothing_is_missed_where_the_stage_did_not_run_in_full():
    spec = _op(sine, {"shapes": "not asked here"})
    assert _verify(spec)
    assert _verify(_op(sine, {"oracle": "in bfloat16"}, dtypes=["float32", "bfloat16"]), dtypes=["float32"])
    assert _verify(_op(sine, {"oracle": "elsewhere"}), case="M=3 N=4")
    assert _verify(_op(sine, {"oracle": dict(reason="seldom", level="full")}))
    assert not rg.verify(_op(sine, {"oracle": dict(reason="seldom", level="full")}), only=["oracle"])


def test_another_finding_of_the_same_stage_still_fails():
    report = _verify(_op(accept={"oracle/wrong-value/out": "only the output"}))
    assert {f.kind for f in report.findings} == {"wrong-value", "accepted-gone"}


def test_more_faults_than_a_report_shows_do_not_hide_a_new_one():
    def swapped(*xs):
        return torch.stack(xs).sum(0) * 1.0

    function = with_backward(swapped, lambda dy, *xs: tuple(1.1 * dy for _ in xs), once=True)
    inputs = {f"x{i}": rg.tensor("M", "N") for i in range(6)}
    accept = {f"oracle/wrong-value/grad x{i}": "known" for i in range(5)}
    report = _verify(rg.op(function, swapped, inputs, accept=accept))
    assert [f.tensor for f in report.findings] == ["grad x5"]
    assert len(report.accepted) == 5


@pytest.mark.parametrize(
    ("accept", "message"),
    [
        ({"higher-order": "x"}, r"`accept` has 'higher-order'.*did you mean 'higher_order'"),
        ({"oracle/wrong": "x"}, r"'oracle/wrong'; the kinds of findings of stage 'oracle' are wrong-value"),
        ({"oracle": " "}, r"`accept` of 'oracle' has ' ' as the reason, expected a sentence"),
        ({"oracle": dict(reason="x", level="slow")}, r"has level 'slow', expected quick or full"),
        ({"oracle": dict(because="x")}, r"\['because'\], expected `reason`"),
        (["oracle"], r"`accept` is list, expected a dict"),
    ],
)
def test_what_means_nothing_is_refused(accept, message):
    with pytest.raises(SpecError, match=message):
        _op(accept=accept)


def _kinds(path: Path) -> set[str]:
    """The kinds of the findings that a module makes: the first arguments of what makes them, where they are literals."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    made = [call for call in calls if ast.unparse(call.func).endswith(("Finding.of", "out.find", ".finding"))]
    assert made or path.stem in ("oracle", "layouts", "shapes")  # these leave it to the judge
    return {kind.value for kind in (call.args[0] for call in made) if isinstance(kind, ast.Constant)}


def test_every_kind_of_every_stage_can_be_accepted():
    assert set(acceptance.KINDS) == {stage.id for stage in stages.load()}
    for stage in stages.load():
        heard = {"address-read", "address-write", "race", "assertion"} if stage.hears else set()
        missing = (_kinds(CHECK / "stages" / f"{stage.id}.py") | heard) - set(acceptance.KINDS[stage.id])
        assert not missing, f"add {missing} to KINDS[{stage.id!r}] in check/acceptance.py"


def test_a_baseline_accepts_what_stood_when_it_was_written(tmp_path):
    file = tmp_path / acceptance.FILE
    before = _verify(_op(), name="op.py:sine")
    assert acceptance.write_baseline(file, [before]) == 1
    assert acceptance.after_writing(before, file).verdict == "proved"
    after = _verify(_op(), name="op.py:sine", baseline=file)
    assert after
    assert after.accepted[0].accepted.startswith("as it stood: grad x")
    assert not _verify(_op(), name="op.py:other", baseline=file)

    gone = _verify(_op(sine), name="op.py:sine", baseline=file)
    assert [f.kind for f in gone.findings] == ["accepted-gone"]
    assert str(file) in gone.findings[0].what
    assert acceptance.write_baseline(file, [gone]) == 0
    assert "[[accepted]]" not in file.read_text()


def test_a_baseline_keeps_what_was_not_looked_at(tmp_path):
    file = tmp_path / "known.toml"
    entry = '[[accepted]]\ntarget = "{}"\nclass = "shapes/raises"\nreason = "no vectors"\nlevel = "full"\n'
    file.write_text(entry.format("op.py:sine") + entry.format("op.py:other"))
    acceptance.write_baseline(file, [_verify(_op(), name=f"{tmp_path}/op.py:sine", baseline=file)])
    assert file.read_text().count("no vectors") == 2
    assert len(acceptance.read_baseline(file, f"{tmp_path}/op.py:sine")) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("accepted = 3", r"has accepted =, expected tables \[\[accepted\]\] alone"),
        ("[[accept]]\n", r"\['accept'\], expected tables"),
        ("[[accepted]]\nclass = 'oracle'\n", r"'oracle' has None as the reason"),
        ("[[accepted]]\nclass = 'oracles'\nreason = 'x'\n", r"'oracles'; expected a stage.*did you mean 'oracle'"),
        ("=", r"cannot read the baseline"),
    ],
)
def test_a_damaged_baseline_is_refused(tmp_path, text, message):
    file = tmp_path / "b.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        acceptance.read_baseline(file, "op.py:sine")
    with pytest.raises(UsageError, match=r"nowhere\.toml"):
        acceptance.baseline_path(tmp_path / "nowhere.toml")


SOURCE = """
import torch, retrograd as rg

class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0].cos() * {factor}

spec = rg.op(Sine.apply, torch.sin, dict(x=rg.tensor("M", "N")), name="sine")
"""


def test_the_command_line_writes_and_reads_the_baseline_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def verify(*more):
        words = ["verify", "op.py:spec", "--level", "quick", "--only", "oracle", "--in-process", "-q", *more]
        return CliRunner().invoke(main, words)

    Path("op.py").write_text(SOURCE.format(factor=1.1))
    assert verify().exit_code == 1
    written = verify("--write-baseline")
    assert (written.exit_code, "1 accepted" in written.output) == (0, True)
    assert 'target = "op.py:spec"' in Path(acceptance.FILE).read_text()
    assert verify().exit_code == 0
    Path("op.py").write_text(SOURCE.format(factor=1))
    assert "does not occur any more: remove it from retrograd-baseline.toml" in verify().output
    assert verify("--write-baseline").exit_code == 0
    assert verify("--baseline", "nowhere.toml").exit_code == 2


SUITE = """
import pytest
from op import spec

@pytest.mark.retrograd(spec, only=["oracle", "mutation"])
def test_sine(retrograd_stage):
    retrograd_stage.assert_passes()
"""


def test_the_plugin_writes_and_reads_the_baseline_of_its_rootdir(pytester):
    pytester.makepyfile(op=SOURCE.format(factor=1.1), test_sine=SUITE)
    pytester.runpytest_inprocess().assert_outcomes(passed=1, failed=1)
    pytester.runpytest_inprocess("--retrograd-write-baseline").assert_outcomes(passed=2)
    pytester.runpytest_inprocess("--junitxml=r.xml").assert_outcomes(passed=2)
    assert "as it stood: grad x" in (pytester.path / "r.xml").read_text()
    pytester.makepyfile(op=SOURCE.format(factor=1))
    gone = pytester.runpytest_inprocess()
    gone.assert_outcomes(passed=1, failed=1)
    gone.stdout.fnmatch_lines(["*does not occur any more*"])
