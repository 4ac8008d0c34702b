"""What training programs ask of torch where a GPU is pretended: optimizers, checkpoints, hooks, pinned memory, DDP."""

from __future__ import annotations

import inspect
import io
import warnings

import pytest
import torch

import retrograd as rg
from retrograd.runtime.gpu_targets import target_named
from retrograd.runtime.triton import fake_gpu


@pytest.fixture
def gpu():
    with fake_gpu.gpu(target_named("sm_90"), devices=True):
        yield


@pytest.fixture
def run():
    pytest.importorskip("triton")
    with rg.cpu_triton() as session:
        yield session


def _stepped(**options):
    weight = torch.nn.Parameter(torch.ones(2, 2, device="cuda"))
    optimizer = torch.optim.AdamW([weight], **options)
    weight.sum().backward()
    optimizer.step()
    return optimizer


def _places(optimizer):
    return {name: t.device.type for state in optimizer.state.values() for name, t in state.items()}


@pytest.mark.parametrize("options", [dict(capturable=True), dict(capturable=True, foreach=True), dict(fused=True)])
def test_optimizers_take_the_weights_for_those_of_a_gpu(gpu, options):
    assert _places(_stepped(**options)) == dict(step="cuda", exp_avg="cuda", exp_avg_sq="cuda")


def test_a_plain_optimizer_counts_its_steps_on_the_cpu(gpu):
    if 'device="cpu"' not in inspect.getsource(torch.optim.Adam):
        pytest.skip("this torch names no place for steps, and what is made without one is on the GPU here")
    assert _places(_stepped())["step"] == "cpu"


def test_the_state_of_an_optimizer_comes_back_to_the_gpu(gpu):
    kept, optimizer = _stepped(fused=True).state_dict(), _stepped(fused=True)
    optimizer.load_state_dict(kept)
    assert set(_places(optimizer).values()) == {"cuda"}


@pytest.mark.parametrize(("place", "device"), [({}, "cuda"), (dict(map_location="cpu"), "cpu")])
def test_a_file_is_read_to_where_it_was_unless_a_place_is_named(gpu, place, device):
    file = io.BytesIO()
    torch.save(dict(x=torch.ones(2, device="cuda")), file)
    file.seek(0)
    read = torch.load(file, **place)["x"]
    assert (read.device.type, read.is_cuda) == (device, device == "cuda")


def test_hooks_of_what_autograd_saves_hear_of_the_gpu(gpu):
    places = []

    def unpack(kept):
        places.append(kept.device.type)
        return kept.to("cuda")

    x = torch.ones(2, device="cuda", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.to("cpu", copy=True), unpack):
        y = x.sin()
    y.sum().backward()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = x.sin()
    y.sum().backward()
    assert (places, x.grad.device.type) == (["cpu"], "cuda")


def test_pinned_memory_is_on_the_cpu_and_says_so(gpu):
    pinned = [torch.ones(2).pin_memory(), torch.empty(2, pin_memory=True)]
    assert all(x.is_pinned() and not x.is_cuda for x in pinned)
    moved = pinned[0].to("cuda", non_blocking=True)
    assert moved.is_cuda
    assert not moved.is_pinned()
    assert not torch.ones(2).is_pinned()


def test_streams_are_told_apart(gpu):
    side = torch.cuda.Stream(priority=-1)
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != side
    with torch.cuda.stream(side), torch.cuda.stream(None):
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_stream() != side
    assert side.priority == -1


def test_a_profile_of_the_gpu_warns_of_no_operator(gpu, capfd):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings(), torch.profiler.profile(activities=activities) as profile:
        torch.ones(2, device="cuda").sin()
    assert "aten::sin" in profile.key_averages().table(sort_by="cuda_time_total")
    assert "Failed to record" not in capfd.readouterr().err


def test_what_is_timed_runs_once(run):
    import triton.testing

    calls = []
    assert triton.testing.do_bench(lambda: calls.append(1)) == 1.0
    assert triton.testing.do_bench(lambda: calls.append(1), quantiles=[0.5, 0.2, 0.8]) == [1.0] * 3
    assert len(calls) == 2


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_ranks_train_for_more_than_one_step(run, tmp_path):
    """In the second step DDP writes the order of its buckets to memory by its address: that was taken for unwritten."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).cuda(), device_ids=[0])
        for _ in range(3):
            model(torch.ones(1, 2, device="cuda")).sum().backward()
        assert model.module.bias.grad.tolist() == [3.0, 3.0]
    finally:
        torch.distributed.destroy_process_group()
    assert not run.faults


def test_a_custom_operator_runs_its_function_for_gpus_and_not_the_one_for_the_cpu(run):
    @torch.library.custom_op("retrograd_tests::twofold", mutates_args=())
    def twofold(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twofold.register_kernel("cpu", lambda x: 3 * x)
    assert twofold(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]
