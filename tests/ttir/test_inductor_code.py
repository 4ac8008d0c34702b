"""Files that Inductor has written on a machine with a GPU, run where one is pretended."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.compiler import ASTSource

import retrograd as rg
from retrograd.compat import torch_inductor
from retrograd.compat.registry import status

_WRITTEN = """
import torch
import triton
import triton.language as tl
from torch._inductor.async_compile import AsyncCompile
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
async_compile = AsyncCompile()

doubling = async_compile.triton('doubling', '''
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
triton_helpers.set_driver_to_gpu()

@triton_heuristics.pointwise(
    size_hints={'x': 4096}, filename=__file__,
    triton_meta={'signature': {'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32', 'XBLOCK': 'constexpr'},
                 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9,
                                            regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
                                            max_threads_per_block=1024, warp_size=32),
                 'constants': {}, 'configs': [{(0,): [['tt.divisibility', 16]], (1,): [['tt.divisibility', 16]]}]},
    inductor_meta={'grid_type': 'Grid1D', 'kernel_name': 'doubling', 'mutated_arg_names': [], 'num_load': 1,
                   'num_reduction': 0, 'max_autotune': True, 'autotune_pointwise': True},
    min_elem_per_thread=0)
@triton.jit
def doubling(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    index = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr0 + index, tl.load(in_ptr0 + index, index < xnumel) * 2, index < xnumel + BEYOND)
''', device_str='cuda')
async_compile.wait(globals())
del async_compile

def call(args):
    x, = args
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        out = empty_strided_cuda((x.numel(),), (1,), torch.float32)
        doubling.run(x, out, x.numel(), stream=get_raw_stream(0))
    return out
"""


@triton.JITFunction  # triton.jit interprets where TRITON_INTERPRET is set
def tripling_kernel(x_ptr, N: tl.constexpr):
    at = x_ptr + tl.arange(0, N)
    tl.store(at, tl.load(at) * 3)


@pytest.mark.parametrize("beyond", [0, 7])
def test_a_file_runs_with_its_first_configurations(tmp_path, monkeypatch, beyond):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    file = tmp_path / f"output_code_{beyond}.py"
    file.write_text(_WRITTEN.replace("BEYOND", str(beyond)))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    with rg.cpu_triton() as run:
        spec.loader.exec_module(module)
        x = torch.randn(3000, device="cuda")
        assert torch.equal(module.call([x]), 2 * x)
        module.call([x])
    assert [record.kernel for record in run.launches] == ["doubling", "doubling"]  # and none to time it
    assert {fault.kind for fault in run.faults} == ({"out of bounds"} if beyond else set())
    assert status(torch_inductor.TIMING).state == "works"


def test_a_source_that_a_launcher_compiles_itself_is_executed():
    signature = {"x_ptr": "*fp32", "N": "constexpr"}
    x, stock = torch.ones(16), triton.compile
    with rg.cpu_triton() as run:
        driver = triton.runtime.driver.active
        kernel = triton.compile(ASTSource(tripling_kernel, signature, {"N": 16}, {}))
        kernel.run(2, 1, 1, 0, kernel.function, kernel.packed_metadata, None, None, None, x, 16)
        assert triton.backends.backends["nvidia"].driver() is driver
    assert "tt.store" in kernel.asm["ttir"]
    assert len(bytes.fromhex(kernel.hash)) == 32
    assert x[0] == 3  # both have read 1
    assert {fault.kind for fault in run.faults if not fault.is_mild} == {"race"}
    assert (triton.compile, triton.compiler.compile) == (stock, stock)


def test_what_dynamo_keeps_of_the_gpu_is_as_before_at_the_end():
    program = """
import torch, retrograd as rg
def asked():
    from torch._dynamo.device_interface import CudaInterface as interface
    return interface.current_device, interface.exchange_device, interface.Stream, interface.get_raw_stream
names = "current_device", "_exchange_device", "Stream"
for _ in range(2):  # it is loaded inside, then before
    with rg.cpu_triton():
        assert asked()[:3] == tuple(getattr(torch.cuda, name) for name in names)
        assert [asked()[0](), asked()[1](0), asked()[3](0)] == [0, 0, 0]
    assert asked() == (*(getattr(torch.cuda, name) for name in names), getattr(torch._C, "_cuda_getCurrentRawStream", None))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
