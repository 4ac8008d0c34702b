"""Autotuners of Triton's: what one has chosen put aside for a while, and the order in which it tries configurations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from retrograd.compat.registry import part

_NAMES = ("cache", "cache_results", "do_bench", "prune_configs")


def kernel_name(tuner: Any) -> str:
    """Name of the kernel that a tuner launches, through heuristics and whatever else is around it."""
    return tuner.base_fn.__name__


def constants(config: Any) -> set[tuple[str, str]]:
    """What of a configuration is in the code before a GPU's: constants with their values, and the hook before it."""
    return {(name, repr(value)) for name, value in config.kwargs.items()} | {("pre_hook", repr(config.pre_hook))}


def written(config: Any) -> str:
    """A configuration as its user writes it, without what is so by default but for the warps."""
    default = {name: each.default for name, each in inspect.signature(type(config)).parameters.items()}
    default |= dict.fromkeys(("num_warps", *config.kwargs), inspect.Parameter.empty)
    settings = config.all_kwargs().items()
    return f"Config({', '.join(f'{name}={value}' for name, value in settings if default.get(name) != value)})"


@contextmanager
def tuned_anew(tuner: Any, ordered: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """Have a tuner know nothing of what was chosen before, in this process or on disk, and forget it at the end.

    Args:
        tuner: the Autotuner.
        ordered: gives of the configurations that pruning has left those that are tried, in their order; where none is
            timed, the first that compiles is chosen.
    """
    from triton.runtime.driver import driver

    before = {name: tuner.__dict__[name] for name in _NAMES if name in tuner.__dict__}
    pruned = type(tuner).prune_configs
    tuner.cache, tuner.cache_results = {}, False
    tuner.do_bench = driver.active.get_benchmarker()  # one that was passed, or kept from a GPU, has a clock
    tuner.prune_configs = lambda kwargs: ordered(list(pruned(tuner, kwargs)))
    try:
        yield
    finally:
        for name in _NAMES:
            tuner.__dict__.pop(name, None)
        tuner.__dict__.update(before)


def _probe_kernel(x: Any, N: Any) -> None:
    """What the self-test tunes; nothing of it is compiled or run."""


@part(
    "triton.autotuning",
    "chooses configurations of autotuned kernels",
    "without a GPU each autotuned kernel runs with one configuration, and others are not compared with it",
    names=tuple(f"Autotuner.{name}" for name in (*_NAMES, "base_fn", "best_config", "run")),
)
def TUNING() -> str:
    import triton

    from retrograd.compat.triton_compile import PROBE_GPU
    from retrograd.compat.triton_ttir import _executing

    launched: list[int] = []
    kernel = SimpleNamespace(fn=_probe_kernel, arg_names=["x", "N"], run=lambda *_, N, **__: launched.append(N))
    tuner: Any = triton.autotune([triton.Config({"N": n}) for n in (1, 2, 3)], key=[])(kernel)  # type: ignore[arg-type]
    before = tuner.cache, tuner.cache_results
    executed = _executing(PROBE_GPU, lambda *_: None, lambda call: call(), lambda key, make: make())
    with executed, tuned_anew(tuner, lambda configs: [*configs[1:], *configs[:1]]):
        tuner.run(0, grid=(1,))
        seen = launched, written(tuner.best_config), kernel_name(tuner)
    if seen != ([2, 3, 1, 2], "Config(N=2, num_warps=4)", "_probe_kernel"):
        return f"a tuner launches and chooses {seen}"
    left = (tuner.cache, tuner.cache_results) != before or {"do_bench", "prune_configs"} & tuner.__dict__.keys()
    return "a tuner keeps what was put into it" if left else ""
