"""Files that ask for their GPU while they are imported, on a machine without: `init`, `verify` and `mutate` of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from retrograd.catalog import load_module, resolve
from retrograd.check.runner import verify
from retrograd.cli import main
from retrograd.errors import SpecError

pytest.importorskip("triton", reason="needs triton, which is for Linux")
pytestmark = [
    pytest.mark.outside,
    pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU"),
]

KERNELS = Path(__file__).with_name("tutorial_kernels.py")
DRIVER = "import triton\nDEVICE = triton.runtime.driver.active.get_active_torch_device()\n"
CATCHES = """
import torch, triton
try:
    DEVICE = triton.runtime.driver.active.get_active_torch_device()
except RuntimeError:
    DEVICE = "none"
def double(x):
    if DEVICE == "none":
        raise RuntimeError("no kernels there")
    return 2 * x
def double_ref(x):
    return 2 * x
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(KERNELS, tmp_path)
    monkeypatch.delitem(sys.modules, "tutorial_kernels", raising=False)  # of another folder
    return tmp_path


def retrograd(*args: str) -> Result:
    return CliRunner().invoke(main, args)


@pytest.mark.parametrize("name", ["softmax", "matmul", "layer_norm"])
def test_kernels_as_in_tutorials_are_described_and_proved(name: str) -> None:
    done = retrograd("init", f"tutorial_kernels.py:{name}", "-o", "op.py")
    assert done.exit_code == 0, done.output
    assert f"reference={name}_ref" in Path("op.py").read_text()
    report = verify(resolve("op.py"), level="quick", only=["contract", "bounds", "races", "oracle", "layouts"])
    assert (report.verdict, report.findings) == ("proved", ())


def test_their_mistakes_are_noticed() -> None:
    text = KERNELS.read_text()
    broken = text.replace("(gw - part * x_hat -", "(gw - x_hat -")
    assert broken != text
    Path("tutorial_kernels.py").write_text(broken)
    assert retrograd("init", "tutorial_kernels.py:layer_norm", "-o", "op.py").exit_code == 0
    report = verify(resolve("op.py"), level="quick", only=["contract", "oracle"])
    assert [(f.stage, f.kind, f.tensor) for f in report.findings] == [("oracle", "wrong-value", "grad x")]


def test_in_pytest_the_place_of_the_spec_is_enough(folder: Path) -> None:
    assert retrograd("init", "tutorial_kernels.py:softmax", "-o", "op.py").exit_code == 0
    mark = """import pytest
@pytest.mark.retrograd("{place}", only=["contract", "bounds"])
def test_softmax(retrograd_stage):
    retrograd_stage.assert_passes()
"""
    for place, outcome in (("op.py:spec", "2 passed"), ("op.py:spce", "did you mean 'spec'")):
        Path("test_op.py").write_text(mark.format(place=place))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(folder),
            "test_op.py",
        ]
        assert outcome in subprocess.run(command, capture_output=True, text=True).stdout


def test_mutants_of_a_kernel_are_made_and_noticed() -> None:
    assert retrograd("init", "tutorial_kernels.py:softmax", "-o", "op.py").exit_code == 0
    # In a process of its own: each mutant is a fork, and torch's threads are here.
    command = [sys.executable, "-m", "retrograd", "mutate", "op.py", "--function", "softmax_kernel", "-n", "2", "-q"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "NOTICED by verify" in done.stdout


def test_a_file_that_would_catch_the_error_is_told_what_its_kernels_run_on() -> None:
    """As fla, which otherwise takes the CPU while it is imported, and fails in each call."""
    Path("catches.py").write_text(CATCHES)
    assert load_module("catches.py", "catches.py").DEVICE != "none"
    assert retrograd("init", "catches.py:double", "-o", "op.py").exit_code == 0
    assert verify(resolve("op.py"), level="quick", only=["contract", "oracle"]).verdict == "proved"


def test_a_file_is_imported_once_more_only_where_it_asks_for_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    Path("breaks.py").write_text("import triton\nprint('imported')\n1 / 0\n")
    with pytest.raises(SpecError, match=r"breaks\.py:3: ZeroDivisionError"):
        load_module("breaks.py", "breaks.py")
    assert capfd.readouterr().out == "imported\n"
    Path("asks.py").write_text(f"{DRIVER}print('imported')\n1 / 0\n")
    with pytest.raises(SpecError, match=r"asks\.py:4: ZeroDivisionError"):
        load_module("asks.py", "asks.py")
    assert capfd.readouterr().out == "imported\n"
    assert not torch.cuda.is_available()


OWN_ERROR = """
import torch
def has_gpu():
    return torch.cuda.is_available() or torch.accelerator.is_available()
print("imported")
if not has_gpu():
    raise NotImplementedError("you need a GPU")
"""


def test_a_file_that_refuses_to_be_imported_without_a_gpu_is_told_of_one(capfd: pytest.CaptureFixture[str]) -> None:
    Path("refuses.py").write_text(OWN_ERROR + "name = torch.cuda.get_device_name()\n")
    assert load_module("refuses.py", "refuses.py").name
    assert capfd.readouterr().out == "imported\n" * 2
    Path("breaks_too.py").write_text(OWN_ERROR.replace("if not has_gpu()", "if has_gpu() < 2"))
    with pytest.raises(SpecError, match=r"breaks_too\.py:7: NotImplementedError: you need"):
        load_module("breaks_too.py", "breaks_too.py")
    assert not torch.cuda.is_available()


def test_where_triton_interprets_no_gpu_is_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    Path("asks.py").write_text(DRIVER)
    with pytest.raises(SpecError, match="active drivers"):
        load_module("asks.py", "asks.py")
