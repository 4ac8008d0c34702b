"""Real Triton backward kernels of RMSNorm that are broken on purpose."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import triton
import triton.language as tl

from retrograd.check.spec import OpSpec, op, tensor


def _load_example():
    # By path: the examples are files for readers, not a package.
    path = Path(__file__).resolve().parents[2] / "examples" / "broken_rms_norm.py"
    found = importlib.util.spec_from_file_location("broken_rms_norm", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


example = _load_example()


@triton.jit
def padded_mean_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    block = tl.program_id(0)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    places = rows.to(tl.int64)[:, None] * N + cols[None, :]
    dy = tl.load(dy_ptr + places, mask=inside, other=0.0)
    x = tl.load(x_ptr + places, mask=inside, other=0.0)
    w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)[None, :]
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
    xhat = x * rstd
    g = dy * w
    c = tl.sum(g * xhat, axis=1)[:, None] / BLOCK_N  # the bug: the row has N values, the block is padded
    tl.store(dx_ptr + places, rstd * (g - xhat * c), mask=inside)
    tl.store(dw_ptr + block * N + cols, tl.sum(dy * xhat, axis=0), mask=cols < N)


def mutant(name, kernel) -> OpSpec:
    return op(
        example.make_rms_norm(kernel),
        example.reference,
        dict(x=tensor("M...", "N"), weight=tensor("N")),
        params=dict(eps=[1e-6, 1e-2]),
        name=name,
    )


# dx forgets the weight, which a test with a weight of ones cannot see (karpathy/llm.c#763).
TR01 = mutant("TR01", example.rms_norm_backward_kernel)

# The row mean is divided by the padded block size (class of missing tail masks).
TR04 = mutant("TR04", padded_mean_kernel)

MUTANTS = {"TR01": TR01, "TR04": TR04}
