"""Faults of one rank in sharded training: what a recording names, and what TORCH_DISTRIBUTED_DEBUG=DETAIL prints.

python benchmarks/fsdp_faults.py > benchmarks/results/fsdp-faults.md

The jobs are those of tests/fsdp/faults.py, two gloo ranks each. A cell has the last line of the rank that says most.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parent.parent / "tests" / "fsdp"
sys.path.insert(0, str(TESTS))

import faults  # noqa: E402  # pyright: ignore[reportMissingImports]

_LONGEST = 330


def ends(*options: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, str(TESTS / "faults.py"), *options, *faults.CASES]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ) | environment)
    return json.loads(done.stdout)


def sentence(case: dict[str, Any]) -> str:
    """What a person reads last, of the rank whose last line names most."""
    lines = [text.strip().splitlines()[-1] for end in case.values() if (text := end["text"]).strip()]
    lines = [re.sub(r"^\[rank\d\]: ", "", line) for line in lines]
    if not lines:
        return f"nothing; exit codes {', '.join(str(end['code']) for end in case.values())}"
    line = max(lines, key=lambda text: (len(re.findall(r"experts|departs|gone|stopped|raised", text)), len(text)))
    line = re.sub(r"TensorOptions\(.*?\)\)\)", "...", line).replace("|", "\\|")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} [...]"


def main() -> None:
    ours, theirs = ends("--record"), ends(TORCH_DISTRIBUTED_DEBUG="DETAIL")
    lines = [
        "# Faults of one rank, and who names them",
        "",
        f"torch {torch.__version__}, two gloo ranks, `python benchmarks/fsdp_faults.py`; rank 1 errs in step 2 of 5.",
        "Seconds are from the step that errs to the end of the rank that ends last, on two shared cores at a load of "
        f"{os.getloadavg()[1]:.0f}; where nothing but the process group's timeout can end a case, that is 4 s of them.",
        "",
        "| fault | `record_collectives()` | names | s | TORCH_DISTRIBUTED_DEBUG=DETAIL | names | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, words in faults.CASES.items():
        cells = [words]
        for side in (ours, theirs):
            text = "\n".join(end["text"] for end in side[case].values())
            named = [
                "module" * bool(re.search(r"experts\.\d|\(root\)|an unnamed tensor", text)),
                "line" * bool(re.search(r'faults\.py(:\d+ \(|", line .*in (train|err))', text)),
                "rank" * bool(re.search(r"rank \d (departs|is gone|stopped|is after)|(Error: bad|Exit: 3)", text)),
            ]
            seconds = max(end["since"] for end in side[case].values())
            cells += [sentence(side[case]), ", ".join(filter(None, named)) or "none", f"{seconds:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
