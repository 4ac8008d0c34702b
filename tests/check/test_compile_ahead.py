"""Kernels compiled by another process, ahead of the cases that need them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import retrograd as rg
from retrograd.check import isolation
from retrograd.check.compile_ahead import compiled_once
from retrograd.check.isolation import VerifyCommand
from retrograd.cli._output import live
from retrograd.compat.triton_compile import PROBE_GPU, absent_gpu, kernel_id, of_dtype
from retrograd.compat.triton_launch import around_compiling, unheard
from retrograd.core import subprocesses
from retrograd.ops.norm import dispatch
from retrograd.ops.types import Impl
from retrograd.runtime import disk_cache
from retrograd.runtime.rehearsal import rehearsing

pytestmark = pytest.mark.outside


@triton.jit
def halved(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols, cols < N) / 2, cols < N)


@triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["N"])
@triton.jit
def halved_back(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols, cols < N) / 2, cols < N)


class Half(torch.autograd.Function):
    """x / 2: the forward with a block for each size, the backward with one that is tuned."""

    @staticmethod
    def forward(_, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        halved[(1,)](x, y, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(_, dy):
        dy = dy.contiguous()
        dx = torch.empty_like(dy)
        halved_back[lambda meta: (triton.cdiv(dy.numel(), meta["BLOCK"]),)](dy, dx, dy.numel())
        return dx


half = rg.op(Half.apply, lambda x: x / 2, dict(x=rg.tensor("N")), sizes=dict(N=(1, 16)))
# As shipped ops that choose by device do: elsewhere it runs no kernel.
by_device = rg.op(
    lambda x: Half.apply(x) if dispatch.FAMILY.choose(None, x.dtype, x.device) is Impl.TRITON else x / 2,
    lambda x: x / 2, dict(x=rg.tensor("N")), sizes=dict(N=(1, 16)),
)  # fmt: skip
in_torch = rg.op(lambda x: x / 2, lambda x: x / 2, dict(x=rg.tensor("N")))
SCRIPT = """
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
import test_compile_ahead as tests
from retrograd.check.compile_ahead import compile_ahead
gpu = dict(major=9, minor=0, warp_size=32, multi_processor_count=132)
gpu |= dict(shared_memory_per_block_optin=232448, regs_per_multiprocessor=65536)
torch.cuda.get_device_properties = lambda device: SimpleNamespace(**gpu)
folder, spec = Path(sys.argv[1]), getattr(tests, sys.argv[2])
(folder / "halved_back").write_text("Config(BLOCK=64, num_warps=4)")  # as the process that verifies says
options = dict(only=["contract", "shapes"], skip=(), level="quick", seed=0, case=None)
compile_ahead(spec, "cuda", folder, dtypes=["float32", "float16"], **options)
"""


def compiled(folder: Path, spec: str) -> Counter[tuple[str, str, int]]:
    """Kernel, type of x and block of what is compiled ahead, in a cache of its own."""
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": ":".join(paths)}
    environment["TRITON_CACHE_DIR"] = str(folder / "triton")
    subprocess.run([sys.executable, "-c", SCRIPT, str(folder), spec], env=environment, check=True)
    kernels = Counter[tuple[str, str, int]]()
    for path in folder.glob("triton/*/halved*.cubin"):
        assert path.stat().st_size
        text = path.with_suffix(".ttir").read_text()
        block, kind = re.search(r"end = (\d+)", text), re.search(r"!tt.ptr<(\w+)>", text)
        kernels[path.stem, kind[1], int(block[1]) if block else 1] += 1
    return kernels


def test_what_cases_launch_is_compiled_and_of_a_tuned_kernel_the_fastest_alone(tmp_path):
    kernels = compiled(tmp_path, "half")
    assert {block for name, _, block in kernels if name == "halved"} == {1, 2, 4, 8, 16}
    assert {of for name, of, _ in kernels if name == "halved"} == {"f32", "f16"}
    tuned = {(of, block): count for (name, of, block), count in kernels.items() if name == "halved_back"}
    assert set(tuned) == {("f32", 32), ("f32", 64), ("f16", 64)}  # all where they are timed, then one
    assert tuned["f32", 32] == 1 < tuned["f32", 64]


def test_a_verification_ends_with_what_compiles_for_it(tmp_path, monkeypatch):
    """Here the other process sees at once that there is no GPU."""
    (tmp_path / "op.py").write_text(
        "import retrograd as rg\nspec = rg.op(lambda x: x / 2, inputs=dict(x=rg.tensor('N')))\n"
    )
    monkeypatch.setattr(isolation, "_GPU_DRIVER", tmp_path / "op.py")
    monkeypatch.setattr(isolation, "cpu_count", lambda: isolation._CORES)
    started: list[list[str]] = []
    stock = subprocesses.Child.__init__
    monkeypatch.setattr(
        subprocesses.Child,
        "__init__",
        lambda self, command, *args, **kw: started.append(command) or stock(self, command, *args, **kw),
    )
    request = VerifyCommand((f"{tmp_path / 'op.py'}:spec", "--level", "quick"), ("--only", "calls"))
    assert isolation.verify_isolated(request, isolation.process_limits()).stages[0].cases == 1
    jobs = {name: value for command in started for name, value in json.loads(command[-1]).items()}
    assert jobs["ahead"] == jobs["kernels"]
    assert not Path(jobs["ahead"]).exists()


def test_what_compiles_is_ended_where_it_holds_too_much(tmp_path):
    program = "import time; kept = b'x' * 2**26; time.sleep(3600)"
    isolation._follow([sys.executable, "-c", program], tmp_path / "events", 2**25, lambda: False)


def test_whoever_watches_sees_what_is_compiled_and_a_log_does_not(capsys):
    child, lines = isolation._Child(running="shapes"), list[tuple[str, str]]()
    for name in ("halved", ""):
        isolation._hear(["compiling", name], child, lambda *line: lines.append(line))
    assert lines == [("shapes", "compiling halved"), ("shapes", "running")]
    with live(quiet=False) as progress:
        for line in (*lines, ("shapes", "passed (0.10 s)")):
            progress(*line)
    assert capsys.readouterr().err == "shapes: passed (0.10 s)\n"


def test_an_op_that_chooses_by_device_is_rehearsed_as_on_a_gpu(tmp_path):
    assert {block for name, _, block in compiled(tmp_path, "by_device") if name == "halved"} == {1, 2, 4, 8, 16}
    assert dispatch.FAMILY.choose(None, torch.float32, torch.device("cpu")) is not Impl.TRITON
    with rehearsing():
        assert dispatch.FAMILY.choose(None, torch.float32, torch.device("cpu")) is Impl.TRITON
        assert dispatch.FAMILY.choose(None, torch.float64, torch.device("cpu")) is not Impl.TRITON
        assert dispatch.FAMILY.choose("torch", torch.float32, torch.device("cpu")) is Impl.TORCH


def test_an_op_without_kernels_has_nothing_compiled(tmp_path):
    assert not compiled(tmp_path, "in_torch")
    assert not (tmp_path / "triton").exists()


@pytest.fixture
def compiling(tmp_path, monkeypatch) -> Iterator[Any]:
    """A function that has a kernel compiled for a GPU, with a cache of its own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    pointer = of_dtype(torch.float32)

    def compile(block: int) -> None:
        halved.warmup(pointer, pointer, 7, BLOCK=block, grid=(1,))

    with absent_gpu(PROBE_GPU):
        yield compile


def test_what_is_compiled_is_told_once(tmp_path, compiling):
    told: list[str] = []
    with compiled_once(str(tmp_path), told.append):
        compiling(4)
        compiling(4)
    compiling(8)
    assert told == ["halved", ""]


def test_a_kernel_that_somebody_compiles_is_waited_for_and_not_compiled_again(tmp_path, compiling, monkeypatch):
    ids: list[str] = []
    with around_compiling(lambda launch, proceed: ids.append(kernel_id(launch.function, launch.args[0]))):
        compiling(4)
    hits: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda cache_hit, **_: hits.append(cache_hit))
    begun = threading.Event()
    with compiled_once(str(tmp_path), lambda name: begun.set()):
        other = threading.Thread(target=compiling, args=(4,))
        with disk_cache.locked(tmp_path / ids[0]):
            other.start()
            begun.wait()
            with unheard():  # as another process would
                compiling(4)
        other.join()
    assert hits == [False, True]
