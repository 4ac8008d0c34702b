import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from retrograd.check.schema import Case, Finding, Report, StageResult
from retrograd.check.spec import OpSpec
from retrograd.cli import main
from retrograd.errors import UndecidedError, UsageError

SPEC = "from retrograd.check.spec import op, tensor\nspec = op(lambda x: x, inputs={'x': tensor('N')}, name='same')\n"


def _report(verdict: str) -> Report:
    repro = "retrograd verify op.py:spec --case 'N=3' --only oracle " + "and more " * 12 + "end"
    found = (Finding("oracle", "value", "grad_x is wrong", Case("float32"), where="everywhere", repro=repro),)
    stage = StageResult("oracle", "Equals the reference", "failed", findings=found if verdict == "finding" else ())
    return Report("op.py:spec", verdict, "full", 0, ("float32",), "cpu", (stage,))  # type: ignore[arg-type]


class Fake:
    """Stands in for retrograd.check.runner and remembers how it was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verdict = "proved"
        self.error: Exception | None = None
        self.spec: OpSpec | None = None
        self.options: dict[str, Any] = {}
        module = types.ModuleType("retrograd.check.runner")
        module.verify = self.verify  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "retrograd.check.runner", module)

    def verify(self, spec: OpSpec, **options: Any) -> Report:
        self.spec, self.options = spec, options
        sys.stdout.write("noise of an op\n")
        if options["progress"]:
            options["progress"]("oracle", "running")
            options["progress"]("oracle", "passed (1.00 s)")
        if self.error:
            raise self.error
        return _report(self.verdict)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "op.py").write_text(SPEC)
    return Fake(monkeypatch)


def _run(*args: str) -> Any:
    return CliRunner().invoke(main, ["verify", "op.py:spec", "--device", "cpu", "--in-process", *args])


@pytest.mark.parametrize(("verdict", "code"), [("proved", 0), ("finding", 1), ("undecided", 3)])
def test_exit_code_is_the_verdict(fake: Fake, verdict: str, code: int) -> None:
    fake.verdict = verdict
    result = _run()
    assert result.exit_code == code
    assert "Equals the reference" in result.stdout


@pytest.mark.parametrize(("error", "code"), [(UsageError("no stage 'x'"), 2), (UndecidedError("NaN"), 3)])
def test_errors_are_a_message_on_stderr(fake: Fake, error: Exception, code: int) -> None:
    fake.error = error
    result = _run()
    assert result.exit_code == code
    assert result.stderr.endswith(f"retrograd: {error}\n")
    assert result.stdout == ""


def test_a_bug_of_ours_is_not_hidden(fake: Fake) -> None:
    fake.error = ZeroDivisionError("bug")
    assert isinstance(_run().exception, ZeroDivisionError)


@pytest.mark.parametrize(
    "args",
    [
        ("--dtype", "float99"), ("--device", "tpu"), ("--device", "cuda:999"), ("-o", "r.pdf"),
        ("-o", "none/r.json"), ("--level", "slow"), ("--seed", "x"), ("--no-such",), ("--memcheck",),
    ],
)  # fmt: skip
def test_wrong_usage_runs_nothing(fake: Fake, args: tuple[str, ...]) -> None:
    result = _run(*args)
    assert result.exit_code == 2
    assert result.stderr
    assert fake.spec is None


def test_options_arrive(fake: Fake) -> None:
    result = _run(
        "--level",
        "quick",
        "--only",
        "a, b",
        "--skip",
        "c",
        "--seed",
        "7",
        "--dtype",
        "f32,bf16",
        "--case",
        "N=3",
        "--budget",
        "1.5m",
        "--configs",
        "all",
    )
    assert result.exit_code == 0
    assert fake.spec is not None
    assert fake.spec.name == "same"
    del fake.options["progress"]
    assert fake.options == {
        "level": "quick", "seed": 7, "only": ("a", "b"), "skip": ("c",), "dtypes": ("float32", "bfloat16"),
        "device": "cpu", "case": "N=3", "name": "op.py:spec", "budget": 90.0,
        "configs": "all",
    }  # fmt: skip


def test_defaults(fake: Fake) -> None:
    assert CliRunner().invoke(main, ["verify", "op.py:spec", "--in-process"]).exit_code == 0
    assert fake.options["dtypes"] is None
    assert fake.options["only"] == ()
    assert fake.options["case"] is None
    assert fake.options["device"] in ("cpu", "cuda")
    assert fake.options["level"] == "full"


@pytest.mark.parametrize(("budget", "message"), [("soon", "expected seconds, or a time"), ("0", "above 0")])
def test_a_budget_that_is_none_is_refused(budget: str, message: str, fake: Fake) -> None:
    result = _run("--budget", budget)
    assert result.exit_code == 2
    assert message in result.stderr


def test_json_on_stdout_is_only_json(fake: Fake) -> None:
    fake.verdict = "finding"
    result = _run("--format", "json")
    assert Report.from_json(result.stdout) == _report("finding")


def test_progress_is_one_line_a_stage_and_quiet_is_none(fake: Fake) -> None:
    assert "oracle: passed (1.00 s)\n" in _run().stderr
    assert "running" not in _run().stderr
    assert "oracle" not in _run("-q").stderr
    assert fake.options["progress"] is None


def test_repro_is_one_line_and_files_are_written(fake: Fake) -> None:
    fake.verdict = "finding"
    result = _run("-o", "r.json", "-o", "r.txt")
    repro = _report("finding").findings[0].repro
    assert result.exit_code == 1
    assert repro in result.stdout
    assert repro in Path("r.txt").read_text()
    assert Report.from_json(Path("r.json").read_text()) == _report("finding")


def test_missing_torch_names_the_extra(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hide:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "torch":
                raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Hide(), *sys.meta_path])
    result = _run()
    assert result.exit_code == 2
    assert "retrograd[torch]" in result.stderr


def test_list_stages_needs_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("retrograd.check.stages")
    stages = [
        types.SimpleNamespace(id="oracle", title="Equals"),
        types.SimpleNamespace(id="nan", title="NaN"),
    ]
    module.load = lambda: stages  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "retrograd.check.stages", module)
    result = CliRunner().invoke(main, ["verify", "--list-stages"])
    assert result.exit_code == 0
    assert result.stdout == "oracle  Equals\nnan     NaN\n"


def test_report_renders_again(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(_report("finding").to_json())
    result = CliRunner().invoke(main, ["report", str(path)])
    assert result.exit_code == 0
    assert "FINDING" in result.stdout
    out = tmp_path / "again.txt"
    assert CliRunner().invoke(main, ["report", str(path), "-o", str(out)]).exit_code == 0
    assert "FINDING" in out.read_text()


@pytest.mark.parametrize("content", [None, b"not json", b"\xff\xfe\x00", b"{}"], ids=["none", "text", "bytes", "empty"])
def test_report_of_a_bad_file_is_a_usage_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "r.json"
    if content is not None:
        path.write_bytes(content)
    result = CliRunner().invoke(main, ["report", str(path)])
    assert result.exit_code == 2
    assert result.stderr.startswith("retrograd: ")


def test_unknown_command_is_wrong_usage() -> None:
    assert CliRunner().invoke(main, ["verfy"]).exit_code == 2


@pytest.mark.parametrize("args", [["--help"], ["verify", "--help"]])
def test_help_imports_neither_torch_nor_rich(args: list[str]) -> None:
    code = (
        "import sys\nfrom retrograd.cli import main\n"
        f"try:\n    main({args!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([m for m in ('torch', 'triton', 'rich', 'numpy', 'jinja2') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "verify" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_mistyped_command_is_told_its_neighbour_and_the_version_is_told() -> None:
    result = CliRunner().invoke(main, ["verfy"])
    assert (result.exit_code, "No such command 'verfy'; did you mean 'verify'?" in result.output) == (2, True)
    result = CliRunner().invoke(main, ["graph", "zzz"])
    assert (result.exit_code, "'zzz'; expected one of unique, diff, " in result.output) == (2, True)
    result = CliRunner().invoke(main, ["verify", "rms_norm", "--in-process", "--only", "orcale"])
    assert (result.exit_code, "did you mean 'oracle'?" in result.output) == (2, True)
    result = CliRunner().invoke(main, ["report", __file__])
    assert (result.exit_code, f"retrograd: {__file__!r}: not a retrograd report" in result.output) == (2, True)
    result = CliRunner().invoke(main, ["verify", "rms_norm_torch", "--in-process", "--only", "races", "-q", "--json"])
    assert json.loads(result.stdout)["schema"] == "retrograd.report/1"
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.output.split()[0]) == (0, "retrograd")


def test_a_pipe_folds_no_line_unless_columns_says_how_wide_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from retrograd.cli._output import console

    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console().width > 1000
    monkeypatch.setenv("COLUMNS", "80")
    assert console().width == 80
