"""Faults of one rank under NCCL: what a recording names, and what Flight Recorder dumped where nothing was recorded.

    python benchmarks/fsdp_nccl.py [CASE ...] [--keep FOLDER]   two GPUs; without any, gloo on the CPU tries the script

The jobs are those of tests/fsdp/faults.py, two ranks each, started by torchrun all at once: every case under
`record_collectives()`, and again without it, with dumps that NCCL's watchdog writes at its timeout of 10 s and
`retrograd fsdp diff` reads. Seconds are from the step that errs to the end of the rank that ends last.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fsdp"))

import faults

CASES = ("healthy", "skip", "swap", "hook", "shape", "save", "raise", "kill", "hang")
_TIMEOUT, _LIMIT, _LONGEST = 10, 90, 420


def job(case: str, folder: Path, record: bool) -> None:
    """What each rank of torchrun runs."""
    if gpu := torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=datetime.timedelta(seconds=_TIMEOUT))
    recording = contextlib.nullcontext()
    if record:
        import retrograd.fsdp

        recording = retrograd.fsdp.record_collectives()
    with recording:
        faults.train(case, dist.get_rank(), folder)
        if gpu:
            torch.cuda.synchronize()
    dist.destroy_process_group()


def start(case: str, folder: Path, record: bool) -> subprocess.Popen[bytes]:
    folder.mkdir()
    ours = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_FR_BUFFER_SIZE": "2000"}
    ours |= {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{folder}/dump_", "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/dump_"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    command += ["--job", case, str(folder), "record" if record else "plain"]
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | ours)


def told(folder: Path, record: bool) -> str:
    """The sentence of the recording that says most, or of the dumps."""
    text = (folder / "output.txt").read_text(errors="replace")
    if record:
        lines = re.findall(r"(?:RanksDifferError: |retrograd\.fsdp: ).*", text)
        said = max(
            lines,
            key=lambda line: (len(re.findall(r"experts|departs|gone|stopped|raised", line)), len(line)),
            default="",
        )
        return said or "nothing"
    dumps = [str(path) for path in sorted(folder.glob("dump_*"))]
    if len(dumps) < 2:
        return f"{len(dumps)} dumps"
    done = subprocess.run(
        [sys.executable, "-m", "retrograd", "fsdp", "diff", *dumps], capture_output=True, text=True, check=False
    )
    return f"exit {done.returncode}: {' '.join((done.stdout + done.stderr).split())}"


def main(cases: list[str], keep: Path | None) -> None:
    where = f"NCCL, {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "gloo"
    print(f"2 ranks, {where}, torch {torch.__version__}\n\n| fault | | s | exit | |\n|" + " --- |" * 5)
    with tempfile.TemporaryDirectory() as name:
        kinds = [(case, record) for case in cases for record in (True, False)]
        folders = {kind: Path(name) / f"{kind[0]}-{kind[1]}" for kind in kinds}
        jobs = {kind: start(kind[0], folder, kind[1]) for kind, folder in folders.items()}
        ends, limit = dict[tuple[str, bool], float](), time.monotonic() + _LIMIT
        while len(ends) < len(jobs) and time.monotonic() < limit:
            time.sleep(0.1)
            ends |= {kind: time.monotonic() for kind in jobs if kind not in ends and jobs[kind].poll() is not None}
        for kind, process in jobs.items():
            if kind not in ends:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2)
            mark = folders[kind] / "fault"
            since = f"{ends[kind] - float(mark.read_text()):.1f}" if kind in ends and mark.exists() else "-"
            if keep is not None and not kind[1]:
                for dump in folders[kind].glob("dump_*"):
                    keep.mkdir(parents=True, exist_ok=True)
                    shutil.copy(dump, keep / f"{kind[0]}-{dump.name}")
            words = told(folders[kind], kind[1]).replace("|", "\\|")
            words = words if len(words) <= _LONGEST else f"{words[:_LONGEST]} [...]"
            fault = faults.CASES.get(kind[0], kind[0])
            print(
                f"| {fault} | {'recorded' if kind[1] else 'dumps'} | {since} | {process.returncode} | {words} |",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        job(sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "record")
    else:
        given, _, folder = " ".join(sys.argv[1:]).partition("--keep ")
        main(given.split() or list(CASES), Path(folder) if folder else None)
