"""Programs and faults of benchmarks/fsdp_programs.py: nothing is said of the healthy ones, rank and line of the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.dealt(3)
@pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")
def test_nothing_is_said_of_healthy_programs_and_faults_are_told():
    command = [sys.executable, str(BENCHMARKS / "fsdp_programs.py")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280, env=environment)
    assert "\n13 of 13\n" in done.stdout, done.stdout
    assert "\n14 of 14\n" in done.stdout, done.stdout
