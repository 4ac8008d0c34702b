"""`retrograd fsdp check -- torchrun ...`: jobs of two gloo ranks whose source knows nothing of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")

JOB = Path(__file__).with_name("job.py")


def check(case: str, *options: str) -> tuple[int, str]:
    """Exit code and output."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "retrograd", "fsdp", "check", *options, "--", *torchrun, str(JOB), *case.split()]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MASTER_PORT": "0"}
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)
    return found.returncode, found.stdout + found.stderr if found.returncode > 1 else found.stdout


def test_a_healthy_job_ends_after_its_steps_and_leaves_logs(tmp_path):
    code, text = check("healthy", "--steps", "3", "--json", "--logs", str(tmp_path))
    assert code == 0, text
    found = json.loads(text)
    assert [(rank["rank"], rank["steps"]) for rank in found["ranks"]] == [(0, 3), (1, 3)]
    assert len({rank["hash"] for rank in found["ranks"]}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.json", "rank-1.json"]


@pytest.mark.dealt(3)
@pytest.mark.parametrize(
    ("case", "options", "said"),
    [
        ("swap", (), ["step 2, collective 4: rank 1 reduces blocks.0 where rank 0 reduces blocks.2"]),
        (
            "flag",
            (),
            ["ranks differ before the first update: cuda.matmul.allow_tf32 is False on rank 0, True on rank 1"],
        ),
        ("raise", (), ["rank 1 raised ValueError: bad batch", "rank 1 ended after all-gather of (root)"]),
        ("die", (), ["rank 1 is gone without a word", "rank 0 ended after reduce-scatter of blocks.2"]),
        (
            "die buckets",
            (),
            [
                "rank 1 is gone without a word, killed or aborted, after all-gather of (root) at",
                "rank 0 raised RuntimeError",
                "rank 0 ended after reduce-scatter of (root), blocks.2",
            ],
        ),
        (
            "hang",
            ("--timeout", "600"),
            ["rank 0 is waiting in reduce-scatter of blocks.2, which is due on rank 1", "job.py:"],
        ),
    ],
)
def test_what_goes_wrong_is_named(case, options, said):
    code, text = check(case, *options)
    assert code == 1, text
    for sentence in said:
        assert sentence in text


def test_a_program_that_cannot_be_started():
    command = [sys.executable, "-m", "retrograd", "fsdp", "check", "--", "no-such-program"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (found.returncode, "'no-such-program' cannot be started" in found.stderr) == (2, True)


def test_the_page_names_lines_of_the_job_as_they_are():
    page = (Path(__file__).parents[2] / "docs" / "fsdp-failures.md").read_text()
    source = [line.strip() for line in JOB.read_text().splitlines()]
    at = {
        (kind, source[int(line) - 1])
        for kind, line in re.findall(r"([\w-]+) of [^;:]* at tests/fsdp/job\.py:(\d+)", page)
    }
    assert at == {("all-gather", "loss = model(x, order).sum()"), ("reduce-scatter", "loss.backward()")}
    hanging = {source[int(line) - 1] for line in re.findall(r"(?<![/_])job\.py:(\d+)", page)}
    assert hanging == {"time.sleep(600)", "loss.backward()"}
