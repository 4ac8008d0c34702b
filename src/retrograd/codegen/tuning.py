"""`@triton.autotune` while launches are recorded: every configuration instead of the fastest, which nobody can time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from retrograd.codegen.schema import Tuning
from retrograd.compat.triton_launch import KernelLaunch, Proceed, around_autotuning

_USUAL = (("num_ctas", 1), ("maxnreg", None), ("ir_override", None))
# The innermost autotuned launch last; None for one of the runs that are compared.
_NOW: list[Tuning | None] = []


def current() -> Tuning | None:
    """The configuration that is launched at this moment; None outside of an autotuned kernel."""
    return _NOW[-1] if _NOW else None


def under_way() -> bool:
    """Whether the launch at this moment is one of those that are compared."""
    return bool(_NOW) and _NOW[-1] is None


def described(tuner: Any, config: Any, configs: int) -> Tuning:
    """What a record keeps of an Autotuner of Triton's and of one of its configurations."""
    hooks = bool(getattr(tuner, "user_defined_pre_hook", False) or getattr(tuner, "user_defined_post_hook", False))
    return Tuning(
        configs,
        {name: value for name, value in config.all_kwargs().items() if (name, value) not in _USUAL},
        tuple(tuner.reset_to_zero),
        tuple(tuner.restore_value),
        hooks or config.pre_hook is not None,
    )


@contextmanager
def every_configuration() -> Iterator[None]:
    """Launch an autotuned kernel once with each configuration that its own pruning leaves."""

    def launch_all(launch: KernelLaunch, _: Proceed) -> None:
        tuner, kwargs = launch.function, launch.kwargs
        tuner.nargs = dict(zip(tuner.arg_names, launch.args, strict=False))
        configs = list(tuner.prune_configs(kwargs))
        for config in configs:
            if config.pre_hook is not None:  # sets the block shapes of descriptors
                config.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()})
            with _configuration(described(tuner, config, len(configs))):
                tuner.fn.run(*launch.args, **kwargs, **config.all_kwargs())
        tuner.nargs = None

    with around_autotuning(launch_all):
        yield


@contextmanager
def chosen_configuration() -> Iterator[None]:
    """Around launches on a GPU: while a kernel is tuned `under_way` is true; then `current` is what was chosen."""

    def note(launch: KernelLaunch, proceed: Proceed) -> Any:
        tuner = launch.function
        inner = tuner.fn.run

        def run(*args: Any, **kwargs: Any) -> Any:
            # Until it has been tuned there is no best configuration of this call.
            config = tuner.best_config
            with _configuration(None if config is None else described(tuner, config, len(tuner.configs))):
                return inner(*args, **kwargs)

        tuner.best_config = None
        tuner.fn.run = run
        try:
            return proceed()
        finally:
            del tuner.fn.run

    with around_autotuning(note):
        yield


@contextmanager
def _configuration(tuning: Tuning | None) -> Iterator[None]:
    _NOW.append(tuning)
    try:
        yield
    finally:
        _NOW.pop()
