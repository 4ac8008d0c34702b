"""`retrograd ci`, the GitHub Action and the pre-commit hooks: their entries run in a scratch repository, healthy and not."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest
from click.testing import CliRunner

from retrograd.cli import main
from retrograd.codegen.access import Access
from retrograd.codegen.schema import Codegen, Facts, Kernel

ROOT = Path(__file__).resolve().parent.parent.parent
DUMPS = ROOT / "tests" / "graph" / "data" / "xla"
OPS = """
import torch

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad_out):
        (x,) = ctx.saved_tensors
        return FACTOR * x * grad_out
"""
SPEC = """
import retrograd as rg
from lib.ops import Square

square = rg.op(Square.apply, lambda x: x * x, dict(x=rg.tensor("N")))
"""
OTHER = 'import retrograd as rg\nimport torch\n\nexp = rg.op(torch.exp, torch.exp, dict(x=rg.tensor("N")))\n'


def _git(*words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed repository with a right op, its spec and a spec of something else."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(tmp_path)])))
    for name, text in {"lib/__init__.py": "", "lib/ops.py": OPS.replace("FACTOR", "2")}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "square.py").write_text(SPEC)
    (tmp_path / "specs" / "other.py").write_text(OTHER)
    _git("init", "-q")
    _git("add", "-A")
    _git("commit", "-qm", "healthy")
    return tmp_path


def _action(command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The step of action.yml that runs the command, as a runner executes it."""
    yaml = pytest.importorskip("yaml", reason="of the group docs, which `make setup` installs")
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    [step] = [step for step in action["runs"]["steps"] if step.get("id") == "check"]
    inputs = {name: str(given.get("default", "")) for name, given in action["inputs"].items()} | {"command": command}
    env = dict(step["env"])
    for name, value in inputs.items():
        env = {key: text.replace(f"${{{{ inputs.{name} }}}}", value) for key, text in env.items()}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "GITHUB_ACTION_PATH": str(ROOT), **env, **more}
    return subprocess.run(["bash", "-eo", "pipefail", "-c", step["run"]], env=env, capture_output=True, text=True)


