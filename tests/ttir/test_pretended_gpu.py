"""What torch answers while a GPU is pretended, and that none of it is kept."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import retrograd as rg
from retrograd.runtime.gpu_targets import target_named
from retrograd.runtime.triton import fake_gpu


@pytest.fixture
def gpu():
    torch.get_device_module.cache_clear()
    with fake_gpu.gpu(target_named("sm_90")):
        yield
    torch.get_device_module.cache_clear()


def test_the_generator_is_forked_and_comes_back(gpu):
    before = torch.get_rng_state()
    with torch.random.fork_rng(device_type="cuda"):
        torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_the_module_of_a_device_is_not_kept_beyond(device):
    torch.get_device_module.cache_clear()
    with fake_gpu.gpu(target_named("sm_90")):
        assert torch.get_device_module(device) is torch.cuda
    assert torch.get_device_module(device) is torch.cuda
    assert torch.get_device_module("cpu") is torch.cpu


def test_what_is_compiled_inside_runs(gpu):
    # Dynamo looks up what torch.get_device_module wraps.
    x = torch.ones(3, requires_grad=True)
    y = torch.compile(lambda x: torch.tanh(x / 5.0) * 5.0, backend="eager", fullgraph=True)(x)
    assert torch.equal(y, torch.tanh(x / 5.0) * 5.0)


class Halved(torch.autograd.Function):
    """A backward that asks for memory on a GPU, and whether its gradient is there."""

    @staticmethod
    def forward(_, x):
        return x / 2

    @staticmethod
    def backward(_, dy):
        assert dy.is_cuda
        return torch.empty_like(dy, device="cuda:0").copy_(dy / 2)


@pytest.mark.parametrize("how", ["grad", "backward"])
def test_a_backward_has_the_gpu_as_well(gpu, how):
    x = torch.ones(3, requires_grad=True)
    y = Halved.apply(x).sum()
    if how == "grad":
        (x.grad,) = torch.autograd.grad(y, x)
    else:
        y.backward()
    assert torch.equal(x.grad, torch.full((3,), 0.5))


def test_a_backward_has_none_beyond():
    with fake_gpu.gpu(target_named("sm_90")):
        x = torch.ones(3, requires_grad=True)
        y = Halved.apply(x).sum()
    with pytest.raises(AssertionError):
        y.backward()


def test_tensors_are_on_the_gpu_but_for_those_that_were_asked_for_on_the_cpu():
    x = torch.ones(3)
    with fake_gpu.gpu(target_named("sm_90"), devices=True):
        there, here = x.device, x.cpu()
        assert (there.type, there.index, x.get_device(), x.is_cpu) == ("cuda", 0, 0, False)
        with torch.device("cuda"):
            assert torch.ones(2).device == there
        assert torch.empty(2, device=torch.device("cuda")).device == there
        for kept in (here, x.to("cpu"), torch.ones(2, device="cpu")):
            assert (kept.device.type, kept.is_cuda, kept.is_cpu, kept.get_device()) == ("cpu", False, True, -1)
        here += 1  # a copy
        assert x.tolist() == [1.0, 1.0, 1.0]
        assert here.to(there).device == there
    assert x.device.type == "cpu"


def test_tensors_are_made_on_the_gpu_that_is_the_default():
    here = torch.ones(2)
    with fake_gpu.gpu(target_named("sm_90"), devices=True):
        torch.set_default_device("cuda")
        made = [torch.rand(2), torch.tensor([1.0]), torch.nn.Linear(2, 2).weight, torch.arange(3)]
        assert all(t.is_cuda and t.device == torch.get_default_device() == torch.device("cuda", 0) for t in made)
        assert made[0].cuda() is made[0]  # where it is already
        assert torch.zeros(2, device="cpu").device.type == "cpu"
        torch.as_tensor(here).add_(1)  # of a tensor that was elsewhere it is a copy
        assert here.tolist() == [1.0, 1.0]
        torch.set_default_device("cpu")
        assert torch.get_default_device().type == torch.ones(1).device.type == "cpu"
        torch.set_default_device("cuda")
    assert torch.get_default_device().type == torch.ones(1).device.type == "cpu"


def test_a_library_that_has_taken_the_cpu_may_enter_a_device_of_it():
    """As fla before 0.6 where it was imported without a GPU: torch has none, and each op was told to raise."""
    with fake_gpu.gpu(target_named("sm_90")), torch.cpu.device(torch.ones(2).device.index):
        assert torch.ones(2).sum() == 2
    assert not hasattr(torch.cpu, "device")


def test_programs_that_ask_for_whatever_accelerator_there_is_get_the_gpu(gpu):
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == 1
    assert torch.accelerator.current_accelerator().type == "cuda"
    assert torch.get_device_module() is torch.cuda
    torch.accelerator.synchronize()
    with torch.accelerator.device_index(torch.ones(2, device="cuda").device.index):
        assert torch.accelerator.current_device_index() == 0
    free, total = torch.accelerator.get_memory_info()
    assert 0 < free <= total == torch.cuda.get_device_properties("cuda").total_memory
    assert torch.bfloat16 in torch.accelerator.get_device_capability()["supported_dtypes"]
    asked = torch.cuda.get_device_properties("cuda")
    assert asked.shared_memory_per_block <= asked.shared_memory_per_block_optin < asked.shared_memory_per_multiprocessor
    assert torch.cuda.get_arch_list() == ["sm_90"]
    assert torch.cuda.get_device_name() == asked.name == "NVIDIA sm_90"


def test_the_name_of_an_amd_gpu_begins_with_its_maker():
    with fake_gpu.gpu(target_named("gfx942")):
        assert torch.cuda.get_device_name() == "AMD gfx942"


def test_draws_on_the_gpu_repeat_for_its_seed(gpu):
    drawn = []
    for seed in (3, 4, 3):
        torch.cuda.manual_seed_all(seed)
        drawn.append(torch.rand(4, device="cuda"))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.cuda.initial_seed() == 3


def test_products_of_matrices_have_the_dtype_that_is_asked_for(gpu):
    # Torch has them for CUDA alone.
    a, b, added = torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 4, 5).bfloat16(), torch.randn(2, 3, 5)
    exact = a.float() @ b.float()
    assert torch.equal(torch.bmm(a, b, out_dtype=torch.float32), exact)
    assert torch.equal(torch.mm(a[0], b[0], torch.float32), exact[0])
    for total in (torch.baddbmm(added, a, b, out_dtype=torch.float32), torch.baddbmm(added, a, b, torch.float32)):
        assert torch.equal(total, torch.baddbmm(added, a.float(), b.float()))
    out = torch.empty(3, 5)
    torch.addmm(added[0], a[0], b[0], out_dtype=torch.float32, beta=2.0, out=out)
    assert torch.equal(out, torch.addmm(added[0], a[0].float(), b[0].float(), beta=2.0))
    assert torch.mm(a[0], b[0]).dtype == torch.bfloat16


_COMPILED = """
import sys, torch
from retrograd.runtime.gpu_targets import target_named
from retrograd.runtime.triton import fake_gpu

