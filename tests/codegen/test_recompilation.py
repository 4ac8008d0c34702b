"""How many kernels a training run with rows of many lengths compiles: counted, nothing is executed."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from gate_process import run

COUNT = """
import json, sys, torch
from retrograd import codegen
from retrograd.runtime.triton import planned_gpu
from retrograd.ops.norm.arguments import BackwardTensors, NormTensors, WantedGrads, WantedOutput
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.norm.triton import norm_bwd, norm_fwd

n, spec = int(sys.argv[1]), NormSpec(True, 1e-5)
vector, half = torch.empty(n, dtype=torch.bfloat16), torch.bfloat16
with planned_gpu.planning(codegen.target_named("sm_90")), codegen.recording("sm_90") as launches:
    for rows in [*range(1, 41), *(2**k + 1 for k in range(6, 16))]:
        x = torch.empty(rows, n, dtype=half)
        y = norm_fwd(NormTensors(x=x, weight=vector, bias=vector), spec, WantedOutput(out_dtype=half, s_dtype=half)).y
        mean, rstd = torch.empty(rows), torch.empty(rows)
        saved = BackwardTensors(grad_out=y, s=x, weight=vector, mean=mean, rstd=rstd)
        norm_bwd(saved, spec, WantedGrads(x=half, weight=half, bias=half))
print(json.dumps([made.kernel for made in codegen.distinct(launches)]))
"""


# A tile of rows, slices of a row, and a row walked in pieces (an odd width).
@pytest.mark.parametrize("n", [1024, 2048, 65536, 33333], ids=lambda n: f"N{n}")
def test_fifty_numbers_of_rows_compile_each_kernel_once(n: int) -> None:
    pytest.importorskip("triton")
    kernels = Counter(json.loads(run("-c", COUNT, str(n))))
    # The finalizer's tile follows the number of parts, a power of two from 16 to 512.
    assert kernels.pop("norm_bwd_kernel_finalize") <= 6
    if n <= 2048:  # a kernel each for 8, 16, 32 and 64 of few rows at a time
        assert kernels.pop("norm_bwd_kernel_few") == 4
    if n == 2048:  # few of these rows are read and written under another cache policy than many
        assert kernels.pop("norm_fwd_kernel") == 2
    assert kernels
    assert set(kernels.values()) == {1}, kernels