def _hook(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    """A hook of .pre-commit-hooks.yaml, started as pre-commit does: the words of its entry, then of `args`."""
    yaml = pytest.importorskip("yaml", reason="of the group docs, which `make setup` installs")
    hooks = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    bin = _commands()
    env = {**os.environ, "PATH": os.pathsep.join([str(bin), os.environ["PATH"]])}
    words = [*shlex.split(hooks[name]["entry"]), *(args or hooks[name].get("args", ()))]
    return subprocess.run(words, env=env, capture_output=True, text=True)


def _commands() -> Path:
    """A folder with `retrograd` as its installation makes it, for this interpreter."""
    folder = Path("bin").resolve()
    folder.mkdir(exist_ok=True)
    command = folder / "retrograd"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m retrograd "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.mark.dealt(2)
def test_changed_ops_are_verified_and_others_are_not(repository: Path) -> None:
    assert "0 ops changed since HEAD" in _hook("retrograd-verify").stdout

    (repository / "lib" / "ops.py").write_text(OPS.replace("FACTOR", "2") + "# a note\n")
    healthy = _hook("retrograd-verify")
    assert healthy.returncode == 0, healthy.stderr
    assert healthy.stdout.endswith("proved     specs/square.py:square\n1 op changed since HEAD\n")

    (repository / "lib" / "ops.py").write_text(OPS.replace("FACTOR", "3"))
    broken = _hook("retrograd-verify")
    assert broken.returncode == 1
    assert broken.stdout.endswith("finding    specs/square.py:square\n1 op changed since HEAD\n")

    _git("commit", "-qam", "broken")
    assert _hook("retrograd-verify").returncode == 0
    assert _hook("retrograd-verify", "specs", "--since", "HEAD~1").returncode == 1


def test_the_action_annotates_the_line_and_writes_sarif_and_a_badge(repository: Path) -> None:
    (repository / "lib" / "ops.py").write_text(OPS.replace("FACTOR", "3"))
    output = repository / "output.txt"
    done = _action("ci specs --level 'quick'", GITHUB_OUTPUT=str(output))
    assert done.returncode == 1, done.stderr
    line = 1 + OPS.splitlines().index("class Square(torch.autograd.Function):")
    assert f"::error file=lib/ops.py,line={line},title=specs/square.py%3Asquare%3A " in done.stdout
    assert "::notice title=retrograd verify specs/other.py%3Aexp::PROVED" in done.stdout
    assert output.read_text() == "exit-code=1\n"
    [run] = json.loads((repository / "retrograd.sarif").read_text())["runs"]
    places = {r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in run["results"]}
    assert places == {"lib/ops.py"}
    badge = Xml.parse(repository / "retrograd.svg").getroot()
    assert badge.get("aria-label") == "retrograd: finding"


@pytest.mark.dealt(2)
def test_the_action_on_what_is_right_and_with_a_baseline(repository: Path) -> None:
    done = _action("ci specs/s*.py")
    assert done.returncode == 0, done.stderr
    assert json.loads((repository / "retrograd.sarif").read_text())["runs"][0]["results"] == []
    assert Xml.parse(repository / "retrograd.svg").getroot().get("aria-label") == "retrograd: proved"

    (repository / "lib" / "ops.py").write_text(OPS.replace("FACTOR", "3"))
    accepted = '[[accepted]]\ntarget = "specs/square.py:square"\nclass = "{}"\nreason = "known"\n'
    _action("ci specs/square.py")
    found = {r["ruleId"] for r in json.loads((repository / "retrograd.sarif").read_text())["runs"][0]["results"]}
    (repository / "retrograd-baseline.toml").write_text("\n".join(map(accepted.format, sorted(found))))
    done = _action("ci specs/square.py")
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = json.loads((repository / "retrograd.sarif").read_text())["runs"]
    assert {r["ruleId"] for r in run["results"]} == found
    assert all(r["suppressions"] == [{"kind": "external", "justification": "known"}] for r in run["results"])


def test_the_action_executes_nothing_that_stands_in_the_command(repository: Path) -> None:
    done = _action("ci specs/other.py; touch owned $(touch owned)")
    assert done.returncode == 2
    assert not (repository / "owned").exists()


def test_graphs_are_held_to_their_lock_file(repository: Path) -> None:
    (repository / "dumps").mkdir()
    step = repository / "dumps" / "step.hlo.txt.gz"
    shutil.copy(DUMPS / "base_step1.hlo.txt.gz", step)
    assert CliRunner().invoke(main, ["graph", "lock", str(step)]).exit_code == 0
    assert _hook("retrograd-graph", "dumps/*.gz").returncode == 0
    assert _action("graph check dumps/*.gz").returncode == 0

    shutil.copy(DUMPS / "stray_step2.hlo.txt.gz", step)
    hook = _hook("retrograd-graph", "dumps/*.gz")
    assert hook.returncode == 1
    assert "changed  step.hlo.txt.gz" in hook.stdout
    done = _action("graph check dumps/*.gz")
    assert done.returncode == 1, done.stderr
    assert "::error file=fsdp_run.py,line=79," in done.stdout
    results = json.loads((repository / "retrograd.sarif").read_text())["runs"][0]["results"]
    assert {result["ruleId"].split("/")[0] for result in results} == {"graph"}


def test_a_kernel_is_held_to_limits(repository: Path) -> None:
    arguments, constants, load = (
        {"x_ptr": "*fp32"},
        {"BLOCK": 64},
        Access("load", 8, "sync", 4, "kernels.py:12", ("x_ptr",)),
    )
    facts = Facts("k", "sm_90", arguments, constants, ("x_ptr",), 4, 3, 40, 0, 1024, False, 0, (load,))
    (repository / "k.json").write_text(
        Codegen("k", ("sm_90",), (Kernel("k", "sm_90", "kernels.py:10", facts=facts),)).to_json()
    )
    assert _hook("retrograd-codegen", "k.json", "--no-spills").returncode == 0
    broken = _hook("retrograd-codegen", "k.json", "--min-load-bytes", "16")
    assert broken.returncode == 1
    assert "limit: k for sm_90 loads 8 bytes a thread at kernels.py:12" in broken.stdout
    done = _action("codegen k.json --min-load-bytes 16")
    assert done.returncode == 1, done.stderr
    [result] = json.loads((repository / "retrograd.sarif").read_text())["runs"][0]["results"]
    assert (result["ruleId"], result["level"]) == ("codegen/limit", "error")
    assert result["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "kernels.py"}


def test_a_folder_without_specs_is_no_success(repository: Path) -> None:
    (repository / "empty").mkdir()
    (repository / "empty" / "op.py").write_text("import retrograd\n")
    results = [CliRunner().invoke(main, ["ci", name]) for name in ("empty", "lib", "nowhere")]
    assert [result.exit_code for result in results] == [2, 2, 2]
    assert "there is no op spec in empty/op.py" in results[0].output
    assert "names retrograd" in results[1].output


def test_a_file_that_cannot_be_imported_fails_and_the_others_are_verified(repository: Path) -> None:
    (repository / "specs" / "bad.py").write_text("import retrograd\nimport no_such_module\n")
    done = _action("ci specs")
    assert done.returncode == 2
    assert "no_such_module" in done.stderr
    assert "PROVED" in done.stdout