def refuse(graph, inputs):
    raise RuntimeError("there is no GPU to compile for")

assert "torch._dynamo" not in sys.modules
with fake_gpu.gpu(target_named("sm_90")):
    doubled = torch.compile(lambda x: 2 * x, backend=refuse, fullgraph=True)
    assert doubled(torch.ones(2)).tolist() == [2.0, 2.0]
try:
    doubled(torch.ones(2))
except Exception as error:
    print(error)
"""


def test_what_compiles_inside_first_compiles_nothing_there():
    process = subprocess.run([sys.executable, "-c", _COMPILED], capture_output=True, text=True, check=False)
    assert "there is no GPU to compile for" in process.stdout, process.stderr


_RESET = """
import torch
from retrograd.runtime.gpu_targets import target_named
from retrograd.runtime.triton import fake_gpu

with fake_gpu.gpu(target_named("sm_90")):
    assert torch.backends.cuda.is_built()
    torch.compiler.reset()
    print(torch.compile(lambda x: 2 * x)(torch.ones(2)).tolist())
    torch.compiler.reset()
"""


def test_the_compiler_is_reset_inside():
    # It imports a part of torch that looks for names which a build with CUDA alone has.
    process = subprocess.run([sys.executable, "-c", _RESET], capture_output=True, text=True, check=False)
    assert process.stdout == "[2.0, 2.0]\n", process.stderr


def test_a_launcher_that_refuses_what_is_not_on_a_gpu_is_verified():
    def doubled(x):
        if x.device.type != "cuda":
            raise ValueError("x is not on a GPU")
        return x * 2

    def refusing(x):
        raise ValueError("never")

    pytest.importorskip("triton")
    for fn, verdict in ((doubled, "proved"), (refusing, "finding")):
        spec = rg.op(fn, lambda x: x * 2, dict(x=rg.tensor("M", "N")), dtypes=["float32"])
        assert rg.verify(spec, level="quick", only=["contract"]).verdict == verdict


class _Factor(torch.autograd.Function):
    """x times 2, whose backward alone asks where its tensors are."""

    @staticmethod
    def forward(ctx, x, places):
        ctx.places = places
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.places[x.device.type], None


@pytest.mark.parametrize(("places", "verdict"), [({"cuda": 2}, "proved"), ({}, "finding"), ({"cuda": 3}, "finding")])
def test_a_backward_that_refuses_what_is_not_on_a_gpu_is_verified(places, verdict):
    pytest.importorskip("triton")
    spec = rg.op(lambda x: _Factor.apply(x, places), lambda x: x * 2, dict(x=rg.tensor("M", "N")), dtypes=["float32"])
    report = rg.verify(spec, level="quick", only=["contract", "oracle"])
    assert report.verdict == verdict
    raised = any("KeyError" in finding.what for finding in report.findings)
    assert raised == (not places)  # none of what was only pretended is told


def test_the_address_of_the_current_stream_is_looked_up_by_libraries_that_hear_of_a_gpu():
    before = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    with fake_gpu.gpu(target_named("sm_90")):
        assert torch._C._cuda_getCurrentRawStream(0) == 0
    assert getattr(torch._C, "_cuda_getCurrentRawStream", None) is before


def test_fresh_memory_holds_the_same_where_it_is_to_repeat():
    with fake_gpu.gpu(target_named("sm_90"), repeats=True):
        held = [torch.empty(5, dtype=torch.bfloat16), torch.ones(2).new_empty(3, 2), torch.empty_like(torch.ones(4))]
        whole = torch.empty(5, dtype=torch.int32, device="cuda")
        with torch.no_grad():
            leaf = torch.empty(3, requires_grad=True)
    assert all(bool(((t > 0.7) & (t < 0.8)).all()) for t in [*held, leaf])
    assert whole.tolist() == [1] * 5


def _doubled(x, missing):
    """2 x, into memory from torch.empty, but for the last rows if some are `missing`."""
    out, rows = torch.empty_like(x), len(x) - missing
    out[:rows] = 2 * x[:rows]
    return out


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("stage", ["oracle", "poison"])
def test_a_row_that_is_not_written_is_found_whatever_was_there_before(stage, missing):
    pytest.importorskip("triton")
    x = dict(x=rg.tensor("M", "N"))
    report = rg.verify(lambda x: _doubled(x, missing), reference=lambda x: 2 * x, inputs=x, level="quick",
                       only=[stage])  # fmt: skip
    assert {f.stage for f in report.findings} == ({stage} if missing else set())
