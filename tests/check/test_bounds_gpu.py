"""The bounds stage where kernels are compiled: what guard bands see on a GPU, and what compute-sanitizer adds."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import retrograd as rg

_PATH = Path(__file__).resolve().parent.parent / "mutants" / "triton_bounds.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels are compiled for a CUDA device"),
]


@triton.jit
def next_kernel(x_ptr, dy_ptr, dx_ptr, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < total, other=0.0)
    right = tl.load(x_ptr + at + 1, mask=at < total, other=0.0)  # the last element has none
    dy = tl.load(dy_ptr + at, mask=at < total, other=0.0)
    tl.store(dx_ptr + at, 2 * x * dy + 0.0 * right, mask=at < total)


@pytest.fixture(scope="module")
def ops():
    spec = importlib.util.spec_from_file_location("triton_bounds_gpu", _PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bounds(spec):
    report = rg.verify(spec, level="quick", only=["bounds"], device="cuda")
    return {f.kind for f in report.findings}


def command(folder, name, *args):
    """The report of `retrograd verify` on an op of triton_bounds.py, as data."""
    target = folder / "target.py"
    target.write_text(
        f"import sys; sys.path.insert(0, {str(_PATH.parent)!r})\n"
        "import triton_bounds\n"
        f"op = (triton_bounds.MUTANTS | triton_bounds.WILD | triton_bounds.HEALTHY)[{name!r}]\n"
    )
    words = [sys.executable, "-m", "retrograd", "verify", f"{target}:op", "--device", "cuda", "--level", "quick"]
    words += ["-q", "--format", "json", *args]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_a_kernel_that_loses_the_gpu_is_told_as_that_in_each_stage(tmp_path):
    report = command(tmp_path, "OB09", "--only", "contract,mutation,algebra,oracle")
    assert {s["id"]: s["status"] for s in report["stages"]} == dict.fromkeys(
        ("contract", "mutation", "algebra"), "failed"
    )
    assert {f["kind"] for s in report["stages"] for f in s["findings"]} == {"crash"}
    assert "illegal memory access" in report["stages"][0]["findings"][0]["what"]
    assert any("three in a row" in note for note in report["notes"])


def test_what_a_lost_gpu_makes_meaningless_is_not_tried(tmp_path):
    report = command(tmp_path, "OB09", "--only", "contract,oracle,shapes,state")
    assert [s["status"] for s in report["stages"]] == ["failed", "failed", "skipped", "skipped"]
    assert all("failed already" in s["reason"] for s in report["stages"][2:])


def test_a_store_beyond_a_tensor_is_found_and_a_masked_one_is_not(ops):
    assert bounds(ops.OB06) == {"write"}
    assert bounds(ops.HEALTHY["masked"]) == set()


def test_a_read_beyond_a_tensor_is_found(ops):
    assert bounds(ops.mutant("next", next_kernel)) == {"read"}


@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer is not on PATH")
@pytest.mark.parametrize(("name", "faults"), [("OB05", True), ("OB07", True), ("masked", False)])
def test_memcheck_sees_accesses_whose_value_is_thrown_away(name, faults, tmp_path):
    report = command(tmp_path, name, "--only", "contract,bounds", "--memcheck")
    (stage,) = (s for s in report["stages"] if s["id"] == "bounds")
    kinds = {f["kind"] for f in stage["findings"]}
    if not faults:
        assert kinds == set()
        assert "memcheck: no fault" in stage["notes"]
        return
    assert kinds == {"memcheck"}, stage["notes"]
    assert "kernel" in stage["findings"][0]["what"]
