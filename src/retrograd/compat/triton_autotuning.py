"""Autotuners of Triton's: what one has chosen put aside for a while, and the order in which it tries configurations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from retrograd.compat.registry import part
from retrograd.compat.triton_launch import KernelLaunch, unheard

_NAMES = ("cache", "cache_results", "do_bench", "prune_configs")


def kernel_name(tuner: Any) -> str:
    """Name of the kernel that a tuner launches, through heuristics and whatever else is around it."""
    return tuner.base_fn.__name__


def constants(config: Any) -> set[tuple[str, str]]:
    """What of a configuration is in the code before a GPU's: constants with their values, and the hook before it."""
    hook = config.pre_hook.func if isinstance(config.pre_hook, partial) else config.pre_hook
    hook = getattr(hook, "__code__", hook)  # pruning may make configurations, and functions in them, at each launch
    return {(name, repr(value)) for name, value in config.kwargs.items()} | {("pre_hook", repr(hook))}


def settings(config: Any) -> set[tuple[str, str]]:
    """All that a configuration sets: the same for two that do the same, which Triton's own comparison misses."""
    return constants(config) | {(name, repr(value)) for name, value in config.all_kwargs().items()}


def written(config: Any) -> str:
    """A configuration as its user writes it, without what is so by default but for the warps."""
    default = {name: each.default for name, each in inspect.signature(type(config)).parameters.items()}
    default |= dict.fromkeys(("num_warps", *config.kwargs), inspect.Parameter.empty)
    settings = config.all_kwargs().items()
    return f"Config({', '.join(f'{name}={value}' for name, value in settings if default.get(name) != value)})"


def compile_only(launch: KernelLaunch, config: str | None = None) -> None:
    """Have a launch of an autotuned kernel compiled with all configurations that pruning leaves, or with one of them.

    Args:
        launch: as Triton's autotuner gets it.
        config: as `written` writes it.
    """
    tuner = launch.function
    pruned = tuner.prune_configs
    tuner.prune_configs = lambda kwargs: [each for each in pruned(kwargs) if config in (None, written(each))]
    try:
        tuner.warmup(*launch.args, **{name: value for name, value in launch.kwargs.items() if name != "warmup"})
    finally:
        tuner.prune_configs = pruned


def timed_shortly(call: Callable[[], Any], quantiles: Any) -> Any:
    """Quantiles of the milliseconds of a call on the GPU, by Triton's own clock in some 10 ms instead of 125."""
    from triton.runtime.driver import driver

    return driver.active.get_benchmarker()(call, warmup=1, rep=5, quantiles=quantiles)


@contextmanager
def tuned_anew(
    tuner: Any, ordered: Callable[[list[Any]], list[Any]], bench: Callable[..., Any] | None = None,
    chosen: dict[Any, Any] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Have a tuner know nothing of what was chosen before, in this process or on disk, and forget it at the end.

    Args:
        tuner: the Autotuner.
        ordered: gives of the configurations that pruning has left those that are tried, in their order; where none is
            timed, the first that compiles is chosen.
        bench: times a configuration, instead of Triton's driver.
        chosen: what it may know all the same, by its key, and what it chooses now.
    """
    from triton.runtime.driver import driver

    before = {name: tuner.__dict__[name] for name in _NAMES if name in tuner.__dict__}
    pruned = type(tuner).prune_configs
    tuner.cache, tuner.cache_results = {} if chosen is None else chosen, False
    # One that was passed, or kept from a GPU, has a clock.
    tuner.do_bench = bench or driver.active.get_benchmarker()
    tuner.prune_configs = lambda kwargs: ordered(list(pruned(tuner, kwargs)))
    try:
        yield
    finally:
        for name in _NAMES:
            tuner.__dict__.pop(name, None)
        tuner.__dict__.update(before)


class ChosenConfigurations:
    """The configurations that autotuned kernels run with, where somebody else than their autotuners chooses.

    Args:
        start: gives, for a kernel and its configurations, the number of the one to begin with; the others follow it.
        bench: as in `tuned_anew`.
        others: that start likewise, whose choices stand, as they do in a process with a GPU: to have seven tuners of an
            op of fla try again in each stage and repeat was 15 % of all that was called.

    Attributes:
        known: by name of the kernel, the configurations that pruning leaves, at most.
        latest: of these kernels, the configuration that the latest launch ran with.
    """

    def __init__(
        self, start: Callable[[str, list[Any]], int], bench: Callable[..., Any] | None = None,
        others: ChosenConfigurations | None = None,
    ) -> None:  # fmt: skip
        self.known: dict[str, list[Any]] = {} if others is None else others.known
        self.latest: dict[str, Any] = {}
        self._start, self._bench = start, bench
        self._met: set[int] = set()
        # By tuner, which is kept so that no other has its id.
        self._chosen: dict[int, tuple[Any, dict[Any, Any]]] = {} if others is None else others._chosen
        self._put_aside = ExitStack()

    def launch(self, tuner: Any, proceed: Callable[[], Any]) -> Any:
        """A launch of an autotuned kernel; what its tuner chose before, by a GPU or somebody else, is put aside."""
        name = kernel_name(tuner)
        if id(tuner) not in self._met:
            self._met.add(id(tuner))
            _, chosen = self._chosen.setdefault(id(tuner), (tuner, {}))
            self._put_aside.enter_context(tuned_anew(tuner, partial(self._in_turn, name), self._bench, chosen))
        result = proceed()
        if name in self.known:
            self.latest[name] = tuner.best_config
        return result

    def _in_turn(self, name: str, configs: list[Any]) -> list[Any]:
        """The configurations of a kernel, from the one on that it is to run with: what does not compile is left out."""
        self.known[name] = max(self.known.get(name, []), configs, key=len)
        start = self._start(name, configs)
        self.latest[name] = configs[start]
        return [*configs[start:], *configs[:start]]  # Triton 3.9 asks how many there are

    def close(self) -> None:
        """Give autotuners back what was chosen for them before."""
        self._put_aside.close()


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
    with executed, unheard(), tuned_anew(tuner, lambda configs: [*configs[1:], *configs[:1]]):
        tuner.run(0, grid=(1,))
        seen = launched, written(tuner.best_config), kernel_name(tuner)
    if seen != ([2, 3, 1, 2], "Config(N=2, num_warps=4)", "_probe_kernel"):
        return f"a tuner launches and chooses {seen}"
    left = (tuner.cache, tuner.cache_results) != before or {"do_bench", "prune_configs"} & tuner.__dict__.keys()
    return "a tuner keeps what was put into it" if left else ""
