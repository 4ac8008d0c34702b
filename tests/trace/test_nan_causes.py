"""Forty planted causes of NaN on one process, under DDP and under FSDP2: operator, line, reason, rank and step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nan_causes
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from retrograd.cli import main
from retrograd.trace import provenance, record, save
from retrograd.trace.rank_provenance import rank_provenance
from retrograd.trace.schema import Op, Stats, Trace

# poison: NaN in all memory that nobody has written. One process every day; with --rotate one of the rest, 30 s each.
WAYS = ("single", *(pytest.param(way, marks=pytest.mark.dealt(3)) for way in ("ddp", "fsdp", "fsdp poison")))
SCALED = "real_one_beside_loss_scaling"


def python_record():
    return record(engine="python")


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")
@pytest.mark.parametrize("way", WAYS)
def test_every_planted_cause_is_told(way):
    command = [sys.executable, nan_causes.__file__, *way.split()]
    # FSDP computes on the accelerator that it sees; these steps are on the CPU.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280, env=environment)
    answers = json.loads(done.stdout)
    assert len(answers) == 40
    assert {name: answer for name, answer in answers.items() if not all(answer["right"].values())} == {}


@pytest.mark.dealt(2)
@pytest.mark.parametrize("name", ["nan_fresh", "nan_unseen"])
def test_every_further_cause_is_told(name):
    script = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    done = subprocess.run([sys.executable, script, "single"], capture_output=True, text=True, check=True, timeout=280)
    assert done.stdout == "{}\n40 of 40 right\n"


def test_the_last_causes_are_told_and_healthy_steps_are_left_alone():
    script = Path(__file__).parents[2] / "benchmarks" / "nan_last.py"
    done = subprocess.run([sys.executable, script, "single"], capture_output=True, text=True, check=True, timeout=280)
    assert done.stdout == "{}\n30 of 30 right\n{}\n10 of 10 healthy\n"


def test_without_a_cause_there_is_none():
    for name in ("log_of_zero", "adam_without_eps"):
        recorder = nan_causes.train(name, nan_causes.Net(), False, python_record)
        assert provenance(recorder.trace).found == ""


def test_an_overflow_that_the_scaler_skips_is_a_note_and_a_step_of_its_own():
    torch.manual_seed(0)
    recorder = nan_causes.train(SCALED, nan_causes.Net(), False, python_record)
    answer = provenance(recorder.trace, births=True)
    assert (answer.found, answer.exit_code, recorder.steps, answer.steps) == ("", 0, 3, 3)
    assert any("GradScaler skipped" in note and "at scale 1.07374e+09" in note for note in answer.notes)
    assert answer.births
    assert all(birth.scaled for birth in answer.births)


def test_a_real_one_in_a_later_step_is_asked_for():
    torch.manual_seed(0)
    trace = nan_causes.train("log_of_zero", nan_causes.Net(), True, python_record).trace
    assert provenance(trace, step=0).found == ""
    assert provenance(trace, step=1).op.place.endswith(f":{nan_causes.CAUSES['log_of_zero'].line}")
    assert provenance(trace, begin=2).found == "nan"


def _tensor(number: int, nan: int, storage: int = -1) -> Stats:
    return Stats(number, (4,), "float32", "cpu", 0.0, 1.0, 1.0, nan, 0, 0, 0, None, storage)


def _trace(rank: int, given: int, received: int) -> Trace:
    """An all-reduce to which this rank gave so many NaN, and what reads the result."""
    ops = [
        Op(0, 0, "backward", "c10d::allreduce_", "head", "", "", "", "", (_tensor(0, given),), (_tensor(1, received),)),
        Op(1, 0, "other", "aten.mul.Tensor", "", "", "", "", "", (_tensor(1, received),), (_tensor(2, received),)),
    ]
    return Trace(ops, rank=rank, meta={"ranks": "2"})


def test_one_rank_says_that_another_gave_it_and_both_say_who():
    alone = provenance(_trace(0, 0, 4))
    assert (alone.origin, alone.op.name) == ("received", "c10d::allreduce_")
    both = rank_provenance([_trace(0, 0, 4), _trace(1, 4, 4)])
    assert (both.rank, both.origin, both.ranks) == (1, "outside", (0, 1))
    assert "rank 0 received it in step 0 by c10d::allreduce_ in module head" in both.notes
    nobody = rank_provenance([_trace(0, 0, 4), _trace(1, 0, 4)])
    assert (nobody.origin, "the sum over ranks is larger" in nobody.reason) == ("made", True)
    one_of_two = rank_provenance([_trace(0, 0, 4)])
    assert any("1 of 2 ranks were read" in note for note in one_of_two.notes)


def test_the_command_takes_the_files_of_all_ranks(tmp_path):
    files = [str(tmp_path / f"run.rank{rank}.trace") for rank in (0, 1)]
    for rank, file in enumerate(files):
        save(_trace(rank, 4 * rank, 4), file)
    answer = CliRunner().invoke(main, ["trace", "nan", *files, "--all"])
    assert answer.exit_code == 1
    assert answer.output.startswith("NaN in step 0 on rank 1")
    assert CliRunner().invoke(main, ["trace", "nan", files[0], files[0]]).exit_code == 2
    assert CliRunner().invoke(main, ["trace", "nan", *files, "--step", "3"]).exit_code == 0


@pytest.mark.parametrize(("rank", "code"), [({}, 1), ({"RANK": "0", "WORLD_SIZE": "2"}, 0)])
def test_a_rank_of_a_job_that_found_one_does_not_end_the_others(tmp_path, rank, code):
    program = tmp_path / "program.py"
    program.write_text("import torch\ntorch.zeros(2).log() - torch.zeros(2).log()\n")
    command = ["trace", "record", "--nan", "--engine", "python", "-o", str(tmp_path / "run.trace"), "--", str(program)]
    environment = dict(os.environ) | rank
    done = subprocess.run(
        [sys.executable, "-m", "retrograd", *command], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "aten.log.default" in done.stdout) == (code, True), done.stderr
    assert len(list(Path(tmp_path).glob("*.trace"))) == 1
