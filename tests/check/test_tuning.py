"""Autotuned kernels on a GPU: each is timed once, the fastest is said, and other configurations are run if asked for."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from specimens import with_backward

import retrograd as rg
from retrograd.check import tuning
from retrograd.compat import triton_autotuning
from retrograd.errors import UsageError
from retrograd.report import to_text

pytestmark = pytest.mark.outside


def some_kernel(x: Any, N: Any, BLOCK: Any) -> None:
    """What is tuned below; nothing of it is compiled or run."""


class Tuned:
    """An autotuned kernel that notes its launches, and a clock by which some block is the fastest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: tuple[int, ...] = (), **options: Any) -> None:
        self.launched: list[tuple[int, int]] = []
        self.timed: list[int] = []
        self.refused = refused
        monkeypatch.setattr(triton_autotuning, "timed_shortly", self.clock)
        kernel = SimpleNamespace(fn=some_kernel, arg_names=["x", "N", "BLOCK"], run=self.run)
        configs = [triton.Config({"BLOCK": n}) for n in (16, 32, 64)]
        self.tuner: Any = triton.autotune(configs, key=["N"], **options)(kernel)

    def run(self, x: Any, N: int, BLOCK: int, **_: Any) -> None:
        if (N, BLOCK) in self.refused:
            raise triton.runtime.errors.OutOfResources(1, 0, "shared memory")
        self.launched.append((N, BLOCK))

    def clock(self, call: Any, quantiles: Any) -> list[float]:
        call()
        self.timed.append(self.launched[-1][1])
        return [1.0 if self.timed[-1] == 32 else 2.0] * 3

    def launch(self, N: int) -> list[int]:
        """The blocks that a launch at this size runs with."""
        self.launched.clear()
        self.tuner.run("x", N, grid=(1,))
        return [block for _, block in self.launched]


def test_a_kernel_is_timed_at_one_size_and_runs_with_the_fastest_at_all(monkeypatch):
    tuned, fastest = Tuned(monkeypatch), dict[str, Any]()
    with tuning.choosing(fastest):
        assert tuned.launch(7) == [16, 32, 64, 32]
        assert tuned.launch(48) == [32, 32]  # once to see whether it compiles there
        assert tuned.launch(48) == [32]
    with tuning.choosing(fastest):  # the next stage
        assert tuned.launch(7) == [32, 32]
    assert tuned.timed == [16, 32, 64]
    assert {name: (timed.config.kwargs["BLOCK"], timed.of) for name, timed in fastest.items()} == {
        "some_kernel": (32, 3)
    }
    assert not tuned.tuner.cache
    assert not {"do_bench", "prune_configs"} & vars(tuned.tuner).keys()


def _anew(configs: Any, *_: Any, **__: Any) -> list[Any]:
    """The same configurations, each with a hook of its own; the one of 64 has another hook than the others."""
    hooked = [(c.kwargs, lambda _: None) for c in configs if c.kwargs["BLOCK"] < 64]
    return [triton.Config(dict(kwargs), pre_hook=hook) for kwargs, hook in hooked] + [
        triton.Config({"BLOCK": 64}, pre_hook=partial(print, end=""))
    ]


def test_configurations_that_pruning_makes_anew_are_known_again(monkeypatch):
    tuned = Tuned(monkeypatch, prune_configs_by={"early_config_prune": _anew})
    with tuning.choosing({}):
        assert tuned.launch(7)[-1] == 32
        assert tuned.launch(48) == [32, 32]
    first, again = (_anew(tuned.tuner.configs) for _ in range(2))
    assert first != again  # by Triton's comparison
    assert list(map(triton_autotuning.settings, first)) == list(map(triton_autotuning.settings, again))
    assert len({tuple(sorted(triton_autotuning.settings(config))) for config in first}) == 3
    assert triton_autotuning.constants(first[0]) & triton_autotuning.constants(first[1])  # the hook
    assert not triton_autotuning.constants(first[0]) & triton_autotuning.constants(first[2])


