"""The machine code of the kernel that measures tensors, for one GPU without it: seconds on one core."""

from __future__ import annotations

import re

import pytest
from gate_process import SUMMARY, run


@pytest.mark.dealt(2)
def test_no_kernel_has_a_fault():
    pytest.importorskip("triton")
    text = run("benchmarks/codegen_trace.py", "sm_90", codes=(0,))
    SUMMARY.append("statistics of tensors, " + next(line for line in text.splitlines() if " kernels for " in line))
    row = next(line for line in text.splitlines() if line.startswith("sm_90 torch.float32"))
    assert re.search(r"loads \{16: \d+\}", row)  # all of 16 bytes
