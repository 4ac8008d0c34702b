"""Programs as users write them, with a NaN and healthy ones, on one process, under DDP and under FSDP2.

One of the two sets every second day with `--rotate`: they take a minute and a half each. test_nan_causes.py runs every day. Beside
them nan_ordinary.py, nan_further.py and nan_healthy.py of benchmarks, which take a minute more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

PROGRAMS = {
    "nan_programs python": "single: 30 of 30, ddp: 11 of 11, fsdp: 6 of 6, ranks: 1 of 1, "
    "healthy single: 11 of 11, healthy ddp: 3 of 3, healthy fsdp: 2 of 2",
    "nan_loops auto": "single: 20 of 20, fsdp: 5 of 5, ddp: 7 of 7, "
    "healthy single: 11 of 11, healthy ddp: 5 of 5, healthy fsdp: 1 of 1",
}


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")
@pytest.mark.dealt(4)
@pytest.mark.parametrize("run", PROGRAMS)
def test_programs_as_users_write_them_are_told_and_healthy_ones_left_alone(run):
    for library in ("transformers", "lightning"):
        pytest.importorskip(library)
    name, engine = run.split()
    script = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, script, engine], capture_output=True, text=True, check=True, timeout=280, env=environment
    )
    assert done.stdout.endswith(f"{PROGRAMS[run]}\n")
