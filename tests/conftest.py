"""Shared fixtures. Without a GPU the real kernels are executed on CPU tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import dealing
import pytest
import specimens  # noqa: F401  before tests/codegen, whose folder has a script of that name, comes ahead on the path
import torch

from retrograd.check import cpu_kernels
from retrograd.core import gc_pause

if TYPE_CHECKING:
    from ranks import Ranks

# What C++ there is in the user's cache would change what is tested; its own tests switch it on.
os.environ.setdefault("RETROGRAD_HOST", "off")
os.environ.setdefault("RETROGRAD_TAPE", "off")
torch.set_num_threads(1)  # two cores: small tests lose more to threads than they gain
os.environ.setdefault("OMP_NUM_THREADS", "1")  # so do processes that tests start, whose threads wait for each other


def pytest_make_parametrize_id(val: object, argname: str) -> None:
    """Binary data names no test: gzip writes the second into it, and workers one second apart then differ in tests."""
    if isinstance(val, bytes) and not val.decode("ascii", "replace").isprintable():
        raise pytest.UsageError(f"parametrize: {argname} is binary data; give ids= or pytest.param(..., id=...)")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rotate", type=int, metavar="DAY", help="of what is marked `dealt` the part of this day alone")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting makes half a million objects and hardly any garbage, for which Python looked a quarter of the time."""
    with gc_pause.paused(age=True):
        return (yield)


@pytest.hookimpl(trylast=True)  # what -k leaves out is gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (day := config.getoption("--rotate")) is None:
        return
    others = dealing.left_out(items, day)
    config.hook.pytest_deselected(items=others)
    gone = set(others)
    items[:] = [item for item in items if item not in gone]


@pytest.fixture
def much_memory() -> Iterator[None]:
    """Of a GPU, given back at the end: PyTorch keeps it, and of 16 workers on one others ran out of 140 GB."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: "cuda", or "cpu" where they are executed without it."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def executed_kernels(request: pytest.FixtureRequest, device: str) -> Iterator[None]:
    """Kernels that a test launches on CPU tensors are executed, unless it is marked `outside`."""
    if request.node.get_closest_marker("outside") is not None:
        yield
        return
    with cpu_kernels.executed(device):
        yield


@pytest.fixture(autouse=True)
def memory_of_the_gpu(request: pytest.FixtureRequest, device: str) -> Iterator[None]:
    """What a process keeps of the GPU's memory goes back after each test: twelve workers share it."""
    yield
    if device == "cuda" and request.node.get_closest_marker("gpu") is not None:
        torch.cuda.empty_cache()


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.device("meta")], ids=["double", "half", "meta"])
def other_defaults(request: pytest.FixtureRequest) -> Callable[[], AbstractContextManager[None]]:
    """A context in which a tensor that is made without naming its dtype or device is not what it usually is."""

    @contextmanager
    def context() -> Iterator[None]:
        if isinstance(request.param, torch.device):
            with request.param:
                yield
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(request.param)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    return context


@pytest.fixture
def alone() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def mesh(alone: None) -> Any:
    """A mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1,))


@pytest.fixture(scope="session")
def _group() -> Iterator[list[Ranks]]:
    started: list[Ranks] = []
    yield started
    for group in started:
        group.close()


@pytest.fixture
def ranks(_group: list[Ranks], tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Two processes joined by gloo, started by the first test that wants them and after one that broke them."""
    if not torch.distributed.is_available():
        pytest.skip("torch is built without distributed")
    from ranks import Ranks

    if not _group or not _group[-1].alive:
        _group.append(Ranks(2, tmp_path_factory.mktemp("ranks") / "store"))
    return _group[-1]
