"""Files of traces whose programs are ended from outside: whole up to there, on each rank of a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from retrograd.trace import load

RECORD = ("-m", "retrograd", "trace", "record", "--engine", "python", "-o")
PROGRAM = """
import os, sys, time, torch
from torch import nn
rank = int(os.environ.get("RANK", "0"))
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
torch.ones(3).exp()  # of a step that does not end
if rank == 1:
    while not os.path.exists("ready"):
        time.sleep(0.02)
    raise ValueError("bad batch")
open("ready", "w").close()
print("ready", flush=True)
while True:
    time.sleep(0.02)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def test_a_program_that_is_terminated_leaves_a_whole_file(program: Path):
    command = [sys.executable, *RECORD, "run.trace", "--", "train.py"]
    with subprocess.Popen(command, cwd=program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 128 + signal.SIGTERM
    trace = load(program / "run.trace")
    assert trace.ops[-1].name == "aten.exp.default"
    assert trace.ops[-1].step == 2
    assert trace.conditions["versions"]["torch"]


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")
def test_a_rank_that_fails_leaves_the_file_of_the_other_whole(program: Path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    command = [*launch, *RECORD, "run.trace", "--", "train.py"]
    done = subprocess.run(
        command, cwd=program, capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 1
    first, second = (load(program / f"run.rank{rank}.trace") for rank in (0, 1))
    assert (first.ops[-1].name, second.ops[-1].name) == ("aten.exp.default", "aten.exp.default")
    assert "ValueError: bad batch" in second.meta["raised"]
