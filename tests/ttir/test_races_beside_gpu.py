"""Where an op is verified on a GPU, races of its kernels are looked for on the CPU, at no extra request."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_races import in_a_process

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def rows() -> dict[str, list]:
    """What the stage says of each op."""
    pytest.importorskip("triton")
    return {name: rest for name, *rest in in_a_process(HERE / "races_beside_gpu.py")}


def test_a_race_is_found(rows):
    kinds, power, _, undecided = rows["racy"]
    assert kinds == ["race"]
    assert power == "every access of column_sums_kernel, in 2 orders of its programs"
    assert undecided == []


def test_atomics_are_left_alone(rows):
    assert rows["atomic"] == [[], "every access of column_sums_kernel, in 2 orders of its programs", [], []]


def test_without_a_kernel_there_is_nothing_to_race(rows):
    assert rows["no kernel"] == [[], "the op launches no Triton kernel", [], []]


def test_what_only_a_gpu_runs_is_a_note_and_no_finding(rows):
    kinds, power, (note,), undecided = rows["needs a GPU"]
    assert (kinds, power, undecided) == ([], "no Triton kernel was executed on the CPU", [])
    assert "no CUDA-capable device" in note


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="verifies on a CUDA device")
def test_on_a_real_gpu_both_are_told():
    from races_beside_gpu import OPS

    import retrograd as rg

    for name, wanted in (("racy", {"race"}), ("atomic", set())):
        spec = rg.op(OPS[name], lambda x: x.sum(0), dict(x=rg.tensor("M", "N")), name=name)
        stage = rg.verify(spec, level="quick", device="cuda", only=["races"]).stage("races")
        assert {finding.kind for finding in stage.findings} == wanted
        assert "column_sums_kernel" in stage.power_text
