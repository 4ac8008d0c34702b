"""Healthy jobs of every kind of parallelism under `record_collectives`: how many it stops, and what it says of them.

    torchrun --nproc-per-node 4 benchmarks/fsdp_healthy.py                  NCCL where there are GPUs, else gloo
    torchrun --nproc-per-node 2 benchmarks/fsdp_healthy.py --steps 20 --strict --jobs ring experts

The jobs are those of tests/fsdp/parallel_jobs.py: HSDP, TP with FSDP2, checkpoints that a thread saves, pipelines,
rings (on GPUs also torch's context parallelism), experts, unused parameters, a gradient scaler, FSDP1, blocks in any
order. Where each step is to be alike, one that differs from those before it ends the job. Exit code 1 if a job was
stopped, something was said of it, or the hashes of ranks differ, as only under Join they may.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fsdp"))

import parallel_jobs

from retrograd.fsdp import Log

NEED_FOUR = ("hybrid_sharded", "tensor_parallel", "pipeline_of_ddp", "any_order_hybrid")
EXPECTED = ("step ", "further steps differ")  # of blocks in any order: that a step is another one


def row(job: str, steps: int, strict: bool, beside: dist.ProcessGroup) -> tuple[list[str], bool]:
    """A line of the table, and whether all is well."""
    began = time.perf_counter()
    changing = job in parallel_jobs.CHANGING
    mine = parallel_jobs.record(job, steps, {"on_change": "record" if changing else "raise", "strict": strict})
    seconds, answers = time.perf_counter() - began, [None] * dist.get_world_size()
    dist.all_gather_object(answers, mine, group=beside)
    errors = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if answer["error"]]
    said = [text for answer in answers for text in answer["problems"] if not (changing and text.startswith(EXPECTED))]
    hashes, log = {answer["hash"] for answer in answers}, Log.from_json(mine["log"])
    # FSDP2's root and an optimizer may issue nothing more after the last step: it is closed when recording ends.
    number = sum(len(log.patterns[step.pattern].entries) for step in log.steps if step.pattern >= 0)
    cells = [job, str(log.total), f"{number / max(1, log.total):.1f}", str(len(errors)), str(len(said))]
    good = not errors and not said and (len(hashes) == 1 or job in parallel_jobs.UNEVEN)
    return [*cells, str(len(hashes)), f"{seconds:.1f}", " / ".join([*errors, *said][:2])], good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--strict", action="store_true", help="ranks are compared before each collective")
    parser.add_argument("--jobs", nargs="+", help="by default all that this number of ranks allows")
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpu else "gloo")
    beside, ranks = dist.new_group(backend="gloo"), dist.get_world_size()
    every = parallel_jobs.JOBS | parallel_jobs.UNEVEN | parallel_jobs.CHANGING | (parallel_jobs.ON_GPUS if gpu else {})
    every = [job for job in every if ranks >= 4 or job not in NEED_FOUR]
    if dist.get_rank() == 0:
        where = f"NCCL, {torch.cuda.get_device_name()}" if gpu else "gloo"
        print(f"{ranks} ranks, {where}, torch {torch.__version__}{', strict' if args.strict else ''}\n")
        print("| job | steps | collectives a step | stopped ranks | other words | hashes | s | |\n|" + " --- |" * 8)
    well = True
    for job in args.jobs or every:
        cells, good = row(job, args.steps, args.strict, beside)
        well &= good
        if dist.get_rank() == 0:
            print(f"| {' | '.join(cells)} |", flush=True)
    dist.destroy_process_group()
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
