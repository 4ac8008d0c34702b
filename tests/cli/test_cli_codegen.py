"""`retrograd codegen` as a person calls it: on saved records, once on a kernel, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from retrograd.cli import main
from retrograd.codegen.access import Access
from retrograd.codegen.schema import Codegen, Facts, Hazard, Kernel
from retrograd.report import load

SPECIMENS = Path(__file__).resolve().parents[1] / "codegen" / "specimens.py"
FACTS = Facts(
    "norm_kernel", "sm_90", {"x_ptr": "*bf16", "N": "i32"}, {"BLOCK": 1024}, ("x_ptr",), 4, 3, 40, 0, 1024, False, 0,
    (Access("load", 16, "sync", 4, "norm.py:12", ("x_ptr",)),),
)  # fmt: skip
HAZARD = Hazard("float_atomics", "adds f32 atomically", "write partial sums", "norm.py:30")


@pytest.fixture
def saved(tmp_path):
    def save(name: str, hazards: tuple[Hazard, ...] = (), **changes: object) -> str:
        kernels = tuple(
            Kernel(
                "norm_kernel", arch, "kernels/norm.py:10", facts=replace(FACTS, target=arch, **changes), hazards=hazards
            )
            for arch in ("sm_90", "gfx942")
        )
        path = tmp_path / name
        path.write_text(Codegen("norm.py:launch", ("sm_90", "gfx942"), kernels).to_json())
        return str(path)

    return save


def codegen(*words: str):
    return CliRunner().invoke(main, ["codegen", *words])


def test_table_of_a_saved_record(saved):
    found = codegen(saved("a.json"))
    assert found.exit_code == 0, found.output
    lines = [line.split() for line in found.stdout.splitlines()]
    assert ["sm_90", "gfx942"] in lines
    assert ["registers", "40", "40"] in lines
    assert "global loads   4 x 16 B" in found.stdout
    assert found.stdout.splitlines()[-1] == "1 kernel for 2 architectures, 0 hazards, no limits set"


def test_limits_decide_the_exit_code(saved):
    kept = codegen(saved("a.json"), "--max-registers", "40", "--no-spills", "--no-hazards")
    assert kept.exit_code == 0
    assert "all limits kept" in kept.stdout
    broken = codegen(saved("a.json"), "--max-registers", "39")
    assert broken.exit_code == 1
    assert "limit: norm_kernel for sm_90, gfx942 uses 40 registers, at most 39 are allowed" in broken.stdout
    assert "1 violation" in broken.stdout


def test_one_architecture(saved):
    found = codegen(saved("a.json"), "--arch", "gfx942", "--json")
    assert [k["target"] for k in json.loads(found.stdout)["kernels"]] == ["gfx942"]


def test_comparison(saved):
    new, old = saved("new.json", registers=80), saved("old.json")
    found = codegen(new, "--against", old)
    assert found.exit_code == 0
    assert f"against {old}: 2 worse, 1 changed" in found.stdout
    assert "worse   norm_kernel: occupancy 75% -> 38% (sm_90)" in found.stdout
    assert "changed norm_kernel: 40 -> 80 registers\n" in found.stdout
    assert codegen(new, "--against", old, "--no-worse").exit_code == 1
    assert codegen(old, "--against", new, "--no-worse").exit_code == 0


def test_annotations(saved):
    found = codegen(
        saved("a.json", hazards=(HAZARD,)), "--max-registers", "39", "--arch", "sm_90", "--format", "github"
    )
    assert found.exit_code == 1
    error, warning, notice = found.stdout.splitlines()
    assert error == (
        "::error file=kernels/norm.py,line=10,title=norm_kernel%3A sm_90::uses 40 registers, at most 39 are allowed"
    )
    assert warning.startswith("::warning file=kernels/norm.py,line=30,title=norm_kernel::adds f32 atomically")
    assert notice.startswith("::notice title=retrograd codegen")


def test_files(saved, tmp_path):
    outputs = [tmp_path / f"out.{suffix}" for suffix in ("json", "html", "txt")]
    args = [word for path in outputs for word in ("-o", str(path))]
    assert codegen(saved("<b>.json", hazards=(HAZARD,)), *args).exit_code == 0
    assert isinstance(load(outputs[0]), Codegen)
    page = outputs[1].read_text()
    assert "adds f32 atomically" in page
    assert "4 x 16 B" in page
    assert "<b>.json" not in page  # names are escaped
    assert "http" not in page.replace("http-equiv", "")
    assert "4 x global load 16 B  norm.py:12 (x_ptr)" in outputs[2].read_text()
    again = CliRunner().invoke(main, ["report", str(outputs[0])])
    assert "norm_kernel" in again.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("x.json", "--no-worse"), "add --against"),
        (("x.json", "--narrow", "a"), "add --min-load-bytes"),
        (("x.json", "--arch", "sm_70"), "`--arch` has 'sm_70', expected some of sm_80, sm_90"),
        (("x.json", "-j", "0"), "`--jobs` is 0"),
        (("x.json", "--run", "--arch", "sm_90"), "a run has the architecture of its GPU"),
        (("nowhere.json",), "cannot read 'nowhere.json'"),
        (("x.json", "-o", "x.xml"), "only `verify` has JUnit XML"),
    ],
    ids=["no-worse", "narrow", "arch", "jobs", "run", "file", "xml"],
)
def test_wrong_usage(words, said):
    found = codegen(*words)
    assert found.exit_code == 2
    assert said in found.stderr


def test_interpreter_is_told_with_the_mend(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = codegen("rms_norm")
    assert found.exit_code == 2
    assert "env -u TRITON_INTERPRET retrograd codegen" in found.stderr


def test_another_record_is_refused(tmp_path):
    from retrograd.graph.schema import Unique

    path = tmp_path / "unique.json"
    path.write_text(Unique((), (), ()).to_json())
    found = codegen(str(path))
    assert found.exit_code == 2
    assert "is another kind of record" in found.stderr


def test_a_function_that_launches(tmp_path):
    """The whole way, in a process of its own, which must not be asked to interpret."""
    pytest.importorskip("triton")
    out = tmp_path / "tuned.json"
    words = ["codegen", f"{SPECIMENS}:tuned", "--arch", "sm_90", "--no-float-atomics", "-o", str(out), "-j", "1"]
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CI")}
    done = subprocess.run([sys.executable, "-m", "retrograd", *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 1, done.stderr
    assert "2 of 2: tuned_kernel for sm_90" in done.stderr
    assert "limit: tuned_kernel for sm_90 adds floating numbers atomically at specimens.py:" in done.stdout
    assert [k.name for k in load(out).kernels] == ["tuned_kernel"] * 2


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("tuned_kernel", [], "give its arguments: --signature 'x_ptr=..., out_ptr=..., N=...'"),
        ("tuned", ["--signature", "x=1"], "`--signature` is given"),
        ("tuned", ["--dtype", "bf16"], "`--dtype` is given"),
        ("made", [], None),
        ("tunde", [], "did you mean 'tuned'"),
        ("fails", [], "ValueError: no such weather"),
        ("F32", [], "is dtype, expected a kernel"),
    ],
    ids=["kernel", "signature", "dtype", "arguments", "name", "raises", "kind"],
)
def test_targets_that_do_not_fit(target, options, said, targets_said):
    assert (said or "launches no Triton kernel") in targets_said[target, tuple(options)]


@pytest.fixture(scope="module")
def targets_said():
    """What is said of wrong targets, in one process that compiles nothing."""
    pytest.importorskip("triton")
    cases = [("tuned_kernel", []), ("tuned", ["--signature", "x=1"]), ("tuned", ["--dtype", "bf16"]), ("made", []),
             ("tunde", []), ("fails", []), ("F32", []), ("tuned", ["--profile"])]  # fmt: skip
    code = (
        "import json, sys\nfrom click.testing import CliRunner\nfrom retrograd.cli import main\n"
        "cases = json.loads(sys.argv[2])\n"
        "said = [CliRunner().invoke(main, ['codegen', f'{sys.argv[1]}:{t}', *o]) for t, o in cases]\n"
        "print(json.dumps([[one.exit_code, one.stderr] for one in said]))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # as a machine without a GPU, which `--profile` asks for
    words = [sys.executable, "-c", code, str(SPECIMENS), json.dumps(cases)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert {code for code, _ in found} <= {2, 3}
    return {(t, tuple(o)): said for (t, o), (_, said) in zip(cases, found, strict=True)}


def test_profile_without_a_gpu(targets_said):
    assert "`--profile` needs a GPU, and torch sees none here" in targets_said["tuned", ("--profile",)]
