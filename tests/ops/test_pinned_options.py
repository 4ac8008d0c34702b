"""What decides bits is said at every launch of ours, whatever Triton's default is."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for folder in ("ops", "fsdp", "trace")
    for path in sorted((ROOT / "src" / "retrograd" / folder).rglob("*.py"))
    if "triton.jit" in path.read_text()
]
# Options of the covering launches, recorded while Triton's own defaults are the other way round.
RECORDED = """
import json, sys
sys.path.insert(0, "tools")
import kernel_code
print(json.dumps([(l.kernel, l.target.name, l.request.options) for _, l in kernel_code.triton_launches(["sm_90", "gfx942"])]))
"""


def kernels(path: Path) -> set[str]:
    """Functions under @triton.jit that a launcher calls: their names say so."""
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        and re.search(r"_kernel(_|$)", node.name)
    }


KERNELS = set().union(*map(kernels, SOURCES))


def launched_directly(source: str) -> list[str]:
    """Calls of the form name[grid](...), past `runtime.triton.launch.launch`, where `name` is a kernel of ours."""
    return [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and ast.unparse(node.func.value).rpartition(".")[2] in {*KERNELS, "kernel"}
    ]


def test_kernels_are_found() -> None:
    assert {"norm_fwd_kernel", "norm_bwd_kernel_slices", "msda_bwd_kernel", "rank_sum_kernel", "statistics_kernel"} <= (
        KERNELS
    )


def test_no_launcher_goes_past_the_pinned_options() -> None:
    others = {"check", "codegen", "compat"}  # which launch kernels of their users, and probes
    package = ROOT / "src" / "retrograd"
    sources = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in others]
    past = {path.name: calls for path in sources if (calls := launched_directly(path.read_text()))}
    assert past == {"launch.py": ["kernel[grid]"]}  # the place where they are pinned


def test_a_launch_past_them_is_seen() -> None:
    assert launched_directly("norm_fwd_kernel[(1,)](x, num_warps=4)\nlaunch(norm_fwd_kernel, (1,), (x,))") == [
        "norm_fwd_kernel[1,]"
    ]


def test_options_do_not_follow_the_defaults_of_triton() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "0"}
    done = subprocess.run(
        [sys.executable, "-c", RECORDED], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    recorded = json.loads(done.stdout)
    assert {kernel for kernel, _, _ in recorded} == KERNELS
    for kernel, target, options in recorded:
        wanted = {"enable_fp_fusion": True}
        wanted |= {"allow_flush_denorm": False} if target == "gfx942" else {"enable_reflect_ftz": True}
        assert {name: options[name] for name in wanted} == wanted, (kernel, target)
