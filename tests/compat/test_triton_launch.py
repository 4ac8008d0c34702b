"""The hook on Triton's launches: several callbacks, any order of leaving, exceptions, and private names that moved."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from retrograd.compat import registry, triton_launch
from retrograd.compat.triton_launch import KernelLaunch, around_autotuning, around_launches, count_launches


@triton.jit
def add_one_kernel(x_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1.0)


@triton.jit
def first_of_two_kernel(pair, out_ptr):
    tl.store(out_ptr, tl.load(pair[0]))


def launched(device: str) -> float:
    x = torch.zeros(16, device=device)
    add_one_kernel[(1,)](x, N=16)
    return float(x.sum())


def classes() -> list[type]:
    from triton.runtime import interpreter, jit

    return [jit.JITFunction, interpreter.InterpretedFunction]


@pytest.fixture(autouse=True)
def put_back():
    hook = triton_launch._LAUNCHES

    def state():
        return [hook._replaced.get(kind, (kind.run,))[0] for kind in classes()], [*hook._callbacks]

    before = state()
    yield
    assert state() == before


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch):
    """No self-test has run yet, and nobody listens."""
    hook = triton_launch._LAUNCHES
    listening = [*hook._callbacks]
    hook._callbacks.clear()
    hook._uninstall()
    monkeypatch.setattr(registry, "_statuses", {})
    yield
    monkeypatch.undo()
    hook._callbacks.extend(listening)
    hook._install()


def test_launches_are_counted(device: str) -> None:
    with count_launches() as count:
        launched(device)
        with count_launches() as inner:
            launched(device)
        add_one_kernel.warmup(torch.zeros(16, device=device), N=16, grid=(1,))
    assert (inner.total, inner.interpreted) == (1, 0)
    assert (count.total, count.interpreted) == (2, 0)
    launched(device)
    assert count.total == 2


def test_launches_in_tritons_interpreter_are_counted_as_such() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    x = torch.zeros(16)
    with count_launches() as count:
        InterpretedFunction(add_one_kernel.fn)[(1,)](x, N=16)
    assert (count.total, count.interpreted, float(x.sum())) == (1, 1, 16.0)


def test_a_kernel_with_a_tuple_is_counted(device: str) -> None:
    out = torch.zeros(1, device=device)
    with count_launches() as count:
        first_of_two_kernel[(1,)]((torch.ones(1, device=device), 2), out)
    assert count.total == 1
    assert out.item() == 1.0


def test_the_latest_callback_is_asked_first_and_decides(device: str) -> None:
    order: list[str] = []

    def note(name: str, goes_on: bool = True):
        def callback(launch: KernelLaunch, proceed: triton_launch.Proceed):
            order.append(f"{name} {launch.name} {launch.grid}")
            return proceed() if goes_on else "no"

        return callback

    with around_launches(note("outer")), around_launches(note("inner")):
        assert launched(device) == 16.0
    assert order == ["inner add_one_kernel (1,)", "outer add_one_kernel (1,)"]
    with around_launches(note("outer")), around_launches(note("inner", goes_on=False)):
        assert launched(device) == 0.0
    assert order[2:] == ["inner add_one_kernel (1,)"]


def test_callbacks_leave_in_any_order(device: str) -> None:
    first, second = count_launches(), count_launches()
    a, b = first.__enter__(), second.__enter__()
    launched(device)
    first.__exit__(None, None, None)
    launched(device)
    second.__exit__(None, None, None)
    launched(device)
    assert (a.total, b.total) == (1, 2)


def test_an_exception_of_a_callback_is_the_launchs_and_leaves_the_others(device: str) -> None:
    def refuse(launch: KernelLaunch, proceed: triton_launch.Proceed) -> None:
        raise LookupError(launch.name)

    with count_launches() as count:
        with pytest.raises(LookupError, match="add_one_kernel"), around_launches(refuse):
            launched(device)
        assert launched(device) == 16.0
    assert count.total == 1


def test_a_launch_within_a_callback_passes_by_all(device: str) -> None:
    depth: list[int] = []

    def again(launch: KernelLaunch, proceed: triton_launch.Proceed):
        depth.append(len(depth))
        if len(depth) < 3:
            launched(device)
        return proceed()

    with around_launches(again), count_launches() as count:
        launched(device)
    assert (len(depth), count.total) == (3, 3)


def test_a_replacement_by_somebody_else_stays(device: str) -> None:
    kind = type(add_one_kernel)
    stock = kind.run
    with count_launches() as count:
        ours = kind.run
        theirs = lambda self, *args, **kwargs: ours(self, *args, **kwargs)  # noqa: E731
        kind.run = theirs
        launched(device)
    assert kind.run is theirs
    assert launched(device) == 16.0
    with count_launches() as again:
        launched(device)
    kind.run = stock
    with count_launches() as without:
        launched(device)
    assert (count.total, again.total, without.total) == (1, 1, 1)


@pytest.mark.parametrize("broken", ["renamed", "other arguments"])
@pytest.mark.usefixtures("untested")
def test_another_run_of_tritons_is_left_alone_with_a_note(
    device: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(add_one_kernel)
    stock = kind.run
    monkeypatch.setattr(kind, "_launch", stock, raising=False)
    if broken == "renamed":
        monkeypatch.delattr(kind, "run")
        call = lambda self, grid: lambda *a, **k: self._launch(*a, grid=grid, warmup=False, **k)  # noqa: E731
    else:
        monkeypatch.setattr(kind, "run", lambda self, grid, warmup, args, kwargs: stock(
            self, *args, grid=grid, warmup=warmup, **kwargs))  # fmt: skip
        call = lambda self, grid: lambda *a, **k: self.run(grid, False, a, k)  # noqa: E731
    monkeypatch.setattr(kind, "__getitem__", call)
    with count_launches() as count:
        assert launched(device) == 16.0
    assert count.total == 0
    (note,) = [each.note for each in registry.statuses() if "is told of kernel launches" in each.note]
    assert "launches are not seen" in note


@pytest.mark.usefixtures("untested")
def test_the_part_works_here() -> None:
    assert registry.status(triton_launch.HOOK).state == "works"


def test_tuners_of_libraries_are_heard_and_keep_what_is_theirs():
    made, heard = [], []

    class Before(Autotuner):
        def __init_subclass__(cls, **named):
            super().__init_subclass__(**named)
            made.append(cls)

        def run(self, *args, **kwargs):
            return "before"

    theirs, tritons = Before.__dict__["__init_subclass__"], Autotuner.__dict__.get("__init_subclass__")
    with around_autotuning(lambda launch, proceed: (heard.append(launch.function), proceed())[1]):

        class After(Before):
            def run(self, *args, **kwargs):
                return super().run(*args, **kwargs) + " and after"

        tuner = After(add_one_kernel, add_one_kernel.arg_names, [triton.Config({})], [], None, None)
        assert tuner.run() == "before and after"
    assert tuner.run() == "before and after"
    assert (heard, made) == ([tuner], [After])
    assert Before.__dict__["__init_subclass__"] is theirs
    assert Autotuner.__dict__.get("__init_subclass__") is tritons
