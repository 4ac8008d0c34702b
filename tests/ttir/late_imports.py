"""An op that imports Triton in its first call, verified by one stage alone, in a process of its own.

python tests/ttir/late_imports.py    # a line of JSON: the stage's findings and verdict without a mask and with one
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import retrograd as rg

MASKED = [False]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        from late_kernels import double

        return double(x, MASKED[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(_: Any, dy: torch.Tensor) -> torch.Tensor:
        from late_kernels import double

        return double(dy, MASKED[0])


def main() -> None:
    spec = rg.op(Double.apply, lambda x: 2 * x, dict(x=rg.tensor("M", "N")), sizes=dict(N=24), dtypes=["float32"])
    assert "triton" not in sys.modules
    rows = []
    for MASKED[0] in (False, True):
        report = rg.verify(spec, level="quick", only=["bounds"])
        rows.append({"findings": [f.what for f in report.findings], "status": report.stage("bounds").status})
    sys.stdout.write(json.dumps({"unmasked": rows[0], "masked": rows[1]}) + "\n")


if __name__ == "__main__":
    main()