def test_where_the_fastest_does_not_compile_the_next_one_runs(monkeypatch):
    tuned = Tuned(monkeypatch, refused=((48, 32),))
    with tuning.choosing({}):
        tuned.launch(7)
        assert tuned.launch(48) == [64, 64]
        assert tuned.launch(7) == [32]


def test_a_configuration_is_chosen_by_its_number_for_all_kernels_or_for_one(monkeypatch):
    tuned, fastest = Tuned(monkeypatch), dict[str, Any]()
    with tuning.choosing(fastest):
        tuned.launch(7)
        with tuning.choosing(fastest, 2) as chosen:
            assert tuned.launch(7) == [64, 64]
        assert chosen.chosen["some_kernel"].kwargs["BLOCK"] == 64
        with tuning.choosing(fastest, 2, "another_kernel"):
            assert tuned.launch(7) == [32, 32]
        assert tuned.launch(7) == [32]
    assert tuned.timed == [16, 32, 64]


def test_a_session_without_a_gpu_chooses_for_itself(monkeypatch):
    fastest = dict[str, Any]()
    with tuning.choosing(fastest):
        report = rg.verify(double(0), level="quick", only=["oracle"], dtypes=["float32"])
    assert report
    assert not fastest


def test_configs_that_there_are_not_are_refused():
    with pytest.raises(UsageError, match="`configs` is 'every', expected some or all"):
        rg.verify(double(0), configs="every")


@triton.jit
def doubled(x_ptr, y_ptr, N, BLOCK: tl.constexpr, OFF: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, (2.0 + OFF) * tl.load(x_ptr + cols, cols < N), cols < N)


def double(off: int) -> Any:
    """2 x by a kernel with five configurations, of which the last is off by so much."""
    settings = [dict(BLOCK=block, OFF=0) for block in (32, 64, 128, 256)] + [dict(BLOCK=512, OFF=off)]
    kernel = triton.autotune([triton.Config(each, num_warps=2) for each in settings], key=["N"])(doubled)

    def launch(x):
        x = x.contiguous()
        y = torch.zeros_like(x)
        if x.numel():
            kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
        return y

    twice = with_backward(launch, lambda dy, _: launch(dy), once=True)
    return rg.op(twice, lambda x: 2 * x, dict(x=rg.tensor("M", "N")), sizes=dict(M=(1, 4), N=(1, 9)))


def determinism(off: int, **options: Any) -> Any:
    return rg.verify(double(off), level="quick", only=["determinism"], dtypes=["float32"], **options)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_configurations_are_compared_where_that_is_asked_for(device, monkeypatch):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("kernels are compiled for a CUDA device")
    # By a clock for which the first is the fastest, whatever a GPU says of such small tensors.
    monkeypatch.setattr(triton_autotuning, "timed_shortly", lambda call, quantiles: [call() or next(ticks)] * 3)
    ticks = iter(range(100))
    default = determinism(1, device=device)
    assert default, to_text(default)
    left_out = (
        "kernel doubled ran with Config(BLOCK=32, OFF=0, num_warps=2), the fastest of 5 configurations where it first "
        "ran; the others were not looked at (--configs all compares them)"
    )
    on_cpu = "level quick ran 4 of 5 configurations of autotuned kernels; level full runs more"
    assert [note for note in default.notes if "configurations" in note] == [left_out if device == "cuda" else on_cpu]
    every = determinism(1, device=device, configs="all")
    assert [finding.tensor for finding in every.findings] == ["out", "grad x"]
    for finding in every.findings:
        assert finding.what.startswith("under Config(BLOCK=512, OFF=1, num_warps=2) of kernel doubled: ")
        assert finding.repro.endswith('configs="all")')
    healthy = determinism(0, device=device, configs="all")
    assert healthy, to_text(healthy)
    assert healthy.stages[0].power_text.endswith("; 5 configurations of autotuned kernels")
