"""The machine code of every kernel that the norms' launch plan chooses, for five GPUs, without any of them.

About three minutes on two cores where Triton's cache is cold, so that one target a day is compiled
(`--rotate`). `benchmarks/codegen_norm.py --full` covers every width with every profile.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from retrograd.codegen import targets

ROOT = Path(__file__).resolve().parents[2]

TARGETS = [pytest.param(name, marks=pytest.mark.dealt(5)) for name in targets()]


@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_has_a_fault(gate, target):
    kernels = [row for row in gate["kernels"] if row["facts"]["target"] == target]
    faults = [f"{row['case']}: {fault}" for row in kernels for fault in row["faults"]]
    assert not faults, f"{len(faults)} faults in {len(kernels)} kernels\n" + "\n".join(faults)


@pytest.mark.parametrize("target", TARGETS)
def test_gate_covers_the_kernels(gate, target):
    rows = [row for row in gate["kernels"] if row["facts"]["target"] == target]
    assert len(rows) >= 50
    assert sum(row["aligned"] for row in rows) >= 40
    compiled = {row["facts"]["kernel"] for row in rows}
    sources = (ROOT / "src/retrograd/ops/norm/triton").glob("*.py")
    written = {
        name for source in sources for name in re.findall(r"^def (norm_\w*kernel\w*)\(", source.read_text(), re.M)
    }
    gpu = targets()[target]
    # Rows are shared by programs on NVIDIA only, which launches all of them together.
    expected = {name for name in written if gpu.nvidia or not name.endswith("_slices")}
    if gpu.nvidia and gpu.arch < 89:  # has no float8
        expected = {name for name in expected if "float8" not in name}
    assert compiled >= expected


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_are_launched_early_from_hopper_on(gate, target):
    """But for slices, which are launched together, and what adds up their sums. That they wait first is a fault's part."""
    rows = [row["facts"] for row in gate["kernels"] if row["facts"]["target"] == target]
    early = {facts["kernel"] for facts in rows if facts["pdl"]}
    late = {facts["kernel"] for facts in rows if not facts["pdl"]}
    if targets()[target].nvidia and targets()[target].arch >= 90:
        assert late <= {"norm_bwd_kernel_slices", "norm_bwd_kernel_finalize"} < early | late
        assert {"norm_fwd_kernel", "norm_fwd_kernel_looped", "norm_bwd_kernel", "norm_bwd_kernel_finalize"} <= early
    else:
        assert not early
