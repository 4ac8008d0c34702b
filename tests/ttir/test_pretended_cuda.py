"""Names of torch.cuda that programs use where a GPU is pretended: devices by number, streams, graphs, kernels for CUDA."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
import torch.utils._triton

import retrograd as rg
from retrograd.compat.registry import works
from retrograd.compat.torch_autograd import ENGINE
from retrograd.compat.torch_library import REGISTERED, _is_torchs
from retrograd.errors import UsageError
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


def test_devices_may_be_numbers(gpu):
    made = [torch.ones(2).to(0), torch.empty(2, device=0), torch.nn.Linear(2, 2).to(0).weight, torch.ones(2).cuda(0)]
    made += [torch.zeros(2, device=made[0].device.index), torch.nn.Linear(2, 2).to(device=0).bias]
    with torch.device(torch.cuda.current_device()):
        made += [torch.ones(2), torch.ones(2, device="cpu").to(torch.device(device=0))]
    assert all(t.is_cuda and t.device.index == 0 for t in made)
    assert [torch.cuda.device(i).idx for i in range(torch.cuda.device_count())] == [0]
    torch.set_default_device(0)
    assert torch.get_default_device() == torch.ones(2).device == torch.device(0)
    assert torch.device("meta").type == "meta"


def test_what_inductor_has_written_allocates(gpu):
    with torch.cuda._DeviceGuard(0):
        made = torch._C._dynamo.guards._empty_strided_cuda((2, 3), (3, 1), torch.bfloat16)
    assert (made.is_cuda, made.shape, made.stride(), made.dtype) == (True, (2, 3), (3, 1), torch.bfloat16)


def test_modules_go_where_they_went_before_once_the_gpu_is_gone():
    with fake_gpu.gpu(target_named("sm_90"), devices=True):
        assert torch.version.cuda
        assert torch.backends.cuda.is_built()
    if not torch.backends.cuda.is_built():
        assert torch.version.cuda is None
        with pytest.raises(RuntimeError):
            torch.nn.Linear(2, 2).to(0)
    assert "record_stream" not in vars(torch.Tensor)


def test_whether_there_is_triton_is_asked_anew():
    asked = torch.utils._triton.has_triton
    before = asked()
    with fake_gpu.gpu(target_named("sm_90"), devices=True):
        assert asked() == (importlib.util.find_spec("triton") is not None)
    assert asked() == before


def test_a_gpu_that_is_not_known_is_named(run):
    with pytest.raises(UsageError, match="unknown target 'gfx1', expected one of: sm_80"), rg.cpu_triton(gpu="gfx1"):
        pass


def test_autocast_lowers_what_it_lowers_on_a_gpu(gpu):
    x, w = torch.ones(4, 4, device="cuda"), torch.ones(4, 4, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        assert (x @ w).dtype == torch.float16
        with torch.autocast("cuda", enabled=False):
            assert (x @ w).dtype == torch.float32
        assert torch.nn.functional.linear(x, w).dtype == torch.float16
    assert (x @ w).dtype == torch.float32


def test_classes_of_tensors_on_the_gpu(gpu):
    assert torch.ones(2).type("torch.cuda.HalfTensor").dtype == torch.float16
    assert torch.ones(2).type(torch.cuda.DoubleTensor).dtype == torch.float64
    assert torch.cuda.IntTensor([1, 2]).tolist() == [1, 2]


def test_streams_and_events(gpu):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        event = stream.record_event()
    torch.ones(2).record_stream(stream)
    torch.cuda.set_stream(stream)
    assert event.query()
    assert stream.query()
    assert stream.device == torch.device("cuda", 0)
    later = torch.cuda.Event(enable_timing=True)
    later.record()
    assert event.elapsed_time(later) == 1e3


def test_numbers_of_a_gpu_that_does_nothing(gpu):
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == torch.cuda.utilization() == 0
    assert torch.cuda.get_device_properties(0).memory_bus_width > 0
    assert torch.cuda.is_initialized()
    torch.cuda.cudart().cudaProfilerStart()
    torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("a"))


def _steps(graph, x):
    """A step of an optimizer that is captured, the parameter and the loss."""
    w = torch.ones(3, device="cuda", requires_grad=True)
    w.grad = torch.zeros(3, device="cuda")
    optimizer, count = torch.optim.SGD([w], lr=0.5), torch.zeros((), device="cuda")
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        optimizer.zero_grad(set_to_none=False)
        loss = (w * x).sum()
        loss.backward()
        optimizer.step()
        count += 1
    return w, loss, count


def test_a_graph_runs_where_it_is_replayed_and_not_where_it_is_captured(gpu):
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(3, device="cuda")
    w, loss, count = _steps(graph, x)
    assert (w.tolist(), count.item()) == ([1.0] * 3, 0.0)
    for value, expected, weight in ((2.0, 6.0, 0.0), (4.0, 0.0, -2.0), (0.0, 0.0, -2.0)):
        x.fill_(value)
        graph.replay()
        assert (loss.item(), w.tolist()) == (expected, [weight] * 3)
    assert count.item() == 3.0
    assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), torch.cuda.graph(graph):
        count.item()


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="this torch has graphs of CUDA alone")
def test_a_graph_of_the_accelerator_is_its_own_context(gpu):
    graph, x = torch.accelerator.Graph(), torch.zeros(3, device="cuda")
    with torch.cuda.Stream(), graph:
        x += 1
    assert isinstance(graph, torch.accelerator.Graph)
    assert x.tolist() == [0.0] * 3
    graph.replay()
    assert x.tolist() == [1.0] * 3


def test_a_kernel_that_a_library_has_registered_for_cuda_runs():
    pytest.importorskip("triton")
    assert works(REGISTERED)
    name = "retrograd_tests::doubled"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, "cpu")(lambda x: 0 * x)
    torch.library.impl(name, "cuda")(lambda x: torch.empty_like(x).copy_(2 * x))
    with rg.cpu_triton() as run:
        assert torch.ops.retrograd_tests.doubled(torch.ones(2, device="cuda")).tolist() == [2.0, 2.0]
    assert not run.faults
    with rg.cpu_triton(pretend=False):
        assert torch.ops.retrograd_tests.doubled(torch.ones(2)).tolist() == [0.0, 0.0]


@torch.library.custom_op("retrograd_tests::ones_like_it", mutates_args=())
def ones_like_it(x: torch.Tensor) -> torch.Tensor:
    assert x.is_cuda == bool(torch.cuda.device_count())
    return torch.ones(x.shape, device=x.device)


ones_like_it.register_fake(torch.empty_like)
ones_like_it.register_autograd(lambda _, grad: torch.full(grad.shape, 3.0, device="cuda"))


def test_functions_of_custom_operators_hear_of_the_gpu(run):
    x = torch.zeros(4, device="cuda", requires_grad=True)
    ones_like_it(x).sum().backward()
    assert x.grad.tolist() == [3.0] * 4
    own = torch.library.custom_op("retrograd_tests::made_inside", lambda x: x.new_ones(3, device="cuda"),
                                  mutates_args=(), schema="(Tensor x) -> Tensor")  # fmt: skip
    assert own(x.detach()).sum().item() == 3.0


def _linear(hook) -> torch.nn.Linear:
    linear = torch.nn.Linear(3, 3).cuda()
    linear.register_full_backward_hook(lambda module, grads, outs: (hook(grads[0]),))
    return linear


def test_hooks_of_a_backward_hear_of_the_gpu(gpu):
    def ones(grad):
        return torch.ones(grad.shape, device="cuda")

    x, y = (torch.zeros(2, 3, device="cuda", requires_grad=True) for _ in range(2))
    x.register_hook(ones)
    (5 * x).sum().backward()
    _linear(ones)(y).sum().backward()
    assert x.grad.tolist() == y.grad.tolist() == [[1.0] * 3] * 2
    assert works(ENGINE)


def test_kernels_that_torch_registers_itself_are_left_to_gpus():
    registered = ["aten/bmm", "_native/bmm_triton_0", "aten/mm", "theirs/bmm", "_native/linalg_polar_out_native_3",
                  "aten/linalg_polar.out"]  # fmt: skip
    keys = [f"{name}/CUDA" for name in registered]
    assert [key for key in keys if not _is_torchs(key, keys)] == ["aten/mm/CUDA", "theirs/bmm/CUDA"]


@pytest.mark.parametrize(
    "use",
    [
        lambda: copy.deepcopy(torch.nn.BatchNorm1d(2)).running_var.sum().item(),
        lambda: torch.empty(2).set_(torch.ones(5)).sum().item(),
        lambda: torch.empty(2).resize_(50).fill_(1).sum().item(),
        lambda: torch.ones(2).resize_(50).fill_(1).sum().item(),
        lambda: torch.add(torch.ones(9), 1, out=torch.empty(0)).sum().item(),
        lambda: torch.empty(3).fill_(torch.nan)[0].item(),
        lambda: [torch.empty(4).numpy().fill(1.0)],
        lambda: torch.empty(4).uniform_().sum().item(),
        lambda: torch.empty(4).normal_(generator=torch.Generator("cuda")).sum().item(),
        lambda: torch.rand(4, generator=torch.Generator("cuda"), out=torch.empty(4)).sum().item(),
        lambda: str(torch.empty(4).zero_()),
    ],
)
def test_what_has_been_written_is_not_told(run, use):
    use()
    assert not run.faults, run.report()


def _filled_by_numpy() -> float:
    buffer = torch.empty(4, device="cpu", pin_memory=True)
    buffer.numpy()[:] = 2.0
    return buffer.cuda().sum().item()


def test_memory_that_numpy_has_written_is_not_told(run):
    assert _filled_by_numpy() == 8.0
    assert not run.faults, run.report()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_what_nobody_has_written_does_not_pass_a_tolerance(run, dtype):
    # A difference in float64 that is compared with a number is what most tests look at.
    for unwritten in (torch.empty(4, device="cuda"), torch.empty(4, dtype=getattr(torch, dtype), device="cuda")):
        run.forget_faults()
        bool((unwritten.to(getattr(torch, dtype)).abs() > 0.5).any())
        assert [fault.kind for fault in run.faults] == ["uninitialised"]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.allclose(torch.empty(4), torch.zeros(4)),
        lambda: torch.empty(4).to(torch.int32).sum().item(),
        lambda: torch.cat([torch.empty(4), torch.full((4,), 100.0)]).max().item(),
        lambda: torch.empty(4).nonzero().shape,
        lambda: torch.ones(4)[torch.empty(4) > 0.5].shape,
        lambda: torch.ones(2).resize_(50).sum().item(),
        lambda: torch.empty(2).resize_(50)[:2].sum().item(),
        lambda: torch.cat([torch.empty(2), torch.ones(9)], out=torch.empty(3)).sum().item(),
        lambda: torch.empty(4)[:2].uniform_(generator=torch.Generator("cuda"))._base.sum().item(),
        lambda: repr(torch.empty(4).sum()),
    ],
)
def test_what_nobody_has_written_is_told_where_it_leaves_torch(run, use):
    use()
    assert [fault.kind for fault in run.faults] == ["uninitialised"], run.report()


def test_a_print_of_what_is_written_in_part_is_noted(run):
    part = torch.empty(4)
    part[:3] = 1.0
    str(part)
    (fault,) = run.faults
    assert (fault.kind, fault.is_mild) == ("left unwritten", True)
    assert "nobody has written 1 of the 4 elements that are printed here" in fault.text()
    run.forget_faults()
    part[3].item()
    assert [fault.kind for fault in run.faults] == ["uninitialised"]


@pytest.mark.parametrize("fill", ["uniform_", "normal_", "exponential_"])
def test_a_generator_draws_once_into_memory_that_nobody_has_written(run, fill):
    drawn, expected = torch.Generator("cuda").manual_seed(3), torch.Generator("cuda").manual_seed(3)
    for _ in range(2):
        values = getattr(torch.empty(8, device="cuda"), fill)(generator=drawn)
        assert torch.equal(values, getattr(torch.zeros(8, device="cuda"), fill)(generator=expected))
    out = torch.rand(8, generator=drawn, out=torch.empty(8, device="cuda"))
    assert torch.equal(out, torch.rand(8, generator=expected, device="cuda"))
    assert not run.faults, run.report()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_whole_numbers_have_histograms(gpu, dtype):
    values = torch.tensor([0, 3, 3, 1, 5, 5, 5], dtype=dtype, device="cuda")
    counts = torch.histc(values, bins=6, min=0, max=5)
    assert counts.tolist() == values.histc(6, 0, 5).tolist() == torch.bincount(values).tolist()
    assert counts.dtype == dtype
    assert torch.histc(values.float(), 3).tolist() == [2.0, 2.0, 3.0]


def test_the_default_generator_has_a_seed_and_an_offset(gpu):
    (generator,) = torch.cuda.default_generators
    torch.manual_seed(5)
    state = generator.get_state()
    pair = state.view(torch.int64)
    assert pair[0] == 5
    before = int(pair[1])
    pair[1] += 4  # as launchers do whose kernels draw four numbers a lane
    generator.set_state(state)
    assert generator.get_state().view(torch.int64).tolist() == [5, before + 4]
    generator.manual_seed(2**64 - 1)
    assert int(generator.get_state().view(torch.int64)[0]) == -1
    drawn = torch.randn(3, generator=generator), torch.randn(3, device="cuda")
    assert torch.equal(*drawn)


def test_what_is_overwritten_is_written_and_the_rest_is_not(run):
    cache, lost = torch.empty(4, 8, device="cuda"), torch.empty(8, device="cuda")
    cache[1] = 2.0
    cache[2] = torch.arange(8.0, device="cuda")
    cache[3, :5].copy_(torch.zeros(5, device="cuda"), non_blocking=True)
    cache[torch.tensor([3, 3, 3], device="cuda"), torch.tensor([5, 6, 7], device="cuda")] = 0.0
    assert cache[1:].sum().item() == 44.0
    assert not run.faults
    cache[1] = lost
    cache[2].add_(lost)
    cache[0].copy_(cache[0])
    lost.copy_(lost)
    lost.index_put_((torch.arange(8, device="cuda"),), torch.ones(8, device="cuda"), accumulate=True)
    for values in (*cache[:3], lost):
        run.forget_faults()
        values.sum().item()
        assert [fault.kind for fault in run.faults] == ["uninitialised"]


def test_files_are_read_to_the_gpu(gpu, tmp_path):
    torch.save(dict(x=torch.ones(3), model=torch.nn.Linear(2, 2).cuda().state_dict()), tmp_path / "c.pt")
    for place in ("cuda", "cuda:0", torch.device("cuda")):
        read = torch.load(tmp_path / "c.pt", map_location=place)
        assert read["x"].is_cuda
        assert read["x"].tolist() == [1.0, 1.0, 1.0]
        assert read["model"]["weight"].device.index == 0
    assert not torch.load(tmp_path / "c.pt", map_location="cpu")["x"].is_cuda


def test_a_function_may_choose_the_place_of_each_storage(run, tmp_path):
    # Tensor.set_ asks no function mode, so the mode that follows unwritten memory is needed, which `gpu` is without.
    torch.save(dict(x=torch.ones(3)), tmp_path / "c.pt")
    assert torch.load(tmp_path / "c.pt", map_location=lambda storage, _: storage.cuda(0))["x"].is_cuda
    assert not torch.load(tmp_path / "c.pt", map_location=lambda storage, _: storage)["x"].is_cuda


def test_a_state_of_random_numbers_comes_back(gpu):
    for get, give in (
        (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
        (torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all),
    ):
        state, drawn = get(), torch.rand(3, device="cuda")
        assert not torch.equal(drawn, torch.rand(3, device="cuda"))
        give(state)
        assert torch.equal(drawn, torch.rand(3, device="cuda"))
    torch.cuda.set_rng_state(torch.tensor([5, 0]).view(torch.uint8))  # as a GPU's is
    assert torch.initial_seed() == 5


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_ranks_are_joined_without_nccl(run, tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).cuda(), device_ids=[0])
        model(torch.ones(1, 2, device="cuda")).sum().backward()
        gathered, sent = torch.empty(4, device="cuda"), torch.empty(4, device="cuda")
        torch.distributed.all_gather([gathered], torch.ones(4, device="cuda"))
        torch.distributed.all_reduce(sent)
        assert gathered.tolist() == [1.0] * 4
        assert not run.faults
        sent.tolist()  # nobody has written what it sums
    finally:
        torch.distributed.destroy_process_group()
    assert [fault.kind for fault in run.faults] == ["uninitialised"]
