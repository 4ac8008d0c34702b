"""Wrote `formats/torch_trace` (torch 2.13 on a CPU), ranks that part at their second batch:

python dump_torch_trace.py formats/torch_trace
"""

import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

KEPT = ("dynamo_start", "str", "dynamo_output_graph", "aot_joint_graph", "aot_forward_graph", "aot_backward_graph")
KEPT += ("describe_tensor", "describe_source", "compilation_metrics", "bwd_compilation_metrics")
ARTIFACTS = ("recompile_reasons", "dynamo_graph_break_reason", "fx_graph_cache_hit", "fx_graph_cache_miss")
ARTIFACTS += ("aotautograd_cache_hit", "aotautograd_cache_miss", "inductor_collective_schedule")
METRICS = ("compile_id", "co_name", "co_filename", "co_firstlineno", "guard_count", "fail_type", "fail_reason")
METRICS += ("stack_trace", "duration_us", "entire_frame_compile_time_s", "graph_input_count")


def train(rank: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as collectives

    dist.init_process_group("gloo")
    weight = torch.ones(4, 2, requires_grad=True)

    @torch.compile(backend="inductor" if dist.get_world_size() > 2 else "aot_eager")
    def step(x):
        y = x @ weight
        if y.sum() < 0:  # a graph break
            return y
        return collectives.all_reduce(torch.tanh(y), "sum", [0, 1])

    for size in (3, 3, 3 if rank == 0 else 5):
        step(torch.ones(size, 4)).sum().backward()


def strip(file: Path, target: Path) -> None:
    """The messages that are read, without paths of this machine."""
    kept, keep = [], False
    for line in file.read_text().splitlines():
        if head := re.match(r"(V\d{4} )[\d:.]+ +\d+ \S+?([^/\s]+\])( \{.*)", line):
            about = json.loads(head[3])
            name = (about.get("artifact") or {}).get("name")
            keep = name in ARTIFACTS or any(kind in about for kind in KEPT)
            for kind in ("compilation_metrics", "bwd_compilation_metrics"):
                if kind in about:
                    about[kind] = {key: about[kind][key] for key in METRICS}
            line = f"{head[1]}12:00:00.000000 100 torch/{head[2]} {json.dumps(about)}"
        if keep:
            kept.append(re.sub(r"/[^\s\"']*/", "", line))
    target.write_bytes(gzip.compress("\n".join([*kept, ""]).encode(), mtime=0))


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]))
        raise SystemExit
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as raw:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__]
        subprocess.run(command, env={**os.environ, "TORCH_TRACE": raw}, check=False)  # the ranks hang up on each other
        for file in Path(raw).glob("dedicated_log_torch_trace_rank_*.log"):
            name = re.sub(r"_\w{8}\.log", "_00000000.log.gz", file.name)
            strip(file, folder / name)
