"""Mutants on a machine with a GPU: the command hides it from itself, and a process that has seen it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from norm_op import spec

import retrograd as rg
from retrograd import config
from retrograd.errors import UsageError


def test_the_command_works_beside_a_gpu():
    command = [sys.executable, "-m", "retrograd", "mutate", "norm_op.py:spec", "-n", "4", "--json", "-q"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    assert "differs" in {result["fate"] for result in json.loads(done.stdout)["results"]}


def test_a_process_that_sees_a_gpu_refuses(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES"):
        rg.mutate(spec)


def test_processes_that_are_started_see_what_is_hidden():
    script = """
import os
from retrograd import config
config.hide_gpus()
print(os.environ["CUDA_VISIBLE_DEVICES"], config.child_environment({})["CUDA_VISIBLE_DEVICES"], sep="|")
"""
    environment = config.child_environment({"CUDA_VISIBLE_DEVICES": "3"})
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "|3"
