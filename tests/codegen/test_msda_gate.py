"""The machine code of every kernel that deformable attention's launch plan chooses, for five GPUs, without any of them.

About two minutes on two cores where Triton's cache is cold, so that one target a day is compiled
(`--rotate`). `benchmarks/codegen_msda.py --full` covers every mode, dtype and number of channels.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from retrograd.codegen import targets

ROOT = Path(__file__).resolve().parents[2]

TARGETS = [pytest.param(name, marks=pytest.mark.dealt(5)) for name in targets()]


@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_has_a_fault(msda_gate, target):
    kernels = [row for row in msda_gate["kernels"] if row["facts"]["target"] == target]
    faults = [f"{row['case']}: {fault}" for row in kernels for fault in row["faults"]]
    assert not faults, f"{len(faults)} faults in {len(kernels)} kernels\n" + "\n".join(faults)


@pytest.mark.parametrize("target", TARGETS)
def test_gate_covers_the_kernels(msda_gate, target):
    rows = [row for row in msda_gate["kernels"] if row["facts"]["target"] == target]
    sources = (ROOT / "src/retrograd/ops/msda/triton").glob("*.py")
    written = {
        name for source in sources for name in re.findall(r"^def (msda_\w*kernel\w*)\(", source.read_text(), re.M)
    }
    if not target.startswith("sm_"):
        written.remove("msda_fwd_kernel_few")  # plans ask for it on NVIDIA alone
    assert {row["facts"]["kernel"] for row in rows} == written
    channels = {row["facts"]["constants"].get("C") for row in rows}
    assert channels >= {16, 32, 64, 128}
    # All but those that touch no pixel.
    indices = {str(c["INDEX"]) for c in (row["facts"]["constants"] for row in rows) if "INDEX" in c}
    assert len(indices) == 2


@pytest.mark.parametrize("target", TARGETS)
def test_additions_are_vectors_from_hopper_on(msda_gate, target):
    """Four corners of four numbers each, for every run of points."""
    found = [
        row["facts"]
        for row in msda_gate["kernels"]
        if row["facts"]["target"] == target
        and row["case"] == "C32-f32-zeros"
        and "grad_out_ptr" in row["facts"]["arguments"]
    ]
    adds = [sum(a["count"] for a in facts["accesses"] if a["op"] == "atomic") for facts in found]
    kinds = {a["kind"] for facts in found for a in facts["accesses"] if a["op"] == "atomic"}
    if targets()[target].nvidia and targets()[target].arch >= 90:
        assert kinds == {"add.f32x4"}
        assert max(adds) == 2 * 4
    else:
        assert "add.f32x4" not in kinds
